"""Packing by column generation: nearly the best rows there are, and a proof of how good they are.

The fewest rows of a histogram are a linear program over all patterns, of which there are too many
to write down. Gilmore and Gomory (1961) start with a few and ask an exact knapsack, whose values
are the program's duals, for patterns that would improve it, until there are none. The duals also
bound from below what any packing must cost. Needs scipy, for its solver (HiGHS).
"""

from collections.abc import Sequence

import numpy as np

from pipeline.extras import require
from pipeline.packing.patterns import Pattern

# The work is limited by numbers of steps and never by the clock, so that it does not depend on how
# busy a machine is.
ITERATIONS = 60

# A gap between cost and bound that is not worth another iteration.
GAP = 1e-7

# Patterns kept from one iteration to the next, for each size.
KEPT = 4


class Knapsack:
    """For every room up to `longest`, the segments that fit into it and are worth most.

    Each length may be used any number of times (up to `most` segments in all), as dynamic
    programming over the room has it (Gilmore and Gomory, 1963).

    >>> sack = Knapsack(np.array([3, 4]), np.array([5.0, 7.0]), longest=10)
    >>> float(sack.worth[10]), sack.rows(np.array([0]), np.array([10])).T.tolist()
    (17.0, [[2, 1]])

    Args:
        sizes: lengths that a segment may have, int64, ascending, from 1.
        values: what a segment of each is worth, float64, at least 0.
        longest: the most room.
        most: the most segments; None for no limit.

    Attributes:
        worth: float64 [longest + 1], the most that a row of each length can be worth.
    """

    def __init__(
        self, sizes: np.ndarray, values: np.ndarray, longest: int, most: int | None = None
    ):
        self._sizes, self._values = sizes, values
        if most is None or most * int(sizes[0]) >= longest:
            layers = [_unlimited(sizes, values, longest)]
        else:
            layers = _limited(sizes, values, longest, most)
        # layers[k]: worth and the first segment taken (−1: nothing fits) with k segments left; a
        # single layer when there is no limit.
        self._worth, self._first = (np.stack(each) for each in zip(*layers, strict=True))
        self.worth = self._worth[-1]

    def worth_with(self, room: int) -> np.ndarray:
        """The most that a row of `room` is worth that holds a segment of each size: [sizes].

        −1 where the size does not fit.
        """
        rest = room - self._sizes
        layer = self._worth[max(len(self._worth) - 2, 0)]
        return np.where(rest >= 0, self._values + layer[np.maximum(rest, 0)], -1.0)

    def rows(self, first: np.ndarray, room: np.ndarray) -> np.ndarray:
        """How often each size is in the best rows of `room` that hold size number `first`.

        int32 [sizes, rows].
        """
        found = np.zeros((len(self._sizes), len(first)), np.int32)
        column = np.arange(len(first))
        layer, taken = len(self._worth) - 1, first
        left = room.copy()
        while len(column):
            found[taken, column] += 1
            left = left - self._sizes[taken]
            layer = max(layer - 1, 0)
            taken = self._first[layer, left]
            goes_on = taken >= 0
            column, left, taken = column[goes_on], left[goes_on], taken[goes_on]
        return found


def _unlimited(sizes: np.ndarray, values: np.ndarray, longest: int):
    worth, first = np.zeros(longest + 1), np.full(longest + 1, -1)
    fitting = np.searchsorted(sizes, np.arange(longest + 1), side="right")
    for room in range(int(sizes[0]), longest + 1):
        count = fitting[room]
        each = worth[room - sizes[:count]] + values[:count]
        first[room] = best = each.argmax()
        worth[room] = each[best]
        if worth[room] <= worth[room - 1]:
            # What fits into less room is as good, and leaves more for other segments.
            worth[room], first[room] = worth[room - 1], first[room - 1]
    return worth, first


def _limited(sizes: np.ndarray, values: np.ndarray, longest: int, most: int):
    layers = [(np.zeros(longest + 1), np.full(longest + 1, -1))]
    for _ in range(most):
        before = layers[-1][0]
        worth, first = np.zeros(longest + 1), np.full(longest + 1, -1)
        for number, (size, value) in enumerate(zip(sizes.tolist(), values.tolist(), strict=True)):
            each = before[: longest + 1 - size] + value
            better = each > worth[size:]
            worth[size:][better] = each[better]
            first[size:][better] = number
        layers.append((worth, first))
    return layers


class Columns:
    """The linear program of a histogram over the patterns found so far.

    Args:
        counts: int64 [longest + 1], segments of each length; none of length 0.
        rooms: positions in a row of each bucket, int64, ascending; the last holds the longest.
        costs: of a row of each bucket, float64.
        most: the most segments in a row; None for no limit.

    Attributes:
        sizes: the lengths that `counts` has, int64, ascending.
    """

    def __init__(
        self, counts: np.ndarray, rooms: np.ndarray, costs: np.ndarray, most: int | None = None
    ):
        self._linprog, self._sparse = _scipy()
        self.rooms, self.costs, self.most = rooms, costs, most
        self.sizes = np.flatnonzero(counts)
        # What segments are worth at least, whoever packs them: sizes never more in a row than the
        # row costs. At first, what their positions cost in the cheapest bucket.
        self._safe = self.sizes * (costs / rooms).min()
        self._proof = self._safe
        self._all = self.demand(counts)
        # Each size alone, as often as it fits into the longest row: every demand can be met.
        alone = rooms[-1] // self.sizes
        self._times = self._sparse.diags_array(
            np.minimum(alone, most or alone).astype(float), format="csc"
        )
        self._bucket = np.full(len(self.sizes), len(rooms) - 1)

    def demand(self, counts: np.ndarray) -> np.ndarray:
        """How many segments of each size `counts` has: float64 [sizes]."""
        return counts[self.sizes].astype(float)

    def places(self, column: int) -> tuple[list[tuple[int, int]], int]:
        """The sizes in a pattern, from the longest, with how often each; and its bucket."""
        begin, end = self._times.indptr[column : column + 2]
        used, times = self._times.indices[begin:end], self._times.data[begin:end].astype(int)
        places = zip(self.sizes[used].tolist(), times.tolist(), strict=True)
        return sorted(places, reverse=True), int(self._bucket[column])

    def bound(self, counts: np.ndarray) -> float:
        """What any packing of `counts` costs at least: proven, and near it after `solve`.

        `counts` may be of more segments than the program's, and of other lengths: one that is no
        size proves as much as the next shorter size.
        """
        below = np.searchsorted(self.sizes, np.arange(len(counts)), side="right")
        proof = np.concatenate([[0], self._proof])[below]
        # Sizes and rooms are whole numbers, so only the worths are rounded; by far less than this.
        return float(proof @ counts) * (1 - 1e-9)

    def add(self, patterns: Sequence[Sequence[Pattern]]) -> None:
        """Adds known patterns of each bucket."""
        for index, of_bucket in enumerate(patterns):
            times = np.zeros((len(self.sizes), len(of_bucket)))
            for column, pattern in enumerate(of_bucket):
                for length, many in pattern.pieces:
                    times[np.searchsorted(self.sizes, length), column] = many
            self._extend(times, np.full(len(of_bucket), index))

    def solve(self, demand: np.ndarray, iterations: int = ITERATIONS) -> np.ndarray:
        """How many rows of each pattern cost least, not whole numbers: float64 [patterns].

        A segment may take the place of a longer one, so a pattern's row may be filled with
        shorter segments than it names.

        Args:
            demand: how many segments there are of each size.
            iterations: the most times that new patterns are asked for.
        """
        safe = self._safe
        best = safe @ demand
        rows, duals = self._relaxed(demand)
        for _ in range(iterations):
            cost = float(rows @ self.costs[self._bucket])
            if cost - best <= GAP * cost:
                break
            # Duals jump about between vertices; half-way between them and the best ones so far,
            # patterns are better and fewer are needed (Wentges, 1997). When that finds nothing,
            # the duals themselves say whether there is anything to be found.
            for values in ((safe + duals) / 2, duals):
                sack = Knapsack(self.sizes, values, int(self.rooms[-1]), self.most)
                values = values / (sack.worth[self.rooms] / self.costs).max()
                if values @ demand > best:
                    best, safe = values @ demand, values
                if values @ self._all > self._proof @ self._all:
                    self._proof = values
                times, bucket = self._improving(sack, duals)
                if len(bucket):
                    break
            if not len(bucket):
                break
            self._forget(rows, duals)
            self._extend(times, bucket)
            rows, duals = self._relaxed(demand)
        return rows

    def _extend(self, times: np.ndarray, bucket: np.ndarray) -> None:
        self._times = self._sparse.hstack([self._times, self._sparse.csc_array(times)], "csc")
        self._bucket = np.concatenate([self._bucket, bucket])

    def _relaxed(self, demand: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The linear program over the patterns there are: rows of each, and the sizes' duals."""
        count = len(self.sizes)
        # Beside the patterns, steps down: a place for a size used by the next smaller one. They
        # keep the duals in order and the program short.
        steps = self._sparse.diags_array(
            [np.ones(count - 1), -np.ones(count - 1)], offsets=[0, -1], shape=(count, count - 1)
        )
        solved = self._linprog(
            np.concatenate([self.costs[self._bucket], np.zeros(count - 1)]),
            A_ub=-self._sparse.hstack([self._times, steps], "csc"),
            b_ub=-demand,
            method="highs-ds",
        )
        assert solved.status == 0, solved.message
        return solved.x[: len(self._bucket)], np.maximum(-solved.ineqlin.marginals, 0)

    def _improving(self, sack: Knapsack, duals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each bucket and size the sack's best row with it, if the program would use it."""
        times, bucket = [], []
        for number, (room, cost) in enumerate(zip(self.rooms, self.costs, strict=True)):
            first = np.flatnonzero(sack.worth_with(int(room)) > 0)
            rows = sack.rows(first, np.full(len(first), room))
            rows = rows[:, duals @ rows > cost * (1 + 1e-9)]
            # Equal rows have equal sums of random numbers, others hardly ever: then one is lost.
            sums = np.random.Philox(0).random_raw(len(rows)) @ rows.astype(np.uint64)
            rows = rows[:, np.unique(sums, return_index=True)[1]]
            times.append(rows)
            bucket.append(np.full(rows.shape[1], number))
        return np.concatenate(times, axis=1), np.concatenate(bucket)

    def _forget(self, rows: np.ndarray, duals: np.ndarray) -> None:
        """Keeps the patterns in use and those nearest to it."""
        most = KEPT * len(self.sizes)
        if len(rows) <= most:
            return
        reduced = self.costs[self._bucket] - self._times.T @ duals
        reduced[rows > 0] = -np.inf
        stay = np.sort(np.argsort(reduced, kind="stable")[:most])
        self._times, self._bucket = self._times[:, stay], self._bucket[stay]


def _scipy():
    purpose = "packing='optimal' (packing='best_fit' does not)"
    optimize = require("scipy.optimize", extra="optimal", purpose=purpose)
    return optimize.linprog, require("scipy.sparse", extra="optimal", purpose=purpose)
