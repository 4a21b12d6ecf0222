"""A proven bound on packing: the fewest rows of one length that could hold a histogram.

The least number of rows is a linear program over all ways to fill a row, which are too many to
list. Gilmore and Gomory (1961) start with a few of these patterns. A knapsack, whose values are the
duals of the program, finds patterns that improve it, until none does. The duals also give a lower
bound on the rows of any packing. The solver is SciPy's HiGHS.
"""

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from pipeline.planning.best_fit import best_fit

ITERATIONS = 60

# Iterations stop when the rows of the program exceed the bound by at most this share.
GAP = 1e-7

# The most patterns that the program keeps between iterations, for each size.
PATTERNS_PER_SIZE = 4


def fewest_rows(counts: np.ndarray, length: int) -> float:
    """A lower bound on the rows of `length` positions that hold `counts[n]` segments of each `n`.

    >>> fewest_rows(np.array([0, 0, 0, 4, 2]), 10)  # two rows of 4 + 3 + 3
    1.999999998
    """
    sizes = np.flatnonzero(counts)
    demand = counts[sizes].astype(float)
    # Any values with which no row is worth more than 1 prove a bound: the value of all segments.
    feasible = sizes / length
    bound = feasible @ demand
    # Patterns are columns: the number of segments of each size. The first are those of best fit.
    packed = best_fit(counts.copy(), length, np.ones(len(counts), bool))
    patterns = np.zeros((len(sizes), len(packed)))
    for number, pattern in enumerate(packed):
        for each, times in pattern.pieces:
            patterns[np.searchsorted(sizes, each), number] = times
    patterns = sparse.csc_array(patterns)
    for _ in range(ITERATIONS):
        rows, duals = _solve(patterns, demand)
        if rows.sum() - bound <= GAP * rows.sum():
            break
        # Duals jump between vertices. Values half-way between them and the best feasible ones give
        # better patterns, so fewer are needed (Wentges, 1997). If they give no pattern, the duals
        # themselves decide whether one exists.
        for values in ((feasible + duals) / 2, duals):
            sack = Knapsack(sizes, values, length)
            values = values / sack.worth[length]
            if values @ demand > bound:
                bound, feasible = values @ demand, values
            found = sack.rows(length)
            found = np.unique(found[:, duals @ found > 1 + 1e-9], axis=1)
            if found.shape[1]:
                break
        else:
            break
        reduced = np.where(rows > 0, -np.inf, 1 - patterns.T @ duals)  # patterns in use stay
        stay = np.sort(np.argsort(reduced, kind="stable")[: PATTERNS_PER_SIZE * len(sizes)])
        patterns = sparse.hstack([patterns[:, stay], sparse.csc_array(found)], "csc")
    # The margin is far above the rounding error of the duals.
    return float(bound) * (1 - 1e-9)


def _solve(patterns: sparse.csc_array, demand: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The fewest rows of each pattern, with fractions, and the duals of the sizes."""
    count, number = patterns.shape
    # Further columns let a place of one size take the next smaller size. They make the duals ascend
    # with the size and keep the program short.
    steps = sparse.diags_array(
        [np.ones(count - 1), -np.ones(count - 1)], offsets=[0, -1], shape=(count, count - 1)
    )
    solved = linprog(
        np.append(np.ones(number), np.zeros(count - 1)),
        A_ub=-sparse.hstack([patterns, steps], "csc"),
        b_ub=-demand,
        method="highs-ds",
    )
    assert solved.status == 0, solved.message
    return solved.x[:number], np.maximum(-solved.ineqlin.marginals, 0)


class Knapsack:
    """The most valuable segments that fit into each room up to `longest`.

    `sizes` are lengths of segments, ascending, and `values` the value of each. `worth`, float64
    [longest + 1], is the greatest value of a row of each length. Solved by dynamic programming over
    the room (Gilmore and Gomory, 1963).

    >>> sack = Knapsack(np.array([3, 4]), np.array([5.0, 7.0]), longest=10)
    >>> float(sack.worth[10]), sack.rows(10).T.tolist()
    (17.0, [[2, 1], [2, 1]])
    """

    def __init__(self, sizes: np.ndarray, values: np.ndarray, longest: int):
        self._sizes = sizes
        self.worth = worth = np.zeros(longest + 1)
        # The number of the first size in the best row of each length; −1 if none fits.
        self._first = np.full(longest + 1, -1)
        for room in range(int(sizes[0]), longest + 1):
            fitting = sizes[: np.searchsorted(sizes, room, side="right")]
            each = worth[room - fitting] + values[: len(fitting)]
            worth[room], self._first[room] = each.max(), each.argmax()
            # A shorter row of the same value leaves more positions for other segments.
            if worth[room] <= worth[room - 1]:
                worth[room], self._first[room] = worth[room - 1], self._first[room - 1]

    def rows(self, room: int) -> np.ndarray:
        """The best row of `room` positions with each size that fits: int32 [sizes, rows]."""
        size = np.flatnonzero(self._sizes <= room)
        times = np.zeros((len(self._sizes), len(size)), np.int32)
        column, left = np.arange(len(size)), np.full(len(size), room)
        while len(column):
            times[size, column] += 1
            left = left - self._sizes[size]
            size = self._first[left]
            fits = size >= 0
            column, left, size = column[fits], left[fits], size[fits]
        return times
