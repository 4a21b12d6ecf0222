"""Fingerprints of templates and parsers: what they see, and what they refuse."""

import collections
import dataclasses
import functools
import importlib
import re
import sys
import textwrap

import numpy as np
import pytest

from pipeline.corpus.preparing.preparation import prepare
from pipeline.text.fingerprints import fingerprint
from pipeline.text.sources import Records
from pipeline.text.templates import Answer, Chat, Function, Markup
from pipeline.text.tokenizers import Bytes
from tests.processes import call

RECORDS = Records([{"text": f"text {number}"} for number in range(5)])
LIMIT = 3

# A project of two modules, with all that a template may depend on.
PROJECT = {
    "words.py": """
        import re

        PATTERN = re.compile("b+")

        def clean(text):
            return PATTERN.sub("", text)

        class Cleaner:
            def __call__(self, text):
                return clean(text)
    """,
    "chats.py": """
        import dataclasses
        import functools
        import enum
        import re
        import numpy as np
        import words
        from words import Cleaner

        SIGN = "!"
        PATTERN = re.compile("a+")
        LIMIT = 100
        TABLE = np.arange(3)
        KNOWN = frozenset({"a", "b", "c", "d"})

        class Role(enum.Enum):
            USER = "user"

        def cut(text, end=LIMIT):
            return text[:end]

        def plain(record):
            # A comment.
            return [(cut(words.clean(record["text"])), float(TABLE[1]))]

        def weigh(record, *, weight, most=LIMIT):
            def inner(text):
                import words
                return Cleaner()(text) if text in KNOWN else text
            return [(inner(record["text"]), weight)]

        half = functools.partial(weigh, weight=0.5)

        def make(sign, weights):
            return lambda record: [(record["text"] + sign, weights["text"])]

        captured, dot = make("?", {"text": 1.0}), make(".", {})

        def twice(function):
            @functools.wraps(function)
            def both(record):
                return function(record) + function(record)
            return both

        @twice
        def decorated(record):
            return plain(record)

        @dataclasses.dataclass
        class Template:
            sign: str
            role: Role = Role.USER
            names: frozenset = KNOWN

            @property
            def end(self):
                return self.sign

            title = functools.cached_property(lambda self: "x")

            def __call__(self, record):
                return [(cut(record["text"]) + self.end, 1.0)]

        object_ = Template(".")

        class Longer(Template):
            def __call__(self, record):
                text = PATTERN.sub(SIGN, record["text"])
                return super().__call__({"text": text}) * 2

        longer = Longer(".")
        method = object_.__call__

        one, other = lambda record: [("a", 1.0)], lambda record: [("a", 0.75)]

        def even(number):
            return number < LIMIT or odd(number - 1)

        @functools.lru_cache
        def odd(number):
            return even(number - 1)

        def inside(limit):
            @dataclasses.dataclass
            class Cut:
                most = limit

                def __call__(self, record):
                    return [(record["text"][: self.most], 1.0)]

            return Cut()

        of_three, of_four = inside(3), inside(4)
    """,
}
OBJECTS = ["object_", "longer", "method"]
NAMES = ["plain", "half", "weigh", "captured", "dot", "decorated", *OBJECTS, "even", "odd"]
NAMES += ["one", "other", "of_three", "of_four"]
WITH_LIMIT = ["plain", "half", "weigh", "decorated", *OBJECTS, "even", "odd"]

ASK = f"""
import chats
from pipeline.text.fingerprints import fingerprint
without_source = lambda r: r in {{'a', 'b', 'c', 'd'}}
print(*[fingerprint(getattr(chats, name)) for name in {NAMES}], fingerprint(without_source))
"""


def write(place, project=PROJECT):
    place.mkdir(exist_ok=True, parents=True)
    for name, text in project.items():
        (place / name).write_text(textwrap.dedent(text))


def ask(program, place, seed):
    """What a program says in a process of its own, which has this hash seed."""
    own = {"PYTHONHASHSEED": str(seed), "PYTHONDONTWRITEBYTECODE": "1"}
    done = call(sys.executable, "-c", program, cwd=place, **own)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_fingerprints_agree_across_processes_hash_seeds_and_places(tmp_path):
    write(tmp_path / "here")
    moved = {name: "# A line.\n\n" + textwrap.dedent(text) for name, text in PROJECT.items()}
    write(tmp_path / "there" / "deep", moved)
    here = ask(ASK, tmp_path / "here", seed=1)
    assert len(set(here)) == len(NAMES) + 1
    assert ask(ASK, tmp_path / "there" / "deep", seed=2) == here


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("# A comment.", "# Another comment.", ["plain", "decorated"]),
        ('PATTERN.sub("", text)', "text", []),  # of another module
        ("return clean(text)", "return text", []),
        ('SIGN = "!"', 'SIGN = "."', ["longer"]),
        ('re.compile("a+")', 're.compile("a")', ["longer"]),
        ('lambda self: "x"', 'lambda self: "y"', OBJECTS),
        ("LIMIT = 100", "LIMIT = 99", WITH_LIMIT),
        ("np.arange(3)", "np.arange(4)", ["plain", "decorated"]),
        ('{"a", "b", "c", "d"}', '{"a", "b", "c"}', ["half", "weigh", *OBJECTS]),
        ("weight=0.5", "weight=0.25", ["half"]),
        ('make("?"', 'make("!"', ["captured"]),
        ('{"text": 1.0}', '{"text": 2.0}', ["captured"]),
        ("function(record) + function(record)", "function(record)", ["decorated"]),
        ("return self.sign", "return self.sign * 2", OBJECTS),
        ('USER = "user"', 'USER = "human"', OBJECTS),
        ('object_ = Template(".")', 'object_ = Template("")', ["object_", "method"]),
        ('{"text": text}) * 2', '{"text": text})', ["longer"]),
    ],
)
def test_a_fingerprint_sees_all_a_template_depends_on(tmp_path, monkeypatch, old, new, changed):
    assert sum(text.count(old) for text in PROJECT.values()) == 1
    found = []
    for text in (old, new):
        place = tmp_path / str(len(found))
        write(place, {name: lines.replace(old, text) for name, lines in PROJECT.items()})
        monkeypatch.syspath_prepend(place)
        for name in ("words", "chats"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        chats = importlib.import_module("chats")
        found.append({name: fingerprint(getattr(chats, name)) for name in NAMES})
    assert [name for name in NAMES if found[0][name] != found[1][name]] == changed


def test_the_fingerprints_of_what_lockstep_brings_stay():
    assert fingerprint(Answer(prompt="{q}", answer="{a}")) == (
        "Answer(prompt='{q}', answer='{a}', null=None)"
    )
    assert fingerprint(Chat()) == (
        "Chat(weights={'assistant': 1.0}, before='<|{role}|>\\n', after='<|end|>\\n', "
        "messages='messages', role='role', content='content', last_only=False, "
        "null=None, unknown='count')"
    )
    assert fingerprint(importlib.import_module("json").loads) == "json.loads"
    assert fingerprint(np.asarray) == "numpy.asarray"
    methods = [re.compile("a").findall, re.compile("b").findall]
    methods += [Chat().__call__, Chat(after="").__call__]
    assert len(set(map(fingerprint, methods))) == 4


def parse(content):
    return {"text": content[:LIMIT]}


class Listed:
    """A template of which nothing tells what it is."""

    def __call__(self, record):
        return [(record["text"], 1.0)]


LISTED = Listed()


def use(record):
    return LISTED(record)


@dataclasses.dataclass(frozen=True)
class Holder:
    held: object

    def __call__(self, record):
        return [(record["text"], 1.0)]


def holding(value):
    return lambda record: [(str(value), 1.0)]


CYCLE = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (Listed(), r"Listed has no fingerprint: it is <.*Listed object.*, an instance of Listed"),
        (use, r"LISTED, which test_fingerprints\.use names, is <.*Listed"),
        (Holder(object()), r"Holder has no fingerprint: test_fingerprints\.Holder\.held is <obj"),
        (Holder(CYCLE), "which contains itself"),
        (holding(sys.__stdin__), "value, which .* captured, is <_io"),
        (functools.partial(parse, Listed()), r"parse has no fingerprint: it is <.*Listed"),
    ],
)
def test_what_has_no_fingerprint_is_named_with_what_to_do(tmp_path, template, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        prepare(RECORDS, Bytes(), tmp_path, template=template)
    assert re.search(r'pipeline\.templates\.Function\(…, fingerprint="v1"\)$', str(caught.value))
    assert not list(tmp_path.iterdir())
    given = Function(template, fingerprint="v1")
    assert fingerprint(given) == "v1"
    assert fingerprint(Holder(given)) != fingerprint(Holder(Function(use, fingerprint="v2")))


def test_functions_without_source_count_with_their_code():
    def make(text):
        names = {"__name__": "typed", "LIMIT": LIMIT}
        exec(text, names)
        return fingerprint(names["f"])

    texts = [
        "def f(r): return r in {'a', 'b', 'c', 'd'}",
        "def f(r): return r in {'a', 'b', 'c'}",
        "def f(r): return [each + 1 for each in r]",
        "def f(r): return [each + 2 for each in r]",
        "def f(r): return r[:LIMIT]",
        "f = lambda r: r",
    ]
    assert len({make(text) for text in texts}) == len(texts)
    assert [make("\n" + text) for text in texts] == [make(text) for text in texts]


def test_values_that_differ_in_one_attribute_are_told_apart():
    point, place = (collections.namedtuple("Point", names) for names in ("x y", "x z"))
    several = [
        *(np.zeros(2, "i8"), np.zeros(2, "f8"), np.zeros((2, 1), "i8"), np.add, np.multiply),
        *("a" + Markup("b"), Markup("ab"), "ab", b"ab", 1, True, 1.0, [1], (1,), {1}, {1: 1}),
        *(point(1, 2), place(1, 2), list[int], list[str], re.compile("a"), re.compile("a", re.I)),
        *(collections.defaultdict(each) for each in (list, int)),
    ]
    assert len({fingerprint(holding(each)) for each in several}) == len(several)


def test_an_own_fingerprint_is_a_text():
    for wrong in ("", 7, None):
        with pytest.raises(ValueError, match=r'fingerprint is .*; give a string, such as "v1"'):
            Function(parse, fingerprint=wrong)
