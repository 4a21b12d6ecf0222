"""Parts: the base of sources whose records lie in files, groups of rows, or other sources."""

import bisect
import functools
import itertools
from collections.abc import Sequence
from typing import Any

from pipeline.errors import OutOfRange


class Parts:
    """Records numbered over several parts; a subclass has `_sizes`, `_read` and `_where`."""

    @property
    def _sizes(self) -> Sequence[int]:
        """The number of records of each part."""
        raise NotImplementedError

    def _read(self, part: int, numbers: Sequence[int]) -> Sequence[Any]:
        """Records of one part by their numbers there, ascending."""
        raise NotImplementedError

    def _where(self, part: int, number: int) -> str:
        raise NotImplementedError

    @functools.cached_property
    def _first(self) -> list[int]:
        """The number of the first record of each part, and of all records."""
        return [0, *itertools.accumulate(self._sizes)]

    def _locate(self, index: int) -> tuple[int, int]:
        """The part that holds a record, and its number there."""
        if not 0 <= index < len(self):
            raise OutOfRange(f"record {index} of {len(self):,}")
        part = bisect.bisect_right(self._first, index) - 1
        return part, index - self._first[part]

    def __len__(self) -> int:
        return self._first[-1]

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The records with these numbers; each part is read once, in ascending order."""
        places = sorted((self._locate(index), at) for at, index in enumerate(indices))
        records: list[Any] = [None] * len(indices)
        for part, run in itertools.groupby(places, key=lambda place: place[0][0]):
            numbers, order = zip(*((number, at) for (_, number), at in run), strict=True)
            for at, record in zip(order, self._read(part, numbers), strict=True):
                records[at] = record
        return records

    def where(self, index: int) -> str:
        """Where a record comes from, for people."""
        return self._where(*self._locate(index))
