"""What a field receives is text, a number that prints exactly, or an error that names the field."""

import copy
import datetime
import decimal
import json
import pickle
import string

import numpy as np
import pytest

from pipeline.corpus.preparing.preparation import prepare
from pipeline.text import templates
from pipeline.text.markup import Markup
from pipeline.text.notes import Watched
from pipeline.text.source import text_of
from pipeline.text.sources import JsonLines, Records
from pipeline.text.templates import Answer, Chat, Preference
from pipeline.text.tokenizers import Bytes
from pipeline.text.values import read_json

NAN = float("nan")
CODE = "{a} {a.__class__} {{ cycler.__init__.__globals__ }} {% include 'x' %} %s $HOME"
ANSWER = Answer(prompt="{q}:", answer="{a}")
CHAT = Chat(before="", after="")
SIDES = Preference(prompt="{q}:", chosen="{a}", rejected="no")


def spelt(template, value):
    """The text of a value in a template, where it is the answer, or the only turn of a chat."""
    record = {"q": "Q", "a": value, "messages": [{"role": "user", "content": value}]}
    return templates.texts(template, record)[0].removeprefix("Q:")


@pytest.mark.parametrize("template", [ANSWER, CHAT])
@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("né", "né"),
        ("né".encode(), "né"),
        (7, "7"),
        (-0.1, "-0.1"),
        (2**70, str(2**70)),
        (np.int8(3), "3"),
        (np.float32(0.1), "0.1"),
        (decimal.Decimal("1.10"), "1.10"),
        (np.str_("a"), "a"),
        (CODE, CODE),
    ],
)
def test_texts_and_numbers_are_spelt_exactly(template, value, text):
    assert spelt(template, value) == text


@pytest.mark.parametrize(
    "number",
    [
        *("5", "0.1", "-1.5", "0.30000000000000004", "123456789012345678.9", "1e16"),
        *("0.1234567890123456789", "12345678901234567890", "-0.00000000000000000010"),
        *("19.90", "1e3", "2.5E-7", "-0.0", "1.0", "-0", "-7"),
    ],
)
def test_numbers_of_json_are_spelt_as_they_are_written(number, tmp_path):
    (tmp_path / "a.jsonl").write_text(f'{{"q": "", "a": {number}}}')
    (record,) = JsonLines(tmp_path / "a.jsonl")
    assert spelt(ANSWER, record["a"]) == spelt(CHAT, record["a"]) == number
    assert record["a"] == json.loads(number)
    assert json.loads(json.dumps(record)) == record
    assert Markup.fill("{a:.3f}", record) == f"{float(number):.3f}"
    assert pickle.loads(pickle.dumps(record)) == record


def test_a_number_of_json_that_is_infinite_is_refused_as_it_is_written(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1E400}')
    (record,) = JsonLines(tmp_path / "a.jsonl")
    with pytest.raises(
        ValueError, match=r"field 'a' holds float \(1E400\), which is infinite; corr"
    ):
        spelt(ANSWER, record["a"])


@pytest.mark.parametrize(
    ("use", "names"),
    [
        (lambda r: r["a"], "a"),
        (lambda r: (r.get("c", 5), r.pop("a", 0), r.setdefault("b", 1)), "abc"),
        (lambda r: "{a}".format_map(r) + string.Template("$a").substitute(r), "a"),
        (lambda r: ("a" in r, len(r), r == {"a": "x", "b": 2}, isinstance(r, dict)), ""),
        *((use, "ab") for use in (dict, list, repr, json.dumps, copy.copy, copy.deepcopy)),
        *((use, "ab") for use in (lambda r: {**r}, lambda r: r | {}, lambda r: {} | r)),
        *((use, "ab") for use in (lambda r: "{a}".format(**r), lambda r: [*r.items()])),
        (lambda r: pickle.loads(pickle.dumps(r)), "ab"),
    ],
)
def test_a_watched_record_is_a_dict_that_tells_what_is_read(use, names):
    read: set = set()
    assert use(Watched({"a": "x", "b": 2}, read)) == use({"a": "x", "b": 2})
    assert read == {*names}


def test_names_of_fields_are_shown_with_what_cannot_be_seen():
    with pytest.raises(ValueError, match=r"no field 'a' \(its fields: ' a', b, ''\)"):
        text_of({" a": "x", "b": "y", "": "z"}, "a")


@pytest.mark.parametrize("template", [ANSWER, CHAT, SIDES])
@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (None, "is null|is None"),
        (np.float32("nan"), "is null|is np.float32"),
        (float("inf"), "holds float"),
        ({"text": "a"}, "holds dict"),
        ([b"a"], "holds list"),
        (True, "holds bool"),
        (b"\xff", "is not UTF-8 text"),
        ("cut \ud83d", "is not UTF-8 text"),
    ],
)
def test_other_values_are_errors_that_name_record_field_and_kind(
    template, value, sentence, tmp_path
):
    record = {"q": "Q", "a": value, "messages": [{"role": "user", "content": value}]}
    record |= {"a": record["messages"]} if template is CHAT else {"messages": []}
    field = "((content|part) of turn 0 of its messages|field 'a'.*)"
    field = field if template is CHAT else "field 'a'"
    with pytest.raises(ValueError, match=rf"record 0: .*{field} ({sentence})"):
        prepare(Records([record], fingerprint="r"), Bytes(), tmp_path, template=template)


def test_a_key_of_many_that_comes_twice_is_found_at_once():
    pairs = ", ".join(f'"{number}": 0' for number in [*range(300_000), 299_999])
    with pytest.raises(ValueError, match="it has the key '299999' twice; keep one of the two"):
        read_json(f"{{{pairs}}}")


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (NAN, "-"), ("a", "a"), ("", ""), (0, "0")],
)
def test_a_null_may_have_a_text(value, text):
    assert spelt(Answer(prompt="{q}:", answer="{a}", null="-"), value) == text
    assert spelt(Answer(prompt="{q}:", answer="{a}", null={"a": "-"}), value) == text
    assert spelt(Chat(before="", after="", null="-"), value) == text
    if text == "-":
        with pytest.raises(ValueError, match="its field 'a' is null"):
            spelt(Answer(prompt="{q}:", answer="{a}", null={"q": ""}), value)


@pytest.mark.parametrize(
    ("text", "fields", "result"),
    [
        ("{a[0]}{a[1][b]}", {"a": ["x", {"b": 5}]}, "x5"),
        ("{a:>4}|{a!r}|{a!s:<3}|", {"a": "b"}, "   b|'b'|b  |"),
        ("{a:.2f}{a:05}", {"a": 1}, "1.0000001"),
        ("{a!r}", {"a": ["x"]}, "['x']"),  # asked for
        ("{day:%Y}", {"day": datetime.date(2024, 1, 1)}, "2024"),
        ("{a[0]:>{n}}{b}", {"a": ["{b}"], "b": "{n}", "n": 5}, "  {b}{n}"),
        ("{{}}{a:>3}", {"a": b"x"}, "{}  x"),
        ("{a[0]}", {"a": [None]}, "is null"),
        ("{a[0]}", {"a": []}, "its field 'a' has no 'a[0]' (the list is shorter)"),
        ("{a[b]}", {"a": "x"}, "its field 'a' has no 'a[b]'"),
        ("{a.b}{a.c[0]}", {"a.b": "x", "a.c": ["y"]}, "xy"),
        ("{a.__class__}", {"a": "x"}, "no field 'a.__class__'; an entry of a field is {a[__class"),
        ("{a[b].__class__}", {"a": {"b": "x"}}, "an entry of a field is {name[entry]}"),
        ("{a[b]c}", {"a": {"b": "x"}}, "expected '}'|Only '.' or '['|an entry of a field is"),
        ("{a:.2f}", {"a": float("inf")}, "holds float"),
        ("{a!r}", {"a": None}, "is null"),
        ("{a:>3}", {"a": ["x"]}, "holds list"),
        ("{0}", {"a": "x"}, "it has a field without a name"),
        ("{a!x}", {"a": "x"}, "a conversion is !r, !a or !s"),
    ],
)
def test_a_format_string_spells_fields_or_says_why_not(text, fields, result):
    try:
        assert Markup.fill(text, fields) == result
    except ValueError as error:
        assert any(each in str(error) for each in result.split("|"))  # noqa: PT017


def test_a_broken_format_string_is_refused_before_any_record():
    for make in (
        lambda text: Answer(prompt=text, answer="{a}"),
        lambda text: Preference(prompt="", chosen="{a}", rejected=["{a}", text]),
        lambda text: Chat(before=text),
    ):
        with pytest.raises(ValueError, match=r"(prompt|rejected|before) is '{a': expected"):
            make("{a")
    with pytest.raises(ValueError, match=r"its only field is \{role\}"):
        Chat(before="{name}")


def quote(record):
    return [(f"{record['a']}{record['more'][0]['b']}", 1.0)]


def test_own_templates_get_text_in_place_of_bytes_and_columns_that_are_not_read_do_not_matter():
    record = {"a": b"x", "more": [{"b": b"y"}], "image": b"\xff\xd8", "none": None}
    assert templates.texts(quote, record) == ["xy"]
    assert templates.texts(Answer(prompt="", answer="{a}"), record) == ["x"]
    with pytest.raises(ValueError, match="the text of a template is not UTF-8"):
        templates.texts(quote, record | {"a": "\ud800"})


def test_a_feature_that_is_null_has_its_fill(tmp_path):
    from pipeline import Feature

    records = Records([{"text": "a", "n": 5}, {"text": "b", "n": None}])
    filled, bare = ({"n": Feature("example", dtype="int32", fill=fill)} for fill in (-1, None))
    corpus = prepare(records, Bytes(), tmp_path / "a", features=filled)
    assert [int(each["n"]) for each in corpus] == [5, -1]
    with pytest.raises(ValueError, match="record 1: n cannot be cast from object"):
        prepare(records, Bytes(), tmp_path / "b", features=bare)
