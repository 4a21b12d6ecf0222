"""Dealing: which piece goes into which slot of which row; each window once, and just in time."""

import collections
import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np

from pipeline.packing.patterns import Packed
from pipeline.planning.pieces import Pieces, Runs


class Slots:
    """A packed histogram laid out for dealing: rows → patterns → slots, all as arrays.

    Row `r` of a bucket is copy `r − row_start[p]` of its pattern `p`. Pieces sorted by size are
    dealt to slots in runs: the slot's first copy takes piece `slot_piece`, the next copy the next.

    Args:
        packed: the histogram.
        positions: of sizes, int64 [n], their positions on each side, [n, sides].
    """

    def __init__(self, packed: Packed, positions: Callable[[np.ndarray], np.ndarray]):
        self.packed = packed
        after = np.cumsum(packed.counts)
        taken = (after - packed.counts).tolist()  # the next piece of each size
        # For each bucket: the first row of each pattern, the first slot of each pattern, the piece
        # and the size of each slot.
        self.row_start: list[np.ndarray] = []
        self.slot_start: list[np.ndarray] = []
        self.slot_piece: list[np.ndarray] = []
        self.slot_size: list[np.ndarray] = []
        for patterns in packed.patterns:
            rows, starts, pieces, sizes = [0], [0], [], []
            for pattern in patterns:
                for size, times in pattern.pieces:
                    for _ in range(times):
                        pieces.append(taken[size])
                        taken[size] += pattern.rows
                        sizes.append(size)
                rows.append(rows[-1] + pattern.rows)
                starts.append(len(pieces))
            for table, values in zip(
                (self.row_start, self.slot_start, self.slot_piece, self.slot_size),
                (rows, starts, pieces, sizes),
                strict=True,
            ):
                table.append(np.array(values, np.int64))
        assert taken == after.tolist(), "every piece has a slot"
        #: Of a row of each pattern, the sum of its segments' squared lengths.
        self.cost = [
            np.add.reduceat((positions(sizes) ** 2).sum(axis=1), starts[:-1])
            if len(sizes)
            else sizes
            for sizes, starts in zip(self.slot_size, self.slot_start, strict=True)
        ]

    def first_piece(self, bucket: int) -> np.ndarray:
        """The piece in the first slot of every row of bucket number `bucket`."""
        rows = np.arange(self.packed.rows(bucket))
        pattern = self.pattern(bucket, rows)
        slot = self.slot_start[bucket][pattern]
        return self.slot_piece[bucket][slot] + rows - self.row_start[bucket][pattern]

    def of_rows(self, bucket: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """How many slots each of `rows` has; the piece and the size of each slot."""
        pattern = self.pattern(bucket, rows)
        first = self.slot_start[bucket][pattern]
        times = self.slot_start[bucket][pattern + 1] - first
        ends = times.cumsum()
        slot = (first - ends + times).repeat(times) + np.arange(ends[-1] if len(ends) else 0)
        copy = (rows - self.row_start[bucket][pattern]).repeat(times)
        return times, self.slot_piece[bucket][slot] + copy, self.slot_size[bucket][slot]

    def pattern(self, bucket: int, rows: np.ndarray) -> np.ndarray:
        """The pattern of each of `rows` of bucket number `bucket`."""
        return self.row_start[bucket].searchsorted(rows, side="right") - 1


@dataclasses.dataclass(frozen=True)
class Dealt:
    """One window of one epoch: every slot has its piece.

    Attributes:
        slots: the rows and their slots.
        pieces: the pieces in the order in which slots count them, integers.
        rows: for each bucket, its rows in the order in which batches take them, int64.
    """

    slots: Slots
    pieces: np.ndarray
    rows: list[np.ndarray]

    def left(self, bucket: int, first: int) -> np.ndarray:
        """The pieces in the rows of a bucket from row `first` on."""
        return self.pieces[self.slots.of_rows(bucket, self.rows[bucket][first:])[1]]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Some rows of a bucket, of one window.

    Attributes:
        dealt: the window.
        bucket: the number of the bucket.
        numbers: the rows: int64 [rows].
    """

    dealt: Dealt
    bucket: int
    numbers: np.ndarray

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def costs(self) -> np.ndarray:
        """The sum of the squared lengths of each row's segments: int64 [rows]."""
        slots = self.dealt.slots
        return slots.cost[self.bucket][slots.pattern(self.bucket, self.numbers)]

    def segments(
        self, order: np.ndarray, places: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Place, piece and size of each segment, where rows number `order` stand at `places`."""
        times, slots, sizes = self.dealt.slots.of_rows(self.bucket, self.numbers[order])
        return places.repeat(times), self.dealt.pieces[slots], sizes


@dataclasses.dataclass(frozen=True)
class Taken:
    """Rows that a batch takes of a source.

    Attributes:
        rows: the rows.
        pieces: what they hold.
        runs: of a remainder, what the pieces are of.
        first: the number of the source's first example.
        epoch: the epoch of whole rows.
    """

    rows: Rows
    pieces: Pieces
    runs: Runs | None
    first: int
    epoch: int

    def segments(
        self, order: np.ndarray, places: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | int]:
        """Rows number `order` at `places`, as `PlannedBatch.segments`; and the epoch of each."""
        row, pieces, sizes = self.rows.segments(order, places)
        examples, starts = self.pieces.locate(pieces)
        epochs: np.ndarray | int = self.epoch
        if self.runs is not None:
            epochs = self.runs.epochs[examples]
            examples, starts = self.runs.examples[examples], self.runs.starts[examples] + starts
        positions = self.pieces.positions(sizes)
        segments = np.empty((len(row), 3 + positions.shape[1]), np.int64)
        segments[:, 0], segments[:, 1] = row, examples
        if self.first:
            segments[:, 1] += self.first
        segments[:, 2], segments[:, 3:] = starts, positions
        return segments, epochs


class Deals(Protocol):
    """Anything that deals windows."""

    def deal(self, epoch: int, place: int) -> Dealt:
        """The window at a place of an epoch's order."""


class Dealer:
    """A cache of dealt windows; those last asked for stay.

    Any number of threads may ask; one that asks for a window that another is dealing waits for it.

    Args:
        windows: what to deal.
        size: how many windows stay.
    """

    def __init__(self, windows: Deals, size: int):
        self._windows, self._size = windows, size
        self._lock = threading.Lock()
        self._dealt: collections.OrderedDict[tuple[int, int], concurrent.futures.Future] = (
            collections.OrderedDict()
        )

    def __reduce__(self):
        return Dealer, (self._windows, self._size)

    def get(self, epoch: int, place: int) -> Dealt:
        """The window at `place` of the epoch's order, now."""
        future, mine = self._future(epoch, place)
        if mine:
            self._fulfil(epoch, place, future)
        else:
            with self._lock:
                if (epoch, place) in self._dealt:
                    self._dealt.move_to_end((epoch, place))
        return future.result()

    def prepare(self, epoch: int, place: int) -> None:
        """Deals that window in the background, so that `get` need not wait for it."""
        future, mine = self._future(epoch, place)
        if mine:
            arguments = epoch, place, future
            threading.Thread(target=self._fulfil, args=arguments, daemon=True).start()

    def _future(self, epoch: int, place: int) -> tuple[concurrent.futures.Future[Dealt], bool]:
        """The window's future, and whether it is the caller's to fulfil."""
        with self._lock:
            future = self._dealt.get((epoch, place))
            mine = future is None
            if future is None:
                future = self._dealt[epoch, place] = concurrent.futures.Future()
                while len(self._dealt) > self._size:
                    self._dealt.popitem(last=False)
        return future, mine

    def _fulfil(self, epoch: int, place: int, future: concurrent.futures.Future) -> None:
        try:
            future.set_result(self._windows.deal(epoch, place))
        except BaseException as error:
            with self._lock:
                self._dealt.pop((epoch, place), None)
            future.set_exception(error)
