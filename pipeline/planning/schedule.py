"""Schedules: the bucket of each step, and the rows it takes from each stream.

The steps of a single stream are those of its epochs: the rest of epochs in progress, and then each
whole epoch, whose last batches may be short. `pipeline.planning.mixture` has those of several.

A curriculum sorts the steps of each of its cycles by bucket. A cycle is a share of an epoch; in a
mixture, of the steps that take as many tokens as all its corpora have.

Epochs, and the intervals of a mixture, are made when their steps are needed. Each is a pure
function of the rows taken before it, so any number of threads may make it.
"""

import abc
import bisect
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from pipeline.planning.options import Options
from pipeline.planning.order import Purpose, random_bits, random_key
from pipeline.planning.quota import ORDERS, Order, Quota
from pipeline.planning.rows import Rows
from pipeline.planning.stream import Stream

# More rows than are ever taken.
NEVER = 1 << 62

# The epochs of a single stream that are kept: readers are in a few at a time.
KEPT = 8


class Counters(NamedTuple):
    """The batches and rows taken before a step."""

    batches: np.ndarray  # int64 [buckets]
    rows: np.ndarray  # int64 [buckets, streams]


class Schedule(abc.ABC):
    """Steps from `start` on, for ever.

    Rows are numbered by bucket, as in their stream. Consecutive steps of a bucket take consecutive
    rows of each stream, which reading in blocks and the order of rows rely on.

    Attributes:
        start: the first step.
    """

    def __init__(self, start: int, streams: Sequence[Stream], options: Options):
        self.start, self._options = start, options
        self._rows_per_batch = np.array([bucket.rows for bucket in options.buckets])
        # The epoch of the first row of each stream, and that of its first whole epoch.
        self._first, self._later = np.array(
            [[stream.passes[0].epoch, stream.whole.epoch] for stream in streams]
        ).T
        # The rows of each bucket and stream before whole epochs, and those of a whole epoch.
        self._rest = np.stack([stream.whole.start for stream in streams], axis=1)
        self._whole = np.stack([stream.whole.counts for stream in streams], axis=1)

    @abc.abstractmethod
    def at(self, step: int) -> tuple[int, list[tuple[int, int, int]]]:
        """The shape of a step, which is the number of its bucket; and its rows.

        Rows are of a stream by number, from a first one on: (stream, first row, how many).
        """

    @abc.abstractmethod
    def before(self, step: int) -> Counters:
        """The batches and rows taken before a step."""

    @abc.abstractmethod
    def epoch_of(self, step: int) -> int:
        """The epoch of a step."""

    @property
    def weighted(self) -> np.ndarray:
        """Whether each stream has rows: bool [streams]."""
        return np.ones(len(self._first), bool)

    @property
    def repeated(self) -> list[int]:
        """The numbers of the buckets of whole epochs."""
        return np.flatnonzero(self._whole[:, self.weighted].any(axis=1)).tolist()

    def epochs(self, step: int) -> list[int]:
        """The least epoch of each stream that is not over before a step."""
        return self._epochs_after(self.before(step).rows)

    def _epochs_after(self, rows: np.ndarray) -> list[int]:
        """As `epochs`, after some rows [buckets, streams]."""
        times = (rows - self._rest) // np.maximum(self._whole, 1)
        times = times.min(axis=0, initial=NEVER, where=self._whole > 0)
        is_whole = (rows >= self._rest).all(axis=0)
        return np.where(is_whole, self._later + times, self._first).tolist()

    def first_step(self, epoch: int) -> int:
        """The first step of an epoch, and at least `start`."""
        return find_first(lambda step: self.epoch_of(step) >= epoch, self.start - 1)

    def first_repeat(self) -> int:
        """The first step from `start` on with rows that a stream had in an epoch before."""
        once = self._rest + self._whole * (self._later == 0)
        return find_first(lambda at: bool((self.before(at).rows > once).any()), self.start) - 1

    def _order(self, quota: Quota, places: int, *, done: int = 0, end: int | None = None) -> Order:
        """The order of buckets: that of a quota, or of a curriculum that keeps it.

        A curriculum has `options.cycles` cycles in `places`; `done`, `end`: as for `ShortFirst`.
        """
        if self._options.curriculum is None:
            return quota
        make, cycles = ORDERS[self._options.curriculum], self._options.cycles
        return make(quota, places=places, cycles=cycles, done=done, end=end)

    def block_around(self, step: int, size: int) -> range:
        """The steps of the block of a step, within its epoch; blocks of `size` begin at step 0."""
        epoch, first = self.epoch_of(step), step // size * size
        begin, end = max(first, self.start), first + size
        begin += bisect.bisect_left(range(begin, step), epoch, key=self.epoch_of)
        if self.epoch_of(end - 1) > epoch:
            end = step + 1 + bisect.bisect(range(step + 1, end), epoch, key=self.epoch_of)
        return range(begin, end)


class PassSteps(NamedTuple):
    """The steps of a single stream that take the rows of one of its passes."""

    start: int  # the first step
    rows: Rows
    batches: np.ndarray  # int64 [buckets], those of one repetition
    steps: int  # of one repetition
    before: np.ndarray  # int64 [buckets], the batches before it


class Epoch(NamedTuple):
    """Consecutive steps of a single stream: an epoch, or the rest of those in progress."""

    start: int  # its first step
    order: Order  # divides its steps among buckets
    batches: np.ndarray  # int64 [buckets], those before it
    begin: np.ndarray  # int64 [buckets], the rows of the stream before it
    end: np.ndarray  # int64 [buckets], the rows of the stream before the next one


class Single(Schedule):
    """The steps of one stream: the rest of its epochs in progress, then one whole epoch each."""

    def __init__(self, start: int, stream: Stream, options: Options):
        super().__init__(start, [stream], options)
        self._passes: list[PassSteps] = []
        before = 0 * self._rows_per_batch
        for rows in stream.passes:
            batches = -(-rows.counts // self._rows_per_batch)
            self._passes.append(PassSteps(start, rows, batches, int(batches.sum()), before))
            before, start = before + batches, start + int(batches.sum())
        self._epochs: tuple[Epoch, ...] = ()  # those made last

    def _find(self, step: int) -> tuple[int, PassSteps]:
        """How often the pass of a step is over before it, and that pass."""
        its_pass = self._passes[-1] if step >= self._passes[-1].start else self._passes[0]
        return (step - its_pass.start) // its_pass.steps, its_pass

    def _epoch_at(self, step: int) -> Epoch:
        times, (first, rows, batches, steps, before) = self._find(step)
        start, epochs = first + times * steps, self._epochs
        if same := [epoch for epoch in epochs if epoch.start == start]:
            return same[0]
        phase = 0
        if self._options.shuffle:
            key = random_key(self._options.seed, "buckets", rows.repeats)
            bits = random_bits(key, Purpose.BUCKETS, 1, epoch=rows.epoch + times)
            phase = int(bits[0]) % steps
        quota, begin = Quota(batches.tolist(), first=phase), rows.start + times * rows.counts
        order = self._order(quota, self._passes[-1].steps, end=steps)
        epoch = Epoch(start, order, before + times * batches, begin, begin + rows.counts)
        self._epochs = (epoch, *epochs[: KEPT - 1])
        return epoch

    def at(self, step: int) -> tuple[int, list[tuple[int, int, int]]]:
        """See `Schedule`."""
        epoch = self._epoch_at(step)
        place = step - epoch.start
        ((shape, number, _),) = epoch.order.between(place, place + 1)
        rows = int(self._rows_per_batch[shape])
        first = int(epoch.begin[shape]) + number * rows
        return shape, [(0, first, min(rows, int(epoch.end[shape]) - first))]

    def before(self, step: int) -> Counters:
        """See `Schedule`."""
        epoch = self._epoch_at(step)
        batches = np.array(epoch.order.before(step - epoch.start))
        rows = np.minimum(epoch.begin + batches * self._rows_per_batch, epoch.end)
        return Counters(epoch.batches + batches, rows[:, None])

    def epoch_of(self, step: int) -> int:
        """See `Schedule`."""
        times, its_pass = self._find(step)
        return its_pass.rows.epoch + times


def find_first(holds: Callable[[int], bool], after: int) -> int:
    """The first step after `after` at which a condition holds; it must then hold for ever."""
    low, high = after, after + 1
    while not holds(high):
        low, high = high, 3 * high - 2 * low
    return bisect.bisect_left(range(high), True, lo=low + 1, key=holds)
