"""Answers to prompts: the prompt is read, the answer is learnt."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.text.templates.template import Span
from pipeline.text.tokenizers import Markup


@dataclass(frozen=True, kw_only=True)
class Answer:
    r"""A prompt without loss, then an answer with it; for instruction and prefix tuning.

    Both are format strings of the record's fields. Special tokens are parsed in the format strings
    alone, not in the fields; see `Markup`.

    >>> Answer(prompt="Q: {question}\nA: ", answer="{answer}")({"question": "2+2", "answer": "4"})
    [('Q: 2+2\nA: ', 0.0), ('4', 1.0)]
    """

    prompt: str
    answer: str

    def __call__(self, record: Mapping[str, Any]) -> list[Span]:
        """The two spans of a record."""
        return [(Markup.fill(self.prompt, record), 0.0), (Markup.fill(self.answer, record), 1.0)]
