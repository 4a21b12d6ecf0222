"""Streams: a stream is one corpus under given options, as endless rows of each length.

A stream is a list of legs. A leg takes the rows of a pass: once for the rest of epochs in progress
after options change, once for each window of a corpus that grows, and for ever for whole epochs,
which are the last leg. A pass takes the rows of a layout window by window, in a seeded order.

Here, `length` is the number of a length, whose bucket and tails take the same rows.
"""

import bisect
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipeline.errors import InvalidValue
from pipeline.fs.fork import Handles
from pipeline.planning import growing
from pipeline.planning.cache import WindowCache
from pipeline.planning.cascade import pack
from pipeline.planning.gaps import check_fill
from pipeline.planning.growing import Place, cut_parts, find_window
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
        times, pieces, parts = self.in_window.take(self.begin, self.end, order)
        spans = self.of_pass.as_spans(self.epoch, pieces, parts)
        spans[:, 1] += self.of_pass.of_plan
        return times, spans


class Pass:
    """The rows of some pieces, window by window: once, or again and again in new orders.

    Attributes:
        layout: the windows and their rows.
        first: the number in the corpus of the first of its examples.
        of_plan: the number in the plan of the first example of the corpus.
        repeats: whether whole epochs follow each other for ever.
        rows: int64 [lengths], the rows of one repetition.
        size: what these rows count in the unit of weights.
    """

    def __init__(
        self,
        stream: "Stream",
        pieces: Pieces,
        *names: object,
        first: int = 0,
        used: Sequence[int] | None = None,
        spans: np.ndarray | None = None,
        rows_before: np.ndarray | None = None,
        ends: bool = True,
    ):
        """`names` select its random bits; `first` is its first example in the corpus.

        `used` is as for `pack`, and `rows_before` and `ends` as for `Layout`. The pieces are cut
        from `spans`, as for `merge_spans`; None: from whole examples.
        """
        options, files, runs = stream.options, stream.lengths.files, None
        key = random_key(options.seed, stream.name, *names)
        pack_window = functools.partial(
            pack,
            buckets=tuple(map(options.in_units, options.buckets)),
            sizes=pieces.table,
            costs=options.costs,
            max_segments=options.most_in_row,
            used=used,
            fill=options.packing == "fill",
        )
        if files is not None and spans is not None:
            runs, files = file_runs(spans, files)
        self.layout = layout = Layout(
            pieces,
            pack_window,
            options.groups,
            key=key if options.shuffle else None,
            window=options.window,
            files=files,
            rows_before=rows_before,
            ends=ends,
        )
        self.first, self.of_plan = first, stream.first
        # The epoch, example and first position of each span; None: pieces are of whole examples.
        self._spans = None if spans is None else [_compact(column) for column in spans[:, :3].T]
        self.repeats = spans is None and rows_before is None
        self._shuffle, self._by_row, self._cache = options.shuffle, stream.mixed, stream.cache
        self._rows_per_batch = [bucket.rows for bucket, *_ in options.groups]
        self._bits = functools.partial(random_bits, key)
        self.rows = layout.rows.sum(axis=1)
        real, examples = layout.real.sum(axis=(0, 1)), int(layout.counts[1:].sum())
        self.size = stream.lengths.count_by(
            options.by, real.tolist(), options.costs, examples - pieces.num_later
        )
        self._files = layout.files
        if layout.files is not None and runs is not None:
            self._files = [np.unique(runs[of_window]) for of_window in layout.files]
        self._orders: dict[int, tuple[np.ndarray, np.ndarray]] = {}

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

    def take(self, epoch: int, length: int, first: int, count: int) -> Rows:
        """Up to `count` rows from row `first` of an epoch on: those that are in one window.

        Once half of a window is taken, the next one is filled in the background.
        """
        windows, edges = self.order(epoch)
        place = int(edges[length].searchsorted(first, side="right")) - 1
        begin, end = edges[length, place : place + 2].tolist()
        last = min(first + count, end)
        filled = self._window(self._cache.get, epoch, place)[length]
        if 2 * (last - begin) > end - begin:
            more, following = divmod(place + 1, len(windows))
            if not more or self.repeats:
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
        draw = functools.partial(self._bits, epoch=epoch, window=window)
        keys = layout.keys(window)
        bits = draw(Purpose.EXAMPLES, len(keys)) if self._shuffle else None
        pieces = sort_by_group(keys, bits)
        pieces = pieces[np.count_nonzero(keys == 0) :]  # pieces of key 0 are in no batch
        if len(layout) > 1:
            pieces = layout.numbers(window)[pieces]
        if len(layout.pieces) < 1 << 32:
            pieces = pieces.astype(np.uint32)

        def order_rows(length: int, segments: np.ndarray, first_pieces: np.ndarray) -> np.ndarray:
            if not self._shuffle:
                return sort_by_group(first_pieces, None)
            rows = self._rows_per_batch[length]
            before = int(edges[length, place] + layout.rows_before[length])
            missing = -before % rows  # in a batch that has begun
            of_length = functools.partial(draw, bucket=length)
            return deal(segments, None if self._by_row else rows, of_length, missing)

        return lay_out(layout.packed(window), pieces, layout.pieces, order_rows)

    def rest(self, epoch: int, rows_before: np.ndarray) -> np.ndarray:
        """The spans that remain of an epoch after some rows of each length.

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
            for length, filled in enumerate(self._window(self._cache.get, epoch, place)):
                rows = len(filled.costs)
                first = min(max(int(rows_before[length] - begins[length, place]), 0), rows)
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
            return as_spans(epoch, numbers + self.first if self.first else numbers, starts, sizes)
        epochs, examples, first = (column[numbers * (len(column) > 1)] for column in self._spans)
        return as_spans(epochs, examples, first + starts, sizes)

    def files_from(self, epoch: int, rows: np.ndarray) -> list[np.ndarray | None]:
        """The files of each window of an epoch, from the first with later rows on; None for all."""
        windows, edges = self.order(epoch)
        place = int(np.count_nonzero((edges[:, 1:] <= rows[:, None]).all(axis=0)))
        files = self._files
        return [None if files is None else files[window] for window in windows[place:].tolist()]


class Chapter(NamedTuple):
    """Some legs of a stream in a row: a run that resumes in one of them plans all of them anew."""

    number: int  # of its first leg
    start: np.ndarray  # int64 [lengths], the rows of the stream before it
    place: Place  # for a corpus that grows, the place before its first window
    has_rest: bool = False  # whether it begins with the rest of epochs in progress


@dataclasses.dataclass(frozen=True, eq=False)
class Leg:
    """A pass as the schedule sees it: rows of a stream that are taken once, or again and again."""

    start: np.ndarray  # int64 [lengths], the rows of the stream before it
    rows: np.ndarray  # int64 [lengths], its rows; if it repeats, those of each time
    size: int  # what these rows count in the unit of weights, at least 1
    epoch: int  # of its first row
    # Before and after the parts of the window of a corpus that grows; else the same place twice.
    places: tuple[Place, Place]
    repeats: bool = False  # for whole epochs; the stream's last leg does
    ends: bool = False  # whether its last batches are short; else rows of the next leg fill them
    planned: Pass | None = None  # None for a window, whose pass is made when it is needed

    @property
    def end(self) -> np.ndarray:
        """The rows of the stream up to its end, at its first time: int64 [lengths]."""
        return self.start + self.rows


class Stream(Handles):
    """The rows of one corpus, leg after leg, by random access.

    A plan of several streams takes single rows: their `options` have buckets of one row. Otherwise
    it takes full batches, and rows that fill none move to a longer bucket. The stream of a corpus
    that grows gains a leg for each window, and waits for its parts.

    Attributes:
        lengths: the lengths of the corpus; of one that grows, none until it is finished.
        name: the name of the corpus.
        mixed: whether the plan has several streams, or one with a weight; they have names.
        first: the number of its first example in the plan.
        parts: the sealed parts of a corpus that grows; None for others.
        begin: the place where the windows of a corpus that grows begin.
        legs: the legs that are known by now.
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
        begin: Place | None = None,
    ):
        """`number` counts earlier streams of the corpus; `rest` has spans of open epochs."""
        self.options, self.cache, self.name, self.first = options, cache, name, first
        self._number, self.epoch, self.mixed = number, epoch, bool(name)
        self.open_epochs: tuple[int, ...] = ()
        self.lost = np.zeros((0, 3 + len(options.buckets[-1].lengths)), np.int64)
        self.legs: tuple[Leg, ...] = ()
        self.lengths, self.parts, self.begin = corpus, corpus.parts, begin or Place()
        if self.parts is None:
            self._plan_whole()
        if rest is not None and len(rest):
            self._plan_rest(rest)
        self.__setstate__({})
        if self.parts is None:
            self.legs = (*self.legs, self._repeat_whole())

    def _plan_whole(self) -> None:
        """Makes the pass of whole epochs, `whole`."""
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
        self.whole = Pass(self, pieces, self._number, True)

    def _repeat_whole(self) -> Leg:
        """The last leg: whole epochs."""
        return self._leg_of(self.whole, self.epoch, repeats=True, ends=not self.mixed)

    def _plan_rest(self, spans: np.ndarray) -> None:
        """Puts a leg for the rest of open epochs first, if the rest has a position."""
        self.open_epochs = tuple(np.unique(spans[:, 0]).tolist())
        if len(self.lengths.excluded):
            stays = ~np.isin(spans[:, 1], self.lengths.excluded)
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
            return
        grows = self.parts is not None
        planned = Pass(
            self,
            pieces,
            self._number,
            False,
            used=used,
            spans=spans,
            rows_before=self._chapter_after(()).start if grows else None,
            ends=not grows,  # else windows follow in the chapter, and fill its last batches
        )
        epoch, ends = int(spans[:, 0].min()), not self.mixed and not grows
        self.legs = (self._leg_of(planned, epoch, ends=ends),)

    def _cut_rest(
        self, lengths: np.ndarray, trees: np.ndarray | None
    ) -> tuple[Pieces, Sequence[int] | None]:
        """The pieces of spans of these lengths, and the lengths of their rows, as for `pack`."""
        pieces = self.options.cut(self._as_lengths(lengths, trees))
        if not self.mixed or self.parts is not None:
            return pieces, None
        # Only lengths that have rows in whole epochs, which follow. A span that they do not hold is
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
        several = any(len(leg.planned.layout) > 1 for leg in self.legs if leg.planned)
        window = self.options.window if several else None
        found = {"lengths": self.lengths.digest, "window": window}
        if several and self.lengths.files is not None:
            found["files"] = digest(self.lengths.files)
        if self.options.by == "loss":
            found["loss"] = f"{self.lengths.loss_share}"
        return found

    @property
    def max_position(self) -> int:
        """The largest position in whole epochs, from 0."""
        return self.whole.layout.pieces.max_position

    # ---- legs

    def leg(self, number: int) -> Leg:
        """A leg; waits for the parts of a window. There is none after the one that repeats."""
        while number >= len(legs := self.legs):
            with self._lock:
                if legs is self.legs:  # no other thread has planned it
                    self.legs = (*legs, self._plan_leg())
        return self.legs[number]

    def grows_at(self, number: int) -> bool:
        """Whether the corpus still grows at a leg, which may then be a window."""
        return self.parts is not None and not self.leg(number).repeats

    def _plan_leg(self) -> Leg:
        """The leg after those that are known: a window or, once the parts end, whole epochs."""
        assert self.parts is not None, "other streams have all their legs"
        number, start, begin, _ = chapter = self._chapter_after(self.legs)
        end, over = find_window(self.parts, begin, self.options)
        if end == begin:
            self.lengths = Lengths.of(self.parts.whole())
            self._plan_whole()
            return self._repeat_whole()
        if number and not self.legs[-1].ends:
            chapter = self.chapter(number - 1)
        ends = over or number - chapter.number == growing.CHAPTER - 1
        planned = self._plan_window((begin, end), start - chapter.start, ends)
        found = Leg(start, planned.rows, max(planned.size, 1), 0, (begin, end), ends=ends)
        self._get_window(found, lambda: planned)
        return found

    def _plan_window(self, places: tuple[Place, Place], before: np.ndarray, ends: bool) -> Pass:
        """The pass of the parts between two places, which follows some rows of its chapter."""
        assert self.parts is not None, "the corpus grows"
        begin, end = places
        pieces = cut_parts(self.parts, range(begin.part, end.part), self.options)
        names, first = ("part", begin.part), begin.example
        return Pass(self, pieces, *names, first=first, rows_before=before, ends=ends)

    def _get_window(self, leg: Leg, make: Callable[[], Pass]) -> Pass:
        """The pass of a window from the cache, made if missing."""
        pieces = leg.places[1].pieces - leg.places[0].pieces
        # Room for the two windows from which batches take rows, the next one, and their passes.
        self.cache.capacity = max(self.cache.capacity, 6 * pieces)
        return self.cache.get(leg, pieces, make)

    def chapter(self, number: int) -> Chapter:
        """The chapter of a leg; if that is not known yet, the chapter that begins with it."""
        legs = self.legs  # other threads may add some
        if number >= len(legs):
            return self._chapter_after(legs)
        first = number
        while first and not legs[first].repeats and not legs[first - 1].ends:
            first -= 1
        begin = legs[first]
        has_rest = begin.planned is not None and not begin.repeats
        return Chapter(first, begin.start, begin.places[0], has_rest)

    def place_after(self, number: int) -> Place:
        """The place after the parts of a leg; if that is not known yet, the place before them."""
        return self._chapter_after(self.legs[: number + 1]).place

    def _chapter_after(self, legs: Sequence[Leg]) -> Chapter:
        """The chapter that begins after some legs, the first ones."""
        if legs:
            return Chapter(len(legs), legs[-1].end, legs[-1].places[1])
        return Chapter(0, np.zeros(len(self.options.groups), np.int64), self.begin)

    def _leg_of(self, planned: Pass, epoch: int, **options: bool) -> Leg:
        """The next leg, of a pass that is no window."""
        _, start, place, _ = self._chapter_after(self.legs)
        size, places = max(planned.size, 1), (place, place)
        return Leg(start, planned.rows, size, epoch, places, **options, planned=planned)

    def plan_of(self, number: int) -> Pass:
        """The pass of a leg that is known."""
        if (leg := self.legs[number]).planned:
            return leg.planned

        def plan() -> Pass:
            before = leg.start - self.chapter(number).start
            return self._plan_window(leg.places, before, leg.ends)

        return self._get_window(leg, plan)

    # ---- rows

    def locate(self, length: int, row: int) -> tuple[Pass, int, int]:
        """The pass of a row of a length, its epoch, and the number of the row in that epoch."""
        number = max(len(self.legs) - 1, 0)
        while not (last := self.leg(number)).repeats and row >= last.end[length]:
            number += 1
        number = bisect.bisect_right(self.legs, row, key=lambda leg: int(leg.start[length])) - 1
        leg = self.legs[number]
        row -= int(leg.start[length])
        if not leg.repeats:
            return self.plan_of(number), leg.epoch, row
        epochs, row = divmod(row, int(leg.rows[length]))
        return self.whole, leg.epoch + epochs, row

    def take(self, length: int, first: int, count: int) -> Iterator[Rows]:
        """Rows `first` to `first + count` of a length, divided by window."""
        while count:
            found, epoch, row = self.locate(length, first)
            rows = found.take(epoch, length, row, count)
            yield rows
            first, count = first + len(rows), count - len(rows)

    def rest(self, rows: np.ndarray, leg: int) -> tuple[np.ndarray, int, Place]:
        """What remains after some rows, none of which follow leg number `leg`.

        The spans of epochs in progress, the first epoch not begun, and the place of the first
        window not begun.
        """
        if rows.any():
            self.leg(leg)
        spans, epoch, place = [self.lost[:0]], self.epoch, self.begin
        # Rows of a window may be left when others of a later window are taken already.
        last = max([n for n, each in enumerate(self.legs) if (rows > each.start).any()], default=-1)
        for number, each in enumerate(self.legs):
            used = np.maximum(rows - each.start, 0)
            if each.repeats:
                over, begun = self.count_times(used)
                for times in range(over, begun):
                    of_epoch = np.clip(used - times * each.rows, 0, each.rows)
                    spans.append(self.whole.rest(each.epoch + times, of_epoch))
                epoch = each.epoch + begun
            elif each.planned or number <= last:
                used = np.minimum(used, each.rows)
                if (used < each.rows).any():
                    spans.append(self.plan_of(number).rest(each.epoch, used))
                place = each.places[1]
        return merge_spans(np.concatenate(spans)), epoch, place

    def count_times(self, rows: np.ndarray) -> tuple[int, int]:
        """The number of whole epochs that are over after some rows of them, and that have begun."""
        used = self.whole.rows > 0
        rows, each = rows[used], self.whole.rows[used]
        return int((rows // each).min()), int((-(-rows // each)).max())

    def after(self, rows: np.ndarray, leg: int, corpus: Lengths, options: Options) -> "Stream":
        """The stream after some rows, as for `rest`, with the rest of open epochs planned again.

        New examples at the end of `corpus` join the latest epoch in progress. If whole epochs of a
        corpus that grew have begun, it is finished, like any other.
        """
        spans, epoch, place = self.rest(rows, leg)
        if corpus.grows and (self.parts is None or epoch > self.epoch):
            corpus = self.lengths
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
            begin=place,
        )

    def window_positions(self, end: Place | None) -> list[np.ndarray]:
        """The positions of each example in the known windows before `end`, as in their rows."""
        windows = [leg.places for leg in self.legs if not leg.planned]
        return [
            cut_parts(
                self.parts, range(first.part, last.part), self.options
            ).positions_per_example()
            for first, last in windows
            if self.parts is not None and (end is None or last.part <= end.part)
        ]

    def files_ahead(self, rows: np.ndarray) -> list[np.ndarray]:
        """The files of each window after some rows, and of each window of the next epoch."""
        assert self.lengths.files is not None, "the corpus has files"
        found = list[np.ndarray | None]()
        for leg in self.legs:
            used = np.maximum(rows - leg.start, 0)
            if leg.repeats:
                over, _ = self.count_times(used)
                found += self.whole.files_from(leg.epoch + over, used - over * leg.rows)
                found += self.whole.files_from(leg.epoch + over + 1, 0 * used)
            elif leg.planned:
                found += leg.planned.files_from(leg.epoch, used)
        every = np.arange(len(self.lengths.files))
        return [every if files is None else files for files in found]


def _compact(values: np.ndarray) -> np.ndarray:
    """`values` in the smallest dtype; only one of them if all are the same."""
    low, high = values.min(), values.max()
    return values[:1].copy() if low == high else values.astype(np.min_scalar_type(high))


def expected_positions(streams: Sequence[Stream], epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """The positions of each example in the batches of an epoch, and the pieces that it has lost.

    int64 [examples, sides], and [pieces, 2 + sides]: example, first position, and sizes. Positions
    lost to overflow, examples left out and pieces without loss do not count. New examples count
    from the epoch that they join; those of a corpus that grows, from the window that has them.
    `streams` are those of one corpus in the stages of a plan.
    """
    expected, first = streams[0].lost[:0, 3:], -1
    if begun := [n for n, each in enumerate(streams) if epoch >= each.epoch]:
        first = begun[-1]
        expected = streams[first].whole.layout.pieces.positions_per_example()
    for number, stream in enumerate(streams[first + 1 :], first + 1):
        before = len(expected)
        if stream.parts is None:
            expected = np.pad(expected, ((0, len(stream.lengths) - before), (0, 0)))
            if epoch == stream.epoch - 1 and epoch in stream.open_epochs:
                expected[before:] = stream.lengths.positions_from(before)
        elif epoch == 0:
            last = streams[number + 1].begin if number + 1 < len(streams) else None
            expected = np.concatenate([expected, *stream.window_positions(last)])
        lost = stream.lost[stream.lost[:, 0] == epoch]
        np.subtract.at(expected, lost[:, 1], lost[:, 3:])
    every = np.concatenate([each.lost for each in streams])
    lost = every[every[:, 0] == epoch, 1:]
    whole = [streams[n].whole for n in begun if streams[n].parts is None]
    if whole and lost.shape[1] == 3:
        lost = np.concatenate([lost, whole[-1].layout.pieces.silent])
    return expected, lost
