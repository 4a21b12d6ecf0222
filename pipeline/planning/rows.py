"""Rows: the rows of windows, one window after another in a seeded order, once or for ever."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pipeline.planning.layout import FlatRows, sum_rows
from pipeline.planning.lengths import NO_EXAMPLES
from pipeline.planning.order import (
    Purpose,
    deal,
    permutation,
    random_bits,
    random_key,
    sort_by_group,
)
from pipeline.planning.pieces import Pieces, as_spans, file_runs
from pipeline.planning.windows import PackedWindows, Windows

if TYPE_CHECKING:
    from pipeline.planning.stream import Stream

# The orders of windows that are kept: readers are in up to two epochs at a time.
ORDERS = 4


class Rows:
    """The rows of some pieces of a stream: once, or again and again in new orders.

    Attributes:
        windows: the windows, which are packed separately.
        counts: int64 [buckets], the rows of one repetition.
        repeats: whether whole epochs follow each other for ever.
        epoch: the epoch of its first row.
        start: int64 [buckets], the rows of the stream before it.
    """

    make_windows: ClassVar[Callable[..., PackedWindows]] = Windows

    def __init__(
        self,
        stream: "Stream",
        pieces: Pieces,
        *,
        epoch: int,
        start: np.ndarray,
        used: Sequence[int] | None = None,
        spans: np.ndarray | None = None,
    ):
        """`used` is as for `Options.packer`.

        The pieces are cut from `spans`, as for `merge_spans`; None: from whole examples.
        """
        options, counts = stream.options, stream.lengths.files
        files = None if counts is None else (np.arange(len(counts)), counts)
        self.epoch, self.start, self.repeats = epoch, start, spans is None
        key = random_key(options.seed, stream.name, stream.number, self.repeats)
        if counts is not None and spans is not None:
            files = file_runs(spans, counts)
        self.windows = self.make_windows(
            pieces, options, key=key if options.shuffle else None, used=used, files=files
        )
        self.counts = self.windows.rows.sum(axis=1)
        # The epoch, example and first position of each span; None: pieces are of whole examples.
        self._spans = None if spans is None else [_compact(column) for column in spans[:, :3].T]
        self._cache, self._lengths, self._first = stream.cache, stream.lengths, stream.first
        self._options, self._bits = options, functools.partial(random_bits, key)
        per_batch = [None if stream.by_row else bucket.rows for bucket in options.buckets]
        self._rows_per_batch: list[int | None] = per_batch
        self._orders: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    @functools.cached_property
    def size(self) -> int:
        """What the rows of one repetition count in the unit of weights; at least 1."""
        pieces = self.windows.pieces
        examples = int(self.windows.counts[1:].sum()) - pieces.num_later
        positions, options = pieces.positions.tolist(), self._options
        return max(self._lengths.count_by(options.by, positions, options.cost, examples), 1)

    @functools.cached_property
    def needs(self) -> int:
        """The cache capacity, in pieces, with which no window is made twice in an epoch."""
        _, edges = self._order(0)
        edges = edges[edges[:, -1] > 0]
        share = edges / edges[:, -1:]
        begins, ends = share[:, :-1].min(axis=0), share[:, 1:].max(axis=0)
        begun = np.searchsorted(np.sort(begins), ends, side="left")
        live = int((begun - np.searchsorted(np.sort(ends), ends, side="left")).max(initial=1))
        # The windows that batches take rows from at a time, the next and the last.
        return (live + 2) * self.windows.most_pieces

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The windows in their order in an epoch, and the rows of each bucket before each one.

        int64 [windows] and [buckets, windows + 1], which ends with all rows.
        """
        epoch = epoch if self._options.shuffle else 0
        if (order := self._orders.get(epoch)) is None:
            windows = np.arange(len(self.windows))
            if self._options.shuffle:
                windows = permutation(self._bits(Purpose.ORDER, len(windows), epoch=epoch))
            edges = np.pad(np.cumsum(self.windows.rows[:, windows], axis=1), ((0, 0), (1, 0)))
            order = self._orders[epoch] = windows, edges
            for oldest in list(self._orders)[:-ORDERS]:
                self._orders.pop(oldest, None)
        return order

    def take(self, shape: int, first: int, count: int) -> FlatRows:
        """Up to `count` rows from row `first` of the stream on: those that are in one window.

        Segments are spans, as for `merge_spans`, with example numbers of the plan. Once half of a
        window is taken, the next one is filled in the background.
        """
        epoch, first = self.epoch, first - int(self.start[shape])
        if self.repeats:
            times, first = divmod(first, int(self.counts[shape]))
            epoch += times
        windows, edges = self._order(epoch)
        place = int(edges[shape].searchsorted(first, side="right")) - 1
        begin, end = edges[shape, place : place + 2].tolist()
        last = min(first + count, end)
        rows = self._window(self._cache.get, epoch, place)[shape].between(
            first - begin, last - begin
        )
        if 2 * (last - begin) > end - begin:
            more, following = divmod(place + 1, len(windows))
            if not more or self.repeats:
                self._window(self._cache.prepare, epoch + more, following)
        spans = self._as_spans(epoch, rows.segments)
        spans[:, 1] += self._first
        return FlatRows(rows.times, spans, rows.costs, rows.places)

    def _window(self, get: Callable, epoch: int, place: int) -> Any:
        """The rows of each bucket in the window at `place` in an epoch's order, from the cache."""
        epoch = epoch if self._options.shuffle else 0
        # The key is not this object, which refers to the cache: so an unused plan is freed at once.
        key = self.windows, epoch, place
        return get(key, self.windows.most_pieces, self._fill, epoch, place)

    def _fill(self, epoch: int, place: int) -> list[FlatRows]:
        """Makes what `_window` caches; segments are those of `lay_out`."""
        order, edges = self._order(epoch)
        window, shuffle = int(order[place]), self._options.shuffle
        draw = functools.partial(self._bits, epoch=epoch, window=window)

        def order_rows(shape: int, segments: np.ndarray, first_pieces: np.ndarray) -> np.ndarray:
            if not shuffle:
                return sort_by_group(first_pieces, None)
            rows = self._rows_per_batch[shape]
            missing = -int(edges[shape, place]) % (rows or 1)  # in a batch that has begun
            return deal(segments, rows, functools.partial(draw, bucket=shape), missing)

        bits = draw(Purpose.EXAMPLES, self.windows.sizes[window]) if shuffle else None
        return [
            FlatRows(times, segments, self._sum_costs(times, segments))
            for times, segments in self.windows.lay_out(window, bits, order_rows)
        ]

    def _sum_costs(self, times: np.ndarray, segments: np.ndarray) -> np.ndarray:
        sizes = segments[:, 2:] if segments.shape[1] > 1 else None
        costs = self.windows.pieces.costs(segments[:, 0], sizes)
        return sum_rows(costs, times)

    def count_times(self, rows: np.ndarray) -> tuple[int, int]:
        """The number of repetitions that are over after some rows of the stream, or have begun."""
        used = self.counts > 0
        rows, counts = np.maximum(rows - self.start, 0)[used], self.counts[used]
        return int((rows // counts).min()), int((-(-rows // counts)).max())

    def rest(self, rows: np.ndarray) -> Iterator[np.ndarray]:
        """The spans that remain of epochs in progress after some rows of the stream, by epoch.

        What is there once is in progress until it is over.
        """
        over, begun = self.count_times(rows) if self.repeats else (0, 1)
        for times in range(over, begun):
            taken = np.clip(rows - self.start - times * self.counts, 0, self.counts)
            yield self._rest(self.epoch + times, taken)

    def _rest(self, epoch: int, rows: np.ndarray) -> np.ndarray:
        """The spans that remain of an epoch after some rows of each bucket.

        Fills only windows of which some rows, but not all, were taken.
        """
        windows, edges = self._order(epoch)
        begins, ends = edges[:, :-1], edges[:, 1:]
        has_rows = ends > begins
        untouched = np.all(~has_rows | (rows[:, None] <= begins), axis=0)
        over = (~has_rows | (rows[:, None] >= ends)).all(axis=0)
        pieces, spans = [NO_EXAMPLES], list[np.ndarray]()
        for place in np.flatnonzero(~over).tolist():
            if untouched[place]:
                pieces.append(self.windows.pieces_in(int(windows[place])))
                continue
            for shape, filled in enumerate(self._window(self._cache.get, epoch, place)):
                first = int(np.clip(rows[shape] - begins[shape, place], 0, len(filled)))
                segments = filled.between(first, len(filled)).segments
                if segments.shape[1] > 1:
                    whole = self.windows.pieces.locate(segments[:, 0])[2][:, 0]
                    is_part = segments[:, 2] != whole
                    spans.append(self._as_spans(epoch, segments[is_part]))
                    segments = segments[~is_part]
                pieces.append(segments[:, 0])
        whole = np.sort(np.concatenate(pieces))
        return np.concatenate([self._as_spans(epoch, whole[:, None]), *spans])

    def _as_spans(self, epoch: int, segments: np.ndarray) -> np.ndarray:
        """The spans of segments that are as for `lay_out`."""
        numbers, starts, sizes = self.windows.pieces.locate(segments[:, 0])
        if segments.shape[1] > 1:
            starts, sizes = starts + segments[:, 1], segments[:, 2:]
        if self._spans is None:
            return as_spans(epoch, numbers, starts, sizes)
        epochs, examples, first = (column[numbers * (len(column) > 1)] for column in self._spans)
        return as_spans(epochs, examples, first + starts, sizes)

    def files_from(self, rows: np.ndarray, mine: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        """The files of each window after some rows of the stream; and of each of the next epoch.

        None stands for all files. `mine` is as for `Plan.files_ahead`, a bool for each row of a
        batch of each bucket.
        """
        over = self.count_times(rows)[0] if self.repeats else 0
        rows = np.maximum(rows - self.start, 0) - over * self.counts
        files = list[np.ndarray | None]()
        for epoch in range(self.epoch + over, self.epoch + over + 1 + self.repeats):
            _, edges = self._order(epoch)
            place = int(np.count_nonzero((edges[:, 1:] <= rows[:, None]).all(axis=0)))
            files += self._files_of(epoch, mine)[place:]
            rows = 0 * rows
        return files

    def _files_of(self, epoch: int, mine: Sequence[np.ndarray]) -> Sequence[np.ndarray | None]:
        """The files of each window of an epoch, as `files_from`."""
        files, (windows, _) = self.windows.files, self._order(epoch)
        return [None if files is None else files[number] for number in windows.tolist()]


def _compact(values: np.ndarray) -> np.ndarray:
    """`values` in the smallest dtype; only one of them if all are the same."""
    low, high = values.min(), values.max()
    return values[:1].copy() if low == high else values.astype(np.min_scalar_type(high))
