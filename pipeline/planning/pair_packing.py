"""Best fit for pairs: rows in which both the inputs and the targets of all pairs fit.

The size of a pair is the number of a line in a table `sizes`, int64 [n, 2], which has its inputs
and targets. Size 0 is for pairs with nothing to train on.
"""

from typing import Any

import numpy as np

from pipeline.planning.patterns import Pattern

# The most sizes that are tried for the next segment of a row. A million pairs of different sizes
# take 50 s; with half as many candidates 36 s, and the fuller side has 0.5 percentage points more
# padding.
CANDIDATES = 1024

# After ROWS rows, each group of sizes gets another candidate: further on by the golden ratio of the
# group (633 of 1,024 parts), or one of the next PROBES sizes that has a pair.
ROWS, GOLDEN, PARTS, PROBES = 8, 633, 1024, 4

# The most exchanges of a segment in a full row, and the most segments that are tried for each.
EXCHANGES, TRIED = 3, 8

# A side that will have free room in a full row counts less: its weight is 1 / (1 + SLACK · share),
# where the share is the free part of the row.
SLACK = 30


def best_fit_pairs(
    counts: np.ndarray,
    room: tuple[int, ...],
    sizes: np.ndarray,
    opens: np.ndarray,
    max_segments: int | None = None,
) -> list[Pattern]:
    """Rows of one bucket of pairs, which are removed from `counts`.

    Arguments are as for `best_fit`, with `room` for inputs and for targets, and the table `sizes`,
    which ascends by the share of a row.

    Makes one row at a time. The largest remaining pair opens it. Each further pair is the one that
    leads furthest towards the full row, and least aside. The full row is a point: the filling of
    both sides at which the remaining positions of both sides would be used up at the same time.
    At the end, segments are exchanged as long as that reduces the free room. (Rows one at a time
    and inner products are from Panigrahy et al., 2011; the point and the exchanges are ours.) Rows
    with the same content are made together.

    >>> sizes = np.array([[0, 0], [2, 3], [5, 4], [6, 7], [8, 7]])
    >>> counts = np.array([0, 1, 2, 0, 2])
    >>> found = best_fit_pairs(counts, (10, 10), sizes, counts > 0)
    >>> [(p.pieces, p.rows, p.fill) for p in found]
    [(((4, 1), (1, 1)), 1, 20), (((4, 1),), 1, 15), (((2, 2),), 1, 18)]
    """
    limits = np.array(room)
    fitting = (counts > 0) & (sizes <= limits).all(axis=1)
    opening = np.flatnonzero(fitting & opens)[::-1].tolist()
    if max_segments == 1:  # nothing to search
        patterns = [Pattern(((n, 1),), int(counts[n]), int(sizes[n].sum()), 1) for n in opening]
        counts[opening] = 0
        return patterns
    filler = _RowFiller(counts, np.flatnonzero(fitting)[::-1], sizes, limits, max_segments)
    patterns = []
    for number in opening:
        while counts[number]:
            row = filler.fill_row(number)
            rows = min(int(counts[size]) // times for size, times in row.items())
            filler.remove(row, rows)
            fill = sum(int(sizes[size].sum()) * times for size, times in row.items())
            patterns.append(Pattern(tuple(row.items()), rows, fill, sum(row.values())))
    return patterns


class _RowFiller:
    """The remaining pairs, and a search for the best row with one of them.

    The remaining sizes, in descending order, are cut into up to `CANDIDATES` groups. One size of
    each group is a candidate for a row. The candidates change after every few rows; otherwise those
    that fit nowhere would stay candidates. Shares of a row are computed with the four basic
    operations only, so that they are the same on every machine.

    `counts` is changed in place; `order` has the sizes that fit into a row of `limits`.
    """

    def __init__(
        self,
        counts: np.ndarray,
        order: np.ndarray,
        sizes: np.ndarray,
        limits: np.ndarray,
        max_segments: int | None,
    ):
        self._counts, self._sizes, self._limits = counts, sizes, limits
        self._most = max_segments or int(limits.sum())
        self._total = (sizes[order] * counts[order, None]).sum(axis=0)  # of the remaining pairs
        self._changes = 0
        self._group(order)

    def _group(self, order: np.ndarray) -> None:
        groups = min(len(order), CANDIDATES)
        edges = np.arange(groups + 1) * len(order) // max(groups, 1)
        self._order, self._begin, self._long = order, edges[:-1], np.diff(edges)
        self._used = 0  # sizes of `order` without a remaining pair
        self._change_candidates()

    def _change_candidates(self) -> None:
        place = self._long * (self._changes * GOLDEN % PARTS) // PARTS
        for _ in range(PROBES):
            self._number = self._order[self._begin + place]
            self._available = self._counts[self._number]  # pairs of each candidate
            place = (place + (self._available == 0)) % self._long
        self._lengths = self._sizes[self._number].T
        self._share = self._lengths / self._limits[:, None]
        self._place = {number: place for place, number in enumerate(self._number.tolist())}
        self._rows, self._changes = 0, self._changes + 1

    def fill_row(self, number: int) -> dict[int, int]:
        """The sizes in a row that a pair of size `number` opens, each with its number of pairs."""
        room = self._limits - self._sizes[number]
        # The free share of each side in a full row, and the weight of a deviation from it.
        rows = self._total / self._limits
        full = 1 - rows / rows.max()
        weight = 1 / (1 + SLACK * full)
        available = self._available.copy()
        if number in self._place:
            available[self._place[number]] -= 1
        places: list[int] = []
        while len(places) + 1 < self._most:
            fits = (self._lengths[0] <= room[0]) & (self._lengths[1] <= room[1]) & (available > 0)
            if not fits.any():
                break
            way = room / self._limits - full
            forth = self._share[0] * way[0] + self._share[1] * way[1]
            aside = np.abs(self._share[0] * way[1] - self._share[1] * way[0])
            best = int(np.where(fits, forth - aside, -np.inf).argmax())
            places.append(best)
            available[best] -= 1
            room = room - self._lengths[:, best]
        for _ in range(EXCHANGES):
            if not places or not self._exchange(places, available, room, full, weight):
                break
        row = {number: 1}
        for size in self._number[places].tolist():
            row[size] = row.get(size, 0) + 1
        return row

    def _exchange(self, places: Any, available: Any, room: Any, full: Any, weight: Any) -> bool:
        """Exchanges one of `places` for the best candidate, if that leads closer to a full row."""

        def deviation(inputs: Any, targets: Any) -> Any:
            sides = inputs / self._limits[0] - full[0], targets / self._limits[1] - full[1]
            return np.abs(sides[0]) * weight[0] + np.abs(sides[1]) * weight[1]

        tried = list(dict.fromkeys(reversed(places)))[:TRIED]
        inputs, targets = (
            room[side] + self._lengths[side][tried][:, None] - self._lengths[side]
            for side in (0, 1)
        )
        possible = (inputs >= 0) & (targets >= 0) & (available > 0)
        deviations = np.where(possible, deviation(inputs, targets), np.inf)
        old, new = divmod(int(deviations.argmin()), deviations.shape[1])
        if not deviations[old, new] < deviation(*room):
            return False
        places.remove(tried[old])
        places.append(new)
        available[tried[old]] += 1
        available[new] -= 1
        room[:] = inputs[old, new], targets[old, new]
        return True

    def remove(self, row: dict[int, int], rows: int) -> None:
        """Removes the pairs of `rows` rows like `row` from the remaining pairs."""
        for number, times in row.items():
            count = self._counts[number] = self._counts[number] - times * rows
            self._total = self._total - self._sizes[number] * (times * rows)
            self._used += count == 0
            if number in self._place:
                self._available[self._place[number]] = count
        self._rows += 1
        if 2 * self._used > len(self._order):
            self._group(self._order[self._counts[self._order] > 0])
        elif self._rows == ROWS and len(self._order) > CANDIDATES:
            self._change_candidates()
