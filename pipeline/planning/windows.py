"""Windows: which pieces are planned together, and in what order they take their slots.

A corpus no larger than a window is planned whole. A larger one is partitioned once: each size is
dealt evenly over the main windows, so that all of them have one histogram and share one pattern
search; each holds whole batches only. What is left over, remainders and the last batch of each
window, is dealt over windows in the same way, until it fits into one. So every epoch has the same
number of batches, and which window a step falls into is arithmetic.
"""

import dataclasses
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from pipeline.packing.cascade import Packed
from pipeline.planning import lengths as lengths_lib
from pipeline.planning.dealing import Dealer, Dealt, Rows, Slots
from pipeline.planning.order import Purpose, permutation, random_bits, sort_by_group
from pipeline.planning.partition import Partition
from pipeline.planning.pieces import Pieces


@dataclasses.dataclass(frozen=True)
class Kind:
    """Windows that share one histogram and its rows.

    Attributes:
        number: how many there are.
        slots: the rows of each.
        first: int64 [longest + 1], the rank of the first piece of each size in the first of them;
            each takes as many of the next ranks as `slots.packed.counts` says.
    """

    number: int
    slots: Slots
    first: np.ndarray


@dataclasses.dataclass(frozen=True)
class Order:
    """The windows of an epoch.

    Attributes:
        epoch: which epoch.
        windows: their numbers, in order: int64 [windows].
        steps: the step after the last of each: int64 [windows].
        rows: the row after the last of each, of every bucket: int64 [buckets, windows].
    """

    epoch: int
    windows: np.ndarray
    steps: np.ndarray
    rows: np.ndarray


class Windows:
    """The rows of all epochs of some pieces, random access.

    Args:
        pieces: what to plan.
        search: packs a histogram: `search(counts, whole=…)`, as `pipeline.packing.cascade.pack`.
        seed: decides every shuffle.
        shuffle: False: every epoch is the same.
        window: the most pieces in a window.
        by_row: whether rows are taken one by one, at the same pace in every bucket. Windows then
            have as many rows of each bucket, so that all buckets are in the same window.

    Attributes:
        pieces: as given.
        kinds: the kinds of windows, in order of their numbers.
        counts: int64 [longest + 1], how many pieces have each size.
        rows: rows of each bucket in an epoch: int64 [buckets].
        batches: batches of each bucket in an epoch: int64 [buckets].
        real: real positions in the rows of each bucket in an epoch: int64 [buckets].
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
        self.pieces, self._seed, self._shuffle = pieces, seed, shuffle
        self._partition: Partition | None = None
        if len(pieces) > window:
            self._partition = Partition(pieces, window, seed if shuffle else None)
            self.counts = self._partition.counts
        else:
            self.counts = lengths_lib.histogram(pieces.numbered())
        counts = self.counts.copy()
        counts[0] = 0
        number = -(-int(counts.sum()) // window) if self._partition else 1
        kinds = _even_kinds if by_row and number > 1 else _whole_kinds
        self.kinds = [
            Kind(number, Slots(packed, pieces.positions), first)
            for number, packed, first in kinds(counts, search, number, window)
        ]
        # The kind of each window, by its number; batches and rows of each bucket in it.
        numbers = [kind.number for kind in self.kinds]
        self._kind = np.repeat(np.arange(len(self.kinds)), numbers)
        all_packed = [kind.slots.packed for kind in self.kinds]
        buckets = range(len(all_packed[0].buckets))
        of_kinds = np.array([[each.batches(i) for each in all_packed] for i in buckets])
        self._batches = of_kinds[:, self._kind]
        of_kinds = np.array([[each.rows(i) for each in all_packed] for i in buckets])
        self._rows = of_kinds[:, self._kind]
        self.batches, self.rows = self._batches.sum(axis=1), self._rows.sum(axis=1)
        of_kinds = np.array([[each.real(i) for each in all_packed] for i in buckets])
        self.real = of_kinds @ np.array(numbers)
        self._latest: Order | None = None
        # The current window, the next, and the last for readers that lag behind.
        self._dealer = Dealer(self, 3)

    def __len__(self) -> int:
        return len(self._kind)

    @property
    def steps(self) -> int:
        """Batches in an epoch."""
        return int(self.batches.sum())

    def order(self, epoch: int) -> Order:
        """The windows of an epoch."""
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
            latest = self._latest = Order(epoch, order, steps, rows)
        return latest

    def batches_at(self, epoch: int, place: int | slice) -> np.ndarray:
        """Batches of each bucket in the window at `place` of the epoch's order: int64 [buckets].

        Of a slice of places, [buckets, places].
        """
        return self._batches[:, self.order(epoch).windows[place]]

    def offsets(self, epoch: int, place: int) -> list[int]:
        """For each bucket, where between even places its batches fall, from 0 to 2**24."""
        window = int(self.order(epoch).windows[place])
        if not self._shuffle:
            return [1 << 23] * len(self.batches)
        return [
            int(self._random(Purpose.PHASE, 1, epoch, window, bucket)[0] >> np.uint64(40))
            for bucket in range(len(self.batches))
        ]

    def take(self, epoch: int, bucket: int, first: int, count: int) -> Rows:
        """At most `count` rows of a bucket from row `first` of the epoch on, of one window."""
        order = self.order(epoch)
        ends = order.rows[bucket]
        place = int(ends.searchsorted(first, side="right"))
        begin = int(ends[place - 1]) if place else 0
        end = min(first + count, int(ends[place]))
        dealt = self._dealer.get(order.epoch, place)
        if 2 * (end - begin) > ends[place] - begin:
            more, following = divmod(place + 1, len(self))
            self._dealer.prepare((order.epoch + more) if self._shuffle else 0, following)
        return Rows(dealt, bucket, dealt.rows[bucket][first - begin : end - begin])

    def left(self, epoch: int, taken: np.ndarray) -> np.ndarray:
        """The pieces that an epoch has left when so many rows of each bucket are taken.

        Only windows of which some rows are taken and others not are dealt.
        """
        order = self.order(epoch)
        begins = order.rows - self._rows[:, order.windows]
        some = order.rows > begins
        untouched = ~(some & (taken[:, None] > begins)).any(axis=0)
        over = ~some | (taken[:, None] >= order.rows)
        found = []
        for place in np.flatnonzero(~over.all(axis=0)).tolist():
            if untouched[place]:
                pieces, sizes = self._members(int(order.windows[place]))
                found.append(np.flatnonzero(sizes) if pieces is None else pieces)
                continue
            dealt = self._dealer.get(order.epoch, place)
            for bucket, rows in enumerate(dealt.rows):
                first = min(max(int(taken[bucket] - begins[bucket, place]), 0), len(rows))
                found.append(dealt.left(bucket, first))
        pieces = np.concatenate([lengths_lib.NONE, *found]).astype(np.int64)
        pieces.sort()
        return pieces

    def _members(self, window: int) -> tuple[np.ndarray | None, np.ndarray]:
        """The pieces of a window, and their sizes; None for a window of all of them, by number."""
        if self._partition is None:
            return None, self.pieces.numbered()
        kind = self.kinds[self._kind[window]]
        share = kind.slots.packed.counts
        nth = window - int(np.searchsorted(self._kind, self._kind[window]))
        return self._partition.members(kind.first + nth * share, share)

    def deal(self, epoch: int, place: int) -> Dealt:
        """Deals the window at `place` of the epoch's order: a pure function."""
        window = int(self.order(epoch).windows[place])
        slots = self.kinds[self._kind[window]].slots
        members, sizes = self._members(window)
        bits = None
        if self._shuffle:
            bits = self._random(Purpose.EXAMPLES, len(sizes), epoch, window)
        order = sort_by_group(sizes, bits)
        order = order[np.count_nonzero(sizes == 0) :]  # size 0 is in no batch
        pieces = order if members is None else members[order]
        rows = []
        for bucket in range(len(self.batches)):
            if self._shuffle:
                count = slots.packed.rows(bucket)
                rows.append(permutation(self._random(Purpose.ROWS, count, epoch, window, bucket)))
            else:
                rows.append(sort_by_group(pieces[slots.first_piece(bucket)], None))
        return Dealt(slots, pieces, rows)

    def _random(self, purpose: Purpose, count: int, epoch: int, window: int, bucket: int = 0):
        return random_bits(self._seed, purpose, count, epoch=epoch, window=window, bucket=bucket)


def _whole_kinds(
    counts: np.ndarray, search: Callable[..., Packed], number: int, window: int
) -> list[tuple[int, Packed, np.ndarray]]:
    """How many windows share which rows, of whole batches; then what is left over, so again."""
    kinds = []
    first = np.zeros_like(counts)
    while True:
        packed = search(counts // number, whole=number > 1)
        while number > 1 and not packed.counts.any():
            # So many sizes that a window has none of each, or no whole batch: fewer windows.
            number //= 2
            packed = search(counts // number, whole=number > 1)
        if packed.counts.any():
            kinds.append((number, packed, first))
        first = first + number * packed.counts
        counts = counts - number * packed.counts
        if number == 1:
            return kinds
        number = max(-(-int(counts.sum()) // window), 1)


def _even_kinds(
    counts: np.ndarray, search: Callable[..., Packed], number: int, window: int
) -> list[tuple[int, Packed, np.ndarray]]:
    """Windows that have as many pieces of each size, up to one: a kind each."""
    del window
    # Which windows have one more of a size differs from size to size (by Fibonacci hashing).
    phase = np.arange(len(counts), dtype=np.uint64) * np.uint64(0x9E3779B1) % np.uint64(1 << 32)
    phase = (phase * np.uint64(number) >> np.uint64(32)).astype(np.int64)
    edges = [(window * counts + phase) // number for window in range(number + 1)]
    packed = [search(last - first, whole=False) for first, last in pairwise(edges)]
    found = zip(packed, edges, strict=False)
    return [(1, each, first) for each, first in found if each.counts.any()]
