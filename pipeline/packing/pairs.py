"""Best fit of pairs: which share a row, where inputs and targets have to fit at once.

A pair's size is its two lengths, and sizes are known by number: a table `sizes`, int64 [n, 2], says
which lengths a number stands for; number 0 is for pairs with nothing to train on. Everything here
works on counts of sizes, and patterns hold numbers.
"""

from collections.abc import Sequence

import numpy as np

from pipeline.packing.bucket import Bucket
from pipeline.packing.patterns import Pattern

# Sizes among which the next segment of a row is chosen, at most. A million pairs of as many sizes
# take 50 s; with half as many candidates 36 s, and half a point less of the fuller side is used.
CANDIDATES = 1024

# After so many rows others take their turn: each run's candidate lies further on, by the golden
# ratio of the run (633 of 1,024 steps), or is one of the next of which any are left.
FRESH, GOLDEN, STEPS, PROBES = 8, 633, 1024, 4

# Exchanges of a segment of a full row for a better one, and how many of its segments are tried.
EXCHANGES, TRIED = 3, 8

# How much less a position of the side that has room counts: by this times the share it has.
SLACK = 30


def best_fit_pairs(
    counts: np.ndarray,
    room: tuple[int, ...],
    sizes: np.ndarray,
    opens: np.ndarray,
    max_segments: int | None = None,
) -> list[Pattern]:
    """Rows of `room` positions, filled along both sides; takes what it placed from `counts`.

    Row by row: the largest pair that is left opens it. Then comes, again and again, the pair that
    leads furthest towards the corner where the row is full, and least aside; the corner lies where
    the positions still to be placed are used up on both sides at the same time. At the end a
    segment is exchanged for another one as long as that leaves less room. (Row by row and by inner
    products, as in Panigrahy et al., 2011; the corner and the exchanges are ours.) Rows that look
    alike are made at once.

    >>> sizes = np.array([[0, 0], [2, 3], [5, 4], [6, 7], [8, 7]])
    >>> counts = np.array([0, 1, 2, 0, 2])
    >>> found = best_fit_pairs(counts, (10, 10), sizes, counts > 0)
    >>> [(p.pieces, p.rows, p.fill) for p in found]
    [(((4, 1), (1, 1)), 1, 20), (((4, 1),), 1, 15), (((2, 2),), 1, 18)]

    Args:
        counts: int64 [n], pairs of each size; changed in place.
        room: positions in a row, of the inputs and of the targets.
        sizes: int64 [n, 2], ascending by what they take of a row.
        opens: bool [n], the sizes that open rows; others only fill holes.
        max_segments: the most pairs in a row; None for no limit.
    """
    limits = np.array(room)
    fitting = (counts > 0) & (sizes <= limits).all(axis=1)
    filler = _Filler(counts, np.flatnonzero(fitting)[::-1], sizes, limits, max_segments)
    patterns = []
    for number in np.flatnonzero(fitting & opens)[::-1].tolist():
        while counts[number]:
            row = filler.row(number)
            rows = min(int(counts[size]) // times for size, times in row.items())
            filler.take(row, rows)
            fill = sum(int(sizes[size].sum()) * times for size, times in row.items())
            patterns.append(Pattern(tuple(row.items()), rows, fill))
    return patterns


class _Filler:
    """The pairs that are left, and the best row with one of them.

    The sizes that are left, from the largest to the smallest, are cut into up to `CANDIDATES` runs,
    and one of each run is a candidate. Others take their turn after every few rows: else those that
    fit nowhere would stay for ever and be all there is. Shares of a row are computed number by
    number with the four operations alone, so that they are the same on every machine.
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
        self._total = (sizes[order] * counts[order, None]).sum(axis=0)  # positions left
        self._turns = 0
        self._cut(order)

    def _cut(self, order: np.ndarray) -> None:
        """Cuts `order`, sizes from the largest, into runs."""
        runs = min(len(order), CANDIDATES)
        edges = np.arange(runs + 1) * len(order) // max(runs, 1)
        self._order, self._begin, self._long = order, edges[:-1], np.diff(edges)
        self._used = 0  # sizes of `order` of which none is left
        self._turn()

    def _turn(self) -> None:
        """Another candidate from each run."""
        place = self._long * (self._turns * GOLDEN % STEPS) // STEPS
        for _ in range(PROBES):
            self._number = self._order[self._begin + place]
            self._left = self._counts[self._number]  # of each candidate
            place = (place + (self._left == 0)) % self._long
        self._lengths = self._sizes[self._number].T
        self._share = self._lengths / self._limits[:, None]
        self._place = {number: place for place, number in enumerate(self._number.tolist())}
        self._rows, self._turns = 0, self._turns + 1

    def row(self, number: int) -> dict[int, int]:
        """The sizes in a row that the size `number` opens, with how often each."""
        room = self._limits - self._sizes[number]
        corner, weight = self._corner()
        left = self._left.copy()
        if number in self._place:
            left[self._place[number]] -= 1
        places: list[int] = []
        while len(places) + 1 < self._most:
            fits = (self._lengths[0] <= room[0]) & (self._lengths[1] <= room[1]) & (left > 0)
            if not fits.any():
                break
            way = room / self._limits - corner
            forth = self._share[0] * way[0] + self._share[1] * way[1]
            aside = np.abs(self._share[0] * way[1] - self._share[1] * way[0])
            best = int(np.where(fits, forth - aside, -np.inf).argmax())
            places.append(best)
            left[best] -= 1
            room = room - self._lengths[:, best]
        for _ in range(EXCHANGES):
            if not places or not self._exchange(places, left, room, corner, weight):
                break
        row = {number: 1}
        for size in self._number[places].tolist():
            row[size] = row.get(size, 0) + 1
        return row

    def _corner(self) -> tuple[np.ndarray, np.ndarray]:
        """The shares of the sides that a full row leaves, and what being off them counts."""
        rows = self._total / self._limits
        corner = 1 - rows / rows.max()
        return corner, 1 / (1 + SLACK * corner)

    def _exchange(self, places, left, room, corner, weight) -> bool:
        """Exchanges one of `places` for what leads nearest to the corner, if it is nearer."""

        def off(inputs, targets):
            sides = inputs / self._limits[0] - corner[0], targets / self._limits[1] - corner[1]
            return np.abs(sides[0]) * weight[0] + np.abs(sides[1]) * weight[1]

        tried = list(dict.fromkeys(reversed(places)))[:TRIED]
        inputs, targets = (
            room[side] + self._lengths[side][tried][:, None] - self._lengths[side]
            for side in (0, 1)
        )
        possible = (inputs >= 0) & (targets >= 0) & (left > 0)
        away = np.where(possible, off(inputs, targets), np.inf)
        out, new = divmod(int(away.argmin()), away.shape[1])
        if not away[out, new] < off(*room):
            return False
        places.remove(tried[out])
        places.append(new)
        left[tried[out]] += 1
        left[new] -= 1
        room[:] = inputs[out, new], targets[out, new]
        return True

    def take(self, row: dict[int, int], rows: int) -> None:
        """Takes the pairs of `rows` such rows from those that are left."""
        for number, times in row.items():
            left = self._counts[number] = self._counts[number] - times * rows
            self._total = self._total - self._sizes[number] * (times * rows)
            self._used += left == 0
            if number in self._place:
                self._left[self._place[number]] = left
        self._rows += 1
        if 2 * self._used > len(self._order):
            self._cut(self._order[self._counts[self._order] > 0])
        elif self._rows == FRESH and len(self._order) > CANDIDATES:
            self._turn()


def volume_bound(totals: np.ndarray, buckets: Sequence[Bucket]) -> tuple[float, tuple[float, ...]]:
    """The share of positions that no packing can exceed: of both sides together, and of each.

    Rows must have room for the inputs and for the targets, and a batch is of one shape; so with one
    bucket the side that needs more rows can be full, and the other as far as the totals' ratio
    allows. Sizes that do not add up to full rows lower what can be reached further; they do not
    count here. With several buckets the least room is a linear program in two constraints, whose
    dual has its best point where two of its lines meet.

    >>> volume_bound(np.array([1000, 600]), [Bucket(1, (100, 100))])
    (0.8, (1.0, 0.6))

    Args:
        totals: positions of all inputs and of all targets.
        buckets: of pairs.
    """
    lengths = np.array([bucket.lengths for bucket in buckets], np.float64)

    def least(room: np.ndarray) -> float:
        """Σ rows · room at the least, with room for both totals."""
        lines = np.concatenate([np.column_stack([lengths, room]), [[1, 0, 0], [0, 1, 0]]])
        best = 0.0
        for first in range(len(lines)):
            for second in range(first):
                (a, b, e), (c, d, f) = lines[first], lines[second]
                if a * d == b * c:
                    continue
                price = np.array([e * d - b * f, a * f - e * c]) / (a * d - b * c)
                if (price >= 0).all() and (lengths @ price <= room * (1 + 1e-12)).all():
                    best = max(best, float(totals @ price))
        return best

    sides = tuple(float(totals[side]) / least(lengths[:, side]) for side in (0, 1))
    return float(totals.sum()) / least(lengths.sum(axis=1)), sides
