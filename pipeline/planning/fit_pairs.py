"""Choosing buckets for pairs: a few pairs of lengths, neither a grid nor a chain."""

import itertools
from collections.abc import Iterator

import numpy as np

from pipeline.packing.bucket import Bucket
from pipeline.packing.cascade import pack
from pipeline.planning.pieces import cut

# Pairs are grouped into cells of lengths, at most so many; that many examples, evenly spread, are
# packed to compare sets of buckets.
CELLS, SAMPLE = 256, 5_000

# By how many multiples a side of a bucket is made longer or shorter at a time.
MOVES = (8, -8, 4, -4, 2, -2, 1, -1)

Lengths = tuple[tuple[int, int], ...]  # of the buckets of a set


class PairFit:
    """Cheap sets of buckets for pairs.

    All pairs, from short to long, are cut into a few groups, each with a bucket that holds it. The
    buckets are then moved to where they cost less, and what they cost is found by packing. A row of
    packed pairs may be longer than its longest pair: then its sides can be as the totals of the
    group, and both be full.

    Args:
        lengths: inputs and targets of each example, integers [n, 2].
        multiple: lengths of buckets are multiples of this.
        most: positions in a row at most, of both sides together.
        packing: "best_fit" or "none".
        dense: whether attention scores cost the square of the row.
        width: of the model.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        *,
        multiple: int,
        most: int,
        packing: str,
        dense: bool,
        width: int,
    ):
        self._multiple, self._most, self._packing = multiple, most, packing
        # Scores are inputs by inputs, targets by targets and targets by inputs.
        self._scores = dense / (6 * width) * (packing != "none")
        lengths = lengths[lengths[:, 1] > 0].astype(np.int64)
        self._cells(lengths)
        sample = lengths[:: max(len(lengths) // SAMPLE, 1)]
        self._pieces = cut(sample, tuple(lengths.max(axis=0).tolist()), "truncate")
        self._table = self._pieces.positions(np.arange(self._pieces.longest + 1))
        self._counts = np.bincount(self._pieces.numbered(), minlength=len(self._table))

    def _cells(self, lengths: np.ndarray) -> None:
        """Examples, positions and longest lengths of each cell that has a pair."""
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
        """What rows of some lengths [..., 2] cost, in positions."""
        inputs, targets = lengths[..., 0].astype(np.float64), lengths[..., 1].astype(np.float64)
        scores = inputs * inputs + targets * targets + inputs * targets
        return inputs + targets + scores * self._scores

    def _buckets(self, examples, total, longest) -> tuple[np.ndarray, np.ndarray]:
        """The best bucket of each of some groups, [..., 2], and what its rows cost."""
        if self._packing == "none":
            return longest, examples * self.price(longest)
        best, cost = longest, (total / longest).max(axis=-1) * self.price(longest)
        # The side that needs more rows becomes longer, to be full together with the other.
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
        """Good sets of up to `most` pairs of lengths, small sets first; the last holds all."""
        found: dict[Lengths, None] = {}
        for chosen in self._by_cutting(most):
            for lengths in self._closed(chosen):
                for each in (lengths, self._moved(lengths)):
                    if len(each) <= most:
                        found[each] = None
        return sorted(found, key=len)

    def _by_cutting(self, most: int) -> Iterator[np.ndarray]:
        """Buckets [k, 2] that each hold the one before, the best cuts by dynamic programming.

        Cells are put in order by what they take of the longest row, on the side where that is more.
        """
        order = np.argsort((self._longest / self._longest.max(axis=0)).max(axis=1), kind="stable")
        count = len(order)
        first, last = np.arange(count)[:, None], np.arange(count)  # a group goes from cell to cell
        examples = np.append(0, np.cumsum(self._examples[order]))
        total = np.pad(np.cumsum(self._total[order], axis=0), ((1, 0), (0, 0)))
        longest = np.maximum.accumulate(self._longest[order], axis=0)
        best, cost = self._buckets(
            examples[last + 1] - examples[first],
            total[last + 1] - total[first],
            np.broadcast_to(longest, (count, count, 2)),
        )
        cost[first > last] = np.inf
        least = np.append(0, np.full(count, np.inf))  # up to each cell
        cuts: list[np.ndarray] = []
        for _ in range(min(most, count)):
            sums = least[:-1, None] + cost
            cuts.append(sums.argmin(axis=0))
            least = np.append(np.inf, sums.min(axis=0))
            end, chosen = count, []
            for split in reversed(cuts):
                chosen.append(best[split[end - 1], end - 1])
                end = split[end - 1]
            yield np.array(chosen)

    def _closed(self, chosen: np.ndarray) -> Iterator[Lengths]:
        """The lengths of some buckets, and one that holds all: the last, or one more."""
        longest = chosen.max(axis=0)
        if longest.sum() > self._most:
            longest = self._longest.max(axis=0)
        chosen = np.minimum(chosen, longest)
        ordered = [(i, t) for _, i, t in sorted({(i + t, i, t) for i, t in chosen.tolist()})]
        last = int(longest[0]), int(longest[1])
        yield (*ordered[:-1], last)
        if last != ordered[-1]:
            yield (*ordered, last)

    def _moved(self, lengths: Lengths) -> Lengths:
        """These buckets, each side made longer or shorter as long as that makes them cheaper."""
        best, least = np.array(lengths), self._estimate(np.array(lengths))
        moves = list(itertools.product(range(len(best)), (0, 1), MOVES))
        moved = True
        while moved:
            moved = False
            for index, side, by in moves:
                tried = best.copy()
                tried[index, side] += by * self._multiple
                tried = tried[np.lexsort((tried[:, 0], tried.sum(axis=1)))]
                if (cost := self._estimate(tried)) < least * (1 - 1e-6):
                    best, least, moved = tried, cost, True
        return tuple((inputs, targets) for inputs, targets in best.tolist())

    def _estimate(self, lengths: np.ndarray) -> float:
        """What the cells cost in buckets [k, 2], full ones if packed; infinite for no such set."""
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
        """What an epoch over the sample costs, for each of its positions."""
        # One row a batch: what is left over at the end of an epoch must not count here.
        packed = pack(
            self._counts,
            [Bucket(1, pair) for pair in lengths],
            sizes=self._table,
            packing=self._packing,
        )
        rows = np.array([packed.rows(index) for index in range(len(lengths))])
        return float(rows @ self.price(np.array(lengths)) / (self._counts @ self._table).sum())
