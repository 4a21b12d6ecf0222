"""Streams: a stream is one corpus under given options, as endless rows of each bucket.

A stream has one or two legs. If options changed, the first leg takes the rest of the epochs in
progress, once. The last leg takes whole epochs for ever. A leg takes the rows of a pass, and a pass
takes the rows of a layout window by window, in a seeded order.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from pipeline.errors import InvalidValue
from pipeline.planning.cache import WindowCache
from pipeline.planning.gaps import check_fill
from pipeline.planning.layout import Layout, WindowRows, lay_out
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

# The orders of windows that a pass keeps: readers are in up to two epochs at a time.
ORDERS = 4


@dataclasses.dataclass
class Rows:
    """Consecutive rows of a stream, of one bucket and in one window."""

    of_pass: "Pass"
    epoch: int
    in_window: WindowRows
    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin

    @property
    def costs(self) -> np.ndarray:
        """The cost of attention in each row: int64 [rows]."""
        return self.in_window.costs[self.begin : self.end]

    def spans(self, order: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The number of segments of each row; and their spans, with example numbers of the plan.

        `order` has numbers of rows, from 0; None takes all.
        """
        times, pieces, parts = self.in_window.take(self.begin, self.end, order)
        spans = self.of_pass.as_spans(self.epoch, pieces, parts)
        spans[:, 1] += self.of_pass.first
        return times, spans


class Pass:
    """The rows of some pieces, window by window: once, or again and again in new orders.

    Attributes:
        layout: the windows and their rows.
        first: the number in the plan of the first example of the corpus.
        repeats: whether whole epochs follow each other for ever.
        rows: int64 [buckets], the rows of one repetition.
    """

    def __init__(
        self,
        stream: "Stream",
        pieces: Pieces,
        number: int,
        used: Sequence[int] | None = None,
        spans: np.ndarray | None = None,
    ):
        """`number` counts earlier streams of the corpus, and `used` is as for `pack`.

        The pieces are cut from `spans`, as for `merge_spans`; None: from whole examples.
        """
        options, files, runs = stream.options, stream.lengths.files, None
        self.repeats = spans is None
        key = random_key(options.seed, stream.name, number, self.repeats)
        if files is not None and spans is not None:
            runs, files = file_runs(spans, files)
        self.layout = layout = Layout(
            pieces,
            options.packer(pieces.table, used=used),
            options.buckets,
            key=key if options.shuffle else None,
            window=options.window,
            files=files,
        )
        self.first = stream.first
        # The epoch, example and first position of each span; None: pieces are of whole examples.
        self._spans = None if spans is None else [_compact(column) for column in spans[:, :3].T]
        self._shuffle, self._by_row, self._cache = options.shuffle, stream.mixed, stream.cache
        self._rows_per_batch = [bucket.rows for bucket in options.buckets]
        self._bits = functools.partial(random_bits, key)
        self.rows = layout.rows.sum(axis=1)
        self._count = functools.partial(stream.lengths.count_by, options.by, costs=options.costs)
        self._files = layout.files
        if layout.files is not None and runs is not None:
            self._files = [np.unique(runs[of_window]) for of_window in layout.files]
        self._orders: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    @functools.cached_property
    def size(self) -> int:
        """What the rows of one repetition count in the unit of weights; at least 1."""
        pieces = self.layout.pieces
        examples = int(self.layout.counts[1:].sum()) - pieces.num_later
        return max(self._count(positions=pieces.positions.tolist(), examples=examples), 1)

    @functools.cached_property
    def needs(self) -> int:
        """The cache capacity, in pieces, with which no window is made twice in an epoch."""
        _, edges = self.order(0)
        edges = edges[edges[:, -1] > 0]
        share = edges / edges[:, -1:]
        begins, ends = share[:, :-1].min(axis=0), share[:, 1:].max(axis=0)
        begun = np.searchsorted(np.sort(begins), ends, side="left")
        live = int((begun - np.searchsorted(np.sort(ends), ends, side="left")).max(initial=1))
        # The windows that batches take rows from at a time, the next and the last.
        return (live + 2) * self.layout.most_pieces

    def order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The windows in their order in an epoch, and the rows of each bucket before each one.

        int64 [windows] and [buckets, windows + 1], which ends with all rows.
        """
        epoch = epoch if self._shuffle else 0
        if (found := self._orders.get(epoch)) is None:
            windows = np.arange(len(self.layout))
            if self._shuffle:
                windows = permutation(self._bits(Purpose.ORDER, len(windows), epoch=epoch))
            edges = np.pad(np.cumsum(self.layout.rows[:, windows], axis=1), ((0, 0), (1, 0)))
            found = self._orders[epoch] = windows, edges
            for oldest in list(self._orders)[:-ORDERS]:
                self._orders.pop(oldest, None)
        return found

    def take(self, epoch: int, bucket: int, first: int, count: int) -> Rows:
        """Up to `count` rows from row `first` of an epoch on: those that are in one window.

        Once half of a window is taken, the next one is filled in the background.
        """
        windows, edges = self.order(epoch)
        place = int(edges[bucket].searchsorted(first, side="right")) - 1
        begin, end = edges[bucket, place : place + 2].tolist()
        last = min(first + count, end)
        filled = self._window(self._cache.get, epoch, place)[bucket]
        if 2 * (last - begin) > end - begin:
            more, following = divmod(place + 1, len(windows))
            if not more or self.repeats:
                self._window(self._cache.prepare, epoch + more, following)
        return Rows(self, epoch, filled, first - begin, last - begin)

    def _window(self, get: Callable, epoch: int, place: int) -> Any:
        """The rows of each bucket in the window at `place` in an epoch's order, from the cache."""
        epoch = epoch if self._shuffle else 0
        # The key has no pass, as that refers to the cache: so an unused plan is freed at once.
        key = self.layout, epoch, place
        return get(key, self.layout.most_pieces, self._fill, epoch, place)

    def _fill(self, epoch: int, place: int) -> list[WindowRows]:
        """The value that `_window` caches."""
        windows, edges = self.order(epoch)
        window, layout = int(windows[place]), self.layout
        draw = functools.partial(self._bits, epoch=epoch, window=window)
        keys = layout.keys(window)
        bits = draw(Purpose.EXAMPLES, len(keys)) if self._shuffle else None
        pieces = sort_by_group(keys, bits)
        pieces = pieces[np.count_nonzero(keys == 0) :]  # pieces of key 0 are in no batch
        if len(layout) > 1:
            pieces = layout.numbers(window)[pieces]
        if len(layout.pieces) < 1 << 32:
            pieces = pieces.astype(np.uint32)

        def order_rows(bucket: int, segments: np.ndarray, first_pieces: np.ndarray) -> np.ndarray:
            if not self._shuffle:
                return sort_by_group(first_pieces, None)
            rows = self._rows_per_batch[bucket]
            missing = -int(edges[bucket, place]) % rows  # in a batch that has begun
            of_bucket = functools.partial(draw, bucket=bucket)
            return deal(segments, None if self._by_row else rows, of_bucket, missing)

        return lay_out(layout.packed(window), pieces, layout.pieces, order_rows)

    def rest(self, epoch: int, rows_before: np.ndarray) -> np.ndarray:
        """The spans that remain of an epoch after some rows of each bucket.

        Fills only windows of which some rows, but not all, were taken.
        """
        windows, edges = self.order(epoch)
        begins, ends = edges[:, :-1], edges[:, 1:]
        has_rows = ends > begins
        untouched = np.all(~has_rows | (rows_before[:, None] <= begins), axis=0)
        over = (~has_rows | (rows_before[:, None] >= ends)).all(axis=0)
        found, spans = [NO_EXAMPLES], list[np.ndarray]()
        for place in np.flatnonzero(~over).tolist():
            if untouched[place]:
                found.append(self.layout.pieces_in(int(windows[place])))
                continue
            for bucket, filled in enumerate(self._window(self._cache.get, epoch, place)):
                rows = len(filled.costs)
                first = min(max(int(rows_before[bucket] - begins[bucket, place]), 0), rows)
                _, pieces, parts = filled.take(first, rows)
                if parts is not None:
                    is_part = parts[1] != self.layout.pieces.locate(pieces)[2][:, 0]
                    spans.append(self.as_spans(epoch, pieces[is_part], parts[:, is_part]))
                    pieces = pieces[~is_part]
                found.append(pieces)
        whole = self.as_spans(epoch, np.sort(np.concatenate(found)))
        return np.concatenate([whole, *spans])

    def as_spans(
        self, epoch: int, pieces: np.ndarray, parts: np.ndarray | None = None
    ) -> np.ndarray:
        """The spans of pieces, or of `parts` of them, as for `WindowRows`."""
        numbers, starts, sizes = self.layout.pieces.locate(pieces)
        if parts is not None:
            starts, sizes = starts + parts[0], parts[1, :, None]
        if self._spans is None:
            return as_spans(epoch, numbers, starts, sizes)
        epochs, examples, first = (column[numbers * (len(column) > 1)] for column in self._spans)
        return as_spans(epochs, examples, first + starts, sizes)

    def files_from(self, epoch: int, rows: np.ndarray) -> list[np.ndarray | None]:
        """The files of each window of an epoch, from the first with later rows on; None for all."""
        windows, edges = self.order(epoch)
        place = int(np.count_nonzero((edges[:, 1:] <= rows[:, None]).all(axis=0)))
        files = self._files
        return [None if files is None else files[window] for window in windows[place:].tolist()]


@dataclasses.dataclass(frozen=True, eq=False)
class Leg:
    """The rows of a pass as rows of a stream: once, or again and again if the pass repeats."""

    planned: Pass
    epoch: int  # of its first row
    start: np.ndarray  # int64 [buckets], the rows of the stream before it


class Stream:
    """The rows of one corpus, by random access.

    A plan of several streams takes single rows: their `options` have buckets of one row. Otherwise
    it takes full batches, and rows that fill none move to a longer bucket.

    Attributes:
        lengths: the lengths of the corpus.
        name: the name of the corpus.
        mixed: whether the plan has several streams, or one with a weight; they have names.
        first: the number of its first example in the plan.
        legs: the rest of epochs in progress, if there is one, then whole epochs.
        whole: the pass of whole epochs.
        epoch: the number of the first whole epoch.
        open_epochs: the earlier epochs of which positions remained.
        lost: spans of open epochs that are in no row: of examples left out, or overlong.
    """

    def __init__(
        self,
        corpus: Lengths,
        options: Options,
        cache: WindowCache,
        *,
        name: str = "",
        first: int = 0,
        number: int = 0,
        epoch: int = 0,
        rest: np.ndarray | None = None,
    ):
        """`number` counts earlier streams of the corpus; `rest` has spans of open epochs."""
        self.lengths, self.options, self.cache = corpus, options, cache
        self.name, self.mixed, self.first = name, bool(name), first
        self._number, self.epoch = number, epoch
        self.open_epochs: tuple[int, ...] = ()
        self.lost = np.zeros((0, 3 + len(options.buckets[-1].lengths)), np.int64)
        self.whole = self._plan_whole()
        self.legs: tuple[Leg, ...] = ()
        start = np.zeros(len(options.buckets), np.int64)
        resumed = None if rest is None or not len(rest) else self._plan_rest(rest)
        if resumed is not None:
            self.legs, start = (Leg(*resumed, start),), resumed[0].rows
        self.legs = (*self.legs, Leg(self.whole, epoch, start))

    def _plan_whole(self) -> Pass:
        """The pass of whole epochs."""
        lengths, longest = self.lengths, self.options.buckets[-1]
        if lengths.num_sides != len(longest.lengths) or lengths.names not in ((), longest.names):
            named = f" of {', '.join(lengths.names)}" if lengths.names else ""
            raise InvalidValue(
                f"lengths has shape {lengths.array.shape}{named}, and the longest bucket is "
                f"{longest!r}; buckets have one length for each side, in the same order: "
                "Bucket(rows=…, length=(inputs, targets)) for pairs, and by name for others"
            )
        if self.options.packing == "fill":
            check_fill(groups=lengths.trees is not None)
        pieces = self.options.cut(lengths)
        if len(pieces.table) == 1:
            silent = f" ({lengths.num_silent:,} have no loss)" if lengths.num_silent else ""
            raise InvalidValue(
                f"none of the examples has a position to train on{silent}; a causal "
                "example needs at least two tokens, and overflow='drop' leaves out those longer "
                f"than the longest bucket ({longest.length})"
            )
        return Pass(self, pieces, self._number)

    def _plan_rest(self, spans: np.ndarray) -> tuple[Pass, int] | None:
        """The pass of the rest of open epochs, and the first of them; None without a position."""
        self.open_epochs = tuple(np.unique(spans[:, 0]).tolist())
        if self.lengths.num_excluded:
            stays = self.lengths.stays[spans[:, 1]]
            spans, self.lost = spans[stays], spans[~stays]
        trees = self.lengths.trees
        trees = None if trees is None else trees[spans[:, 1]]
        pieces, used = self._cut_rest(spans[:, 3:].astype(np.uint32), trees)
        sizes = pieces.positions_per_example()
        lost = spans.copy()
        lost[:, 3:] -= sizes
        if not self.options.vectors:  # the last positions are lost
            lost[:, 2] += sizes[:, 0]
        self.lost = np.concatenate([self.lost, lost[lost[:, 3:].any(axis=1)]])
        if len(pieces.table) == 1:
            return None
        return Pass(self, pieces, self._number, used, spans), int(spans[:, 0].min())

    def _cut_rest(
        self, lengths: np.ndarray, trees: np.ndarray | None
    ) -> tuple[Pieces, Sequence[int] | None]:
        """The pieces of spans of these lengths, and the buckets of their rows, as for `pack`."""
        pieces = self.options.cut(self._as_lengths(lengths, trees))
        if not self.mixed:
            return pieces, None
        # Only buckets that have rows in whole epochs, which follow. A span that they do not hold is
        # split; an example of several sides or a group cannot be split and is dropped.
        used = np.flatnonzero(self.whole.rows).tolist()
        buckets = [self.options.buckets[number] for number in used]
        sizes, vectors = pieces.positions_per_example(), self.options.vectors
        is_whole = np.full(len(sizes), vectors) if trees is None else trees[:, 1] > 0
        holds = np.any([(sizes <= bucket.lengths).all(axis=1) for bucket in buckets], axis=0)
        sizes[is_whole & ~holds] = 0
        room = tuple(map(max, zip(*(bucket.lengths for bucket in buckets), strict=True)))
        rest = self._as_lengths(sizes, trees)
        return self.options.cut(rest, room, "truncate" if vectors else "split"), used

    def _as_lengths(self, sizes: np.ndarray, trees: np.ndarray | None) -> Lengths:
        """Sizes [n, sides] of spans as `Lengths`."""
        array = sizes if self.options.vectors else sizes[:, 0]
        return Lengths(types.SimpleNamespace(lengths=array, trees=trees))

    @property
    def identity(self) -> dict[str, Any]:
        """Everything of the corpus on which its rows depend, as JSON."""
        several = any(len(leg.planned.layout) > 1 for leg in self.legs)
        window = self.options.window if several else None
        found = {"lengths": self.lengths.digest, "window": window}
        if several and self.lengths.files is not None:
            found["files"] = digest(self.lengths.files)
        return found

    @property
    def max_position(self) -> int:
        """The largest position in whole epochs, from 0."""
        return self.whole.layout.pieces.max_position

    # ---- rows

    def take(self, bucket: int, first: int, count: int) -> Iterator[Rows]:
        """Rows `first` to `first + count` of a bucket, divided by window."""
        while count:
            leg = next(leg for leg in reversed(self.legs) if first >= leg.start[bucket])
            epochs, row = 0, first - int(leg.start[bucket])
            if leg.planned.repeats:
                epochs, row = divmod(row, int(leg.planned.rows[bucket]))
            rows = leg.planned.take(leg.epoch + epochs, bucket, row, count)
            yield rows
            first, count = first + len(rows), count - len(rows)

    def rest(self, rows: np.ndarray) -> tuple[np.ndarray, int]:
        """What remains after some rows: spans of epochs in progress, and the next whole epoch."""
        *resumed, whole = self.legs
        spans = [self.lost[:0]]
        for leg in resumed:
            used = np.minimum(rows, leg.planned.rows)
            if (used < leg.planned.rows).any():
                spans.append(leg.planned.rest(leg.epoch, used))
        used = np.maximum(rows - whole.start, 0)
        over, begun = self.count_times(used)
        for times in range(over, begun):
            of_epoch = np.clip(used - times * self.whole.rows, 0, self.whole.rows)
            spans.append(self.whole.rest(whole.epoch + times, of_epoch))
        return merge_spans(np.concatenate(spans)), whole.epoch + begun

    def count_times(self, rows: np.ndarray) -> tuple[int, int]:
        """The number of whole epochs that are over after some rows of them, and that have begun."""
        used = self.whole.rows > 0
        rows, each = rows[used], self.whole.rows[used]
        return int((rows // each).min()), int((-(-rows // each)).max())

    def after(self, rows: np.ndarray, corpus: Lengths, options: Options) -> "Stream":
        """The stream after some rows, with the rest of open epochs planned again.

        New examples at the end of `corpus` join the latest epoch in progress.
        """
        spans, epoch = self.rest(rows)
        before = len(self.lengths)
        if len(spans) and len(corpus) > before:
            sizes = corpus.positions_from(before)
            joining = as_spans(epoch - 1, np.arange(before, len(corpus)), 0, sizes)
            spans = np.concatenate([spans, joining[sizes.any(axis=1)]])
        return Stream(
            corpus,
            options,
            self.cache,
            name=self.name,
            first=self.first,
            number=self._number + 1,
            epoch=epoch,
            rest=spans,
        )

    def files_ahead(self, rows: np.ndarray) -> list[np.ndarray]:
        """The files of each window after some rows, and of each window of the next epoch."""
        assert self.lengths.files is not None, "the corpus has files"
        found = list[np.ndarray | None]()
        *resumed, whole = self.legs
        for leg in resumed:
            found += leg.planned.files_from(leg.epoch, rows)
        used = np.maximum(rows - whole.start, 0)
        over, _ = self.count_times(used)
        found += self.whole.files_from(whole.epoch + over, used - over * self.whole.rows)
        found += self.whole.files_from(whole.epoch + over + 1, 0 * used)
        every = np.arange(len(self.lengths.files))
        return [every if files is None else files for files in found]


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
    if begun := [n for n, each in enumerate(streams) if epoch >= each.epoch]:
        first = begun[-1]
        expected = streams[first].whole.layout.pieces.positions_per_example()
    for stream in streams[first + 1 :]:
        before = len(expected)
        expected = np.pad(expected, ((0, len(stream.lengths) - before), (0, 0)))
        if epoch == stream.epoch - 1 and epoch in stream.open_epochs:
            expected[before:] = stream.lengths.positions_from(before)
        lost = stream.lost[stream.lost[:, 0] == epoch]
        np.subtract.at(expected, lost[:, 1], lost[:, 3:])
    every = np.concatenate([each.lost for each in streams])
    return expected, every[every[:, 0] == epoch, 1:]
