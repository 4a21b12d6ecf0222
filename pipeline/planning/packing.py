"""Packing on histograms: which lengths share a row, and in how many rows.

Everything here works on counts of lengths, never on examples: best-fit decreasing treats all rows
that look alike at once, so its cost grows with the number of distinct rows and not with the
number of examples.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from pipeline.planning.bucket import Bucket


@dataclasses.dataclass(frozen=True)
class Pattern:
    """One way to fill a row, and how many rows are filled that way.

    `pieces` says which lengths the row holds and how often: ((100, 2), (28, 1)) is a row with two
    segments of 100 positions and one of 28.
    """

    pieces: tuple[tuple[int, int], ...]
    rows: int

    @property
    def fill(self) -> int:
        """Real positions in one such row."""
        return sum(length * times for length, times in self.pieces)

    @property
    def squares(self) -> int:
        """The sum of its segments' squared lengths: what attention inside segments costs."""
        return sum(length * length * times for length, times in self.pieces)


def best_fit(
    counts: np.ndarray, length: int, *, opens_above: int = 0, max_segments: int | None = None
) -> list[Pattern]:
    """Rows of `length` positions, packed best-fit decreasing; takes what it placed from `counts`.

    Segments are placed from the longest to the shortest, each into the open row with the least
    room that still holds it (Johnson et al., 1974). Lengths up to `opens_above` open no row of
    their own: they only fill holes.

    >>> counts = np.array([0, 0, 3, 0, 0, 0, 1, 0, 2])  # three of 2, one of 6, two of 8
    >>> [(p.pieces, p.rows) for p in best_fit(counts, 10)]
    [(((8, 1), (2, 1)), 2), (((6, 1), (2, 1)), 1)]

    Args:
        counts: int64 [≥ longest + 1], how many segments of each length there are; changed in place.
        length: positions in a row.
        opens_above: only segments longer than this open rows.
        max_segments: the most segments in one row; None for no limit.
    """
    limit = max_segments or length
    # Rows alike in what they hold are one entry (pieces as a linked list, segments, rows), filed
    # under the room that is left. Bit r of `rooms` says that `filed[r]` is not empty.
    filed: dict[int, list] = {}
    rooms = 0
    full: list = []

    def file(entry, room):
        nonlocal rooms
        if room == 0 or entry[1] >= limit:
            full.append(entry)
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
            room = size + (fitting & -fitting).bit_length() - 1
            chain, segments, rows = filed[room].pop()
            if not filed[room]:
                rooms &= ~(1 << room)
            left = place(chain, segments, rows, room, size, left)
        if left and size > opens_above:
            each = min(length // size, limit)
            left = place(None, 0, -(-left // each), length, size, left)
        counts[size] = left
    entries = full + [entry for room in sorted(filed) for entry in filed[room]]
    return [Pattern(_unlink(chain), rows) for chain, _, rows in entries]


def _unlink(chain) -> tuple[tuple[int, int], ...]:
    pieces = []
    while chain:
        chain, size, times = chain
        pieces.append((size, times))
    return tuple(reversed(pieces))


def one_per_row(
    counts: np.ndarray, length: int, *, opens_above: int = 0, max_segments: int | None = None
) -> list[Pattern]:
    """Rows of one segment each, for models that take no segment ids. Arguments as `best_fit`."""
    del max_segments
    patterns = []
    for size in np.flatnonzero(counts[: length + 1])[::-1].tolist():
        if size > opens_above:
            patterns.append(Pattern(((size, 1),), int(counts[size])))
            counts[size] = 0
    return patterns


# What "optimal" cannot place well, and what moves between buckets, goes by best fit.
PACKINGS = {"best_fit": best_fit, "optimal": best_fit, "none": one_per_row}


def check_packing(packing: str) -> str:
    """`packing`, or a `ValueError` that names those there are."""
    if packing not in PACKINGS:
        raise ValueError(f"packing is {packing!r}; it must be one of {', '.join(PACKINGS)}")
    return packing


def row_cost(length, *, attention: str = "dense", width: int = 1024):
    """What a row of `length` positions costs a Transformer of `width`, in positions.

    With "dense" attention, scores cost `length / (6 · width)` of everything else in a layer whose
    MLP is four times as wide. With "segment" attention, which skips other segments, a row costs
    its positions.

    >>> row_cost(6144)
    12288.0
    """
    return length + length * length / (6 * width) * (attention == "dense")


@dataclasses.dataclass(frozen=True)
class Packed:
    """A histogram packed into rows of several buckets.

    Attributes:
        buckets: the shapes, ascending by length.
        patterns: for each bucket, its patterns.
        counts: int64 [longest + 1], the segments of each length that were placed.
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
        rows = self.patterns[index]
        return max((sum(times for _, times in p.pieces) for p in rows), default=1)

    def segments(self, index: int) -> int:
        """Segments in the rows of bucket number `index`."""
        return sum(p.rows * sum(times for _, times in p.pieces) for p in self.patterns[index])


def pack(
    counts: np.ndarray,
    buckets: Sequence[Bucket],
    *,
    packing: str = "best_fit",
    max_segments: int | None = None,
    whole: bool = False,
    found: Sequence[Sequence[Pattern]] | None = None,
) -> Packed:
    """Packs a histogram into the buckets' rows, from the longest bucket down.

    Segments that need a bucket open its rows, shorter ones fill the holes, and what is left goes
    on to the next shorter bucket. Then, from the shortest up, the rows that fill no batch of their
    bucket are packed anew into the next longer one, so that at most one batch, of the longest
    bucket, is under-filled.

    Args:
        counts: int64 [longest + 1], segments of each length; not changed. Index 0 is ignored.
        buckets: ascending by length; the last holds the longest segment.
        packing: "best_fit", "optimal" or "none".
        max_segments: the most segments in one row; None for no limit.
        found: for each bucket, patterns that hold segments of `counts`; what they leave is packed
            as above. "optimal" is best fit unless its patterns are given here.
        whole: leave out the segments of the under-filled batch (they are missing from the
            result's `counts`) instead of filling it up with empty rows.
    """
    find = PACKINGS[packing]
    patterns = [list(known) for known in found] if found else [[] for _ in buckets]
    left = counts - histogram_of(itertools.chain(*patterns), len(counts))
    left[0] = 0
    for index in reversed(range(len(buckets))):
        below = buckets[index - 1].length if index else 0
        patterns[index] += find(
            left, buckets[index].length, opens_above=below, max_segments=max_segments
        )
    assert not left.any(), "the longest bucket holds the longest segment"

    def repack(index: int, moved: np.ndarray) -> None:
        length = buckets[index + 1].length
        patterns[index + 1] += find(moved, length, max_segments=max_segments)

    return settled(patterns, buckets, counts, repack, whole=whole)


def settled(
    patterns: list[list[Pattern]],
    buckets: Sequence[Bucket],
    counts: np.ndarray,
    repack: Callable[[int, np.ndarray], None],
    *,
    whole: bool,
) -> Packed:
    """The rows of all buckets, those that fill no batch of theirs moved on to longer ones.

    Args:
        patterns: of each bucket; changed in place.
        buckets: the shapes, in ascending order.
        counts: int64 [sizes], what is in all the patterns.
        repack: packs the segments of a bucket's spare rows into the patterns of a later bucket.
        whole: as for `pack`.
    """
    left = np.zeros_like(counts)
    for index, bucket in enumerate(buckets):
        last = index + 1 == len(buckets)
        if last and not whole:
            break
        patterns[index], spare = _split_spare(patterns[index], bucket.rows)
        moved = histogram_of(spare, len(counts))
        if last:
            left = moved
        elif spare:
            repack(index, moved)
    placed = counts - left
    placed[0] = 0
    return Packed(tuple(buckets), tuple(map(tuple, patterns)), placed)


def _split_spare(patterns: list[Pattern], rows: int) -> tuple[list[Pattern], list[Pattern]]:
    """Splits off the emptiest rows, so that a multiple of `rows` stays."""
    spare = sum(pattern.rows for pattern in patterns) % rows
    stay, go = [], []
    for pattern in sorted(patterns, key=lambda pattern: pattern.fill):
        moved = min(spare, pattern.rows)
        spare -= moved
        if moved:
            go.append(dataclasses.replace(pattern, rows=moved))
        if pattern.rows > moved:
            stay.append(dataclasses.replace(pattern, rows=pattern.rows - moved))
    return stay, go


def histogram_of(patterns: Iterable[Pattern], size: int) -> np.ndarray:
    """How many segments of each size the patterns' rows hold: int64 [size]."""
    counts = np.zeros(size, np.int64)
    for pattern in patterns:
        for length, times in pattern.pieces:
            counts[length] += times * pattern.rows
    return counts
