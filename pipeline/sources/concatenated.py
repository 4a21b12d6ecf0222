"""Several sources as one."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.sources.files import locate
from pipeline.sources.source import Source, read_records, where


class Concatenated:
    """The records of the first source, then those of the second, and so on.

    >>> both = Concatenated([[{"text": "a"}], [{"text": "b"}, {"text": "c"}]])
    >>> len(both), both[2]
    (3, {'text': 'c'})
    """

    def __init__(self, sources: Sequence[Source]):
        self.sources = list(sources)

    @functools.cached_property
    def _first(self) -> list[int]:
        """The number of the first record of each source, and of all records."""
        return [0, *itertools.accumulate(map(len, self.sources))]

    @property
    def fingerprint(self) -> str:
        """See `Source`."""
        return "+".join(source.fingerprint for source in self.sources)

    def __len__(self) -> int:
        return self._first[-1]

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        number, within = locate(self._first, index)
        return self.sources[number][within]

    def __getitems__(self, indices: Sequence[int]) -> list[Mapping[str, Any]]:
        """The records with these numbers; neighbours in one source are read together."""
        records: list[Mapping[str, Any]] = []
        places = (locate(self._first, index) for index in indices)
        for number, run in itertools.groupby(places, key=lambda place: place[0]):
            records += read_records(self.sources[number], [within for _, within in run])
        return records

    def where(self, index: int) -> str:
        """Where the source says that the record came from."""
        number, within = locate(self._first, index)
        return where(self.sources[number], within)

    def __str__(self) -> str:
        return " and ".join(map(str, self.sources))
