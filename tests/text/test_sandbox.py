"""Chat templates run in a sandbox, for a bounded time, with bounded texts."""

import time

import pytest

jinja2 = pytest.importorskip("jinja2")

from pipeline.errors import InvalidValue, NotInstalled  # noqa: E402
from pipeline.text import sandbox  # noqa: E402

BOMBS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    "{% for a in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
    "{{ 'a' * 9999999999 }}",
    "{{ [1] * 9999999999 }}",
    "{{ 2 ** 9999999999 }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '%9999999999d' | format(1) }}",
    "{{ '{:9999999999d}'.format(1) }}",
    "{{ 'a' | center(9999999999) }}",
    "{{ 'a'.ljust(9999999999) }}",
    "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "{{ ('a' * 99999).join(('b' * 99999) | list) }}",
    "{% set n = namespace(s='a') %}{% for a in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{{ '%*d' % (9999999999, 1) }}",
    "{{ '%*d' | format(9999999999, 1) }}",
    "{{ '{:{}}'.format(1, 9999999999) }}",
    "{{ '{a:{w}}'.format_map({'a': 1, 'w': 9999999999}) }}",
    "{{ '{a:9999999999}'.format_map({'a': 1}) }}",
    "{{ [1] | batch(9999999999, 0) | list }}",
    "{{ [1] | slice(9999999999) | list }}",
    "{{ 1 | round(9999999999, 'ceil') }}",
    "{{ (1).to_bytes(9999999999) }}",
    "{{ [1] | tojson(indent=9999999999) }}",
    "{{ ''.join(['a' * 9999999] * 99) }}",
    "{{ (['a' * 9999999] * 99) | join }}",
    "{{ (['a' * 9999999] * 99) | map('upper') | join('-') }}",
    "{{ ('a' * 600) | replace('a', 'b' * 300000, 600) }}",
    "{{ ('a' * 600).replace('a', 'b' * 300000, 600) }}",
    "{{ range(1500) | list | tojson(indent=100000) }}",
    "{{ ('a\n' * 3000) | indent(50000) }}",
    "{{ '%.9999999999f' % 1 }}",
    "{{ '{:{}9}'.format(1, 999999999) }}",
    "{{ 'a'.encode() * 200000000 }}",
    "{% set n = namespace(s='a') %}{% for a in range(99) %}{% set n.s = '%s%s' % (n.s, n.s) %}"
    "{% endfor %}",
    "{% set n = namespace(s='a'|safe) %}{% for a in range(99) %}{% set n.s = n.s + n.s %}"
    "{% endfor %}",
    "{% set s %}{% for a in range(99) %}{{ 'a' * 9999999 }}{% endfor %}{% endset %}",
    "{% set n = namespace(s='a') %}{% for a in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
]


@pytest.mark.parametrize("template", BOMBS)
def test_a_template_that_never_ends_or_makes_endless_text_is_refused(template, monkeypatch):
    monkeypatch.setattr(sandbox, "SECONDS", 1)
    begin = time.monotonic()
    reason = "the chat template fails: (it (makes|runs|counts|indents)|maximum recursion)"
    with pytest.raises(InvalidValue, match=reason):
        sandbox.render(template, {})
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}",
        "{{ ''|attr('__class__') }}",
        "{{ '{0.__class__}'|attr('format')('') }}",
        "{{ [''].append('') }}",
        "{% include 'a' %}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(template):
    with pytest.raises(InvalidValue, match="the chat template fails"):
        print(sandbox.render(template, {}))


@pytest.mark.parametrize(
    "template", ["{% if %}", "{{ 'a' | none }}", "{{ 'a' is nothing }}", "{{ 'ab' | random }}"]
)
def test_what_is_not_jinja_is_refused(template):
    with pytest.raises(InvalidValue, match=r"the chat template is not Jinja: .*, in line 1; give"):
        sandbox.render(template, {})


def test_a_jinja_with_a_hole_in_its_sandbox_is_refused(monkeypatch):
    monkeypatch.setattr(jinja2, "__version__", "3.1.5")
    with pytest.raises(NotInstalled, match=r"jinja2 is 3\.1\.5, in which .* 'jinja2>=3\.1\.6'"):
        sandbox.render("old {{ 1 }}", {})


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ 'a' ~ 1 ~ none }}{{ [1, 2] + [3] }}", "a1None[1, 2, 3]"),
        ("{{ 'é<' | tojson }}{{ 'é' | tojson(ensure_ascii=True) }}", '"é<""\\u00e9"'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
        (
            "{{ 'ab'.replace('a', 'c') }}{{ '%3d' % 7 }}{{ '-' * 3 }}{{ 'a'.center(3) }}",
            "cb  7--- a ",
        ),
        (
            "{% for a in [1, 2, 3] %}{% if a == 2 %}{% continue %}{% endif %}{{ a }}{% endfor %}",
            "13",
        ),
        ("{% macro f(a) %}({{ a }}){% endmacro %}{{ f(1) }}{{ 'a' + 'b' }}", "(1)ab"),
        ("{{ strftime_now('%d %b %Y') }}", "26 Jul 2024"),
        ("{{ '%d' | format(1700000000) }} {{ '{}'.format(1700000000) }}", "1700000000 1700000000"),
        ("{{ 1700000000 | round }} {{ [1700000000] | join }}", "1700000000 1700000000"),
        (
            "{{ [1, 2, 3] | batch(2) | list }} {{ [1, 2] | slice(2) | list }}",
            "[[1, 2], [3]] [[1], [2]]",
        ),
        ("{{ 'ab' | join('-') }} {{ [{'n': 1}, {'n': 2}] | join('-', 'n') }}", "a-b 1-2"),
        ("{{ '* %s at %d' % ('a', 1700000000) }}", "* a at 1700000000"),
        ("{{ '%(n)d*' % {'n': 250000000} }}", "250000000*"),
        ("{{ '{{\"at\": {}}}'.format(1700000000) }}", '{"at": 1700000000}'),
        ("{{ 'of 250000000: %s' % 1 }}", "of 250000000: 1"),
        ("{{ range(3) | batch(2, 1700000000) | list }}", "[[0, 1], [2, 1700000000]]"),
        ("{{ ('a' * 9999999).replace('&', '&amp;') | replace('<', '&lt;') | length }}", "9999999"),
        ("{{ 'aXX'.replace('X', 'y', 1) }} {{ 'a\nb' | indent(2) }}", "ayX a\n  b"),
        ("{% macro m() %}{{ caller() }}{% endmacro %}{% call m() %}x{% endcall %}", "x"),
    ],
)
def test_other_templates_give_the_text_of_jinja(template, text):
    assert sandbox.render(template, {"strftime_now": sandbox.tell_day("2024-07-26")}) == text
