"""A slice of a source, by fractions."""

from collections.abc import Sequence
from typing import Any

from pipeline.errors import InvalidValue
from pipeline.text.sources.parts import Parts
from pipeline.text.sources.source import Source, read_records, where


class Slice(Parts):
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
            raise InvalidValue(f"Slice from {begin} to {end}; it takes 0.0 <= begin < end <= 1.0")
        self.source, self.begin, self.end = source, begin, end

    @property
    def fingerprint(self) -> str:
        """See `Source`."""
        return f"{self.source.fingerprint}[{self.begin}:{self.end}]"

    def _at(self, fraction: float) -> int:
        return int(len(self.source) * fraction)

    @property
    def _sizes(self) -> list[int]:
        return [self._at(self.end) - self._at(self.begin)]

    def _read(self, part: int, numbers: Sequence[int]) -> Sequence[Any]:
        first = self._at(self.begin)
        return read_records(self.source, [first + number for number in numbers])

    def _where(self, part: int, number: int) -> str:
        return where(self.source, self._at(self.begin) + number)

    def __str__(self) -> str:
        return f"{self.begin:.1%} to {self.end:.1%} of {self.source}"
