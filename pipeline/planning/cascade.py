"""Packing a histogram of sizes into rows of several buckets, from the longest bucket down."""

import itertools
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np

from pipeline.planning.bucket import Bucket
from pipeline.planning.gaps import Cuts, fill_rows, remove_rows
from pipeline.planning.pair_packing import best_fit_pairs
from pipeline.planning.patterns import Packed, Pattern, best_fit, count_rows, count_segments
from pipeline.planning.tails import count_surplus, group_tails

# With "optimal", best fit packs the segments that the given patterns do not hold.
Packing = Literal["best_fit", "fill", "optimal", "none"]
PACKINGS: tuple[Packing, ...] = get_args(Packing)

# Whether a model computes the scores of all positions of a row, or skips other segments.
Attention = Literal["dense", "segment"]
ATTENTIONS: tuple[Attention, ...] = get_args(Attention)

# Rows less full than this share are packed again into longer ones, if that costs less.
FULL_ENOUGH = 0.9


def pack(
    counts: np.ndarray,
    buckets: Sequence[Bucket],
    *,
    sizes: np.ndarray | None = None,
    max_segments: int | None = None,
    surplus: Sequence[int] | None = None,
    patterns: Sequence[Sequence[Pattern]] | None = None,
    fill: bool = False,
) -> Packed:
    """Packs a histogram into rows of the buckets.

    Buckets are filled from the longest to the shortest. Segments too long for any shorter bucket
    open rows, shorter segments fill these rows, and the rest go to the next shorter bucket. Then,
    from the shortest bucket to the longest, the emptiest rows are packed again into a longer
    bucket: rows with much room, if that costs less, and surplus rows (too few for another batch, or
    for tails). So at most one batch, of the longest bucket, is not full.

    Args:
        counts: int64 [sizes], segments of each size; not changed. Index 0 is ignored.
        buckets: ascending by length, with their tails; the last holds every segment.
        sizes: the positions of each size, int64 [sizes, 1], for pairs [sizes, 2]; by default, a
            size is a length.
        max_segments: the most segments in one row.
        surplus: for each length, the number of surplus rows, if later rows continue the batches.
            None: the number of rows that fill no batch.
        patterns: for each length, patterns to use first, whose segments `counts` includes.
        fill: whether segments are cut to fill the rows of each length; see `fill_rows`.
    """
    groups = group_tails(buckets)
    buckets = [bucket for bucket, *_ in groups]
    positions = np.arange(len(counts))[:, None] if sizes is None else sizes

    def search(left: np.ndarray, bucket: Bucket, opens: np.ndarray) -> list[Pattern]:
        if positions.shape[1] == 1:
            return best_fit(left, bucket.length, opens, max_segments)
        return best_fit_pairs(left, bucket.lengths, positions, opens, max_segments)

    placed = [list(of_bucket) for of_bucket in patterns or [()] * len(buckets)]
    remaining = counts - count_segments([p for each in placed for p in each], len(counts))
    remaining[0] = 0
    holds = np.stack([(positions <= bucket.lengths).all(axis=1) for bucket in buckets])
    for index in reversed(range(len(buckets))):
        opens = ~np.logical_or.reduce(holds[:index])
        placed[index] += search(remaining, buckets[index], opens)
    assert not remaining.any(), "the last bucket holds every segment"
    if fill:
        return _fill(placed, groups, len(counts), max_segments, surplus)
    for index, bucket in enumerate(buckets[:-1]):
        room, rest = np.array(bucket.lengths), range(index + 1, len(buckets))
        to = next((each for each in rest if np.all(room <= buckets[each].lengths)), None)
        if to is None:  # only where a plan takes single rows, of which none is surplus
            continue

        def repack(rows: Sequence[Pattern], to: int = to) -> list[Pattern]:
            moved = count_segments(rows, len(counts))
            return search(moved, buckets[to], moved > 0)

        enough = FULL_ENOUGH * room.sum()
        empty = [p for p in placed[index] if p.fill < enough and p.segments != max_segments]
        spare = count_rows(empty)
        if count_rows(repack(empty)) * row_cost(*buckets[to].lengths) >= spare * row_cost(*room):
            spare = 0
        rows = count_rows(placed[index]) - spare
        spare += surplus[index] if surplus else count_surplus(rows, groups[index])
        placed[index], moving = _split_surplus(placed[index], spare, max_segments)
        placed[to] += repack(moving)
    counts = counts.copy()
    counts[0] = 0
    return Packed(tuple(map(tuple, placed)), counts)


def _fill(
    placed: Sequence[Sequence[Pattern]],
    groups: Sequence[Sequence[Bucket]],
    sizes: int,
    max_segments: int | None,
    surplus: Sequence[int] | None,
) -> Packed:
    """Fills the rows of each length with the documents in its patterns; arguments as for `pack`."""
    cuts, filled, number = Cuts(sizes), list[list[Pattern]](), 0
    documents = [count_segments(patterns, sizes) for patterns in placed]
    for index, group in enumerate(groups):
        length = group[0].length
        chains = fill_rows(documents[index], length, cuts, max_segments)
        if index + 1 < len(groups):
            rows = sum([chain.rows for chain in chains])
            many = surplus[index] if surplus else count_surplus(rows, group)
            chains, moved = remove_rows(chains, many, cuts)
            documents[index] -= moved
            documents[index + 1] += moved
        filled.append([pattern for chain in chains for pattern in chain.patterns])
        number += sum([chain.num_cuts for chain in chains])
    return Packed(tuple(map(tuple, filled)), np.sum(documents, axis=0), cuts.table, number)


def _split_surplus(
    patterns: list[Pattern], surplus: int, max_segments: int | None
) -> tuple[list[Pattern], list[Pattern]]:
    """Splits off the `surplus` emptiest rows; rows with `max_segments` segments come last."""
    stay, go = [], []
    for pattern in sorted(patterns, key=lambda each: (each.segments == max_segments, each.fill)):
        if moved := min(surplus, pattern.rows):
            go.append(pattern._replace(rows=moved))
            pattern = pattern._replace(rows=pattern.rows - moved)
            surplus -= moved
        if pattern.rows:
            stay.append(pattern)
    return stay, go


def row_cost(*lengths: Any, attention: Attention = "dense", width: int = 1024) -> Any:
    """The cost of a row of some length in a Transformer of width `width`, in positions.

    `fit_buckets` explains the formula. For pairs, `lengths` are those of inputs and targets, and
    targets attend to inputs too.

    >>> row_cost(6144)
    12288.0
    """
    scores = sum(a * b for a, b in itertools.combinations_with_replacement(lengths, 2))
    return sum(lengths) + scores / (6 * width) * (attention == "dense")
