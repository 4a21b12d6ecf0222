"""Packing a histogram of sizes into rows of several buckets, from the longest bucket down."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np

from pipeline.planning.bucket import Bucket
from pipeline.planning.gaps import Cuts, count_cuts, fill_rows, remove_rows
from pipeline.planning.lengths import weigh
from pipeline.planning.patterns import Packed, Pattern, best_fit, count_rows, count_segments
from pipeline.planning.vectors import best_fit_vectors

Packing = Literal["best_fit", "fill", "none"]
PACKINGS: tuple[Packing, ...] = get_args(Packing)

# Whether a model computes the scores of all positions of a row, or skips other segments.
Attention = Literal["dense", "segment"]
ATTENTIONS: tuple[Attention, ...] = get_args(Attention)

# Rows less full than this share are packed again into longer ones, if that costs less.
FULL_ENOUGH = 0.9

# Vectors are tried for lengths if rows that reach `max_segments` leave this share of all positions
# empty: they take a hundred times as long.
WORTH_VECTORS = 0.01


def pack(
    counts: np.ndarray,
    buckets: Sequence[Bucket],
    *,
    sizes: np.ndarray | None = None,
    costs: Sequence[float] | None = None,
    max_segments: int | None = None,
    surplus: Sequence[int] | None = None,
    used: Sequence[int] | None = None,
    fill: bool = False,
) -> Packed:
    """Packs a histogram into rows of the buckets.

    Buckets are filled from the longest to the shortest. Segments too long for any shorter bucket
    open rows, shorter segments fill these rows, and the rest go to the next shorter bucket. Then,
    from the shortest bucket to the longest, the emptiest rows are packed again into a longer
    bucket: rows with much room, if that costs less, and surplus rows, too few for another batch. So
    at most one batch, of the longest bucket, is not full.

    A limit on segments is one more side of vectors; for lengths only if that costs less.

    Args:
        counts: int64 [sizes], segments of each size; not changed. Index 0 is ignored.
        buckets: ascending by length; the last holds every segment.
        sizes: the positions of each size, int64 [sizes, sides]; by default, a size is a length.
        costs: what a position of each side costs; 1 by default.
        max_segments: the most segments in one row.
        surplus: for each bucket, the number of surplus rows, if later rows continue the batches.
            None: the number of rows that fill no batch.
        used: the numbers of the buckets that may have rows; None for all.
        fill: whether segments are cut to fill the rows of each bucket; see `fill_rows`. Rows of
            whole segments are used if they cost less, as they may with `max_segments`.
    """
    rooms = np.array([bucket.lengths for bucket in buckets])
    positions = np.arange(len(counts))[:, None] if sizes is None else sizes
    weights: Sequence[float] = costs or (1,) * positions.shape[1]
    fills, room_fills = weigh(positions, weights), weigh(rooms, weights)
    prices = [row_cost(*room) for room in (rooms * weights).tolist()]
    lengths = range(len(rooms)) if used is None else used

    def by_length(left: np.ndarray, index: int, opens: np.ndarray) -> list[Pattern]:
        return best_fit(left, int(rooms[index, 0]), opens, max_segments)

    def by_vector(left: np.ndarray, index: int, opens: np.ndarray) -> list[Pattern]:
        room, columns = rooms[index], positions
        if max_segments is not None:
            room = np.append(room, max_segments)
            columns = np.column_stack([columns, np.ones(len(columns), np.int64)])
        return best_fit_vectors(left, room, columns, opens, fills)

    def place(search: Callable[..., list[Pattern]]) -> tuple[list[list[Pattern]], float]:
        """The rows of each length, and their cost."""
        placed, left = [list[Pattern]() for _ in rooms], counts.copy()
        left[0] = 0
        holds = np.stack([(positions <= room).all(axis=1) for room in rooms])
        for index in reversed(lengths):
            opens = ~holds[[shorter for shorter in lengths if shorter < index]].any(axis=0)
            placed[index] = search(left, index, opens)
        assert not left.any(), "the last bucket holds every segment"
        of_length = zip(map(count_rows, placed), prices, strict=True)
        return placed, sum(rows * price for rows, price in of_length)

    search = by_length if len(weights) == 1 else by_vector
    placed, cost = place(search)
    filled: Packed | None = None
    if fill:
        filled = _fill(placed, buckets, len(counts), max_segments, surplus)
        if max_segments is None:
            return filled
    if search is by_length and max_segments not in (None, 1):
        each = [(room, p) for room, ps in zip(room_fills, placed, strict=True) for p in ps]
        empty = sum([(room - p.fill) * p.rows for room, p in each if p.segments == max_segments])
        if empty > WORTH_VECTORS * sum([room * p.rows for room, p in each]):
            other, less = place(by_vector)
            placed, search = (other, by_vector) if less < cost else (placed, search)
    for index in lengths:
        longer = (n for n in lengths if n > index and np.all(rooms[index] <= rooms[n]))
        if (to := next(longer, None)) is None:
            continue  # it is the last, or the plan takes single rows, of which none is surplus

        def repack(rows: Sequence[Pattern], to: int = to) -> list[Pattern]:
            moved = count_segments(rows, len(counts))
            return search(moved, to, moved > 0)

        enough = FULL_ENOUGH * room_fills[index]
        empty = [p for p in placed[index] if p.fill < enough and p.segments != max_segments]
        spare = count_rows(empty)
        if count_rows(repack(empty)) * prices[to] >= spare * prices[index]:
            spare = 0
        rows = count_rows(placed[index]) - spare
        spare += surplus[index] if surplus else rows % buckets[index].rows
        placed[index], moving = _split_surplus(placed[index], spare, max_segments)
        placed[to] += repack(moving)
    counts = counts.copy()
    counts[0] = 0
    found = Packed(tuple(map(tuple, placed)), counts)
    # Where the limit ends rows, whole documents may need fewer.
    return found if filled is None or found.cost(prices) < filled.cost(prices) else filled


def _fill(
    placed: Sequence[Sequence[Pattern]],
    buckets: Sequence[Bucket],
    sizes: int,
    max_segments: int | None,
    surplus: Sequence[int] | None,
) -> Packed:
    """Fills the rows of each bucket with the documents in its patterns; arguments as for `pack`."""
    cuts, filled, number = Cuts(sizes), list[list[Pattern]](), 0
    documents = [count_segments(patterns, sizes) for patterns in placed]
    for index, bucket in enumerate(buckets):
        chains = fill_rows(documents[index], bucket.length, cuts, max_segments)
        if index + 1 < len(buckets):
            rows = sum(map(count_rows, chains))
            many = surplus[index] if surplus else rows % bucket.rows
            chains, moved = remove_rows(chains, many, cuts)
            documents[index] -= moved
            documents[index + 1] += moved
        filled.append([*itertools.chain.from_iterable(chains)])
        number += count_cuts(chains)
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

    `fit_buckets` explains the formula. Each side attends to itself and to those before it. Lengths
    are times the cost of their side.

    >>> row_cost(6144)
    12288.0
    """
    scores = sum(a * b for a, b in itertools.combinations_with_replacement(lengths, 2))
    return sum(lengths) + scores / (6 * width) * (attention == "dense")
