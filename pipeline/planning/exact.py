"""Exact fill: rows of whole examples that are as full as the remaining ones allow.

Best fit leaves gaps where few short examples are left to fill them. Here, the longest remaining
example opens a row, and a subset of the others fills the rest of it, exactly if there is one: a
subset sum over the histogram, whose reachable sums are the bits of a whole number (Pisinger, 1999).
The row is repeated as often as the examples allow. Where examples are few and long, that uses up
the short ones too early, and best fit has fuller rows: so packers try both.
"""

import bisect
from collections.abc import Mapping, Sequence

import numpy as np

from pipeline.planning.patterns import Pattern

# The most sums of a window that are taken, which is about a second of them; and of a row, whose
# sums are in memory together. A sum of longer rows counts as several.
MOST_SUMS, MOST_OF_ROW, BITS = 500_000, 1 << 16, 1 << 15


class Work:
    """The sums that may still be taken. They are counted, so that every machine gives up alike."""

    def __init__(self, sums: int = MOST_SUMS):
        self.left = sums


def fill_exactly(
    counts: np.ndarray, length: int, opens: np.ndarray, work: Work
) -> list[Pattern] | None:
    """Rows of one bucket, which are removed from `counts`; None if they take too much work.

    Arguments are as for `best_fit`.

    >>> counts = np.array([0, 0, 0, 2, 1, 1, 0, 2])  # two of 3, one of 4, one of 5, two of 7
    >>> found = fill_exactly(counts, 12, counts > 0, Work())
    >>> [(pattern.pieces, pattern.rows) for pattern in found]
    [(((7, 1), (5, 1)), 1), (((7, 1), (4, 1)), 1), (((3, 2),), 1)]
    """
    sizes = (np.flatnonzero(counts[1 : length + 1]) + 1).tolist()
    left = {size: int(counts[size]) for size in sizes}
    patterns, available = list[Pattern](), sizes.copy()
    for size in reversed(sizes):
        while left[size] and opens[size]:
            left[size] -= 1
            row = _fill(left, available, length - size, work)
            left[size] += 1
            if work.left < 0:
                return None
            row[size] = row.get(size, 0) + 1
            rows = min(left[size] // times for size, times in row.items())
            for size, times in row.items():
                left[size] -= times * rows
                if not left[size]:
                    del available[bisect.bisect_left(available, size)]
            pieces = tuple(sorted(row.items(), reverse=True))
            fill = sum(size * times for size, times in pieces)
            patterns.append(Pattern(pieces, rows, fill, sum(row.values())))
    counts[sizes] = [left[size] for size in sizes]
    return patterns


def _fill(left: Mapping[int, int], sizes: Sequence[int], room: int, work: Work) -> dict[int, int]:
    """The sizes that fill `room` best, with their times, of those that are `left`; long ones first.

    `sizes` ascend. Bit `n` of `reached` is set if some of the sizes so far add up to `n`.
    """
    if not sizes or sizes[0] > room:
        return {}
    reached, mask, weight = 1, (1 << room + 1) - 1, 1 + room // BITS
    most = min(work.left, MOST_OF_ROW) // weight
    sums = list[tuple[int, int, int]]()  # a size, its times, and what was reached without them
    for index in range(bisect.bisect_right(sizes, room) - 1, -1, -1):
        size = sizes[index]
        times, more = min(left[size], room // size), 1
        while times and not reached >> room:
            more = min(more, times)
            sums.append((size, more, reached))
            reached |= reached << size * more & mask
            times, more = times - more, 2 * more
        if reached >> room:
            break
        if len(sums) > most:
            work.left = -1
            return {}
    work.left -= len(sums) * weight
    total, row = reached.bit_length() - 1, dict[int, int]()
    for size, times, before in reversed(sums):
        if not before >> total & 1:
            row[size] = row.get(size, 0) + times
            total -= size * times
    return row
