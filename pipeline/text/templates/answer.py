"""Answer: a prompt without loss, then an answer with loss."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pipeline.errors import require_type
from pipeline.text.markup import Markup, Null, is_blank, parse_format
from pipeline.text.notes import note
from pipeline.text.template import Span
from pipeline.text.turns import UNANSWERED, UNASKED


@dataclass(frozen=True, kw_only=True)
class Answer:
    r"""A prompt without loss, then an answer with loss; for instruction and prefix tuning.

    Both are format strings of the record's fields, which hold texts or numbers. Special tokens are
    parsed in the format strings alone, not in the fields; see `Markup`.

    >>> Answer(prompt="Q: {question}\nA: ", answer="{answer}")({"question": "2+2", "answer": "4"})
    [('Q: 2+2\nA: ', 0.0), ('4', 1.0)]

    Attributes:
        prompt: the text before the answer.
        answer: the text to learn.
        null: the text of fields that are null or NaN, such as ""; or a dict of such texts by field.
            Default None: they are errors.

    Raises:
        ValueError: a format string has a brace or a field that is not complete.
    """

    prompt: str
    answer: str
    null: Null = None

    takes_bytes: ClassVar = True

    def __post_init__(self) -> None:
        for name in ("prompt", "answer"):
            require_type(name, getattr(self, name), str, "a text, with fields such as {question}")
            parse_format(getattr(self, name), name)

    def __call__(self, record: Mapping[str, Any]) -> list[Span]:
        """The two spans of a record."""
        prompt, answer = (
            Markup.fill(format, record, self.null) for format in (self.prompt, self.answer)
        )
        if is_blank(self.answer, answer) and (prompt + answer).strip():
            note(UNANSWERED, "")
        elif is_blank(self.prompt, prompt) and answer.strip():
            note(UNASKED, "")
        return [(prompt, 0.0), (answer, 1.0)]
