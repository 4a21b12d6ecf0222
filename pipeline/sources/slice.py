"""A slice of a source, by fractions."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.sources.source import Source, read_records, where


class Slice:
    """The records of `source` from fraction `begin` up to fraction `end`.

    Slices that share a bound share no record and leave none out.

    >>> letters = [{"text": letter} for letter in "abcdefg"]
    >>> [len(Slice(letters, 0.0, 0.9)), len(Slice(letters, 0.9, 1.0))]
    [6, 1]

    Raises:
        ValueError: not 0 <= begin < end <= 1.
    """

    def __init__(self, source: Source, begin: float, end: float):
        if not 0 <= begin < end <= 1:
            raise ValueError(f"Slice from {begin} to {end}; it takes 0.0 <= begin < end <= 1.0")
        self.source, self.begin, self.end = source, begin, end

    @property
    def _bounds(self) -> tuple[int, int]:
        return int(len(self.source) * self.begin), int(len(self.source) * self.end)

    @property
    def fingerprint(self) -> str:
        """See `Source`."""
        return f"{self.source.fingerprint}[{self.begin}:{self.end}]"

    def __len__(self) -> int:
        begin, end = self._bounds
        return end - begin

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self.source[self._within(index)]

    def __getitems__(self, indices: Sequence[int]) -> list[Mapping[str, Any]]:
        """The records with these numbers."""
        return read_records(self.source, [self._within(index) for index in indices])

    def where(self, index: int) -> str:
        """Where the source says that the record came from."""
        return where(self.source, self._within(index))

    def _within(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self):,}")
        return self._bounds[0] + index

    def __str__(self) -> str:
        return f"{self.begin:.1%} to {self.end:.1%} of {self.source}"
