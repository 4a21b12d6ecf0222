"""Flat rows: the segments of rows one after another in arrays, and the number of each row."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable

import numpy as np

from pipeline.planning.patterns import Packed

# An order of rows: of a shape, from the number of segments and the first piece of each.
OrderRows = Callable[[int, np.ndarray, np.ndarray], np.ndarray]


def ranges(first: np.ndarray, sizes: np.ndarray, dtype: type = np.int64) -> np.ndarray:
    """The ranges of `sizes[i]` numbers from `first[i]` on, one after another.

    >>> ranges(np.array([5, 0, 9]), np.array([2, 3, 0])).tolist()
    [5, 6, 0, 1, 2]
    """
    numbers = (first - sizes.cumsum() + sizes).astype(dtype).repeat(sizes)
    numbers += np.arange(len(numbers), dtype=dtype)
    return numbers


def count_before(row: np.ndarray, count: np.ndarray) -> np.ndarray:
    """The sum of the counts before each one in its row: int64, shaped as `count`; rows ascend.

    >>> count_before(np.array([0, 0, 0, 4, 4]), np.array([2, 3, 1, 5, 1])).tolist()
    [0, 2, 5, 0, 5]
    """
    before = count.cumsum(axis=0) - count
    return before - before[row_starts(row)]


def row_starts(row: np.ndarray) -> np.ndarray:
    """The number of the first one in each one's row: int64, shaped as `row`; rows ascend.

    >>> row_starts(np.array([0, 0, 0, 4, 4])).tolist()
    [0, 0, 0, 3, 3]
    """
    in_row = np.bincount(row)
    return (in_row.cumsum() - in_row)[row]


@dataclasses.dataclass(eq=False)
class FlatRows:
    """Rows of one shape.

    Attributes:
        times: int64 [rows], the number of segments of each row.
        segments: [segments, columns], the segments, row by row.
        costs: int64 [rows], the cost of attention in each row.
        places: uint64 [rows], the place of each row in its batch, in order: 0 is the begin, and
            2**32 the end. None: rows are in order.
    """

    times: np.ndarray
    segments: np.ndarray
    costs: np.ndarray
    places: np.ndarray | None = None

    @classmethod
    def join(cls, every: Iterable["FlatRows"]) -> "FlatRows":
        """Rows one after another."""
        first, *others = every
        if not others:
            return first
        every = (first, *others)
        times, segments, costs = (
            np.concatenate([getattr(rows, name) for rows in every])
            for name in ("times", "segments", "costs")
        )
        places = [rows.places for rows in every if rows.places is not None]
        return cls(times, segments, costs, np.concatenate(places) if places else None)

    def __len__(self) -> int:
        return len(self.times)

    @functools.cached_property
    def _starts(self) -> np.ndarray:
        """The first segment of each row: int64 [rows]."""
        return self.times.cumsum() - self.times

    def between(self, begin: int, end: int) -> "FlatRows":
        """The rows from number `begin` to `end`."""
        low, high = (
            self._starts[row] if row < len(self) else len(self.segments) for row in (begin, end)
        )
        places = None if self.places is None else self.places[begin:end]
        times, costs = self.times[begin:end], self.costs[begin:end]
        return FlatRows(times, self.segments[low:high], costs, places)

    def in_order(self, numbers: np.ndarray) -> np.ndarray:
        """The rows `numbers` of a batch, by their places."""
        if self.places is None:
            return numbers
        return numbers[self.places[numbers].argsort(kind="stable")]

    def pick(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The number of segments of each of the rows `numbers`, and their segments."""
        times = self.times[numbers]
        return times, self.segments.take(ranges(self._starts[numbers], times), axis=0)


def sum_rows(values: np.ndarray, times: np.ndarray, by: np.ufunc = np.add) -> np.ndarray:
    """The sum over the segments of each row, or another reduction."""
    return by.reduceat(values, times.cumsum() - times) if len(times) else times


def lay_out(
    packed: Packed,
    pieces: np.ndarray,
    order_rows: OrderRows,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The rows of each bucket from a packed histogram: the times and segments of `FlatRows`.

    `pieces` are the numbers of the pieces, sorted by key, without those of key 0. A segment is the
    number of its piece; and if some are cut to fill rows, also its first position in the piece and
    the number of its positions. `order_rows` is called with the shape, which is the number of a
    bucket, and the number of segments and the first piece of each of its rows, ascending by
    segments; it returns the rows in order.

    >>> from pipeline.planning.options import Bucket, Options
    >>> lengths = np.array([5, 3, 4, 2, 1])
    >>> packer = Options(buckets=(Bucket(1, 8),)).packer(sizes=np.arange(6)[:, None])
    >>> packed = packer.pack(np.bincount(lengths))
    >>> [rows] = lay_out(packed, lengths.argsort(), lambda shape, times, first: first.argsort())
    >>> [column.tolist() for column in rows]  # two rows, of the pieces 0 and 1, and 2, 3 and 4
    [[2, 3], [[0], [1], [2], [3], [4]]]
    """
    patterns = [pattern for of_bucket in packed.patterns for pattern in of_bucket]
    flat = itertools.chain.from_iterable(pattern.pieces for pattern in patterns)
    key, times = np.fromiter(itertools.chain.from_iterable(flat), np.int64).reshape(-1, 2).T
    entries = np.array([len(pattern.pieces) for pattern in patterns], np.int64)
    rows = np.array([pattern.rows for pattern in patterns], np.int64)
    segments = np.array([pattern.segments for pattern in patterns], np.int64)
    # An entry, a key of a pattern, takes `times * rows` pieces from `first` on.
    of_entry = rows.repeat(entries)
    order, used = key.argsort(kind="stable"), times * of_entry
    first = np.empty(len(key), np.int64)
    first[order] = used[order].cumsum() - used[order]
    parts = None
    if len(packed.cuts):
        parts, first = _cut_entries(packed, key, used, first)
        parts = parts.repeat(times, axis=1)
    # The piece of each segment of a pattern, in its first row; the next row takes the next piece.
    piece = first.repeat(times) + ranges(0 * times, times) * of_entry.repeat(times)
    start = segments.cumsum() - segments  # the first segment of each pattern
    ends = np.cumsum([len(of_bucket) for of_bucket in packed.patterns])
    flat_rows = []
    for shape, (low, high) in enumerate(itertools.pairwise([0, *ends.tolist()])):
        pattern = low + segments[low:high].argsort(kind="stable")
        copy = ranges(0 * pattern, rows[pattern])  # the number of each row in its pattern
        pattern = pattern.repeat(rows[pattern])
        at = order_rows(shape, segments[pattern], pieces[piece[start[pattern]] + copy])
        pattern, copy = pattern[at], copy[at]
        number = segments[pattern]
        which = ranges(start[pattern], number)
        taken = piece[which]
        taken += copy.repeat(number)
        columns = pieces[taken, None]
        if parts is not None:
            columns = np.column_stack([columns, *parts[:, which]])
        flat_rows.append((number, columns))
    return flat_rows


def _cut_entries(
    packed: Packed, size: np.ndarray, used: np.ndarray, first: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The begin and the size of each entry, [2, entries], and its first piece, with packing="fill".

    In `size` and `first`, both parts of a piece count as pieces of sizes of their own; see `Cuts`.
    """
    sizes, table = len(packed.counts), packed.cuts
    number = np.bincount(size, used, sizes + 2 * len(table)).astype(np.int64)
    begins, lengths, whole = np.zeros((3, len(number)), np.int64)
    whole[:sizes] = lengths[:sizes] = np.arange(sizes)
    whole[sizes::2] = whole[sizes + 1 :: 2] = table[:, 0]
    begins[sizes + 1 :: 2] = lengths[sizes::2] = table[:, 1]
    lengths[sizes + 1 :: 2] = table[:, 0] - table[:, 1]
    # A piece that is cut counts once, with its first part. Second parts take the same pieces, in
    # the same order.
    counted = number.copy()
    counted[sizes + 1 :: 2] = 0
    order, base = whole.argsort(kind="stable"), np.empty(len(number), np.int64)
    base[order] = counted[order].cumsum() - counted[order]
    base[sizes + 1 :: 2] = base[sizes::2]
    base -= number.cumsum() - number
    return np.stack([begins[size], lengths[size]]), first + base[size]
