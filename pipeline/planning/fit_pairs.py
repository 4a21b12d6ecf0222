"""The choice of buckets for pairs: the few pairs of lengths that cost least."""

import itertools
from collections.abc import Iterator

import numpy as np

from pipeline.planning.bucket import Bucket
from pipeline.planning.cascade import Packing, pack
from pipeline.planning.pieces import cut

# Estimates use a grid with up to CELLS cells of lengths that have pairs. Sets of buckets are then
# compared by packing about SAMPLE evenly spaced examples.
CELLS, SAMPLE = 256, 5_000

# The changes of a side of a bucket that the search tries, in multiples of `multiple`.
MOVES = (8, -8, 4, -4, 2, -2, 1, -1)

Lengths = tuple[tuple[int, int], ...]  # inputs and targets of each bucket of a set


class PairFit:
    """A search for cheap sets of buckets for pairs.

    First, all pairs are sorted from short to long and cut into a few groups, each with a bucket
    that holds it. Then the lengths of the buckets change as long as the estimated cost falls. Last,
    packing gives the cost of each set. A row of packed pairs may be longer than the longest pair:
    its sides can then have the ratio of the group's totals, so that both can be full.

    Bucket lengths are multiples of `multiple`; a row has at most `most` positions on both sides
    together. With `dense`, attention computes scores between all positions of a row.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        *,
        multiple: int,
        most: int,
        packing: Packing,
        dense: bool,
        width: int,
    ):
        self._multiple, self._most = multiple, most
        self._packing: Packing = packing
        # The cost of a score; the scores are inputs², targets² and inputs · targets.
        self._scores = dense / (6 * width) * (packing != "none")
        lengths = lengths[lengths[:, 1] > 0].astype(np.int64)
        self._make_cells(lengths)
        sample = lengths[:: max(len(lengths) // SAMPLE, 1)]
        pieces = cut(sample, tuple(lengths.max(axis=0).tolist()), "truncate")
        self._table = pieces.positions(np.arange(pieces.longest + 1))
        self._counts = np.bincount(pieces.sizes(0, len(pieces)), minlength=len(self._table))

    def _make_cells(self, lengths: np.ndarray) -> None:
        """Computes the examples, total positions and longest lengths of each cell with a pair."""
        ends, step = -(-np.maximum(lengths, 1) // self._multiple), 1
        while True:
            cells = (ends - 1) // step
            key = cells[:, 0] * (cells[:, 1].max() + 1) + cells[:, 1]
            found, cell = np.unique(key, return_inverse=True)
            if len(found) <= CELLS:
                break
            step *= 2
        self._examples = np.bincount(cell).astype(np.float64)
        self._total = np.stack([np.bincount(cell, side) for side in lengths.T], axis=1)
        self._longest = np.zeros((len(found), 2), np.int64)
        np.maximum.at(self._longest, cell, ends * self._multiple)

    def price(self, lengths: np.ndarray) -> np.ndarray:
        """The cost of rows of some lengths [..., 2], in positions."""
        inputs, targets = lengths[..., 0].astype(np.float64), lengths[..., 1].astype(np.float64)
        scores = inputs * inputs + targets * targets + inputs * targets
        return inputs + targets + scores * self._scores

    def _best_buckets(
        self, examples: np.ndarray, total: np.ndarray, longest: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The best bucket for each of some groups, [..., 2], and the cost of its rows, [...].

        A group has a number of examples, and total and longest inputs and targets, [..., 2].
        """
        if self._packing == "none":
            return longest, examples * self.price(longest)
        best, cost = longest, (total / longest).max(axis=-1) * self.price(longest)
        # Lengthen the side that needs more rows, so that both sides are full together.
        for side, other in ((0, 1), (1, 0)):
            wanted = longest[..., other] * total[..., side] / np.maximum(total[..., other], 1)
            for rounded in (np.floor, np.ceil):
                length = (rounded(wanted / self._multiple) * self._multiple).astype(np.int64)
                length = np.minimum(length, self._most - longest[..., other])
                length = np.maximum(length // self._multiple * self._multiple, longest[..., side])
                tried = longest.copy()
                tried[..., side] = length
                costs = (total / tried).max(axis=-1) * self.price(tried)
                better = costs < cost
                best, cost = np.where(better[..., None], tried, best), np.minimum(costs, cost)
        return best, cost

    def sets(self, most: int) -> list[Lengths]:
        """Good sets of up to `most` buckets, small sets first; the last bucket holds all pairs."""
        found: dict[Lengths, None] = {}
        for buckets in self._cut_groups(most):
            for lengths in self._add_longest(buckets):
                for each in (lengths, self._improve(lengths)):
                    if len(each) <= most:
                        found[each] = None
        return sorted(found, key=len)

    def _cut_groups(self, most: int) -> Iterator[np.ndarray]:
        """The best buckets [k, 2] for k = 1 … `most` groups of cells, by dynamic programming.

        Cells are sorted by their greater share of the longest lengths, and cut into groups.
        """
        order = np.argsort((self._longest / self._longest.max(axis=0)).max(axis=1), kind="stable")
        count = len(order)
        first, last = np.arange(count)[:, None], np.arange(count)  # cells of a group
        examples = np.append(0, np.cumsum(self._examples[order]))
        total = np.pad(np.cumsum(self._total[order], axis=0), ((1, 0), (0, 0)))
        longest = np.maximum.accumulate(self._longest[order], axis=0)
        best, cost = self._best_buckets(
            examples[last + 1] - examples[first],
            total[last + 1] - total[first],
            np.broadcast_to(longest, (count, count, 2)),
        )
        cost[first > last] = np.inf
        least = np.append(0, np.full(count, np.inf))  # the cost of the cells up to each one
        cuts: list[np.ndarray] = []
        for _ in range(min(most, count)):
            sums = least[:-1, None] + cost
            cuts.append(sums.argmin(axis=0))
            least = np.append(np.inf, sums.min(axis=0))
            end, buckets = count, []
            for begin in reversed(cuts):
                buckets.append(best[begin[end - 1], end - 1])
                end = begin[end - 1]
            yield np.array(buckets)

    def _add_longest(self, buckets: np.ndarray) -> Iterator[Lengths]:
        """Sets with a bucket that holds all pairs: in place of the last bucket, or after it."""
        longest = buckets.max(axis=0)
        if longest.sum() > self._most:
            longest = self._longest.max(axis=0)
        buckets = np.minimum(buckets, longest)
        ordered = [(i, t) for _, i, t in sorted({(i + t, i, t) for i, t in buckets.tolist()})]
        last = int(longest[0]), int(longest[1])
        yield (*ordered[:-1], last)
        if last != ordered[-1]:
            yield (*ordered, last)

    def _improve(self, lengths: Lengths) -> Lengths:
        """Changes one side of one bucket at a time, as long as the estimated cost falls."""
        best, least = np.array(lengths), self._estimate(np.array(lengths))
        moves = list(itertools.product(range(len(best)), (0, 1), MOVES))
        improved = True
        while improved:
            improved = False
            for index, side, by in moves:
                tried = best.copy()
                tried[index, side] += by * self._multiple
                tried = tried[np.lexsort((tried[:, 0], tried.sum(axis=1)))]
                if (cost := self._estimate(tried)) < least * (1 - 1e-6):
                    best, least, improved = tried, cost, True
        return tuple((inputs, targets) for inputs, targets in best.tolist())

    def _estimate(self, lengths: np.ndarray) -> float:
        """The cost of all cells in buckets [k, 2], assuming full rows; infinite for a bad set."""
        holds = np.all(self._longest[:, None] <= lengths, axis=-1)
        valid = (
            lengths.min() > 0
            and np.all(lengths <= lengths[-1])
            and np.all(holds[:, -1])
            and lengths[-1].sum() <= self._most
            and len(np.unique(lengths, axis=0)) == len(lengths)
        )
        if not valid:
            return np.inf
        bucket, price = holds.argmax(axis=1), self.price(lengths)
        if self._packing == "none":
            return float(self._examples @ price[bucket])
        totals = (np.bincount(bucket, side, len(lengths)) for side in self._total.T)
        return float((np.stack(list(totals), axis=1) / lengths).max(axis=1) @ price)

    def cost(self, lengths: Lengths) -> float:
        """The cost of an epoch of the sample, per position."""
        # Batches of one row: the last batch of each bucket, which is not full, must not count.
        packed = pack(
            self._counts,
            [Bucket(1, pair) for pair in lengths],
            sizes=self._table,
            packing=self._packing,
        )
        rows = np.array([packed.rows(index) for index in range(len(lengths))])
        return float(rows @ self.price(np.array(lengths)) / (self._counts @ self._table).sum())
