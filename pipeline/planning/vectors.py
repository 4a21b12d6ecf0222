"""Best fit for vectors: rows in which all sides of all examples fit.

The size of an example is the number of a line in a table `sizes`, int64 [n, sides], which has its
length on each side. Size 0 is for examples with nothing to train on. A limit on the number of
segments in a row is one more side, of which each example takes 1.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.planning.patterns import Pattern

# The most sizes that are tried for the next segment of a row. With half as many, a million pairs of
# different sizes take 36 s for 50 s, and the fuller side has 0.5 percentage points more padding. So
# above MANY sizes, of which more fit together, there are FEWER candidates.
CANDIDATES, MANY, FEWER = 1024, 200_000, 256

# After ROWS rows, each group of sizes gets another candidate: further on by the golden ratio of the
# group (633 of 1,024 parts), or one of the next PROBES sizes that has an example.
ROWS, GOLDEN, PARTS, PROBES = 8, 633, 1024, 4

# The most exchanges of a segment in a full row, and the most segments that are tried for each.
EXCHANGES, TRIED = 3, 8

# A side that will have free room in a full row counts less: its weight is 1 / (1 + SLACK · share),
# where the share is the free part of the row.
SLACK = 30


def best_fit_vectors(
    counts: np.ndarray,
    room: Sequence[int] | np.ndarray,
    sizes: np.ndarray,
    opens: np.ndarray,
    fills: np.ndarray,
) -> list[Pattern]:
    """Rows of one bucket, which are removed from `counts`.

    Arguments are as for `best_fit`, with `room` on each side, the table `sizes`, which ascends by
    the share of a row, and what each size adds to the `fill` of a pattern.

    Makes one row at a time. The largest remaining example opens it. Each further example is the one
    that leads furthest towards the full row, and least aside. The full row is a point: the filling
    of the sides at which the remaining positions of all sides would be used up at the same time.
    At the end, segments are exchanged as long as that reduces the free room. (Rows one at a time
    and inner products are from Panigrahy et al., 2011; the point and the exchanges are ours.) Rows
    with the same content are made together.

    >>> sizes = np.array([[0, 0], [2, 3], [5, 4], [6, 7], [8, 7]])
    >>> counts = np.array([0, 1, 2, 0, 2])
    >>> found = best_fit_vectors(counts, (10, 10), sizes, counts > 0, sizes.sum(axis=1))
    >>> [(p.pieces, p.rows, p.fill) for p in found]
    [(((4, 1), (1, 1)), 1, 20), (((4, 1),), 1, 15), (((2, 2),), 1, 18)]
    """
    limits = np.array(room)
    fitting = (counts > 0) & (sizes <= limits).all(axis=1)
    opening = np.flatnonzero(fitting & opens)[::-1].tolist()
    if not opening:
        return []
    fill_of = fills.tolist()
    if (2 * sizes[fitting].min(axis=0) > limits).any():  # no two fit into a row
        patterns = [Pattern(((n, 1),), int(counts[n]), fill_of[n], 1) for n in opening]
        counts[opening] = 0
        return patterns
    filler = _RowFiller(counts, np.flatnonzero(fitting)[::-1], sizes, limits)
    patterns = []
    for number in opening:
        while counts[number]:
            row = filler.fill_row(number)
            rows = min(int(counts[size]) // times for size, times in row.items())
            filler.remove(row, rows)
            fill = sum(fill_of[size] * times for size, times in row.items())
            patterns.append(Pattern(tuple(row.items()), rows, fill, sum(row.values())))
    return patterns


class _RowFiller:
    """The remaining examples, and a search for the best row with one of them.

    The remaining sizes, in descending order, are cut into up to `CANDIDATES` groups. One size of
    each group is a candidate. Candidates change after every few rows; else those that fit nowhere
    would stay. Shares of a row are computed with the four basic operations only, so that they are
    the same on every machine.
    """

    def __init__(
        self, counts: np.ndarray, order: np.ndarray, sizes: np.ndarray, limits: np.ndarray
    ):
        self._counts, self._sizes, self._limits = counts, sizes, limits
        self._pairs = [*itertools.combinations(range(len(limits)), 2)]  # of sides
        self._total = (sizes[order] * counts[order, None]).sum(axis=0)  # of the remaining examples
        self._most = CANDIDATES if len(order) <= MANY else FEWER
        self._changes = 0
        self._group(order)

    def _group(self, order: np.ndarray) -> None:
        groups = min(len(order), self._most)
        edges = np.arange(groups + 1) * len(order) // max(groups, 1)
        self._order, self._begin, self._long = order, edges[:-1], np.diff(edges)
        self._used = 0  # sizes of `order` without a remaining example
        self._change_candidates()

    def _change_candidates(self) -> None:
        offset = self._long * (self._changes * GOLDEN % PARTS) // PARTS
        for _ in range(PROBES):
            self._number = self._order[self._begin + offset]
            self._available = self._counts[self._number]  # examples of each candidate
            offset = (offset + (self._available == 0)) % self._long
        self._lengths = self._sizes[self._number].T.astype(float)
        self._share = self._lengths / self._limits[:, None]
        numbers = self._number.tolist()
        self._candidate_of = dict(zip(numbers, range(len(numbers)), strict=True))
        self._rows, self._changes = 0, self._changes + 1

    def fill_row(self, number: int) -> dict[int, int]:
        """The sizes in a row that an example of size `number` opens, each with its number."""
        room = (self._limits - self._sizes[number]).astype(float)
        # The free share of each side in a full row, and the weight of a deviation from it.
        rows = self._total / self._limits
        full = 1 - rows / rows.max()
        weight = 1 / (1 + SLACK * full)
        available = self._available.copy()
        if number in self._candidate_of:
            available[self._candidate_of[number]] -= 1
        chosen: list[int] = []
        while True:
            fits = available > 0
            for lengths, free in zip(self._lengths, room, strict=True):
                fits &= lengths <= free
            if not fits.any():
                break
            way = room / self._limits - full
            forth, aside = np.zeros((2, len(fits)))
            for share, free in zip(self._share, way, strict=True):
                forth += share * free
            for a, b in self._pairs:
                aside += np.abs(self._share[a] * way[b] - self._share[b] * way[a])
            score = forth - aside * (2 / len(way))
            best = int(np.where(fits, score, -np.inf).argmax())
            chosen.append(best)
            available[best] -= 1
            room = room - self._lengths[:, best]
        for _ in range(EXCHANGES):
            if not chosen or not self._exchange(chosen, available, room, full, weight):
                break
        row = {number: 1}
        for size in self._number[chosen].tolist():
            row[size] = row.get(size, 0) + 1
        return row

    def _exchange(self, chosen: Any, available: Any, room: Any, full: Any, weight: Any) -> bool:
        """Exchanges one of `chosen` for the best candidate, if that leads closer to a full row."""
        tried = list(dict.fromkeys(reversed(chosen)))[:TRIED]
        possible, before, after = available > 0, 0.0, np.zeros(1)
        for lengths, limit, *of_side in zip(
            self._lengths, self._limits, room, full, weight, strict=True
        ):
            free, share, by = of_side
            before += abs(free / limit - share) * by
            rooms = (free + lengths[tried])[:, None] - lengths
            possible = possible & (rooms >= 0)
            after = after + np.abs(rooms / limit - share) * by
        deviations = np.where(possible, after, np.inf)
        old, new = divmod(int(deviations.argmin()), deviations.shape[1])
        if not deviations[old, new] < before:
            return False
        chosen.remove(tried[old])
        chosen.append(new)
        available[tried[old]] += 1
        available[new] -= 1
        room += self._lengths[:, tried[old]] - self._lengths[:, new]
        return True

    def remove(self, row: dict[int, int], rows: int) -> None:
        """Removes the examples of `rows` rows like `row` from the remaining ones."""
        for number, times in row.items():
            count = self._counts[number] = self._counts[number] - times * rows
            self._total = self._total - self._sizes[number] * (times * rows)
            self._used += count == 0
            if number in self._candidate_of:
                self._available[self._candidate_of[number]] = count
        self._rows += 1
        if 2 * self._used > len(self._order):
            self._group(self._order[self._counts[self._order] > 0])
        elif self._rows == ROWS and len(self._order) > self._most:
            self._change_candidates()
