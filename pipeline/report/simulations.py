"""Simulations: the batches that other libraries make of a stream of lengths.

`benchmarks.agreement` compares them with Grain and infinibatch themselves.
"""

import bisect
import dataclasses
from collections.abc import Callable

import numpy as np

from pipeline.report.stream import Stream


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulation:
    """The batches of one pass over a stream, as shapes.

    Attributes:
        rows: rows of each batch, int64 [batches].
        lengths: positions in each of its rows, int64 [batches].
        tokens: real positions in all batches.
        squares: the sum of the squared lengths of segments: the scores that attention inside
            segments computes.
        cut: documents that lie in more than one segment.
        reread: examples to read again to resume after an interruption, at most.
        targets: for pairs, target positions in each row, int64 [batches]; `lengths` then counts
            input positions. Targets attend to inputs too.
    """

    rows: np.ndarray
    lengths: np.ndarray
    tokens: int
    squares: int
    cut: int
    reread: int
    targets: np.ndarray | int = 0

    @property
    def positions(self) -> int:
        """All positions, real and padding."""
        return int(self.rows @ (self.lengths + self.targets))

    @property
    def scores(self) -> int:
        """The scores that attention over whole rows computes."""
        scores = self.lengths**2 + self.lengths * self.targets + np.square(self.targets)
        return int(self.rows @ scores)

    @property
    def shapes(self) -> int:
        """The number of different batch shapes, each of which is compiled once."""
        targets = np.broadcast_to(self.targets, self.rows.shape)
        return len(np.unique(np.stack([self.rows, self.lengths, targets]), axis=1).T)


def _simulation(stream: Stream, rows, lengths, reread: int) -> Simulation:
    """The simulation of batches that hold each piece of the stream as one segment."""
    return Simulation(
        rows=np.asarray(rows, np.int64),
        lengths=np.broadcast_to(lengths, len(rows)).astype(np.int64),
        tokens=int(stream.pieces.sum()),
        squares=int(np.square(stream.pieces).sum()),
        cut=stream.cut,
        reread=reread,
    )


def batch_sizes(units: int, rows: int) -> np.ndarray:
    """The rows of each batch when `units` rows are dealt out `rows` at a time.

    >>> batch_sizes(7, 3).tolist()
    [3, 3, 1]
    """
    return np.diff(np.append(np.arange(0, units, rows), units))


# ---- one example in a row


def pad_batches(stream: Stream, *, rows: int, window: int, length: int | None = None) -> Simulation:
    """Windows of examples sorted by length, cut into batches padded to their longest example.

    A window of `rows` examples keeps the order as it is. To resume inside a longer window, it is
    read and sorted again.

    >>> simulation = pad_batches(Stream(np.array([2, 5, 3, 1]), 8), rows=2, window=4)
    >>> simulation.rows.tolist(), simulation.lengths.tolist()
    ([2, 2], [2, 5])

    Batches have `rows` examples; `length` pads all rows alike, instead.
    """
    pieces = stream.pieces
    ordered = pieces[np.lexsort((pieces, np.arange(len(pieces)) // window))]
    starts = np.arange(0, len(pieces), rows)
    lengths = np.maximum.reduceat(ordered, starts) if len(starts) else starts
    reread = min(window, len(pieces)) if window > rows else 0
    return _simulation(stream, batch_sizes(len(pieces), rows), length or lengths, reread)


def token_budget(stream: Stream, *, budget: int, window: int) -> Simulation:
    """Windows sorted from the longest down, cut into batches of `budget // longest left` rows.

    infinibatch's `BucketedReadaheadBatchIterator` does this and shuffles the batches of a window.
    To resume inside a window, it is read again.
    """
    rows, lengths = [], []
    for start in range(0, len(stream.pieces), window):
        ordered = np.sort(stream.pieces[start : start + window])[::-1].tolist()
        at = 0
        while at < len(ordered):
            lengths.append(ordered[at])
            rows.append(min(max(budget // ordered[at], 1), len(ordered) - at))
            at += rows[-1]
    return _simulation(stream, rows, lengths, reread=min(window, len(stream.pieces)))


def bucket_by_length(stream: Stream, *, budget: int, ends: tuple[int, ...]) -> Simulation:
    """Each example waits in the bucket of its length until `budget // length` rows are there.

    tf.data's `bucket_by_sequence_length` with `pad_to_bucket_boundary` does this. Examples that
    still wait at the end make smaller batches. To resume, everything since the oldest waiting
    example is read again.

    `ends` are the longest lengths of the buckets, ascending.
    """
    bucket = np.searchsorted(ends, stream.pieces)
    sizes, reread = [], 0
    for index, end in enumerate(ends):
        where, rows = np.flatnonzero(bucket == index), max(budget // end, 1)
        sizes.append(batch_sizes(len(where), rows))
        # A batch leaves with its last row; the rows of an unfinished one wait until the end.
        leaves = np.append(where[rows - 1 :: rows], len(bucket))[: len(sizes[-1])]
        reread = max(reread, int((leaves - where[::rows]).max(initial=0)))
    lengths = np.repeat(ends, [len(each) for each in sizes])
    return _simulation(stream, np.concatenate(sizes), lengths, reread)


# ---- several examples in a row


def concatenate_and_split(stream: Stream, *, rows: int, length: int) -> Simulation:
    """All documents one after another, cut every `length` positions; `rows` rows in a batch.

    To resume, the document at the end of the last row is read again.
    """
    ends = np.cumsum(stream.documents)
    total = int(ends[-1]) if len(ends) else 0
    cut = int(np.count_nonzero((ends - stream.documents) // length < (ends - 1) // length))
    segments = np.diff(np.sort(np.concatenate([np.arange(0, total, length), ends])))
    squares = int(np.square(segments).sum())
    simulation = _simulation(stream, batch_sizes(-(-total // length), rows), length, min(cut, 1))
    return dataclasses.replace(simulation, squares=squares, cut=cut)


def first_fit(stream: Stream, *, rows: int, length: int, open_rows: int) -> Simulation:
    """Each example goes into the first of `open_rows` rows that has room for it.

    Where none has, all rows are emitted and as many are opened, as Grain's
    `FirstFitPackIterDataset` does. To resume, the examples of the open rows are packed again.
    """
    return _pack(stream, rows, length, open_rows, _place_first)


def best_fit(stream: Stream, *, rows: int, length: int, open_rows: int) -> Simulation:
    """As `first_fit`, into the row that is left with least room: `BestFitPackIterDataset`."""
    return _pack(stream, rows, length, open_rows, _place_best)


def _pack(stream: Stream, rows: int, length: int, open_rows: int, place: Callable) -> Simulation:
    used = reread = begin = 0
    room = [length] * open_rows
    for number, size in enumerate(stream.pieces.tolist()):
        if not place(room, size):
            used += open_rows - room.count(length)
            reread, begin = max(reread, number - begin), number
            room = [length] * open_rows
            place(room, size)
    used += open_rows - room.count(length)
    reread = max(reread, len(stream.pieces) - begin)
    return _simulation(stream, batch_sizes(used, rows), length, reread)


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
