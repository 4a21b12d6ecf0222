"""Several sources as one."""

import bisect
import itertools
from collections.abc import Sequence
from typing import Any

from pipeline.sources.source import Source, read_records, where


class Concatenated:
    """The records of the first source, then those of the second, and so on.

    >>> both = Concatenated([[{"text": "a"}], [{"text": "b"}, {"text": "c"}]])
    >>> len(both), both[2]
    (3, {'text': 'c'})
    """

    def __init__(self, sources: Sequence[Source]):
        self.sources = list(sources)

    @property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(map(len, self.sources)))

    @property
    def fingerprint(self) -> str:
        """See `Source`."""
        return "+".join(source.fingerprint for source in self.sources)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        source, within = self._at(index)
        return source[within]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """The records with these numbers; neighbours in one source are read together."""
        found: list[dict[str, Any]] = []
        places = map(self._at, indices)
        for _, run in itertools.groupby(places, key=lambda place: id(place[0])):
            same = list(run)
            found += read_records(same[0][0], [within for _, within in same])
        return found

    def where(self, index: int) -> str:
        """Where the source says that the record came from."""
        return where(*self._at(index))

    def _at(self, index: int) -> tuple[Source, int]:
        ends = self._ends
        if not 0 <= index < ends[-1]:
            raise IndexError(f"record {index} of {ends[-1]:,}")
        number = bisect.bisect_right(ends, index)
        return self.sources[number], index - (ends[number - 1] if number else 0)

    def __str__(self) -> str:
        return " and ".join(map(str, self.sources))
