"""Windows: the pieces that are packed together, and the order of windows and rows in an epoch.

The division (`pipeline.planning.division`) fixes the windows and their rows once. So every epoch
has the same number of batches, and arithmetic gives the window of a step.
"""

import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from pipeline.planning import lengths as lengths_lib
from pipeline.planning.assignment import Assignment, AssignmentCache, Slots
from pipeline.planning.division import Pack, divide
from pipeline.planning.order import Purpose, deal, permutation, random_bits, sort_by_group
from pipeline.planning.patterns import Packed
from pipeline.planning.pieces import Pieces

# Packed histograms that are kept; others are packed again when they are needed.
RECENT = 8

Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True)
class WindowOrder:
    """The order of the windows in an epoch."""

    epoch: int
    windows: np.ndarray  # int64 [windows], their numbers, in order
    rows: np.ndarray  # int64 [buckets, windows + 1], rows before each window, and all
    batches: np.ndarray  # the same; a batch belongs to the window that has its first row
    starts: np.ndarray  # the same, rows before the first batch of each window

    @functools.cached_property
    def steps(self) -> np.ndarray:
        """The steps before each window, and all: int64 [windows + 1]."""
        return self.batches.sum(axis=0)


class Windows:
    """The rows of some pieces in every epoch, by random access; up to `window` pieces in a window.

    With `by_row`, a plan takes single rows instead of batches, at the same pace in every bucket.
    All windows then have about the same number of rows of each bucket, so that all buckets are in
    the same window at a time.

    Attributes:
        files: for each window, the numbers of its files; None if windows are not made of files.
        kinds: the kinds of windows, in order of the windows' numbers.
        counts: int64 [longest + 1], pieces of each size.
        rows, batches: int64 [buckets], rows and batches of each bucket in an epoch.
        real: int64 [buckets], real positions in the rows of each bucket in an epoch.
        most_segments: the most segments in a row of each bucket; at least 1.
    """

    def __init__(
        self,
        pieces: Pieces,
        pack: Pack,
        rows_per_batch: Sequence[int],
        *,
        seed: int,
        shuffle: bool,
        window: int,
        by_row: bool = False,
        files: np.ndarray | None = None,
    ):
        self.pieces, self._pack, self._rows_per_batch = pieces, pack, np.array(rows_per_batch)
        self._bits = functools.partial(random_bits, seed)
        self._shuffle, self._by_row = shuffle, by_row
        self._packed: dict[Any, Packed] = {}
        self._slots: dict[int, Slots] = {}
        self._division = divide(
            pieces,
            window,
            seed if shuffle else None,
            by_row=by_row,
            files=files,
            rows_per_batch=rows_per_batch,
        )
        self.counts, self.files = self._division.counts, self._division.files
        with _no_garbage_collection():  # packing makes millions of tuples, and no cycles
            self.kinds = list(self._division.kinds(self._pack_once))
        # The kind of each window, by its number; rows and batches of each bucket in it.
        numbers = np.array([kind.number for kind in self.kinds])
        self._kind = np.repeat(np.arange(len(self.kinds)), numbers)
        rows, real, segments = (
            np.stack([getattr(kind, name) for kind in self.kinds], axis=1)
            for name in ("rows", "real", "most_segments")
        )
        self._rows = rows[:, self._kind]
        self.rows, self.real = rows @ numbers, real @ numbers
        self.most_segments = segments.max(axis=1).tolist()
        # The current window, the next one, and the last one for readers that lag behind.
        self._cache = AssignmentCache(self.assign, 3)
        self._latest: WindowOrder | None = None
        self.batches = self.order(0).batches[:, -1]

    def _pack_once(
        self, counts: np.ndarray, *, whole: bool = False, surplus: Sequence[int] | None = None
    ) -> Packed:
        key = counts.tobytes(), whole, surplus
        return _keep(self._packed, key, lambda: self._pack(counts, whole=whole, surplus=surplus))

    def packed(self) -> Iterator[Packed]:
        """The packed histogram of each of `kinds`."""
        return (kind.packed(self._pack_once) for kind in self.kinds)

    def _slots_of(self, window: int) -> Slots:
        kind = int(self._kind[window])
        return _keep(
            self._slots,
            kind,
            lambda: Slots(self.kinds[kind].packed(self._pack_once), self.pieces.positions),
        )

    def __len__(self) -> int:
        return len(self._kind)

    @functools.cached_property
    def steps(self) -> int:
        """Batches in an epoch."""
        return int(self.batches.sum())

    def order(self, epoch: int) -> WindowOrder:
        """The order of the windows in an epoch."""
        epoch = epoch if self._shuffle else 0
        latest = self._latest
        if latest is None or latest.epoch != epoch:
            order = np.arange(len(self))
            if self._shuffle:
                order = permutation(self._bits(Purpose.WINDOWS, len(self), epoch=epoch))
            rows = np.pad(np.cumsum(self._rows[:, order], axis=1), ((0, 0), (1, 0)))
            rows_per_batch = self._rows_per_batch[:, None]
            if self.files is None:  # the last batch of a window may not be full
                batches = np.diff(rows) + rows_per_batch - 1
                batches = np.pad(np.cumsum(batches // rows_per_batch, axis=1), ((0, 0), (1, 0)))
                starts = rows
            else:  # batches go on from window to window
                batches = -(-rows // rows_per_batch)
                starts = np.minimum(batches * rows_per_batch, self.rows[:, None])
            latest = self._latest = WindowOrder(epoch, order, rows, batches, starts)
            if self._by_row:
                # Those of which buckets take rows at a time, the next one, and the last one.
                self._cache.size = max(self._cache.size, 2 + _most_at_a_time(rows))
        return latest

    def offsets(self, epoch: int, place: int) -> list[int]:
        """For each bucket, the offset of its batches in the window, as `interleave` takes it."""
        window = int(self.order(epoch).windows[place])
        if not self._shuffle:
            return [1 << 23] * len(self.batches)
        draw = functools.partial(self._bits, Purpose.PHASE, 1, epoch=epoch, window=window)
        buckets = range(len(self.batches))
        return [int(draw(bucket=bucket)[0] >> np.uint64(40)) for bucket in buckets]

    def take(
        self, epoch: int, bucket: int, first: int, count: int
    ) -> tuple[Assignment, np.ndarray]:
        """A window, and the numbers of up to `count` rows from row `first` of the epoch on."""
        order = self.order(epoch)
        edges = order.rows[bucket]
        place = int(edges.searchsorted(first, side="right")) - 1
        begin, last = edges[place : place + 2].tolist()
        end = min(first + count, last)
        assignment = self._cache.get(order.epoch, place)
        if 2 * (end - begin) > last - begin:
            more, following = divmod(place + 1, len(self))
            self._cache.prepare((order.epoch + more) if self._shuffle else 0, following)
        return assignment, assignment.rows[bucket][first - begin : end - begin]

    def remaining_pieces(self, epoch: int, rows_before: np.ndarray) -> np.ndarray:
        """The pieces that remain of an epoch after some rows of each bucket: int64, ascending.

        Assigns only windows of which some rows, but not all, are before.
        """
        order = self.order(epoch)
        begins, ends = order.rows[:, :-1], order.rows[:, 1:]
        has_rows = ends > begins
        untouched = np.all(~has_rows | (rows_before[:, None] <= begins), axis=0)
        over = (~has_rows | (rows_before[:, None] >= ends)).all(axis=0)
        found = [lengths_lib.NO_EXAMPLES]
        for place in np.flatnonzero(~over).tolist():
            if untouched[place]:
                pieces, sizes = self._members(int(order.windows[place]))
                found.append(np.flatnonzero(sizes) if pieces is None else pieces)
                continue
            assignment = self._cache.get(order.epoch, place)
            for bucket, rows in enumerate(assignment.rows):
                first = min(max(int(rows_before[bucket] - begins[bucket, place]), 0), len(rows))
                found.append(assignment.pieces_from(bucket, first))
        return np.sort(np.concatenate(found).astype(np.int64))

    def files_from(self, epoch: int, rows: np.ndarray) -> list[np.ndarray | None]:
        """The files of each window of an epoch, from the first with later rows on; None for all."""
        order = self.order(epoch)
        place = int(np.count_nonzero((order.rows[:, 1:] <= rows[:, None]).all(axis=0)))
        if self.files is None:
            return [None] * (place < len(self))
        return [self.files[window] for window in order.windows[place:].tolist()]

    def _members(self, window: int) -> tuple[np.ndarray | None, np.ndarray]:
        """The pieces of a window and their sizes; None for all pieces in order."""
        kind, share = self.kinds[self._kind[window]], self._slots_of(window).packed.counts
        nth = window - int(np.searchsorted(self._kind, self._kind[window]))
        first = None if kind.first is None else kind.first + nth * share
        return self._division.members(window, first, share)

    def assign(self, epoch: int, place: int) -> Assignment:
        """Assigns the window at `place` of an epoch's order; a pure function."""
        window = int(self.order(epoch).windows[place])
        slots = self._slots_of(window)
        members, sizes = self._members(window)
        bits = None
        if self._shuffle:
            bits = self._bits(Purpose.EXAMPLES, len(sizes), epoch=epoch, window=window)
        order = sort_by_group(sizes, bits)
        order = order[np.count_nonzero(sizes == 0) :]  # pieces of size 0 are in no batch
        pieces = order if members is None else members[order]
        rows = []
        for bucket in range(len(self.batches)):
            if self._shuffle:
                draw = functools.partial(self._bits, epoch=epoch, window=window, bucket=bucket)
                rows_per_batch = None if self._by_row else slots.packed.buckets[bucket].rows
                rows.append(deal(slots.segments(bucket), rows_per_batch, draw))
            else:
                rows.append(sort_by_group(pieces[slots.first_piece(bucket)], None))
        return Assignment(slots, pieces, rows)


def _most_at_a_time(rows: np.ndarray) -> int:
    """The most windows that have rows to take, if all buckets take theirs at the same pace."""
    share = rows[rows[:, -1] > 0] / rows[rows[:, -1] > 0][:, -1:]
    begins, ends = share[:, :-1].min(axis=0), share[:, 1:].max(axis=0)
    begun = np.searchsorted(np.sort(begins), ends, side="left")
    return int((begun - np.searchsorted(np.sort(ends), ends, side="left")).max(initial=1))


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Pauses the collector, which would go through all objects of the process again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _keep(recent: dict[Any, Value], key: Any, make: Callable[[], Value]) -> Value:
    """The value of `key`, made anew unless it is one of the recent ones."""
    if (found := recent.get(key)) is None:
        found = recent[key] = make()
        for oldest in list(recent)[:-RECENT]:
            recent.pop(oldest, None)
    return found
