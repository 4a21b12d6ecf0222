"""Preference: a group of a prompt, the preferred answer, and rejected ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pipeline.errors import InvalidValue
from pipeline.text.markup import Markup, Null, is_blank, parse_format, parts_of
from pipeline.text.notes import note
from pipeline.text.template import LeftOut, Template, apply, check, traits_of
from pipeline.text.turns import UNASKED


@dataclass(frozen=True, kw_only=True)
class Preference:
    r"""A group of a prompt, the preferred answer, and one or several rejected ones.

    The prompt and the sides are format strings of the record's fields, like those of `Answer`, or
    templates, such as `Chat`. The spans that all sides begin with are the prefix, whose tokens have
    weight 0, since they cancel in every pairwise loss.

    >>> record = {"question": "2+2", "right": "4", "wrong": "5"}
    >>> Preference(prompt="Q: {question}\nA: ", chosen="{right}", rejected="{wrong}")(record)
    [[('Q: 2+2\nA: ', 0.0)], [('4', 1.0)], [('5', 1.0)]]

    If a record has two chats, as lists of turns, the prefix is the turns that they share:

    >>> chats = Preference(chosen=Chat(messages="chosen"), rejected=Chat(messages="rejected"))
    >>> question = {"role": "user", "content": "2+2"}
    >>> answers = [{"role": "assistant", "content": content} for content in ("4", "5")]
    >>> chats({"chosen": [question, answers[0]], "rejected": [question, answers[1]]})
    [[('<|user|>\n', 0.0), ('2+2<|end|>\n', 0.0), ('<|assistant|>\n', 0.0)],
     [('4<|end|>\n', 1.0)], [('5<|end|>\n', 1.0)]]

    Without a prompt, the prefix of texts ends where a word ends, before white space:

    >>> Preference(chosen="{a}", rejected="{b}")({"a": "Q: 2+2 A: four", "b": "Q: 2+2 A: five"})
    [[('Q: 2+2 A:', 0.0)], [(' four', 1.0)], [(' five', 1.0)]]

    A record is in no batch if its preferred side equals another one, or if a side has no loss, or
    adds no text to the prefix but marks; `prepare` counts such records.

    Attributes:
        prompt: what comes before all sides. Default nothing: the sides begin with it.
        chosen: the preferred side.
        rejected: the other side; or a list of several.
        null: as for `Answer`.

    Raises:
        ValueError: as for `Answer`.
    """

    prompt: str | Template = ""
    chosen: str | Template
    rejected: str | Template | Sequence[str | Template]
    null: Null = None

    takes_bytes: ClassVar = True

    def __post_init__(self) -> None:
        for name in ("prompt", "chosen", "rejected"):
            for side in self._rejected if name == "rejected" else [getattr(self, name)]:
                if isinstance(side, str):
                    parse_format(side, name)
        sides = self.prompt, self.chosen, *self._rejected
        if self.prompt and any(traits_of(side).whole for side in sides):
            raise InvalidValue(
                "prompt is given, and Jinja spells whole chats, each with its beginning; omit it, "
                "and let the sides be whole chats, such as a function that returns "
                'jinja({"messages": [*record["prompt"], *record["chosen"]]})'
            )

    @property
    def _rejected(self) -> Sequence[str | Template]:
        """The rejected sides, as a list."""
        rejected: Any = self.rejected
        return rejected if isinstance(rejected, list | tuple) else [rejected]

    @property
    def nodes(self) -> int:
        """The prefix and the sides."""
        return 2 + len(self._rejected)

    def __call__(self, record: dict[str, Any]) -> list[list[Any]]:
        """The spans of the prefix of a record, of its preferred side, and of the others."""
        formats = [self.chosen, *self._rejected]
        sides = [self._fill(format, record, 1.0) for format in formats]
        if self.prompt:
            filled = self._fill(self.prompt, record, 0.0)
            prompt = [(text, 0.0, *values) for text, _, *values in filled]
            if isinstance(self.prompt, str) and is_blank(self.prompt, prompt[0][0]):
                note(UNASKED, "")
            begin, *texts = ("".join(text for text, *_ in spans) for spans in (prompt, *sides))
            if begin.strip() and all(text.startswith(begin) for text in texts):
                note("have sides that begin with the prompt, which is twice", repr(begin[:40]))
            sides = [[*prompt, *side] for side in sides]
        elif all(isinstance(format, str) for format in formats):
            sides = _share_words([side[0][0] for side in sides])
        # What decides tokens, weights and features.
        first, *others = keys = [
            [(parts_of(text), _as_plain(rest)) for text, *rest in side] for side in sides
        ]
        if first in others:
            raise LeftOut("have a chosen and a rejected side that are equal")
        shared = _count_shared(keys)
        rests = [side[shared:] for side in sides]
        if not all(map(_has_text, rests, formats)):
            raise LeftOut("have a side that is empty, or that ends where another one goes on")
        if not all(any(weight for _, weight, *_ in rest) for rest in rests):
            raise LeftOut("have a side without loss, such as a chat that ends with the user")
        prefix = [(text, 0.0, *values) for text, _, *values in sides[0][:shared]]
        return [prefix or [("", 0.0)], *rests]

    def _fill(self, format: str | Template, record: dict[str, Any], weight: float) -> list[Any]:
        if isinstance(format, str):
            return [(Markup.fill(format, record, self.null), weight)]
        spans = apply(format, record)
        check(spans)
        return [*spans]


def _as_plain(value: Any) -> Any:
    """The same value, equal for arrays, lists and numbers of any type that have equal values."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        return {name: _as_plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [*map(_as_plain, value)]
    return "NaN" if value != value else value


def _count_shared(sequences: Sequence[Sequence[Any]]) -> int:
    """How many entries sequences have in common, from their beginning on."""
    rows = enumerate(zip(*sequences, strict=False))
    other = (n for n, entries in rows if entries.count(entries[0]) < len(entries))
    return next(other, min(map(len, sequences)))


def _share_words(texts: Sequence[Markup]) -> list[list[Any]]:
    """Each text as a span, after a span of the words that all begin with, if there are any."""
    ends = (at for at in range(_count_shared(texts), 0, -1) if not texts[0][at - 1].isspace())
    borders = (at for at in ends if all((text[at : at + 1] or " ").isspace() for text in texts))
    if (at := next(borders, 0)) > 0:
        halves = [text.cut([at]) for text in texts]
        if len({prefix.parts for prefix, _ in halves}) == 1:
            return [[(prefix, 0.0), (rest, 1.0)] for prefix, rest in halves]
    return [[(text, 1.0)] for text in texts]


def _has_text(spans: Sequence[Any], format: str | Template) -> bool:
    """Whether spans have text: that of fields, or of a format string without any."""
    parts = [part for text, *_ in spans for part in parts_of(text)]
    has_no_field = isinstance(format, str) and "{" not in format
    return any(text and (has_no_field or not is_markup) for text, is_markup in parts)
