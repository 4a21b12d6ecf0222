"""Simulations: the batches that other libraries make of lengths in the order of reading, as shapes.

Commit 3bb3208 has a test that compares those of infinibatch with infinibatch itself.
"""

import dataclasses
import heapq

import numpy as np


@dataclasses.dataclass(frozen=True)
class Simulation:
    """The batches of one pass over some examples.

    Attributes:
        rows: rows of each batch, int64 [batches].
        lengths: positions in each of its rows, int64 [batches].
        tokens: real positions in all batches.
    """

    rows: np.ndarray
    lengths: np.ndarray
    tokens: int

    @property
    def positions(self) -> int:
        """All positions, real and padding."""
        return int(self.rows @ self.lengths)

    @property
    def padding(self) -> float:
        """The share of padding, from 0 to 1."""
        return 1 - self.tokens / self.positions

    @property
    def shapes(self) -> int:
        """The number of different batch shapes, each of which is compiled once."""
        return len(np.unique(np.stack([self.rows, self.lengths]), axis=1).T)


def pad_batches(
    lengths: np.ndarray, *, rows: int, window: int, length: int | None = None
) -> Simulation:
    """Windows of examples sorted by length, cut into batches padded to their longest example.

    >>> simulation = pad_batches(np.array([2, 5, 3, 1]), rows=2, window=4)
    >>> simulation.rows.tolist(), simulation.lengths.tolist()
    ([2, 2], [2, 5])

    A window of `rows` examples keeps the order as it is; `length` pads all rows alike, instead.
    """
    ordered = lengths[np.lexsort((lengths, np.arange(len(lengths)) // window))]
    starts = np.arange(0, len(lengths), rows)
    heights = np.diff(np.append(starts, len(lengths)))
    longest = np.maximum.reduceat(ordered, starts)
    if length is not None:
        longest = np.full(len(starts), length)
    return Simulation(heights, longest, int(lengths.sum()))


def token_budget(lengths: np.ndarray, *, budget: int, window: int) -> Simulation:
    """Windows sorted from the longest down, cut into batches of `budget // longest left` rows.

    infinibatch's `BucketedReadaheadBatchIterator` does this and shuffles the batches of a window.
    """
    rows, longest = [], []
    for start in range(0, len(lengths), window):
        ordered = np.sort(lengths[start : start + window])[::-1].tolist()
        at = 0
        while at < len(ordered):
            longest.append(ordered[at])
            rows.append(min(max(budget // ordered[at], 1), len(ordered) - at))
            at += rows[-1]
    return Simulation(np.array(rows), np.array(longest), int(lengths.sum()))


def next_fit(lengths: np.ndarray, length: int) -> np.ndarray:
    """The row of each example, int64 [n]: one that does not fit closes the row before it.

    >>> next_fit(np.array([5, 3, 2, 7]), length=8).tolist()
    [0, 0, 1, 2]
    """
    first, room = np.zeros(len(lengths), np.int64), 0
    for example, size in enumerate(lengths.tolist()):
        if size > room:
            first[example], room = 1, length
        room -= size
    return np.cumsum(first) - 1


def first_fit_decreasing(lengths: np.ndarray, length: int) -> np.ndarray:
    """The row of each example, int64 [n]: from the longest down, each in the first that holds it.

    >>> first_fit_decreasing(np.array([3, 2, 7, 1, 5]), length=8).tolist()
    [1, 2, 0, 0, 1]
    """
    found, room = np.zeros(len(lengths), np.int64), np.full(len(lengths), length)
    for example in np.argsort(-lengths, kind="stable"):
        found[example] = np.argmax(room >= lengths[example])
        room[found[example]] -= lengths[example]
    return found


def karmarkar_karp(costs: np.ndarray, parts: int) -> np.ndarray:
    """The part of each example, int64 [n], where parts cost about the same, whatever their length.

    The largest differencing method (Karmarkar and Karp, 1982) for several parts: each example is a
    partition with one part that is not empty. The two partitions whose parts differ most are
    joined, the costliest part of one with the cheapest of the other, until one is left. Parts
    descend by cost.

    >>> karmarkar_karp(np.array([8, 7, 6, 5, 4]), parts=2).tolist()
    [1, 0, 1, 0, 0]
    """
    heap = []
    for number, cost in enumerate(costs.tolist()):
        sums = np.zeros(parts)
        sums[0] = cost
        heap.append((-float(cost), number, sums, np.array([number]), np.zeros(1, np.int64)))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, sums, examples, places = heapq.heappop(heap)
        _, _, others, more, there = heapq.heappop(heap)
        sums = sums + others[::-1]
        order = np.argsort(-sums, kind="stable")
        places = np.argsort(order)[np.append(places, parts - 1 - there)]
        sums, examples = sums[order], np.append(examples, more)
        heapq.heappush(heap, (sums[-1] - sums[0], number, sums, examples, places))
    *_, examples, places = heap[0]
    return places[np.argsort(examples)]
