"""Patterns: the ways in which rows are filled; and what a packer, which finds them, is.

Packing works on counts of sizes and never sees an example. All rows with the same content are one
pattern, so the cost grows with the number of patterns and not with the number of examples.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np


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


@dataclasses.dataclass(frozen=True)
class Rules:
    """The rows that a packer fills, and what they cost. Lengths are in units of `align` columns."""

    rooms: np.ndarray  # int64 [buckets, sides], the lengths of each bucket, which ascend
    rows: tuple[int, ...]  # of a batch of each bucket
    prices: tuple[float, ...]  # of a row of each bucket
    weights: tuple[float, ...]  # what a unit of each side counts in the fill of a row
    max_segments: int | None  # in a row; None: no limit
    used: Sequence[int] | None  # the numbers of the buckets that may have rows; None: all
    sums: int  # that exact fill may take for a histogram; 0: rows are not filled exactly


class Packer(Protocol):
    """Packs histograms into rows; `PACKERS` lists the classes that do.

    Attributes:
        cuts: whether segments are cut although they would fit in a row.
    """

    cuts: ClassVar[bool]

    def __init__(self, rules: Rules, sizes: np.ndarray):
        """`sizes` has the length of each size on each side, in units: int64 [sizes, sides]."""

    def pack(self, counts: np.ndarray, surplus: Sequence[int] | None = None) -> Packed:
        """The rows of a histogram, the segments of each size: int64 [sizes]; index 0 is ignored.

        `surplus` has the number of rows of each bucket, the emptiest ones, that are moved to a
        longer bucket; None: those that fill no batch. `Windows` finds these numbers bucket by
        bucket, so the rows of a bucket before that move must depend on nothing but the surplus of
        shorter buckets.
        """
        ...


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
