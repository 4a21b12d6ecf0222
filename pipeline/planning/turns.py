"""Turns: which bucket each step has, so that what the steps add up to stays even.

Each bucket has its share of the steps. Buckets differ in whom they hold: long rows may be one
source's, short ones another's. So of the buckets that are due the one is taken in the middle of
which sources and buckets are nearest to their dues, by least squares, as in vector balancing.
That goes from step to step, and so is done in blocks; how often each bucket came before a block is
found by rounding the exact shares. All numbers are whole, so that every host finds the same.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

BLOCK = 256  # steps
KEPT = 8  # blocks

ONE = 1 << 12  # the fixed point of sums, in steps
LAG = Fraction(1, 4)  # what a bucket out of turn counts beside a source out of its share


class Turns:
    """Deals steps 0, 1, 2, … to buckets.

    >>> turns = Turns([Fraction(2), Fraction(1)], [[-1], [2]])
    >>> [turns.taker(step) for step in range(6)]
    [0, 1, 0, 0, 1, 0]
    >>> turns.before(6).tolist()
    [4, 2]

    Args:
        shares: of each bucket, its share of the steps, in any unit.
        effects: of each bucket, what a step of it adds to each of several sums, in steps; these
            sums should stay near 0, and do so on average.
    """

    def __init__(self, shares: Sequence[Fraction], effects: Sequence[Sequence[int | Fraction]]):
        whole = sum(shares, Fraction(0))
        self._shares = [share / whole for share in shares]
        lags = [
            [((bucket == other) - self._shares[other]) * LAG for other in range(len(shares))]
            for bucket in range(len(shares))
        ]
        self._effects = np.array(
            [
                [round(each * ONE) for each in (*some, *lag)]
                for some, lag in zip(effects, lags, strict=True)
            ],
            np.int64,
        )
        self._blocks: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def before(self, step: int) -> np.ndarray:
        """How many of the steps below `step` each bucket has."""
        number, within = divmod(step, BLOCK)
        if not within:
            return self._start(number)[0]
        start, order = self._block(number)
        return start + np.bincount(order[:within], minlength=len(start))

    def taker(self, step: int) -> int:
        """The bucket of `step`."""
        number, within = divmod(step, BLOCK)
        return int(self._block(number)[1][within])

    def _start(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Steps of each bucket before a block, and the sums by then."""
        steps = number * BLOCK
        exact = [share * steps for share in self._shares]
        # Up or down, as is best for the sums; a rare bucket to the nearest, lest it go back.
        common = [index for index, share in enumerate(self._shares) if share * BLOCK >= 4]
        counts = [math.floor(due + Fraction(1, 2)) for due in exact]
        for index in common:
            counts[index] = math.floor(exact[index])
        off = [round((count - due) * ONE) for count, due in zip(counts, exact, strict=True)]
        sums = np.array(off, np.int64) @ self._effects // ONE
        most = self._shares.index(max(self._shares))
        while missing := steps - sum(counts):
            index, more = most, 1 if missing > 0 else -1
            if common and missing > 0:
                index = common.pop(self._best(sums, common))
            counts[index] += more
            sums = sums + more * self._effects[index]
        return np.array(counts, np.int64), sums

    def _best(self, sums: np.ndarray, among: Sequence[int] | np.ndarray) -> int:
        """Which of the buckets `among`, counted in it, has the best sums half-way through it."""
        return int(np.argmin(((2 * sums + self._effects[among]) ** 2).sum(axis=1)))

    def _block(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Steps of each bucket before a block, and the bucket of each of its steps."""
        known = self._blocks.get(number)
        if known is None:
            start, sums = self._start(number)
            left = self._start(number + 1)[0] - start
            order = np.empty(BLOCK, np.int64)
            for step in range(BLOCK):
                due = np.flatnonzero(left)
                order[step] = index = due[self._best(sums, due)]
                left[index] -= 1
                sums = sums + self._effects[index]
            known = start, order
            if len(self._blocks) >= KEPT:
                self._blocks.clear()
            self._blocks[number] = known
        return known
