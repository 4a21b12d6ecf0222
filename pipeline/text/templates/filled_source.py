"""FilledSource: the text that a template makes of each record, for training a tokenizer on it."""

from collections.abc import Sequence

from pipeline.text.fingerprints import fingerprint
from pipeline.text.sources.parts import Parts
from pipeline.text.sources.source import Source, where
from pipeline.text.templates.template import Template, fill


class FilledSource(Parts):
    """Records `{"text": …}`: all spans of each record of a source, one after another.

    >>> from pipeline.text.templates.answer import Answer
    >>> FilledSource([{"q": "2+2", "a": "4"}], Answer(prompt="{q}=", answer="{a}"))[0]
    {'text': '2+2=4'}
    """

    def __init__(self, source: Source, template: Template):
        self.source, self.template = source, template

    @property
    def fingerprint(self) -> str:
        """See `Source`."""
        return f"{self.source.fingerprint}-{fingerprint(self.template)}"

    @property
    def _sizes(self) -> list[int]:
        return [len(self.source)]

    def _read(self, part: int, numbers: Sequence[int]) -> list[dict[str, str]]:
        filled = fill(self.template, self.source, numbers)
        return [{"text": "".join(text for text, _ in spans)} for spans in filled]

    def _where(self, part: int, number: int) -> str:
        return where(self.source, number)

    def __str__(self) -> str:
        return f"{self.source}, by a template"
