"""Markup: text in which a tokenizer parses marks, kept apart from the text of records."""

import re
import string
from collections.abc import Mapping
from typing import Any

from pipeline.errors import InvalidValue


class MarkError(InvalidValue):
    """A text that is not markup has a special token that the tokenizer cannot encode as text."""


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
    def fill(cls, text: str, fields: Mapping[str, Any]) -> "Markup":
        """Like `text.format_map(fields)`; the text is markup, and the fields are not.

        >>> Markup.fill("Q: {q}", {"q": "Who?"}).parts
        (('Q: ', True), ('Who?', False))
        """
        pieces: list[Any] = []
        for own, name, spec, conversion in string.Formatter().parse(text):
            pieces.append((own, True))
            if name is not None:
                end = (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
                pieces.append((f"{{{name}{end}}}".format_map(fields), False))
        return join(*pieces)

    def __add__(self, other: str) -> "Markup":
        return join(self, other)

    def __radd__(self, other: str) -> "Markup":
        return join(other, self)


def parts_of(text: str) -> tuple[tuple[str, bool], ...]:
    """The parts of `Markup`; a plain text is one part, not markup."""
    return text.parts if isinstance(text, Markup) else ((text, False),)


def join(*pieces: Any) -> Markup:
    """Markup of texts, and of pairs as in `parts`; neighbours of the same kind become one part."""
    parts: list[tuple[str, bool]] = []
    for piece in pieces:
        for text, own in [piece] if isinstance(piece, tuple) else parts_of(piece):
            if parts and parts[-1][1] == own:
                text = parts.pop()[0] + text
            if text:
                parts.append((text, own))
    joined = str.__new__(Markup, "".join(text for text, _ in parts))
    joined.parts = tuple(parts)
    return joined


def is_mark(token: str) -> bool:
    """Whether a token looks like a mark: a name between signs.

    Tokenizers also add tokens that do occur in texts: words, signs and runs of spaces.

    >>> [is_mark(token) for token in ("<|end|>", "[INST]", "</s>", "bitcoin", "  ", "...", "(")]
    [True, True, True, False, False, False, False]
    """
    return re.fullmatch(r"[^\w\s].*\w.*[^\w\s]", token, re.DOTALL) is not None
