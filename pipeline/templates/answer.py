"""Answers to prompts: the prompt is read, the answer is learnt."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.templates.template import Span


@dataclass(frozen=True, kw_only=True)
class Answer:
    r"""A prompt without loss, then an answer with it; for instruction and prefix tuning.

    Both are format strings of the record's fields.

    >>> Answer(prompt="Q: {question}\nA: ", answer="{answer}")({"question": "2+2", "answer": "4"})
    [('Q: 2+2\nA: ', 0.0), ('4', 1.0)]
    """

    prompt: str
    answer: str

    def __call__(self, record: Mapping[str, Any]) -> list[Span]:
        """The two spans of a record."""
        return [(self.prompt.format_map(record), 0.0), (self.answer.format_map(record), 1.0)]
