"""Streams: a stream is one corpus under given options, as endless rows of each bucket.

It has one or two passes. If options changed, the first pass has the rest of the epochs in progress,
once. The last one has whole epochs for ever. A pass takes the rows of its windows, one window after
another, in a seeded order.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from pipeline.errors import InvalidValue
from pipeline.planning.cache import WindowCache
from pipeline.planning.gaps import check_fill
from pipeline.planning.layout import FlatRows, sum_rows
from pipeline.planning.lengths import NO_EXAMPLES, Lengths, digest
from pipeline.planning.options import Options
from pipeline.planning.order import (
    Purpose,
    deal,
    permutation,
    random_bits,
    random_key,
    sort_by_group,
)
from pipeline.planning.pieces import (
    Pieces,
    as_spans,
    file_runs,
    merge_spans,
)
from pipeline.planning.windows import PackedWindows, Windows

# The orders of windows that a pass keeps: readers are in up to two epochs at a time.
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
        self.windows = self._make_windows(options, pieces, used, files, key)
        self.counts = self.windows.rows.sum(axis=1)
        # The epoch, example and first position of each span; None: pieces are of whole examples.
        self._spans = None if spans is None else [_compact(column) for column in spans[:, :3].T]
        self._cache, self._lengths, self._first = stream.cache, stream.lengths, stream.first
        self._options, self._bits = options, functools.partial(random_bits, key)
        per_batch = [None if stream.by_row else bucket.rows for bucket in options.buckets]
        self._rows_per_batch: list[int | None] = per_batch
        self._orders: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def _make_windows(
        self,
        options: Options,
        pieces: Pieces,
        used: Sequence[int] | None,
        files: tuple[np.ndarray, np.ndarray] | None,
        key: int,
    ) -> PackedWindows:
        """The windows; arguments are as for `Windows` and `Options.packer`."""
        return Windows(
            pieces,
            options.packer(pieces.table, used=used),
            options.buckets,
            key=key if options.shuffle else None,
            window=options.window,
            files=files,
        )

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


class Stream:
    """The rows of one corpus, by random access.

    A plan of several streams takes single rows: their `options` have buckets of one row. Otherwise
    it takes full batches, and rows that fill none move to a longer bucket.

    Attributes:
        lengths: the lengths of the corpus.
        name: the name of the corpus.
        by_row: whether the plan takes any number of rows at a time, not batches.
        first: the number of its first example in the plan.
        number: how many earlier streams the corpus has had.
        passes: the rest of epochs in progress, if there is one, then whole epochs.
        open_epochs: the earlier epochs of which positions remained.
        lost: spans of open epochs that are in no row: of examples left out, or overlong.
    """

    def __init__(
        self,
        lengths: Lengths,
        options: Options,
        cache: WindowCache,
        *,
        name: str,
        by_row: bool,
        first: int = 0,
        number: int = 0,
        epoch: int = 0,
        rest: np.ndarray | None = None,
        make_rows: type[Rows] = Rows,
    ):
        """Whole epochs begin with number `epoch`; `rest` has spans of open epochs."""
        self._make_rows = make_rows
        self.lengths, self.options, self.cache = lengths, options, cache
        self.name, self.by_row, self.first, self.number = name, by_row, first, number
        self.open_epochs: tuple[int, ...] = ()
        self.lost = np.zeros((0, 3 + len(options.names)), np.int64)
        none = np.zeros(len(options.buckets), np.int64)
        whole = self._make_rows(self, self._cut_whole(), epoch=epoch, start=none)
        self.passes: tuple[Rows, ...] = (whole,)
        if rest is not None and len(rest) and (resumed := self._plan_rest(rest)):
            whole.start = resumed.counts
            self.passes = (resumed, whole)

    @property
    def whole(self) -> Rows:
        """The pass of whole epochs."""
        return self.passes[-1]

    def _cut_whole(self) -> Pieces:
        """The pieces of whole examples, checked."""
        lengths, longest = self.lengths, self.options.buckets[-1]
        if lengths.num_sides != len(longest.lengths) or lengths.names not in ((), longest.names):
            named = f" of {', '.join(lengths.names)}" if lengths.names else ""
            raise InvalidValue(
                f"lengths has shape {lengths.array.shape}{named}, and the longest bucket is "
                f"{longest!r}; buckets have one length for each side, in the same order: "
                "Bucket(rows=…, length=(inputs, targets)) for pairs, and by name for others"
            )
        if self.options.cuts:
            check_fill(groups=lengths.has_groups)
        pieces = self.options.cut(lengths)
        if len(pieces.table) == 1:
            silent = f" ({lengths.num_silent:,} have no loss)" if lengths.num_silent else ""
            excluded = lengths.num_excluded - lengths.num_silent
            silent += f" (exclude leaves out {excluded:,})" if excluded else ""
            raise InvalidValue(
                f"none of the examples has a position to train on{silent}; a causal "
                "example needs at least two tokens, and overflow='drop' leaves out those longer "
                f"than the longest bucket ({longest.length})"
            )
        return pieces

    def _plan_rest(self, spans: np.ndarray) -> Rows | None:
        """The pass of the rest of open epochs; None without a position."""
        self.open_epochs = tuple(np.unique(spans[:, 0]).tolist())
        if self.lengths.num_excluded:
            stays = self.lengths.stays[spans[:, 1]]
            spans, self.lost = spans[stays], spans[~stays]
        pieces, used = self._cut_rest(spans[:, 1], spans[:, 3:].astype(np.uint32))
        sizes = pieces.positions_per_example()
        lost = spans.copy()
        lost[:, 3:] -= sizes
        if not self.options.vectors:  # the last positions are lost
            lost[:, 2] += sizes[:, 0]
        self.lost = np.concatenate([self.lost, lost[lost[:, 3:].any(axis=1)]])
        if len(pieces.table) == 1:
            return None
        none, epoch = np.zeros(len(self.options.buckets), np.int64), int(spans[:, 0].min())
        return self._make_rows(self, pieces, epoch=epoch, start=none, used=used, spans=spans)

    def _cut_rest(
        self, examples: np.ndarray, sizes: np.ndarray
    ) -> tuple[Pieces, Sequence[int] | None]:
        """The pieces of spans of these sizes, and the buckets of their rows, as for `packer`."""
        lengths = self.lengths.of_parts(examples, sizes)
        pieces = self.options.cut(lengths)
        if not self.by_row:
            return pieces, None
        # Only buckets that have rows in whole epochs, which follow. A span that they do not hold is
        # split; an example of several sides or a group cannot be split and is dropped.
        used = np.flatnonzero(self.whole.counts).tolist()
        buckets = [self.options.buckets[number] for number in used]
        sizes, vectors = pieces.positions_per_example(), self.options.vectors
        holds = np.any([(sizes <= bucket.lengths).all(axis=1) for bucket in buckets], axis=0)
        sizes[(lengths.indivisible | vectors) & ~holds] = 0
        room = tuple(map(max, zip(*(bucket.lengths for bucket in buckets), strict=True)))
        rest = self.lengths.of_parts(examples, sizes)
        return self.options.cut(rest, room, "truncate" if vectors else "split"), used

    @property
    def identity(self) -> dict[str, Any]:
        """Everything of the corpus on which its rows depend, as JSON."""
        several = any(len(source.windows) > 1 for source in self.passes)
        window = self.options.window if several else None
        identity = {"lengths": self.lengths.digest, "window": window}
        by_file = any(source.windows.files is not None for source in self.passes)
        if by_file and self.lengths.files is not None:
            identity["files"] = digest(self.lengths.files)
        return identity

    @property
    def max_position(self) -> int:
        """The largest position in whole epochs, from 0."""
        return self.whole.windows.pieces.max_position

    # ---- rows

    def take(self, shape: int, first: int, count: int) -> Iterator[FlatRows]:
        """Rows `first` to `first + count` of a shape, divided by window; see `Rows.take`."""
        while count:
            source = next(
                source for source in reversed(self.passes) if first >= source.start[shape]
            )
            yield (rows := source.take(shape, first, count))
            first, count = first + len(rows), count - len(rows)

    def rest(self, rows: np.ndarray) -> tuple[np.ndarray, int]:
        """What remains after some rows: spans of epochs in progress, and the next whole epoch."""
        spans = itertools.chain.from_iterable(source.rest(rows) for source in self.passes)
        _, begun = self.whole.count_times(rows)
        return merge_spans(np.concatenate([self.lost[:0], *spans])), self.whole.epoch + begun

    def after(
        self, rows: np.ndarray, lengths: Lengths, options: Options, make_rows: type[Rows]
    ) -> "Stream":
        """The stream after some rows, with the rest of open epochs planned again.

        New examples at the end of `lengths` join the latest epoch in progress.
        """
        spans, epoch = self.rest(rows)
        before = len(self.lengths)
        if len(spans) and len(lengths) > before:
            sizes = lengths.positions_from(before)
            joining = as_spans(epoch - 1, np.arange(before, len(lengths)), 0, sizes)
            spans = np.concatenate([spans, joining[sizes.any(axis=1)]])
        return Stream(
            lengths,
            options,
            self.cache,
            name=self.name,
            by_row=self.by_row,
            first=self.first,
            number=self.number + 1,
            epoch=epoch,
            rest=spans,
            make_rows=make_rows,
        )

    def files_ahead(self, rows: np.ndarray, mine: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The files of each window after some rows, and of each window of the next epoch.

        `mine` is as for `Rows.files_from`.
        """
        assert self.lengths.files is not None, "the corpus has files"
        every = np.arange(len(self.lengths.files))
        known = itertools.chain.from_iterable(
            source.files_from(rows, mine) for source in self.passes
        )
        return [every if files is None else files for files in known]


def _compact(values: np.ndarray) -> np.ndarray:
    """`values` in the smallest dtype; only one of them if all are the same."""
    low, high = values.min(), values.max()
    return values[:1].copy() if low == high else values.astype(np.min_scalar_type(high))


def expected_positions(streams: Sequence[Stream], epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """The positions of each example in the batches of an epoch, and the pieces that it has lost.

    int64 [examples, sides], and [pieces, 2 + sides]: example, first position, and sizes. Positions
    lost to overflow and examples left out do not count. New examples count from the epoch that they
    join. `streams` are those of one corpus in the stages of a plan.
    """
    expected, first = streams[0].lost[:0, 3:], -1
    if begun := [n for n, stream in enumerate(streams) if epoch >= stream.whole.epoch]:
        first = begun[-1]
        expected = streams[first].whole.windows.pieces.positions_per_example()
    for stream in streams[first + 1 :]:
        before = len(expected)
        expected = np.pad(expected, ((0, len(stream.lengths) - before), (0, 0)))
        if epoch == stream.whole.epoch - 1 and epoch in stream.open_epochs:
            expected[before:] = stream.lengths.positions_from(before)
        lost = stream.lost[stream.lost[:, 0] == epoch]
        np.subtract.at(expected, lost[:, 1], lost[:, 3:])
    every = np.concatenate([stream.lost for stream in streams])
    return expected, every[every[:, 0] == epoch, 1:]
