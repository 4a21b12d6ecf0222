"""Patterns: ways to fill a row; found by best-fit decreasing on a histogram.

Everything here works on counts of lengths, never on examples: all rows that look alike are treated
at once, so the cost grows with the number of distinct rows and not with the number of examples.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np

from pipeline.packing.bucket import Bucket


@dataclasses.dataclass(frozen=True)
class Pattern:
    """One way to fill a row, and how many rows are filled that way.

    Attributes:
        pieces: which sizes the row holds and how often: ((100, 2), (28, 1)) is a row with two
            segments of 100 positions and one of 28. Of pairs, sizes are numbers.
        rows: how many rows.
        fill: real positions in one such row, of both sides of pairs.
    """

    pieces: tuple[tuple[int, int], ...]
    rows: int
    fill: int

    @property
    def segments(self) -> int:
        """Segments in one such row."""
        return sum(times for _, times in self.pieces)


@dataclasses.dataclass(frozen=True)
class Packed:
    """A histogram packed into rows of several buckets.

    Attributes:
        buckets: the shapes, ascending by length.
        patterns: for each bucket, its patterns.
        counts: int64 [sizes], the segments of each size that were placed.
    """

    buckets: tuple[Bucket, ...]
    patterns: tuple[tuple[Pattern, ...], ...]
    counts: np.ndarray

    def rows(self, index: int) -> int:
        """Rows of bucket number `index`, without empty ones."""
        return sum(pattern.rows for pattern in self.patterns[index])

    def batches(self, index: int) -> int:
        """Batches of bucket number `index`; the last may end in empty rows."""
        return -(-self.rows(index) // self.buckets[index].rows)

    def real(self, index: int) -> int:
        """Real positions in the rows of bucket number `index`."""
        return sum(pattern.fill * pattern.rows for pattern in self.patterns[index])

    def most_segments(self, index: int) -> int:
        """The most segments in a row of bucket number `index`; 1 if it has no rows."""
        return max((pattern.segments for pattern in self.patterns[index]), default=1)

    def segments(self, index: int) -> int:
        """Segments in the rows of bucket number `index`."""
        return sum(pattern.rows * pattern.segments for pattern in self.patterns[index])


def histogram_of(patterns: Iterable[Pattern], size: int) -> np.ndarray:
    """How many segments of each size the patterns' rows hold: int64 [size]."""
    counts = np.zeros(size, np.int64)
    for pattern in patterns:
        for length, times in pattern.pieces:
            counts[length] += times * pattern.rows
    return counts


def best_fit(
    counts: np.ndarray,
    room: tuple[int, ...],
    sizes: np.ndarray,
    opens: np.ndarray,
    max_segments: int | None = None,
) -> list[Pattern]:
    """Rows of `room` positions, packed best-fit decreasing; takes what it placed from `counts`.

    Segments are placed from the longest to the shortest, each into the open row with the least
    room that still holds it (Johnson et al., 1974).

    >>> counts = np.array([0, 0, 3, 0, 0, 0, 1, 0, 2])  # three of 2, one of 6, two of 8
    >>> found = best_fit(counts, (10,), np.arange(9)[:, None], np.ones(9, bool))
    >>> [(p.pieces, p.rows) for p in found]
    [(((8, 1), (2, 1)), 2), (((6, 1), (2, 1)), 1)]

    Args:
        counts: int64 [longest + 1], how many segments of each length there are; changed in place.
        room: positions in a row, one number.
        sizes: the positions of each size: of lengths, their own number.
        opens: bool [longest + 1], the lengths that open rows; others only fill holes.
        max_segments: the most segments in one row; None for no limit.
    """
    del sizes
    (length,) = room
    limit = max_segments or length
    # Rows alike in what they hold are one entry (pieces as a linked list, segments, rows), filed
    # under the room that is left. Bit r of `rooms` says that `filed[r]` is not empty.
    filed: dict[int, list] = {}
    rooms = 0
    full: list = []

    def file(entry, room):
        nonlocal rooms
        if room == 0 or entry[1] >= limit:
            full.append((entry, room))
        else:
            filed.setdefault(room, []).append(entry)
            rooms |= 1 << room

    def place(chain, segments, rows, room, size, left):
        """Puts up to `left` segments of `size` into `rows` equal rows; returns what is left."""
        each = min(room // size, limit - segments)
        whole = min(rows, left // each)
        if whole:
            file(((chain, size, each), segments + each, whole), room - each * size)
            left -= whole * each
            rows -= whole
        if rows and left:  # fewer than `each` are left, for one more row
            file(((chain, size, left), segments + left, 1), room - left * size)
            rows, left = rows - 1, 0
        if rows:
            file((chain, segments, rows), room)
        return left

    for size in np.flatnonzero(counts[: length + 1])[::-1].tolist():
        if size == 0:
            break
        left = int(counts[size])
        while left and (fitting := rooms >> size):
            room_left = size + (fitting & -fitting).bit_length() - 1
            chain, segments, rows = filed[room_left].pop()
            if not filed[room_left]:
                rooms &= ~(1 << room_left)
            left = place(chain, segments, rows, room_left, size, left)
        if left and opens[size]:
            each = min(length // size, limit)
            left = place(None, 0, -(-left // each), length, size, left)
        counts[size] = left
    entries = full + [(entry, left) for left in sorted(filed) for entry in filed[left]]
    return [Pattern(_unlink(chain), rows, length - left) for (chain, _, rows), left in entries]


def _unlink(chain) -> tuple[tuple[int, int], ...]:
    pieces = []
    while chain:
        chain, size, times = chain
        pieces.append((size, times))
    return tuple(reversed(pieces))
