"""Assignment: decides which piece is in which slot of the rows of a window.

A slot is a place for one piece in a row. Packing fixes the size of each slot; an assignment puts a
piece of that size into it.
"""

import collections
import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable

import numpy as np

from pipeline.fs.fork import restart_in_children
from pipeline.planning.patterns import Packed
from pipeline.planning.pieces import Pieces


class Slots:
    """The slots of a packed histogram, as arrays: rows → patterns → slots.

    Row `r` of a bucket is copy `r − row_start[p]` of its pattern `p`. The pieces of a window are
    sorted by size. The slot of the first copy takes piece number `slot_piece` in that order, the
    slot of the next copy the next piece. `positions` maps sizes to their positions on each side.

    Attributes, for each bucket:
        row_start, slot_start: the first row and the first slot of each pattern.
        slot_piece: the piece of each slot in the first copy of the pattern.
        slot_size: the size of each slot.
        cost: for each pattern, the sum of the squared lengths of a row's segments.
    """

    def __init__(self, packed: Packed, positions: Callable[[np.ndarray], np.ndarray]):
        self.packed = packed
        ends = np.cumsum(packed.counts)
        next_piece = (ends - packed.counts).tolist()  # of each size
        arrays = []
        for patterns in packed.patterns:
            filled = []
            for pattern in patterns:
                first, of_size = [], []
                for size, times in pattern.pieces:
                    for _ in range(times):
                        first.append(next_piece[size])
                        next_piece[size] += pattern.rows
                        of_size.append(size)
                filled.append((pattern.rows, first, of_size))
            rows, starts, pieces, sizes = [0], [0], [], []
            for number, first, of_size in sorted(filled, key=lambda each: len(each[1])):
                rows.append(rows[-1] + number)
                pieces += first
                sizes += of_size
                starts.append(len(pieces))
            arrays.append([np.array(each, np.int64) for each in (rows, starts, pieces, sizes)])
        self.row_start, self.slot_start, self.slot_piece, self.slot_size = zip(*arrays, strict=True)
        assert next_piece == ends.tolist(), "every piece has a slot"
        self.cost = [
            np.add.reduceat((positions(sizes) ** 2).sum(axis=1), starts[:-1])
            if len(sizes)
            else sizes
            for sizes, starts in zip(self.slot_size, self.slot_start, strict=True)
        ]

    def segments(self, bucket: int) -> np.ndarray:
        """The number of segments of each row of bucket number `bucket`, ascending: int32 [rows]."""
        segments = np.diff(self.slot_start[bucket]).astype(np.int32)
        return segments.repeat(np.diff(self.row_start[bucket]))

    def first_piece(self, bucket: int) -> np.ndarray:
        """The piece in the first slot of every row of bucket number `bucket`."""
        rows = np.arange(self.packed.rows(bucket))
        pattern = self.pattern(bucket, rows)
        slot = self.slot_start[bucket][pattern]
        return self.slot_piece[bucket][slot] + rows - self.row_start[bucket][pattern]

    def of_rows(
        self, bucket: int, rows: np.ndarray, pattern: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The number of slots of each of `rows`; the piece and the size of each slot."""
        first = self.slot_start[bucket][pattern]
        times = self.slot_start[bucket][pattern + 1] - first
        ends = times.cumsum()
        slot = (first - ends + times).repeat(times) + np.arange(ends[-1] if len(ends) else 0)
        copy = (rows - self.row_start[bucket][pattern]).repeat(times)
        return times, self.slot_piece[bucket][slot] + copy, self.slot_size[bucket][slot]

    def pattern(self, bucket: int, rows: np.ndarray) -> np.ndarray:
        """The number of the pattern of each of `rows` of bucket number `bucket`."""
        return self.row_start[bucket].searchsorted(rows, side="right") - 1


@dataclasses.dataclass(frozen=True)
class Assignment:
    """The pieces in all slots of one window in one epoch."""

    slots: Slots
    pieces: np.ndarray  # integers, sorted by size
    rows: list[np.ndarray]  # int64, for each bucket, in the order in which batches take them

    def pieces_from(self, bucket: int, first: int) -> np.ndarray:
        """The pieces in the rows of a bucket from the row at place `first` on."""
        rows = self.rows[bucket][first:]
        return self.pieces[self.slots.of_rows(bucket, rows, self.slots.pattern(bucket, rows))[1]]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Some rows of a source for a batch; they are in one bucket and one window."""

    assignment: Assignment
    bucket: int
    numbers: np.ndarray  # int64 [rows]
    patterns: np.ndarray  # int64 [rows], the number of each row's pattern
    pieces: Pieces  # of which the window is made
    spans: np.ndarray | None  # of a remainder, those that its pieces are cut from
    first: int  # the number of the source's first example in the plan
    epoch: int  # of all rows, unless they are of a remainder

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def costs(self) -> np.ndarray:
        """The sum of the squared lengths of each row's segments: int64 [rows]."""
        return self.assignment.slots.cost[self.bucket][self.patterns]

    def select(self, order: np.ndarray) -> "Rows":
        """Some of the rows, in an order."""
        return dataclasses.replace(self, numbers=self.numbers[order], patterns=self.patterns[order])

    def segments(
        self, order: np.ndarray, places: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | int]:
        """The segments of the rows of `order`, as in `PlannedBatch.segments`, and their epochs.

        `places` has the place in the batch of each row of `order`.
        """
        times, slots, sizes = self.assignment.slots.of_rows(
            self.bucket, self.numbers[order], self.patterns[order]
        )
        examples, starts = self.pieces.locate(self.assignment.pieces[slots])
        epochs: np.ndarray | int = self.epoch
        if self.spans is not None:
            spans = self.spans[examples]
            epochs, examples, starts = spans[:, 0], spans[:, 1], spans[:, 2] + starts
        positions = self.pieces.positions(sizes)
        segments = np.empty((len(sizes), 3 + positions.shape[1]), np.int64)
        segments[:, 0], segments[:, 1] = places.repeat(times), examples
        if self.first:
            segments[:, 1] += self.first
        segments[:, 2], segments[:, 3:] = starts, positions
        return segments, epochs


class AssignmentCache:
    """The assignments of the windows used last.

    Any number of threads may use it. A thread that needs a window which another thread is assigning
    waits for it, so that no window is assigned twice. `size` may be changed.
    """

    def __init__(self, assign: Callable[[int, int], Assignment], size: int):
        self._assign, self.size = assign, size
        self.restart()
        restart_in_children(self)

    def restart(self) -> None:
        """Forgets all windows, also those that a thread is assigning; see `pipeline.fs.fork`."""
        self._lock = threading.Lock()
        self._futures: collections.OrderedDict[tuple[int, int], concurrent.futures.Future] = (
            collections.OrderedDict()
        )

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return AssignmentCache, (self._assign, self.size)

    def get(self, epoch: int, place: int) -> Assignment:
        """The window at `place` in the order of an epoch; assigns it or waits for it."""
        future, is_new = self._find_or_add(epoch, place)
        if is_new:
            self._fulfil(epoch, place, future)
        return future.result()

    def prepare(self, epoch: int, place: int) -> None:
        """Assigns a window in the background, so that `get` need not wait for it."""
        future, is_new = self._find_or_add(epoch, place)
        if is_new:
            arguments = epoch, place, future
            threading.Thread(target=self._fulfil, args=arguments, daemon=True).start()

    def _find_or_add(
        self, epoch: int, place: int
    ) -> tuple[concurrent.futures.Future[Assignment], bool]:
        """The future of a window, and whether it is new, so that the caller must fulfil it."""
        with self._lock:
            is_new = (epoch, place) not in self._futures
            future = self._futures.setdefault((epoch, place), concurrent.futures.Future())
            self._futures.move_to_end((epoch, place))
            while len(self._futures) > self.size:
                self._futures.popitem(last=False)
        return future, is_new

    def _fulfil(self, epoch: int, place: int, future: concurrent.futures.Future) -> None:
        try:
            future.set_result(self._assign(epoch, place))
        except BaseException as error:
            with self._lock:
                self._futures.pop((epoch, place), None)
            future.set_exception(error)
