"""Alignment: rows in which each segment begins at a multiple of `align` columns.

A segment of n positions takes ⌈n / align⌉ units of `align` columns. Packing sees only units, so its
histogram is short. `Alignment` then puts pieces into the rows that packing found.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pipeline.planning.bucket import Bucket
from pipeline.planning.patterns import Packed, Pattern


class Alignment:
    """The units that pieces of each size take.

    >>> aligned = Alignment(np.arange(5)[:, None], align=2)
    >>> aligned.units.tolist(), aligned.fold(np.array([0, 5, 1, 1, 2])).tolist()
    ([[0], [1], [2]], [0, 6, 3])

    Args:
        positions: the positions of each size, int64 [sizes, 1], for pairs [sizes, 2]; 0 for
            size 0.
        align: columns in a unit; lengths of buckets are multiples of it.

    Attributes:
        units: the units of each *place*, which sizes of equal units share: int64 [places, 1], for
            pairs [places, 2]; ascending by the share of a row.
    """

    def __init__(self, positions: np.ndarray, align: int):
        self._positions, self._align = positions, align
        units = -(-positions // align)
        key = np.ravel_multi_index(tuple(units.T), tuple(units.max(axis=0) + 1))
        _, first, place = np.unique(key, return_index=True, return_inverse=True)
        longest = np.maximum(units.max(axis=0), 1)
        order = (units[first] @ longest[::-1]).argsort(kind="stable")
        self.units = units[first[order]]
        self._place = np.empty(len(order), np.int64)
        self._place[order] = np.arange(len(order))
        self._place = self._place[place]  # the place of each size

    def fold(self, counts: np.ndarray) -> np.ndarray:
        """The number of pieces in each place, from `counts` of each size: int64 [places]."""
        found = np.zeros(len(self.units), np.int64)
        np.add.at(found, self._place, counts)
        return found

    def filled(self, counts: np.ndarray) -> float:
        """The share of real positions in the columns that pieces take, from 0 to 1."""
        units = self.fold(counts) @ self.units
        return float((counts @ self._positions).sum() / (self._align * units.sum()))

    def pack(
        self,
        search: Callable[..., Packed],
        counts: np.ndarray,
        buckets: Sequence[Bucket],
        **options: Any,
    ) -> Packed:
        """Packs pieces by `search`, which packs places and takes the other arguments."""
        counts = counts.copy()
        counts[0] = 0
        packed = search(self.fold(counts), self.in_units(buckets), **options)
        # The sizes of the pieces in each place, ascending, each with its number of pieces.
        pieces = [collections.deque[list[int]]() for _ in self.units]
        for size in np.flatnonzero(counts).tolist():
            pieces[self._place[size]].append([size, int(counts[size])])
        patterns = [
            tuple(row for pattern in of_bucket for row in self._fill(pattern, pieces))
            for of_bucket in packed.patterns
        ]
        return Packed(tuple(patterns), counts)

    def in_units(self, buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
        """The buckets, with lengths in units."""
        each = [tuple(length // self._align for length in b.lengths) for b in buckets]
        return tuple(
            Bucket(bucket.rows, lengths[0] if len(lengths) == 1 else lengths)
            for bucket, lengths in zip(buckets, each, strict=True)
        )

    def _fill(
        self, pattern: Pattern, pieces: "list[collections.deque[list[int]]]"
    ) -> "list[Pattern]":
        """The rows of a pattern of places, filled with the next of `pieces`, which are removed.

        Rows differ only where a place changes to pieces of the next size.
        """
        found, left = [], pattern.rows
        while left:
            row, rows = collections.Counter[int](), left
            for place, times in pattern.pieces:
                size, number = pieces[place][0]
                if number >= times:  # this size alone fills the place in several rows
                    row[size] += times
                    rows = min(rows, number // times)
                    continue
                rows = 1
                for size, number in pieces[place]:
                    taken = min(number, times)
                    row[size] += taken
                    if not (times := times - taken):
                        break
            for size, times in row.items():
                of_size = pieces[self._place[size]][0]
                of_size[1] -= times * rows
                if not of_size[1]:
                    pieces[self._place[size]].popleft()
            fill = sum(int(self._positions[size].sum()) * times for size, times in row.items())
            found.append(Pattern(tuple(row.items()), rows, fill, pattern.segments))
            left -= rows
        return found
