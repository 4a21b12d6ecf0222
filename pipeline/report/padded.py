"""Ways to make batches with one example in a row, each padded to some length."""

import numpy as np

from pipeline.report.simulated import Simulated, dealt, sum_of_squares, total
from pipeline.report.stream import Stream


def to_longest(stream: Stream, *, rows: int, longest: int) -> Simulated:
    """Every row as long as the longest example of all; `rows` in a batch.

    >>> to_longest(Stream(n := np.array([2, 5, 3]), n), rows=2, longest=5).rows.tolist()
    [2, 1]
    """
    sizes = dealt(len(stream.pieces), rows)
    return _simulated(stream, sizes, np.full(len(sizes), longest), reread=0)


def to_longest_in_batch(stream: Stream, *, rows: int) -> Simulated:
    """Batches of `rows` as they come, each padded to its own longest example."""
    return _simulated(
        stream, dealt(len(stream.pieces), rows), _longest(stream.pieces, rows), reread=0
    )


def sorted_windows(stream: Stream, *, rows: int, window: int) -> Simulated:
    """Windows of `window` examples, sorted by length, then cut into batches of `rows`.

    To go on inside a window, it must be read and sorted again.
    """
    lengths = np.concatenate([stream.pieces[:0], *_sorted(stream.pieces, window)])
    return _simulated(
        stream,
        dealt(len(lengths), rows),
        _longest(lengths, rows),
        reread=min(window, len(lengths)),
    )


def token_budget(stream: Stream, *, budget: int, window: int) -> Simulated:
    """Windows sorted from the longest down, cut into batches of `budget // longest left` rows.

    This is what infinibatch's `BucketedReadaheadBatchIterator` does; the order in which it then
    shuffles a window's batches changes no count. To go on inside a window, it is read again.
    """
    rows: list[int] = []
    lengths: list[int] = []
    for part in _sorted(stream.pieces, window, whole=True):
        ordered = part[::-1].tolist()
        at, end = 0, len(ordered)
        while at < end:
            most = max(budget // ordered[at], 1)
            rows.append(min(most, end - at))
            lengths.append(ordered[at])
            at += most
    sizes, longest = np.array(rows, np.int64), np.array(lengths, np.int64)
    return _simulated(stream, sizes, longest, reread=min(window, len(stream.pieces)))


def bucket_by_length(stream: Stream, *, budget: int, ends: tuple[int, ...]) -> Simulated:
    """Each example waits in the bucket of its length, until `budget // length` rows are there.

    This is tf.data's `bucket_by_sequence_length`, with `pad_to_bucket_boundary`; at the end, what
    waits comes as it is. To go on, everything since the oldest waiting example is read again.

    Args:
        stream: the examples.
        budget: positions in a batch.
        ends: the longest length of each bucket, ascending.
    """
    bucket_of = np.searchsorted(ends, np.arange(ends[-1] + 1)).astype(np.uint8)
    bucket = bucket_of[stream.pieces]
    reread = 0
    rows, lengths = [], []
    for index, end in enumerate(ends):
        where, most = np.flatnonzero(bucket == index), max(budget // end, 1)
        rows.append(dealt(len(where), most))
        lengths.append(np.full(len(rows[-1]), end, np.int64))
        reread = max(reread, _longest_wait(where, most, len(bucket)))
    return _simulated(stream, np.concatenate(rows), np.concatenate(lengths), reread=reread)


def _longest_wait(where: np.ndarray, rows: int, read: int) -> int:
    """How many examples have been read since the oldest that waits, at most.

    Args:
        where: the examples of one bucket, as places in the stream.
        rows: that make a batch.
        read: examples in the stream.
    """
    last = where[rows - 1 :: rows]
    waits = last - where[::rows][: len(last)]
    left = read - where[len(last) * rows] if len(where) % rows else 0
    return max(int(waits.max(initial=0)), int(left))


def _simulated(stream: Stream, rows, lengths, *, reread: int) -> Simulated:
    return Simulated(
        rows=rows,
        lengths=lengths.astype(np.int64),
        tokens=total(stream.pieces),
        squares=sum_of_squares(stream.pieces),
        cut=stream.cut,
        reread=reread,
    )


def _longest(lengths: np.ndarray, rows: int) -> np.ndarray:
    """The longest of each `rows` lengths; the last group may be smaller."""
    whole = len(lengths) // rows * rows
    longest = lengths[:whole].reshape(-1, rows).max(axis=1)
    return longest if whole == len(lengths) else np.append(longest, lengths[whole:].max())


def _sorted(lengths: np.ndarray, window: int, *, whole: bool = False):
    """Windows in order, each sorted; many at a time, flattened, unless they are wanted `whole`."""
    end = len(lengths) // window * window
    many = max((1 << 20) // window, 1) * window
    for start in range(0, end, many):
        windows = np.sort(lengths[start : min(start + many, end)].reshape(-1, window), axis=1)
        yield from windows if whole else [windows.ravel()]
    if end < len(lengths):
        yield np.sort(lengths[end:])
