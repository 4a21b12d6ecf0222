"""Packing: a histogram of sizes into rows of several buckets, from the longest bucket down."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from pipeline.packing.bucket import Bucket
from pipeline.packing.pairs import best_fit_pairs
from pipeline.packing.patterns import Packed, Pattern, best_fit, histogram_of

# "optimal" places by best fit what its patterns leave, and what moves between buckets.
PACKINGS = ("best_fit", "optimal", "none")


def one_per_row(
    counts: np.ndarray,
    room: tuple[int, ...],
    sizes: np.ndarray,
    opens: np.ndarray,
    max_segments: int | None = None,
) -> list[Pattern]:
    """Rows of one segment each, for models that take no segment ids. Arguments as `best_fit`."""
    del max_segments
    chosen = np.flatnonzero(opens & (counts > 0) & (sizes <= room).all(axis=1))[::-1]
    found = [
        Pattern(((number, 1),), int(counts[number]), int(sizes[number].sum()))
        for number in chosen.tolist()
    ]
    counts[chosen] = 0
    return found


def pack(
    counts: np.ndarray,
    buckets: Sequence[Bucket],
    *,
    sizes: np.ndarray | None = None,
    packing: str = "best_fit",
    max_segments: int | None = None,
    whole: bool = False,
    found: Sequence[Sequence[Pattern]] | None = None,
) -> Packed:
    """Packs a histogram into the buckets' rows, from the longest bucket down.

    Segments that no shorter bucket holds open a bucket's rows, others fill the holes, and what is
    left goes on to the next shorter bucket. Then, from the shortest up, the rows that fill no batch
    of their bucket are packed anew into the next longer one that holds theirs, so that at most one
    batch, of the longest bucket, is under-filled.

    Args:
        counts: int64 [sizes], segments of each size; not changed. Index 0 is ignored.
        buckets: ascending by length; the last holds every segment.
        sizes: int64 [sizes, 2], the inputs and targets that each size stands for; None: sizes are
            lengths.
        packing: "best_fit", "optimal" or "none".
        max_segments: the most segments in one row; None for no limit.
        found: for each bucket, patterns that hold segments of `counts`; what they leave is packed
            as above. "optimal" is best fit unless its patterns are given here.
        whole: leave out the segments of the under-filled batch (they are missing from the
            result's `counts`) instead of filling it up with empty rows.
    """
    pairs = sizes is not None
    positions = np.arange(len(counts))[:, None] if sizes is None else sizes
    find = one_per_row if packing == "none" else best_fit_pairs if pairs else best_fit
    patterns = [list(known) for known in found] if found else [[] for _ in buckets]
    left = counts - histogram_of(itertools.chain(*patterns), len(counts))
    left[0] = 0
    holds = [(positions <= bucket.lengths).all(axis=1) for bucket in buckets]
    for index in reversed(range(len(buckets))):
        opens = ~np.logical_or.reduce([np.zeros_like(holds[0]), *holds[:index]])
        patterns[index] += find(left, buckets[index].lengths, positions, opens, max_segments)
    assert not left.any(), "the last bucket holds every segment"

    def repack(index: int, moved: np.ndarray) -> None:
        room = buckets[index].lengths
        later = range(index + 1, len(buckets))
        to = next(i for i in later if np.less_equal(room, buckets[i].lengths).all())
        patterns[to] += find(moved, buckets[to].lengths, positions, moved > 0, max_segments)

    return _settled(patterns, buckets, counts, repack, whole=whole)


def _settled(
    patterns: list[list[Pattern]],
    buckets: Sequence[Bucket],
    counts: np.ndarray,
    repack: Callable[[int, np.ndarray], None],
    *,
    whole: bool,
) -> Packed:
    """The rows of all buckets, those that fill no batch of theirs moved on to longer ones."""
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


def row_cost(length, *, attention: str = "dense", width: int = 1024):
    """What a row of `length` positions costs a Transformer of `width`, in positions.

    With "dense" attention, scores cost `length / (6 · width)` of everything else in a layer whose
    MLP is four times as wide. With "segment" attention, which skips other segments, a row costs
    its positions.

    >>> row_cost(6144)
    12288.0
    """
    return length + length * length / (6 * width) * (attention == "dense")
