"""Windows: the pieces that are packed together, and the order of windows and rows in an epoch.

A corpus no larger than a window is one window. A larger corpus is divided once: the pieces of each
size are spread evenly over the windows, so that these share one histogram and one search for
patterns. Each window has whole batches only. The rest (remainders of sizes, and the last batch of
each window) is divided into windows in the same way, until it fits into one. So every epoch has the
same number of batches, and arithmetic gives the window of a step.
"""

import dataclasses
import functools
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from pipeline.packing.patterns import Packed
from pipeline.planning import lengths as lengths_lib
from pipeline.planning.assignment import Assignment, AssignmentCache, Slots
from pipeline.planning.deal import deal
from pipeline.planning.order import Purpose, permutation, random_bits, sort_by_group
from pipeline.planning.partition import Partition
from pipeline.planning.pieces import Pieces


@dataclasses.dataclass(frozen=True)
class WindowKind:
    """Windows with the same histogram and the same rows.

    Attributes:
        number: the number of such windows.
        slots: the rows of each window.
        first: int64 [longest + 1], the rank of the first piece of each size in the first window.
            Each window takes the next `slots.packed.counts` ranks of each size.
    """

    number: int
    slots: Slots
    first: np.ndarray


@dataclasses.dataclass(frozen=True)
class WindowOrder:
    """The order of the windows in an epoch.

    Attributes:
        epoch: the epoch.
        windows: int64 [windows], the numbers of the windows, in order.
        steps: int64 [windows], the step after the last step of each.
        rows: int64 [buckets, windows], the row after the last row of each, for each bucket.
    """

    epoch: int
    windows: np.ndarray
    steps: np.ndarray
    rows: np.ndarray


class Windows:
    """The rows of some pieces in every epoch, by random access.

    Args:
        pieces: the pieces.
        search: packs a histogram: `search(counts, whole=…)`, as `pipeline.packing.cascade.pack`.
        seed: the seed of every shuffle.
        shuffle: False makes every epoch the same.
        window: the most pieces in a window.
        by_row: whether a plan takes single rows instead of batches, at the same pace in every
            bucket. All windows then have about the same number of rows of each bucket, so that all
            buckets are in the same window at a time.

    Attributes:
        pieces: the argument.
        kinds: the kinds of windows, in order of the windows' numbers.
        counts: int64 [longest + 1], pieces of each size.
        rows: int64 [buckets], rows of each bucket in an epoch.
        batches: int64 [buckets], batches of each bucket in an epoch.
        real: int64 [buckets], real positions in the rows of each bucket in an epoch.
    """

    def __init__(
        self,
        pieces: Pieces,
        search: Callable[..., Packed],
        *,
        seed: int,
        shuffle: bool,
        window: int,
        by_row: bool = False,
    ):
        self.pieces, self._seed, self._shuffle, self._by_row = pieces, seed, shuffle, by_row
        self._partition: Partition | None = None
        if len(pieces) > window:
            self._partition = Partition(pieces, window, seed if shuffle else None)
            self.counts = self._partition.counts
        else:
            sizes, found = lengths_lib.histogram(pieces.sizes())
            self.counts = np.zeros(int(sizes.max(initial=0)) + 1, np.int64)
            self.counts[sizes] = found
        counts = self.counts.copy()
        counts[0] = 0
        number = -(-int(counts.sum()) // window) if self._partition else 1
        divide = _divide_evenly if by_row and number > 1 else _divide_into_batches
        self.kinds = [
            WindowKind(number, Slots(packed, pieces.positions), first)
            for number, packed, first in divide(counts, search, number, window)
        ]
        # The kind of each window, by its number; batches and rows of each bucket in it.
        numbers = np.array([kind.number for kind in self.kinds])
        self._kind = np.repeat(np.arange(len(self.kinds)), numbers)
        all_packed = [kind.slots.packed for kind in self.kinds]
        buckets = range(len(all_packed[0].buckets))
        batches, rows, real = (
            np.array([[of(packed, i) for packed in all_packed] for i in buckets])
            for of in (Packed.batches, Packed.rows, Packed.real)
        )
        self._batches, self._rows = batches[:, self._kind], rows[:, self._kind]
        self.batches, self.rows, self.real = batches @ numbers, rows @ numbers, real @ numbers
        self._latest: WindowOrder | None = None
        # The current window, the next one, and the last one for readers that lag behind.
        self._cache = AssignmentCache(self.assign, 3)

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
                order = permutation(
                    random_bits(self._seed, Purpose.WINDOWS, len(self), epoch=epoch)
                )
            steps = np.cumsum(self._batches.sum(axis=0)[order])
            rows = np.cumsum(self._rows[:, order], axis=1)
            latest = self._latest = WindowOrder(epoch, order, steps, rows)
        return latest

    def batches_at(self, epoch: int, place: int | slice) -> np.ndarray:
        """Batches of each bucket in the window at `place` of an epoch's order: int64 [buckets].

        For a slice of places [buckets, places].
        """
        return self._batches[:, self.order(epoch).windows[place]]

    def rows_at(self, epoch: int, place: int) -> np.ndarray:
        """Rows of each bucket in the window at `place` of an epoch's order: int64 [buckets]."""
        return self._rows[:, self.order(epoch).windows[place]]

    def offsets(self, epoch: int, place: int) -> list[int]:
        """For each bucket, the offset of its batches in the window, as `interleave` takes it."""
        window = int(self.order(epoch).windows[place])
        if not self._shuffle:
            return [1 << 23] * len(self.batches)
        return [
            int(self._random(Purpose.PHASE, 1, epoch, window, bucket)[0] >> np.uint64(40))
            for bucket in range(len(self.batches))
        ]

    def take(
        self, epoch: int, bucket: int, first: int, count: int
    ) -> tuple[Assignment, np.ndarray]:
        """Up to `count` rows of a bucket from row `first` of the epoch on, all of one window.

        Returns:
            The window, and the numbers of the rows in it.
        """
        order = self.order(epoch)
        ends = order.rows[bucket]
        place = int(ends.searchsorted(first, side="right"))
        begin = int(ends[place - 1]) if place else 0
        end = min(first + count, int(ends[place]))
        assignment = self._cache.get(order.epoch, place)
        if 2 * (end - begin) > ends[place] - begin:
            more, following = divmod(place + 1, len(self))
            self._cache.prepare((order.epoch + more) if self._shuffle else 0, following)
        return assignment, assignment.rows[bucket][first - begin : end - begin]

    def remaining_pieces(self, epoch: int, rows_before: np.ndarray) -> np.ndarray:
        """The pieces that remain of an epoch after some rows of each bucket: int64, ascending.

        Assigns only windows of which some rows, but not all, are before.
        """
        order = self.order(epoch)
        begins = order.rows - self._rows[:, order.windows]
        has_rows = order.rows > begins
        untouched = np.all(~has_rows | (rows_before[:, None] <= begins), axis=0)
        over = (~has_rows | (rows_before[:, None] >= order.rows)).all(axis=0)
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

    def _members(self, window: int) -> tuple[np.ndarray | None, np.ndarray]:
        """The pieces of a window and their sizes; None for all pieces in order."""
        if self._partition is None:
            return None, self.pieces.sizes()
        kind = self.kinds[self._kind[window]]
        share = kind.slots.packed.counts
        nth = window - int(np.searchsorted(self._kind, self._kind[window]))
        return self._partition.members(kind.first + nth * share, share)

    def assign(self, epoch: int, place: int) -> Assignment:
        """Assigns the window at `place` of an epoch's order; a pure function."""
        window = int(self.order(epoch).windows[place])
        slots = self.kinds[self._kind[window]].slots
        members, sizes = self._members(window)
        bits = None
        if self._shuffle:
            bits = self._random(Purpose.EXAMPLES, len(sizes), epoch, window)
        order = sort_by_group(sizes, bits)
        order = order[np.count_nonzero(sizes == 0) :]  # pieces of size 0 are in no batch
        pieces = order if members is None else members[order]
        rows = []
        for bucket in range(len(self.batches)):
            if self._shuffle:
                draw = functools.partial(
                    random_bits, self._seed, epoch=epoch, window=window, bucket=bucket
                )
                height = None if self._by_row else slots.packed.buckets[bucket].rows
                rows.append(deal(slots.segments(bucket), height, draw))
            else:
                rows.append(sort_by_group(pieces[slots.first_piece(bucket)], None))
        return Assignment(slots, pieces, rows)

    def _random(
        self, purpose: Purpose, count: int, epoch: int, window: int, bucket: int = 0
    ) -> np.ndarray:
        return random_bits(self._seed, purpose, count, epoch=epoch, window=window, bucket=bucket)


def _divide_into_batches(
    counts: np.ndarray, search: Callable[..., Packed], number: int, window: int
) -> list[tuple[int, Packed, np.ndarray]]:
    """Divides a histogram into kinds of windows, with whole batches but in the last window.

    Args:
        counts: int64 [longest + 1], pieces of each size.
        search: as for `Windows`.
        number: the number of windows.
        window: the most pieces in a window.

    Returns:
        As in `WindowKind`: the number of windows, the rows of each, and the first ranks.
    """
    kinds = []
    first = np.zeros_like(counts)
    while True:
        packed = search(counts // number, whole=number > 1)
        while number > 1 and not packed.counts.any():
            # A window has no piece of any size, or no whole batch: use fewer windows.
            number //= 2
            packed = search(counts // number, whole=number > 1)
        if packed.counts.any():
            kinds.append((number, packed, first))
        first = first + number * packed.counts
        counts = counts - number * packed.counts
        if number == 1:
            return kinds
        number = max(-(-int(counts.sum()) // window), 1)


def _divide_evenly(
    counts: np.ndarray, search: Callable[..., Packed], number: int, window: int
) -> list[tuple[int, Packed, np.ndarray]]:
    """Divides a histogram into windows whose counts of each size differ by at most one.

    Each window is a kind of its own. Arguments and result as for `_divide_into_batches`.
    """
    del window
    # Fibonacci hashing of the size decides which windows have one more piece of it.
    phase = np.arange(len(counts), dtype=np.uint64) * np.uint64(0x9E3779B1) % np.uint64(1 << 32)
    phase = (phase * np.uint64(number) >> np.uint64(32)).astype(np.int64)
    edges = [(window * counts + phase) // number for window in range(number + 1)]
    packed = [search(last - first, whole=False) for first, last in pairwise(edges)]
    found = zip(packed, edges, strict=False)
    return [(1, each, first) for each, first in found if each.counts.any()]
