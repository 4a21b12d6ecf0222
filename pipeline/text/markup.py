"""Markup: text in which a tokenizer parses marks, kept apart from the text of records."""

import functools
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipeline.errors import InvalidValue
from pipeline.text.values import NUMBERS, as_text, is_null

# The text of nulls in all fields, or by field; None: nulls are refused.
Null = str | Mapping[str, str] | None

FORMATTER = string.Formatter()

# Own text of a template that is meant as a mark.
MEANT = re.compile(r"<\|[^<>|\s]+\|>")


class Markup(str):
    r"""A template's own text, in which marks such as `<|end|>` become their tokens.

    Marks in any other text stay text. `+` keeps the two kinds of text apart:

    >>> text = "Hi" + Markup("<|end|>\n")
    >>> text, text.parts
    ('Hi<|end|>\n', (('Hi', False), ('<|end|>\n', True)))

    All other ways to join strings, such as f-strings, make plain text.

    Attributes:
        parts: pieces of the text, in order, each with whether it is markup.
    """

    parts: tuple[tuple[str, bool], ...]

    def __new__(cls, text: str = "") -> "Markup":  # noqa: D102
        return join(text) if isinstance(text, Markup) else join((str(text), True))

    @classmethod
    def fill(cls, text: str, fields: Mapping[str, Any], null: Null = None) -> "Markup":
        """Like `text.format_map(fields)`; the text is markup, and the fields are not.

        Fields are texts or numbers, as `values.as_text` has them; `{field!r}` takes other values.

        >>> Markup.fill("Q: {q}", {"q": "Who?"}).parts
        (('Q: ', True), ('Who?', False))
        """
        pieces: list[Any] = []
        for literal, name, root, spec, conversion in parse_format(text, "the text of a template"):
            pieces.append((literal, True))
            if name is None:
                continue
            if root not in fields and "." in root:
                entry = root.replace(".", "[", 1)
                raise InvalidValue(f"it has no field {root!r}; an entry of a field is {{{entry}]}}")
            value = fields[root]
            for entry in re.findall(r"\[([^\]]*)\]", name[len(root) :]):
                try:
                    if isinstance(value, str | bytes):
                        raise TypeError(f"it is the text {value!r:.40}, not a list or a dict")
                    value = value[int(entry) if entry.isdigit() else entry]
                except (LookupError, TypeError) as error:
                    why = "the list is shorter" if isinstance(error, IndexError) else error
                    raise InvalidValue(f"its field {root!r} has no {name!r} ({why})") from error
            blank = null if null is None or isinstance(null, str) else null.get(root)
            if spec or conversion:
                spec = spec.format_map(fields) if spec else ""
                value = _format(value, f"its field {name!r}", blank, spec, conversion)
            pieces.append((as_text(value, f"its field {name!r}", blank), False))
        return join(*pieces)

    def cut(self, offsets: Sequence[int]) -> "list[Markup]":
        """The pieces between some offsets, which ascend, one more than there are offsets.

        >>> [piece.parts for piece in Markup.fill("Q: {q}", {"q": "Who?"}).cut([4])]
        [(('Q: ', True), ('W', False)), (('ho?', False),)]
        """
        pieces: list[list[Any]] = [[]]
        begin, due = 0, list(reversed(offsets))
        for text, is_markup in self.parts:
            end = begin + len(text)
            while due and due[-1] < end:
                size = max(due.pop() - begin, 0)
                pieces[-1].append((text[:size], is_markup))
                pieces.append([])
                text, begin = text[size:], begin + size
            pieces[-1].append((text, is_markup))
            begin = end
        return [join(*piece) for piece in [*pieces, *([] for _ in due)]]

    def __add__(self, other: str) -> "Markup":
        return join(self, other)

    def __radd__(self, other: str) -> "Markup":
        return join(other, self)


@functools.lru_cache(256)
def parse_format(
    text: str, what: str
) -> tuple[tuple[str, str | None, str, str | None, str | None], ...]:
    """The pieces of a format string: literal text, a field's name, its root, spec and conversion.

    `what` names the string in errors, which are about braces and fields without a name.
    """
    try:
        pieces = list(FORMATTER.parse(text))
        names = [name for _, name, *_ in pieces if name is not None]
        if not all(re.match(r"[^\d\[]", name) for name in names):
            raise ValueError("it has a field without a name")
        if not all(re.fullmatch(r"[^\[]+(\[[^\]]+\])*", name) for name in names):
            raise ValueError("an entry of a field is {name[entry]} or {name[0]}")
        if not {conversion or "s" for *_, conversion in pieces} <= {*"ars"}:
            raise ValueError("a conversion is !r, !a or !s")
    except (TypeError, ValueError) as error:
        raise InvalidValue(
            f"{what} is {text!r}: {error}; a field of the record is {{name}}, and a brace itself "
            "is {{ or }}"
        ) from None
    return tuple(
        (literal, name, (name or "").split("[")[0], spec, conversion)
        for literal, name, spec, conversion in pieces
    )


def is_blank(format: str, filled: str) -> bool:
    """Whether a format string has fields, and none of them has text in what was made of it.

    >>> is_blank("Q: {q}", Markup.fill("Q: {q}", {"q": ""})), is_blank("Q", Markup("Q"))
    (True, False)
    """
    has_fields = any(name is not None for _, name, *_ in parse_format(format, "a format"))
    fields = (text for text, is_markup in parts_of(filled) if not is_markup)
    return has_fields and not any(map(str.strip, fields))


def _format(value: Any, what: str, null: str | None, spec: str, conversion: str | None) -> str:
    """A value as its conversion and its format spec print it."""
    kind: Any = type(value)
    if conversion in ("r", "a") and not is_null(value):
        value = FORMATTER.convert_field(value, conversion)
    elif isinstance(value, NUMBERS) or kind.__format__ is object.__format__:
        text = as_text(value, what, null)
        value = value if isinstance(value, NUMBERS) and not is_null(value) else text
    return format(value, spec)


def parts_of(text: str) -> tuple[tuple[str, bool], ...]:
    """The parts of `Markup`; a plain text is one part, not markup."""
    return text.parts if isinstance(text, Markup) else ((text, False),)


def join(*pieces: Any) -> Markup:
    """Markup of texts, and of pairs as in `parts`; neighbours of the same kind become one part."""
    parts: list[tuple[str, bool]] = []
    for piece in pieces:
        for text, is_markup in [piece] if isinstance(piece, tuple) else parts_of(piece):
            if parts and parts[-1][1] == is_markup:
                text = parts.pop()[0] + text
            if text:
                parts.append((text, is_markup))
    joined = str.__new__(Markup, "".join(text for text, _ in parts))
    joined.parts = tuple(parts)
    return joined


def any_of(texts: Iterable[str]) -> str:
    """A pattern of any of some texts, of which the first counts; of none, it matches nothing."""
    return "|".join(map(re.escape, texts)) or "(?!)"


def is_mark(token: str) -> bool:
    """Whether a token looks like a mark: a name between signs.

    Tokenizers also add tokens that do occur in texts: words, signs and runs of spaces.

    >>> [is_mark(token) for token in ("<|end|>", "[INST]", "</s>", "bitcoin", "  ", "...", "(")]
    [True, True, True, False, False, False, False]
    """
    return re.fullmatch(r"[^\w\s].*\w.*[^\w\s]", token, re.DOTALL) is not None
