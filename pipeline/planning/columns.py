"""Column generation: the linear program behind packing="optimal", and a proven bound.

Finding the cheapest rows is a linear program over all patterns, which are too many to list.
Gilmore and Gomory (1961) start with a few patterns. An exact knapsack, whose values are the duals
of the program, finds patterns that improve it, until none does. The duals also give a lower bound
on the cost of any packing. The solver (HiGHS) needs scipy. Rounding turns the program's fractional
rows into whole rows of segments.
"""

from collections.abc import Sequence

import numpy as np

from pipeline.errors import require
from pipeline.planning.patterns import Pattern, Remaining, count_rows

# Limits are numbers of iterations, never seconds: the load of a machine must not change the result.
ITERATIONS = 60

# Iterations stop when the cost exceeds the bound by at most this share.
GAP = 1e-7

# The most patterns that the program keeps between iterations, for each size.
PATTERNS_PER_SIZE = 4

# Rows are rounded in up to ROUNDS rounds; after each, the program is solved again for the remaining
# segments. A round makes at least the share SHARE of the rows, after ROUND_ITERATIONS iterations
# at most.
SHARE, ROUNDS, ROUND_ITERATIONS = 0.2, 60, 2


class Knapsack:
    """The most valuable segments that fit into each room up to `longest`, `most` at most.

    `sizes` are lengths of segments, ascending, and `values` the value of each. `worth`, float64
    [longest + 1], is the greatest value of a row of each length. Solved by dynamic programming over
    the room (Gilmore and Gomory, 1963).

    >>> sack = Knapsack(np.array([3, 4]), np.array([5.0, 7.0]), longest=10)
    >>> float(sack.worth[10]), sack.rows(10).T.tolist()
    (17.0, [[2, 1], [2, 1]])
    """

    def __init__(
        self, sizes: np.ndarray, values: np.ndarray, longest: int, most: int | None = None
    ):
        self._sizes = sizes
        # Line k has the worth of rows of up to k segments, and the number of their first size (−1
        # if none fits). It is computed from line k − 1. Without a limit there is one line.
        lines = 1 if most is None or most * int(sizes[0]) >= longest else most + 1
        every = np.zeros((lines, longest + 1))
        self._first = np.full((lines, longest + 1), -1)
        limited = int(lines > 1)
        before, worth, first = every[: lines - limited], every[limited:], self._first[limited:]
        for room in range(int(sizes[0]), longest + 1):
            fitting = sizes[: np.searchsorted(sizes, room, side="right")]
            each = before[:, room - fitting] + values[: len(fitting)]
            worth[:, room], first[:, room] = each.max(axis=1), each.argmax(axis=1)
            # A shorter row of the same value leaves more positions for other segments.
            shorter = worth[:, room] <= worth[:, room - 1]
            worth[shorter, room] = worth[shorter, room - 1]
            first[shorter, room] = first[shorter, room - 1]
        self.worth = every[-1]

    def rows(self, room: int) -> np.ndarray:
        """The best row of `room` positions with each size that fits: int32 [sizes, rows]."""
        size = np.flatnonzero(self._sizes <= room)
        times = np.zeros((len(self._sizes), len(size)), np.int32)
        column, left, line = np.arange(len(size)), np.full(len(size), room), len(self._first) - 1
        while len(column):
            times[size, column] += 1
            left = left - self._sizes[size]
            line = max(line - 1, 0)
            size = self._first[line, left]
            fits = size >= 0
            column, left, size = column[fits], left[fits], size[fits]
        return times


class Columns:
    """The linear program of a histogram over the patterns found so far.

    A row of each bucket has `rooms` positions, costs `costs`, and has at most `most` segments.
    """

    def __init__(
        self, counts: np.ndarray, rooms: np.ndarray, costs: np.ndarray, most: int | None = None
    ):
        purpose = "packing='optimal' (packing='best_fit' does not)"
        self._linprog = require("scipy.optimize", extra="optimal", purpose=purpose).linprog
        self._sparse = require("scipy.sparse", extra="optimal", purpose=purpose)
        self.rooms, self.costs, self.most = rooms, costs, most
        self.sizes = np.flatnonzero(counts)
        # The first patterns meet every demand: rows of one size alone, in the longest bucket.
        alone = rooms[-1] // self.sizes
        self._times = self._sparse.diags_array(
            np.minimum(alone, most or alone).astype(float), format="csc"
        )
        self._bucket = np.full(len(self.sizes), len(rooms) - 1)

    def demand(self, counts: np.ndarray) -> np.ndarray:
        """The number of segments of each size in `counts`: float64 [sizes]."""
        return counts[self.sizes].astype(float)

    def places(self, column: int) -> tuple[list[tuple[int, int]], int]:
        """The lengths in a pattern, longest first, each with its number; and the bucket."""
        begin, end = self._times.indptr[column : column + 2]
        used, times = self._times.indices[begin:end], self._times.data[begin:end].astype(int)
        places = zip(self.sizes[used].tolist(), times.tolist(), strict=True)
        return sorted(places, reverse=True), int(self._bucket[column])

    def add(self, patterns: Sequence[Sequence[Pattern]]) -> None:
        """Adds patterns of each bucket to the program."""
        for index, of_bucket in enumerate(patterns):
            times = np.zeros((len(self.sizes), len(of_bucket)))
            for column, pattern in enumerate(of_bucket):
                for length, many in pattern.pieces:
                    times[np.searchsorted(self.sizes, length), column] = many
            self._extend(times, np.full(len(of_bucket), index))

    def solve(self, demand: np.ndarray, iterations: int = ITERATIONS) -> tuple[np.ndarray, float]:
        """The cheapest number of rows of each pattern, with fractions, and a lower bound on cost.

        Rows are float64 [patterns]; the bound is proven for any packing. A segment may take the
        place of a longer one, so a row may have shorter segments than its pattern names.
        """
        # Feasible duals: a value for each size such that no row is worth more than it costs. They
        # prove the bound. The first ones are the cost of the size's positions in the cheapest
        # bucket.
        feasible = self.sizes * (self.costs / self.rooms).min()
        best = feasible @ demand
        rows, duals = self._solve_relaxed(demand)
        for _ in range(iterations):
            cost = float(rows @ self.costs[self._bucket])
            if cost - best <= GAP * cost:
                break
            # Duals jump between vertices. Values half-way between them and the best feasible ones
            # give better patterns, so fewer are needed (Wentges, 1997). If they give no pattern,
            # the duals themselves decide whether one exists.
            for values in ((feasible + duals) / 2, duals):
                sack = Knapsack(self.sizes, values, int(self.rooms[-1]), self.most)
                values = values / (sack.worth[self.rooms] / self.costs).max()
                if values @ demand > best:
                    best, feasible = values @ demand, values
                times, bucket = self._improve(sack, duals)
                if len(bucket):
                    break
            if not len(bucket):
                break
            self._drop_patterns(rows, duals)
            self._extend(times, bucket)
            rows, duals = self._solve_relaxed(demand)
        # The margin is far above the rounding error of the duals.
        return rows, float(best) * (1 - 1e-9)

    def _extend(self, times: np.ndarray, bucket: np.ndarray) -> None:
        self._times = self._sparse.hstack([self._times, self._sparse.csc_array(times)], "csc")
        self._bucket = np.concatenate([self._bucket, bucket])

    def _solve_relaxed(self, demand: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The rows of the present patterns and the duals of the sizes, which solve the program."""
        count = len(self.sizes)
        # Further columns let a place of one size take the next smaller size. They make the duals
        # ascend with the size and keep the program short.
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

    def _improve(self, sack: Knapsack, duals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The knapsack's best row with each size in each bucket, if it improves the program."""
        times, bucket = [], []
        for number, (room, cost) in enumerate(zip(self.rooms, self.costs, strict=True)):
            rows = sack.rows(int(room))
            rows = rows[:, duals @ rows > cost * (1 + 1e-9)]
            # Equal rows have equal sums of random numbers. Different rows very rarely do; one of
            # them is then lost.
            sums = np.random.Philox(0).random_raw(len(rows)) @ rows.astype(np.uint64)
            rows = rows[:, np.unique(sums, return_index=True)[1]]
            times.append(rows)
            bucket.append(np.full(rows.shape[1], number))
        return np.concatenate(times, axis=1), np.concatenate(bucket)

    def _drop_patterns(self, rows: np.ndarray, duals: np.ndarray) -> None:
        """Removes the patterns of the highest reduced cost, but none in use."""
        most = PATTERNS_PER_SIZE * len(self.sizes)
        if len(rows) <= most:
            return
        reduced = self.costs[self._bucket] - self._times.T @ duals
        reduced[rows > 0] = -np.inf
        stay = np.sort(np.argsort(reduced, kind="stable")[:most])
        self._times, self._bucket = self._times[:, stay], self._bucket[stay]


def make_rows(
    left: Remaining, places: Sequence[tuple[int, int]], room: int, most: int | None, rows: int
) -> list[Pattern]:
    """Up to `rows` rows of `room` positions, whose segments are taken from those `left`.

    `places` has lengths, the longest first, each with its number of places in a row. A place takes
    the longest segment that fits into it; more such segments, `most` in all, fill the rest.
    """
    found = list[Pattern]()
    while rows and left.segments:
        row, free, segments = dict[int, int](), room, most or room
        for size, times in [*places, (room, segments)]:
            for _ in range(min(times, segments)):
                if not (longest := left.longest(min(size, free))):
                    break
                left.take(longest)
                row[longest] = row.get(longest, 0) + 1
                free, segments = free - longest, segments - 1
        more = min(rows - 1, *(left.counts.get(size, 0) // many for size, many in row.items()))
        for size, many in row.items():
            if more:
                left.take(size, more * many)
        found.append(Pattern.of_lengths(row.items(), 1 + more))
        rows -= 1 + more
    return found


def round_rows(columns: Columns, counts: np.ndarray) -> list[list[Pattern]]:
    """Patterns of each bucket, with whole rows, at nearly the cost of the program's solution.

    Each round makes the integer part of the program's rows, then one row for each of the largest
    fractions. Segments may remain at the end.
    """
    counts = counts.copy()
    counts[0] = 0
    left, found = Remaining(counts), [list[Pattern]() for _ in columns.rooms]

    def make(column: int, rows: int) -> int:
        places, bucket = columns.places(column)
        made = make_rows(left, places, int(columns.rooms[bucket]), columns.most, rows)
        found[bucket] += made
        return count_rows(made)

    for _ in range(ROUNDS):
        if not left.segments:
            break
        demand = np.array([left.counts.get(size, 0) for size in columns.sizes.tolist()], float)
        rows, _ = columns.solve(demand, ROUND_ITERATIONS)
        whole = np.floor(rows + 1e-6).astype(np.int64)
        done = sum(make(column, int(whole[column])) for column in np.flatnonzero(whole)[::-1])
        for column in np.argsort(whole - rows, kind="stable"):
            if done >= SHARE * rows.sum():
                break
            done += make(column, 1)
    return found
