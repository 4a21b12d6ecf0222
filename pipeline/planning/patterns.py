"""Patterns: the ways in which rows are filled, and best-fit decreasing, which finds them.

Packing works on counts of sizes and never sees an example. All rows with the same content are one
pattern, so the cost grows with the number of patterns and not with the number of examples.
"""

import bisect
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

# Best fit keeps a bit for each free room of a row, in words of 2**SHIFT bits.
SHIFT = 15
MASK = (1 << SHIFT) - 1


class Pattern(NamedTuple):
    """The content of a row, and the number of rows that have this content.

    `pieces` has each size in the row with its number of occurrences: ((100, 2), (28, 1)) is a row
    with two segments of 100 positions and one of 28. With several sides, a size is a line number in
    a table of sizes.
    """

    pieces: tuple[tuple[int, int], ...]
    rows: int
    fill: Any  # real positions in one such row; those of a side count with its cost
    segments: int  # in one such row


@dataclasses.dataclass(frozen=True)
class Packed:
    """A histogram packed into rows of several buckets."""

    patterns: tuple[tuple[Pattern, ...], ...]  # for each bucket
    counts: np.ndarray  # int64 [sizes], the segments of each size that have a place in a row
    # With packing="fill", the ways in which documents are cut, as `Cuts.table`; and the number that
    # are cut.
    cuts: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 2), np.int64))
    num_cuts: int = 0

    def rows(self, index: int) -> int:
        """Rows of bucket number `index`, without empty rows."""
        return count_rows(self.patterns[index])

    def cost(self, prices: Sequence[float]) -> float:
        """The cost of all rows, from the price of a row of each bucket."""
        return sum(
            count_rows(patterns) * price
            for patterns, price in zip(self.patterns, prices, strict=True)
        )

    def most_in_row(self, index: int, continuations: np.ndarray) -> tuple[int, int]:
        """The most segments (at least 1) and continuations in a row of bucket number `index`.

        `continuations` are those of a piece of each size.
        """
        patterns, most = self.patterns[index], 0
        if continuations.any():
            in_rows = [[int(continuations[size]) * n for size, n in p.pieces] for p in patterns]
            most = max(map(sum, in_rows), default=0)
        return max([pattern.segments for pattern in patterns], default=1), most


class Remaining:
    """The segments of a histogram that have no row yet: `counts` by size, and their sums."""

    def __init__(self, histogram: np.ndarray):
        self._sizes = np.flatnonzero(histogram).tolist()  # ascending
        self.counts = dict(zip(self._sizes, histogram[self._sizes].tolist(), strict=True))
        self.positions = int(histogram @ np.arange(len(histogram)))
        self.segments = int(histogram.sum())

    def longest(self, room: int) -> int:
        """The size of the longest segment that fits into `room`; 0 if there is none."""
        index = bisect.bisect_right(self._sizes, room)
        return self._sizes[index - 1] if index else 0

    def take(self, size: int, times: int = 1) -> None:
        """Takes some segments of a size."""
        self.positions -= size * times
        self.segments -= times
        self.counts[size] -= times
        if not self.counts[size]:
            del self.counts[size], self._sizes[bisect.bisect_left(self._sizes, size)]


def count_rows(patterns: Iterable[Pattern]) -> int:
    """The rows of some patterns."""
    return sum([pattern.rows for pattern in patterns])


def count_segments(patterns: Iterable[Pattern], size: int) -> np.ndarray:
    """The number of segments of each size in all rows of some patterns: int64 [size]."""
    counts = np.zeros(size, np.int64)
    for pattern in patterns:
        for length, times in pattern.pieces:
            counts[length] += times * pattern.rows
    return counts


def best_fit(
    counts: np.ndarray, length: int, opens: np.ndarray, max_segments: int | None = None
) -> list[Pattern]:
    """Rows of one bucket, packed by best-fit decreasing; removes their segments from `counts`.

    Takes the segments from the longest to the shortest and puts each into the open row with the
    least room that holds it (Johnson et al., 1974).

    >>> counts = np.array([0, 0, 3, 0, 0, 0, 1, 0, 2])  # three of 2, one of 6, two of 8
    >>> patterns = best_fit(counts, 10, np.ones(9, bool))
    >>> [(pattern.pieces, pattern.rows) for pattern in patterns]
    [(((8, 1), (2, 1)), 2), (((6, 1), (2, 1)), 1)]

    `counts`, int64 [n], is changed in place. `opens`, bool [n], has the sizes that may open a row;
    the others only fill rows already open. A row has `max_segments` segments at most.
    """
    limit, may_open = max_segments or length, opens.tolist()
    # An entry is a set of equal rows: (pieces, segments, rows). `open_rows` maps the free room of a
    # row to its entries. Bit r of `rooms`, which are words of 2**SHIFT bits, is set if the entries
    # of room r are not empty, and bit w of `words` if word w is not 0.
    open_rows: dict[int, list] = {}
    patterns: list[Pattern] = []
    rooms, words = [0] * ((length >> SHIFT) + 1), 0
    # Planning spends most of its time in this loop, so it calls few functions and makes patterns by
    # `tuple.__new__`.
    entries: list | None
    new, free = tuple.__new__, 0
    some = np.flatnonzero(counts[1 : length + 1])[::-1] + 1
    remaining = []
    for size, count in zip(some.tolist(), counts[some].tolist(), strict=True):
        word, bit = size >> SHIFT, size & MASK
        while count:
            if fitting := rooms[word] >> bit:
                free = size + (fitting & -fitting).bit_length() - 1
            elif fitting := words >> word + 1:
                free = word + (fitting & -fitting).bit_length()
                fitting = rooms[free]
                free = (free << SHIFT) + (fitting & -fitting).bit_length() - 1
            if fitting:
                entries = open_rows[free]
                pieces, segments, rows = entries[-1]
                times = free // size
                if times > limit - segments:
                    times = limit - segments
                full = count // times
                full = rows if full > rows else full
                part = rows > full and count > full * times
                if stay := rows - full - part:
                    entries[-1] = pieces, segments, stay
                else:
                    entries.pop()
                    if not entries:
                        rooms[free >> SHIFT] ^= 1 << (free & MASK)
                        if not rooms[free >> SHIFT]:
                            words ^= 1 << (free >> SHIFT)
            elif may_open[size]:
                times = length // size
                if times > limit:
                    times = limit
                pieces, segments, free = (), 0, length
                full = count // times
                part = count > full * times
            else:
                break
            if full:
                more, left = segments + times, free - times * size
                count -= full * times
                if not left or more == limit:
                    row = ((*pieces, (size, times)), full, length - left, more)
                    patterns.append(new(Pattern, row))
                elif entries := open_rows.get(left):
                    entries.append(((*pieces, (size, times)), more, full))
                else:
                    open_rows[left] = [((*pieces, (size, times)), more, full)]
                    rooms[left >> SHIFT] |= 1 << (left & MASK)
                    words |= 1 << (left >> SHIFT)
            if part:  # fewer than `times` remain, for one more row
                left = free - count * size
                if entries := open_rows.get(left):
                    entries.append(((*pieces, (size, count)), segments + count, 1))
                else:
                    open_rows[left] = [((*pieces, (size, count)), segments + count, 1)]
                    rooms[left >> SHIFT] |= 1 << (left & MASK)
                    words |= 1 << (left >> SHIFT)
                count = 0
        remaining.append(count)
    counts[some] = remaining
    for free in sorted(open_rows):
        for pieces, segments, rows in open_rows[free]:
            patterns.append(new(Pattern, (pieces, rows, length - free, segments)))
    return patterns
