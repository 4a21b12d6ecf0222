"""Simulations: the batches that other libraries make of lengths in the order of reading, as shapes.

`benchmarks.agreement` compares them with Grain and infinibatch themselves.
"""

import bisect
import dataclasses
from collections.abc import Callable

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


def first_fit(lengths: np.ndarray, *, length: int, open_rows: int) -> int:
    """Rows that are needed if each example goes into the first of `open_rows` with room for it.

    Where none has, all rows are emitted and as many are opened, as Grain's
    `FirstFitPackIterDataset` does.
    """
    return _pack(lengths, length, open_rows, _place_first)


def best_fit(lengths: np.ndarray, *, length: int, open_rows: int) -> int:
    """As `first_fit`, into the row that is left with least room: `BestFitPackIterDataset`."""
    return _pack(lengths, length, open_rows, _place_best)


def _pack(lengths: np.ndarray, length: int, open_rows: int, place: Callable) -> int:
    used, room = 0, [length] * open_rows
    for size in lengths.tolist():
        if not place(room, size):
            used += open_rows - room.count(length)
            room = [length] * open_rows
            place(room, size)
    return used + open_rows - room.count(length)


def _place_first(room: list[int], size: int) -> bool:
    for row, free in enumerate(room):
        if free >= size:
            room[row] = free - size
            return True
    return False


def _place_best(room: list[int], size: int) -> bool:
    """Keeps `room` in ascending order; rows with equal room are alike."""
    row = bisect.bisect_left(room, size)
    if row == len(room):
        return False
    bisect.insort(room, room.pop(row) - size)
    return True
