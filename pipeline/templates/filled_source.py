"""FilledSource: the text that a template makes of each record, for training a tokenizer on it."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.fingerprints import fingerprint
from pipeline.sources.source import Source, where
from pipeline.templates.template import Template, fill


class FilledSource:
    """Records `{"text": …}`: all spans of each record of a source, one after another.

    >>> from pipeline.templates.answer import Answer
    >>> FilledSource([{"q": "2+2", "a": "4"}], Answer(prompt="{q}=", answer="{a}"))[0]
    {'text': '2+2=4'}
    """

    def __init__(self, source: Source, template: Template):
        self.source, self.template = source, template

    @property
    def fingerprint(self) -> str:
        """See `Source`."""
        return f"{self.source.fingerprint}-{fingerprint(self.template)}"

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Mapping[str, Any]]:
        """The records with these numbers."""
        filled = fill(self.template, self.source, indices)
        return [{"text": "".join(text for text, _ in spans)} for spans in filled]

    def where(self, index: int) -> str:
        """Where the source says that the record came from."""
        return where(self.source, index)

    def __str__(self) -> str:
        return f"{self.source}, by a template"
