"""Streams: a stream is one corpus under given options, as endless rows of each length.

A stream is a list of passes. A pass takes the rows of a layout window by window, in a seeded order:
once for the rest of an epoch after options change, or repeatedly for whole epochs.

Here, `length` is the number of a length, whose bucket and tails take the same rows.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from pipeline.errors import InvalidValue
from pipeline.planning.alignment import Alignment
from pipeline.planning.bucket import Bucket
from pipeline.planning.cache import WindowCache
from pipeline.planning.cascade import pack
from pipeline.planning.gaps import check_fill
from pipeline.planning.layout import Layout, Slots, WindowRows, make_slots
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
from pipeline.planning.patterns import Packed
from pipeline.planning.pieces import (
    Pieces,
    as_spans,
    cut,
    file_runs,
    merge_spans,
    trainable_positions,
)
from pipeline.planning.solution import Solution, load_solution

# The orders of windows that a pass keeps: readers are in up to two epochs at a time.
ORDERS = 4


@dataclasses.dataclass
class Rows:
    """Consecutive rows of a stream, of one length and in one window."""

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
        times, pieces, sizes, begins = self.in_window.take(self.begin, self.end, order)
        starts, positions = 0 if begins is None else begins, self.of_pass.layout.pieces.positions
        spans = self.of_pass.as_spans(self.epoch, pieces, starts, positions(sizes))
        spans[:, 1] += self.of_pass.first
        return times, spans


class Pass:
    """The rows of some pieces, window by window: once, or again and again in new orders.

    Attributes:
        layout: the windows and their rows.
        first_epoch: the epoch of its first rows.
        spans: the spans that the pieces are cut from, as for `merge_spans`; None: whole examples.
        first: the number in the plan of the first of these examples.
        repeats: whether whole epochs follow each other for ever.
        rows: int64 [lengths], the rows of one repetition.
        size: the tokens, examples or positions with loss in these rows, by the unit of weights.
        solution: the patterns of its rows with packing="optimal"; else None.
    """

    def __init__(
        self,
        stream: "Stream",
        pieces: Pieces,
        *names: object,
        first: int = 0,
        buckets: tuple[Bucket, ...] = (),
        spans: np.ndarray | None = None,
        chapter: tuple[np.ndarray, bool] | None = None,
    ):
        """`names` select its random bits; `first` is its first example in the stream.

        `buckets` are those that may have rows, by default all; `chapter` is as for `Layout`.
        """
        options, files, runs = stream.options, stream.lengths.files, None
        key = random_key(options.seed, stream.name, *names)
        pack_window, self.solution = _make_packer(stream, pieces, buckets or options.buckets)
        if files is not None and spans is not None:
            runs, files = file_runs(spans, files)
        self.layout = layout = Layout(
            pieces,
            pack_window,
            options.groups,
            key=key if options.shuffle else None,
            window=options.window,
            files=files,
            chapter=chapter,
        )
        self.spans, self.first = spans, stream.first + first
        self.repeats = spans is None and chapter is None
        self.first_epoch = stream.epoch if spans is None else int(spans[:, 0].min())
        self._shuffle, self._by_row, self._cache = options.shuffle, bool(stream.name), stream.cache
        self._rows_per_batch = [bucket.rows for bucket, *_ in options.groups]
        self._bits = functools.partial(random_bits, key)
        self.rows, self.size = layout.rows.sum(axis=1), int(layout.real.sum())
        if options.by == "examples":
            self.size = int(layout.counts[1:].sum()) - pieces.num_later
        elif options.by == "loss":
            self.size = max(int(self.size * stream.lengths.loss_share), 1)
        self._files = layout.files
        if layout.files is not None and runs is not None:
            self._files = [np.unique(runs[of_window]) for of_window in layout.files]
        self._orders: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    @functools.cached_property
    def needs(self) -> int:
        """The cache capacity, in pieces, with which no window is made twice in an epoch."""
        _, edges = self.order(self.first_epoch)
        edges = edges[edges[:, -1] > 0]
        share = edges / edges[:, -1:]
        begins, ends = share[:, :-1].min(axis=0), share[:, 1:].max(axis=0)
        begun = np.searchsorted(np.sort(begins), ends, side="left")
        live = int((begun - np.searchsorted(np.sort(ends), ends, side="left")).max(initial=1))
        # The windows that batches take rows from at a time, the next and the last; all with slots.
        return 2 * (live + 2) * self.layout.most_pieces

    def order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The windows in their order in an epoch, and the rows of each length before each one.

        int64 [windows] and [lengths, windows + 1], which ends with all rows.
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

    def take(self, epoch: int, length: int, first: int, count: int, last_epoch: float) -> Rows:
        """Up to `count` rows from row `first` of an epoch on: those that are in one window.

        Once half of a window is taken, the next one is filled in the background, unless it is of an
        epoch after `last_epoch`.
        """
        windows, edges = self.order(epoch)
        place = int(edges[length].searchsorted(first, side="right")) - 1
        begin, end = edges[length, place : place + 2].tolist()
        last = min(first + count, end)
        filled = self._window(self._cache.get, epoch, place)[length]
        if 2 * (last - begin) > end - begin:
            more, following = divmod(place + 1, len(windows))
            if not more or (self.repeats and epoch < last_epoch):
                self._window(self._cache.prepare, epoch + more, following)
        return Rows(self, epoch, filled, first - begin, last - begin)

    def _window(self, get: Callable, epoch: int, place: int) -> Any:
        """The rows of each length in the window at `place` in an epoch's order, from the cache."""
        epoch = epoch if self._shuffle else 0
        # The key has no pass, as that refers to the cache: so an unused plan is freed at once.
        key = self.layout, epoch, place
        return get(key, self.layout.most_pieces, self._fill, epoch, place)

    def _fill(self, epoch: int, place: int) -> list[WindowRows]:
        """The value that `_window` caches."""
        windows, edges = self.order(epoch)
        window, layout = int(windows[place]), self.layout
        every: list[Slots] = self._cache.get(
            (layout, window),
            layout.most_pieces,
            lambda: make_slots(layout.packed(window), layout.pieces),
        )
        draw = functools.partial(self._bits, epoch=epoch, window=window)
        sizes = layout.sizes(window)
        bits = draw(Purpose.EXAMPLES, len(sizes)) if self._shuffle else None
        pieces = sort_by_group(sizes, bits)
        pieces = pieces[np.count_nonzero(sizes == 0) :]  # pieces of size 0 are in no batch
        if len(layout) > 1:
            pieces = layout.numbers(window)[pieces]
        if len(layout.pieces) < 1 << 32:
            pieces = pieces.astype(np.uint32)
        filled = []
        for length, (slots, rows) in enumerate(zip(every, self._rows_per_batch, strict=True)):
            if not self._shuffle:
                order = sort_by_group(pieces[slots.first_piece()], None)
            else:
                before = int(edges[length, place] + layout.rows_before[length])
                missing = -before % rows  # in a batch that has begun
                of_length = functools.partial(draw, bucket=length)
                order = deal(slots.segments(), None if self._by_row else rows, of_length, missing)
            filled.append(WindowRows(slots, order, pieces, layout.pieces, flat=self._by_row))
        return filled

    def rest(self, epoch: int, rows_before: np.ndarray) -> np.ndarray:
        """The spans that remain of an epoch after some rows of each length.

        Fills only windows of which some rows, but not all, were taken.
        """
        windows, edges = self.order(epoch)
        begins, ends = edges[:, :-1], edges[:, 1:]
        has_rows = ends > begins
        untouched = np.all(~has_rows | (rows_before[:, None] <= begins), axis=0)
        over = (~has_rows | (rows_before[:, None] >= ends)).all(axis=0)
        found, parts = [NO_EXAMPLES], [np.zeros((3, 0), np.int64)]
        for place in np.flatnonzero(~over).tolist():
            if untouched[place]:
                window = int(windows[place])
                found.append(self.layout.numbers(window)[self.layout.sizes(window) > 0])
                continue
            for length, filled in enumerate(self._window(self._cache.get, epoch, place)):
                rows = len(filled.costs)
                first = min(max(int(rows_before[length] - begins[length, place]), 0), rows)
                _, pieces, sizes, cut_at = filled.take(first, rows)
                if cut_at is not None:
                    is_part = sizes != self.layout.pieces.positions_of(pieces)[:, 0]
                    parts.append(np.stack([pieces, cut_at, sizes])[:, is_part])
                    pieces = pieces[~is_part]
                found.append(pieces)
        pieces = np.sort(np.concatenate(found))
        whole = self.as_spans(epoch, pieces, 0, self.layout.pieces.positions_of(pieces))
        pieces, cut_at, sizes = np.concatenate(parts, axis=1)
        if not len(pieces):
            return whole
        return np.concatenate([whole, self.as_spans(epoch, pieces, cut_at, sizes[:, None])])

    def as_spans(
        self, epoch: int, pieces: np.ndarray, begins: np.ndarray | int, sizes: np.ndarray
    ) -> np.ndarray:
        """The spans of `sizes` positions of pieces, from `begins` on."""
        numbers, starts = self.layout.pieces.locate(pieces)
        starts = starts + begins
        if self.spans is None:
            return as_spans(epoch, numbers, starts, sizes)
        epochs, examples, first = self.spans[numbers, :3].T
        return as_spans(epochs, examples, first + starts, sizes)

    def files_from(self, epoch: int, rows: np.ndarray) -> list[np.ndarray | None]:
        """The files of each window of an epoch, from the first with later rows on; None for all."""
        windows, edges = self.order(epoch)
        place = int(np.count_nonzero((edges[:, 1:] <= rows[:, None]).all(axis=0)))
        files = self._files
        return [None if files is None else files[window] for window in windows[place:].tolist()]


class Stream:
    """The rows of one corpus, pass after pass, by random access.

    A plan of several streams, which have names, takes single rows: their `options` have buckets of
    one row. Otherwise it takes full batches, and rows that fill none move to a longer bucket.

    Attributes:
        name: the name of the corpus; empty if it is the only one.
        first: the number of its first example in the plan.
        whole: the pass of whole epochs.
        passes: first the pass of the rest of epochs in progress, if any; then `whole`.
        epoch: the number of the first whole epoch.
        open_epochs: the earlier epochs of which positions remained.
        lost: spans of open epochs that are in no row: of examples left out, or overlong.
        starts: int64 [passes, lengths], the rows before each pass.
    """

    def __init__(
        self,
        lengths: Lengths,
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
        self.lengths, self.options, self.cache = lengths, options, cache
        self.name, self.first = name, first
        self._number, self.epoch = number, epoch
        longest = options.buckets[-1]
        if lengths.array.ndim != len(longest.lengths):
            raise InvalidValue(
                f"lengths has shape {lengths.array.shape} and the longest bucket has length "
                f"{longest.length}; pairs need buckets with two lengths, Bucket(rows=…, "
                "length=(inputs, targets)), and others with one"
            )
        if options.packing == "fill":
            check_fill(groups=lengths.trees is not None)
        pieces = cut(lengths.array, longest.lengths, options.overflow, lengths.trees)
        if pieces.longest == 0:
            raise InvalidValue(
                "none of the examples has a position to train on; a causal "
                "example needs at least two tokens, and overflow='drop' leaves out those longer "
                f"than the longest bucket ({longest.length})"
            )
        self.whole = Pass(self, pieces, number, True)  # its epochs are whole
        self.max_position = pieces.max_position
        self.open_epochs: tuple[int, ...] = ()
        self.lost = np.zeros((0, 3 + len(longest.lengths)), np.int64)
        self.passes: tuple[Pass, ...] = (self.whole,)
        if rest is not None and len(rest):
            self._plan_rest(rest)
        rows = np.stack([0 * self.whole.rows, *(found.rows for found in self.passes)])
        self.starts = rows.cumsum(axis=0)[:-1]

    def _plan_rest(self, spans: np.ndarray) -> None:
        """Puts a pass of the rest of open epochs first, if the rest has a position."""
        self.open_epochs = tuple(np.unique(spans[:, 0]).tolist())
        if len(self.lengths.excluded):
            stays = ~np.isin(spans[:, 1], self.lengths.excluded)
            spans, self.lost = spans[stays], spans[~stays]
        lengths = spans[:, 3:].astype(np.uint32)
        trees = self.lengths.trees
        trees = None if trees is None else trees[spans[:, 1]]
        pieces, buckets = self._cut_rest(lengths if self.options.pairs else lengths[:, 0], trees)
        sizes = pieces.positions_per_example()
        lost = spans.copy()
        lost[:, 3:] -= sizes
        self.lost = np.concatenate([self.lost, lost[lost[:, 3:].any(axis=1)]])
        if pieces.longest:
            planned = Pass(self, pieces, self._number, False, buckets=buckets, spans=spans)
            self.passes = planned, self.whole

    def _cut_rest(
        self, lengths: np.ndarray, trees: np.ndarray | None
    ) -> tuple[Pieces, tuple[Bucket, ...]]:
        """The pieces of spans of these lengths, and the buckets for their rows."""
        pieces = cut(lengths, self.options.buckets[-1].lengths, self.options.overflow, trees)
        if not self.name:
            return pieces, self.options.buckets
        # Only buckets that have rows in whole epochs, which follow. A span that they do not hold is
        # split; a pair or a group cannot be split and is dropped.
        buckets = tuple(self.options.buckets[n] for n in np.flatnonzero(self.whole.rows))
        sizes = pieces.positions_per_example()
        holds = [(sizes <= bucket.lengths).all(axis=1) for bucket in buckets]
        room = tuple(map(max, zip(*(bucket.lengths for bucket in buckets), strict=True)))
        if self.options.pairs:
            sizes[~np.logical_or.reduce(holds)] = 0
            return cut(sizes, room, "truncate"), buckets
        if trees is not None:
            sizes[(trees[:, 1] > 0) & (sizes[:, 0] > room[0])] = 0
        return cut(sizes[:, 0], room, "split", trees), buckets

    @property
    def identity(self) -> dict[str, Any]:
        """Everything of the corpus on which its rows depend, as JSON."""
        several = any(len(each.layout) > 1 for each in self.passes)
        window = self.options.window if several else None
        found = {"lengths": self.lengths.digest, "window": window}
        if several and self.lengths.files is not None:
            found["files"] = digest(self.lengths.files)
        if self.options.by == "loss":
            found["loss"] = f"{self.lengths.loss_share}"
        if self.solution is not None:
            names = "patterns", "patterns of the rest"
            for name, each in zip(names, reversed(self.passes), strict=False):
                assert each.solution is not None
                found[name] = each.solution.digest
        return found

    @property
    def solution(self) -> Solution | None:
        """The patterns of whole epochs with packing="optimal"; else None."""
        return self.whole.solution

    # ---- rows

    def locate(self, length: int, row: int) -> tuple[Pass, int, int]:
        """The pass of a row of a length, its epoch, and the number of the row in that epoch."""
        number = len(self.passes) - 1
        while number and row < self.starts[number, length]:
            number -= 1
        found, row = self.passes[number], row - int(self.starts[number, length])
        if not found.repeats:
            return found, found.first_epoch, row
        epochs, row = divmod(row, int(found.rows[length]))
        return found, found.first_epoch + epochs, row

    def take(
        self, length: int, first: int, count: int, last_epoch: float = float("inf")
    ) -> Iterator[Rows]:
        """Rows `first` to `first + count` of a length, divided by window."""
        while count:
            found, epoch, row = self.locate(length, first)
            rows = found.take(epoch, length, row, count, last_epoch)
            yield rows
            first, count = first + len(rows), count - len(rows)

    def rest(self, rows: np.ndarray) -> tuple[np.ndarray, int]:
        """The spans that remain of open epochs after some rows, and the first epoch not begun."""
        spans = [self.lost[:0]]
        for found, start in zip(self.passes[:-1], self.starts, strict=False):
            used = np.clip(rows - start, 0, found.rows)
            spans.append(found.rest(found.first_epoch, used))
        whole = self.whole
        rows = np.maximum(rows - self.starts[-1], 0)
        over, begun = self._count_times(rows)
        for number in range(over, begun):
            used = np.clip(rows - number * whole.rows, 0, whole.rows)
            spans.append(whole.rest(self.epoch + number, used))
        return merge_spans(np.concatenate(spans)), self.epoch + begun

    def _count_times(self, rows: np.ndarray) -> tuple[int, int]:
        """The number of whole epochs that are over after some rows, and that have begun."""
        used = self.whole.rows > 0
        rows, each = rows[used], self.whole.rows[used]
        return int((rows // each).min()), int((-(-rows // each)).max())

    def after(self, rows: np.ndarray, lengths: Lengths, options: Options) -> "Stream":
        """The stream after some rows, with the rest of open epochs planned again.

        `lengths` may have new examples at its end; they join the latest epoch in progress.
        """
        spans, epoch = self.rest(rows)
        new = np.arange(len(self.lengths), len(lengths))
        if len(spans) and len(new):
            sizes = trainable_positions(lengths.array[new])
            joining = as_spans(epoch - 1, new, 0, sizes)
            spans = np.concatenate([spans, joining[sizes.any(axis=1)]])
        return Stream(
            lengths,
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
        for part, start in zip(self.passes[:-1], self.starts, strict=False):
            found += part.files_from(part.first_epoch, rows - start)
        rows = np.maximum(rows - self.starts[-1], 0)
        over, _ = self._count_times(rows)
        found += self.whole.files_from(self.epoch + over, rows - over * self.whole.rows)
        found += self.whole.files_from(self.epoch + over + 1, 0 * rows)
        every = np.arange(len(self.lengths.files))
        return [every if files is None else files for files in found]


def _make_packer(
    stream: Stream, pieces: Pieces, buckets: tuple[Bucket, ...]
) -> tuple[Callable[..., Packed], Solution | None]:
    """The function by which a `Layout` packs histograms into some buckets, and its solution.

    With packing="optimal", it uses a solution for all pieces, which is stored beside the corpus.
    """
    options = stream.options
    solution, aligned = None, None
    if options.align > 1:
        aligned = Alignment(pieces.positions(np.arange(pieces.longest + 1)), options.align)
    units = pieces.table if aligned is None else aligned.units
    fill = options.packing == "fill"
    search: Callable[..., Packed] = functools.partial(pack, sizes=units, fill=fill)
    if options.packing == "optimal":
        counts, shapes, share = pieces.count(), buckets, 1.0
        if aligned is not None:
            share = aligned.filled(counts)
            counts, shapes = aligned.fold(counts), aligned.in_units(buckets)
        solution = load_solution(stream.lengths.store, counts, shapes, options.max_segments)
        solution.bound *= share
        search = solution.pack
    if aligned is not None:
        search = functools.partial(aligned.pack, search)
    return functools.partial(_pack_into, search, buckets, options), solution


def _pack_into(
    search: Callable[..., Packed],
    used: tuple[Bucket, ...],
    options: Options,
    counts: np.ndarray,
    *,
    surplus: Sequence[int] | None,
) -> Packed:
    """Packs a histogram into the buckets `used`, which are some or all; see `cascade.pack`."""
    most = 1 if options.packing == "none" else options.max_segments
    if used == options.buckets:
        return search(counts, used, max_segments=most, surplus=surplus)
    packed = search(counts, used, max_segments=most)  # rows are taken one by one: no surplus
    patterns = dict(zip(used, packed.patterns, strict=True))
    every = tuple(patterns.get(bucket, ()) for bucket in options.buckets)
    return dataclasses.replace(packed, patterns=every)


def expected_positions(streams: Sequence[Stream], epoch: int) -> np.ndarray:
    """The positions of each example in the batches of an epoch: int64 [examples, 1 or 2].

    This is the only definition of coverage. Positions lost to overflow and examples left out do not
    count. New examples count from the epoch that they join. `streams` are those of one corpus in
    the stages of a plan.
    """
    first = max([n for n, each in enumerate(streams) if epoch >= each.epoch], default=0)
    expected = streams[first].whole.layout.pieces.positions_per_example()
    for stream in streams[first + 1 :]:
        before = len(expected)
        expected = np.pad(expected, ((0, len(stream.lengths) - before), (0, 0)))
        if epoch == stream.epoch - 1 and epoch in stream.open_epochs:
            expected[before:] = trainable_positions(stream.lengths.array[before:])
        lost = stream.lost[stream.lost[:, 0] == epoch]
        np.subtract.at(expected, lost[:, 1], lost[:, 3:])
    return expected
