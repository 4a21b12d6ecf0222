"""Packing: from a histogram of sizes to rows of several buckets.

A packer fills buckets from the longest to the shortest. Segments too long for any shorter bucket
open rows, shorter segments fill these rows, and the rest go to the next shorter bucket. Then, from
the shortest bucket to the longest, the emptiest rows are packed again into a longer bucket: rows
with much room, if that costs less, and surplus rows, too few for another batch. So at most one
batch, of the longest bucket, is not full.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from pipeline.planning.best_fit import best_fit
from pipeline.planning.exact import Work, fill_exactly
from pipeline.planning.gaps import Cuts, count_cuts, fill_rows, remove_rows
from pipeline.planning.lengths import weigh
from pipeline.planning.patterns import (
    Packed,
    Packer,
    Pattern,
    Rules,
    count_rows,
    count_segments,
)
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

# Rows are filled exactly if best fit needs more than this share over full rows.
WORTH_EXACT = 0.001


# The rows of each bucket; and a search for the rows of one, which removes their segments from the
# remaining ones, and is given the number of the bucket and which sizes may open a row.
Placed = list[list[Pattern]]
Search = Callable[[np.ndarray, int, np.ndarray], list[Pattern] | None]


class BestFit:
    """Rows of whole examples: by best fit, or filled exactly where that costs less.

    A limit on segments is one more side of vectors; for lengths only if that costs less.
    """

    cuts: ClassVar[bool] = False

    def __init__(self, rules: Rules, sizes: np.ndarray):
        """See `Packer`."""
        self._rules, self._sizes, self._one = rules, sizes, sizes.shape[1] == 1
        self._exactly = rules.sums > 0 and self._one and rules.max_segments is None
        weights = (1,) if self._one else rules.weights  # by length, the fill is in units
        self._fills, self._rooms = (weigh(lengths, weights) for lengths in (sizes, rules.rooms))
        self._used = range(len(rules.rooms)) if rules.used is None else rules.used
        self._holds = np.stack([(sizes <= room).all(axis=1) for room in rules.rooms])

    def pack(self, counts: np.ndarray, surplus: Sequence[int] | None = None) -> Packed:
        """See `Packer`."""
        counts = _without_empty(counts)
        search: Search = self._by_length if self._one else self._by_vector
        placed = self._place(counts, search)
        assert placed is not None, "best fit always ends"
        if self._one and self._rules.max_segments not in (None, 1):
            search, placed = self._limit_segments(counts, placed)
        repack = functools.partial(self._repack, counts, search)
        apart = _without_surplus(surplus)
        packed = repack(placed, apart)
        if self._exactly and self._has_gaps(packed):
            work = Work(self._rules.sums)
            filled = self._place(counts, functools.partial(self._fill_exactly, work))
            if filled is not None and self._is_cheaper(exact := repack(filled, apart), packed):
                placed, packed = filled, exact
        return packed if surplus == apart else repack(placed, surplus)

    # ---- one bucket

    def _by_length(self, left: np.ndarray, index: int, opens: np.ndarray) -> list[Pattern]:
        return best_fit(left, int(self._rules.rooms[index, 0]), opens, self._rules.max_segments)

    def _by_vector(self, left: np.ndarray, index: int, opens: np.ndarray) -> list[Pattern]:
        room, columns = self._rules.rooms[index], self._sizes
        if self._rules.max_segments is not None:
            room = np.append(room, self._rules.max_segments)
            columns = np.column_stack([columns, np.ones(len(columns), np.int64)])
        return best_fit_vectors(left, room, columns, opens, self._fills)

    def _fill_exactly(
        self, work: Work, left: np.ndarray, index: int, opens: np.ndarray
    ) -> list[Pattern] | None:
        return fill_exactly(left, int(self._rules.rooms[index, 0]), opens, work)

    # ---- all buckets

    def _place(self, counts: np.ndarray, search: Search) -> Placed | None:
        """The rows of each bucket before any is packed again; None if the search gives up."""
        left, placed = counts.copy(), Placed([] for _ in self._rules.rooms)
        for index in reversed(self._used):
            shorter = [number for number in self._used if number < index]
            opens = np.logical_not(self._holds[shorter].any(axis=0))
            if (rows := search(left, index, opens)) is None:
                return None
            placed[index] = rows
        assert not left.any(), "the last bucket holds every segment"
        return placed

    def _limit_segments(self, counts: np.ndarray, placed: Placed) -> tuple[Search, Placed]:
        """Rows whose number of segments is limited: as vectors, if these cost less."""
        most = self._rules.max_segments
        rooms = [(room, p) for room, ps in zip(self._rooms, placed, strict=True) for p in ps]
        empty = sum([(room - p.fill) * p.rows for room, p in rooms if p.segments == most])
        if empty > WORTH_VECTORS * sum([room * p.rows for room, p in rooms]):
            other = self._place(counts, self._by_vector)
            assert other is not None, "best fit always ends"
            if self._cost(other) < self._cost(placed):
                return self._by_vector, other
        return self._by_length, placed

    def _cost(self, placed: Placed) -> float:
        prices = self._rules.prices
        return sum(count_rows(rows) * price for rows, price in zip(placed, prices, strict=True))

    def _has_gaps(self, packed: Packed) -> bool:
        """Whether the rows of some bucket are more than full ones would be, by `WORTH_EXACT`."""
        for room, patterns in zip(self._rooms.tolist(), packed.patterns, strict=True):
            fewest = -(-sum([pattern.fill * pattern.rows for pattern in patterns]) // room)
            if count_rows(patterns) > fewest * (1 + WORTH_EXACT):
                return True
        return False

    def _is_cheaper(self, packed: Packed, other: Packed) -> bool:
        return packed.cost(self._rules.prices) < other.cost(self._rules.prices)

    def _repack(
        self, counts: np.ndarray, search: Search, placed: Placed, surplus: Sequence[int] | None
    ) -> Packed:
        """The rows after the emptiest ones of each bucket are packed into longer ones."""
        rules, placed = self._rules, [*map(list, placed)]
        for index in self._used:
            longer = (n for n in self._used if n > index)
            holds = (n for n in longer if np.all(rules.rooms[index] <= rules.rooms[n]))
            if (to := next(holds, None)) is None:
                continue  # it is the last, or the plan takes single rows, of which none is surplus

            def repack(rows: Sequence[Pattern], to: int = to) -> list[Pattern]:
                moved = count_segments(rows, len(counts))
                patterns = search(moved, to, moved > 0)
                assert patterns is not None, "best fit always ends"
                return patterns

            enough, most = FULL_ENOUGH * self._rooms[index], rules.max_segments
            empty = [p for p in placed[index] if p.fill < enough and p.segments != most]
            spare = count_rows(empty)
            if count_rows(repack(empty)) * rules.prices[to] >= spare * rules.prices[index]:
                spare = 0
            rows = count_rows(placed[index]) - spare
            spare += surplus[index] if surplus else rows % rules.rows[index]
            placed[index], moving = _split_surplus(placed[index], spare, most)
            placed[to] += repack(moving)
        return Packed(tuple(map(tuple, placed)), counts)


class Fill(BestFit):
    """Rows that are filled by cutting examples; see `fill_rows`.

    Rows of whole examples are used if they cost less, as they may with `max_segments`.
    """

    cuts: ClassVar[bool] = True

    def pack(self, counts: np.ndarray, surplus: Sequence[int] | None = None) -> Packed:
        """See `Packer`."""
        counts = _without_empty(counts)
        if self._rules.max_segments is not None:
            apart = _without_surplus(surplus)
            if self._is_cheaper(super().pack(counts, apart), self._fill(counts, apart)):
                return super().pack(counts, surplus)
        return self._fill(counts, surplus)

    def _fill(self, counts: np.ndarray, surplus: Sequence[int] | None) -> Packed:
        """Full rows, of cut examples."""
        rules, placed = self._rules, self._place(counts, self._by_length)
        assert placed is not None, "best fit always ends"
        cuts, filled, number = Cuts(len(counts)), list[list[Pattern]](), 0
        examples = [count_segments(patterns, len(counts)) for patterns in placed]
        last = len(examples) - 1
        for index, room in enumerate(rules.rooms[:, 0].tolist()):
            chains = fill_rows(examples[index], room, cuts, rules.max_segments)
            if index < last:
                rows = sum(map(count_rows, chains))
                many = surplus[index] if surplus else rows % rules.rows[index]
                chains, moved = remove_rows(chains, many, cuts)
                examples[index] -= moved
                examples[index + 1] += moved
            filled.append([*itertools.chain.from_iterable(chains)])
            number += count_cuts(chains)
        return Packed(tuple(map(tuple, filled)), np.sum(examples, axis=0), cuts.table, number)


# By the name of a packing, all of which `Packing` lists. With "none", `Rules.max_segments` is 1.
PACKERS: dict[Packing, type[Packer]] = {
    "best_fit": BestFit,
    "fill": Fill,
    "none": BestFit,
}


def _without_empty(counts: np.ndarray) -> np.ndarray:
    counts = counts.copy()
    counts[0] = 0
    return counts


def _without_surplus(surplus: Sequence[int] | None) -> list[int] | None:
    """No surplus rows of any bucket, for the choice between two ways to pack.

    Surplus rows are counted from the rows of the way that costs less. If they led to the other one,
    rows of shorter buckets would be too few or too many for batches.
    """
    return None if surplus is None else [0] * len(surplus)


def _split_surplus(
    patterns: list[Pattern], surplus: int, max_segments: int | None
) -> tuple[list[Pattern], list[Pattern]]:
    """Splits off the `surplus` emptiest rows; rows with `max_segments` segments come last."""
    stay, go = [], []
    for pattern in sorted(
        patterns, key=lambda pattern: (pattern.segments == max_segments, pattern.fill)
    ):
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
