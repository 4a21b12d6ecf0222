"""Several sources as one."""

from collections.abc import Sequence
from typing import Any

from pipeline.text.sources.parts import Parts
from pipeline.text.sources.source import Source, read_records, where


class Concatenated(Parts):
    """The records of the first source, then those of the second, and so on.

    >>> both = Concatenated([[{"text": "a"}], [{"text": "b"}, {"text": "c"}]])
    >>> len(both), both[2]
    (3, {'text': 'c'})
    """

    def __init__(self, sources: Sequence[Source]):
        self.sources = list(sources)

    @property
    def fingerprint(self) -> str:
        """See `Source`."""
        return "+".join(source.fingerprint for source in self.sources)

    @property
    def _sizes(self) -> list[int]:
        return list(map(len, self.sources))

    def _read(self, part: int, numbers: Sequence[int]) -> Sequence[Any]:
        return read_records(self.sources[part], numbers)

    def _where(self, part: int, number: int) -> str:
        return where(self.sources[part], number)

    def __str__(self) -> str:
        return " and ".join(map(str, self.sources))
