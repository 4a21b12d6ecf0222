"""Schedules: the bucket of each step, and the rows it takes from each stream.

The steps of a single stream are those of its epochs: the rest of epochs in progress, and then each
whole epoch, whose last batches may be short. The steps of a mixture are in intervals, which end
where a stream ends the rest of an epoch. In an interval, each stream has a constant rate, so a
quota gives any step without the steps before it.

A curriculum sorts the steps of each of its cycles by bucket. A cycle is a share of an epoch; in a
mixture, of the steps that take as many tokens as all its corpora have.

Epochs and intervals are made when their steps are needed. Each is a pure function of the rows taken
before it, so any number of threads may make it.
"""

import abc
import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from pipeline.planning.options import Options
from pipeline.planning.order import Purpose, Quota, ShortFirst, random_bits, random_key
from pipeline.planning.rows import Rows
from pipeline.planning.stream import Stream

# What streams are owed is counted in units of 1 / UNIT row; their pace, in units of 1 / PACE pass.
UNIT, PACE = 1 << 64, 1 << 160

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

    def _order(self, quota: Quota, places: int, **cycle: Any) -> Quota | ShortFirst:
        """The order of buckets: that of a quota, or of cycles, `options.cycles` in `places`."""
        if self._options.curriculum is None:
            return quota
        return ShortFirst(quota, places=places, cycles=self._options.cycles, **cycle)

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
    order: Quota | ShortFirst  # divides its steps among buckets
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
        start, kept = first + times * steps, self._epochs
        if known := [epoch for epoch in kept if epoch.start == start]:
            return known[0]
        phase = 0
        if self._options.shuffle:
            key = random_key(self._options.seed, "buckets", rows.repeats)
            bits = random_bits(key, Purpose.BUCKETS, 1, epoch=rows.epoch + times)
            phase = int(bits[0]) % steps
        quota, begin = Quota(batches.tolist(), first=phase), rows.start + times * rows.counts
        order = self._order(quota, self._passes[-1].steps, end=steps)
        epoch = Epoch(start, order, before + times * batches, begin, begin + rows.counts)
        self._epochs = (epoch, *kept[: KEPT - 1])
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


class Taken(NamedTuple):
    """What a mixture has given out before a step, at which another one takes over."""

    epoch: int = 0  # of the step
    # What to add to each stream's epochs for those of the plan; None without a weight.
    offsets: Sequence[int | None] = ()
    # The rows of each bucket and stream, int64 [buckets, streams], and those owed to it, times
    # `UNIT`; None if the streams are new.
    rows: np.ndarray | None = None
    owed: Sequence[Sequence[int]] = ()
    done: int = 0  # the steps of the cycle in progress, if there is a curriculum


NOTHING = Taken()


@dataclasses.dataclass(frozen=True)
class Interval:
    """Consecutive steps of a mixture with constant rates."""

    start: int  # the first step
    begin: Counters  # what was taken before it
    owed: Sequence[Sequence[int]]  # for each bucket, the rows owed to each stream, times `UNIT`
    rows_per_batch: np.ndarray  # int64 [buckets]
    bucket_order: Quota | ShortFirst  # divides steps among buckets
    stream_quotas: Sequence[Quota]  # for each bucket, divides its rows among streams
    # For each bucket, the rows of each stream in a step, times `per_step`.
    rates: Sequence[Sequence[int]]
    per_step: int
    end: int | None = None  # one past the last step; None if the interval never ends

    def before(self, step: int) -> Counters:
        """The batches and rows taken before a step."""
        steps = np.array(self.bucket_order.before(step - self.start))
        taken = (steps * self.rows_per_batch).tolist()
        of_buckets = zip(self.stream_quotas, taken, strict=True)
        rows = np.array([quota.before(place) for quota, place in of_buckets])
        return Counters(self.begin.batches + steps, self.begin.rows + rows)

    def owed_at(self, step: int) -> list[list[int]]:
        """What is owed to each stream before a step, as `owed`."""
        steps = (step - self.start) * UNIT
        taken = (self.before(step).rows - self.begin.rows).tolist()
        return [
            [
                had + rate * steps // self.per_step - n * UNIT
                for had, rate, n in zip(*of_bucket, strict=True)
            ]
            for of_bucket in zip(self.owed, self.rates, taken, strict=True)
        ]

    def done_at(self, step: int) -> int:
        """The steps before a step in its cycle; 0 without a curriculum."""
        order = self.bucket_order
        return order.done(step - self.start) if isinstance(order, ShortFirst) else 0

    def at(self, step: int) -> tuple[int, list[tuple[int, int, int]]]:
        """See `Schedule.at`."""
        place = step - self.start
        ((shape, number, _),) = self.bucket_order.between(place, place + 1)
        rows, base = int(self.rows_per_batch[shape]), self.begin.rows[shape].tolist()
        ranges = self.stream_quotas[shape].between(number * rows, (number + 1) * rows)
        return shape, [(stream, base[stream] + low, high - low) for stream, low, high in ranges]


class Mixture(Schedule):
    """The steps of several streams, each with its share of the rows of any few steps.

    The epoch of a step is the least of the epochs of all streams with a weight; a stream that gets
    a weight later counts its epochs from the epoch of that step.
    """

    def __init__(
        self,
        start: int,
        streams: Sequence[Stream],
        options: Options,
        weights: Mapping[str, Fraction],
        taken: Taken = NOTHING,
    ):
        """`taken` is what the mixture before this one has given out; default: there is none."""
        super().__init__(start, streams, options)
        none = np.zeros((len(options.buckets), 0), np.int64)
        had = none if taken.rows is None else taken.rows
        new = len(streams) - had.shape[1]
        owed = taken.owed or [()] * len(none)
        self._owed = [[*of_bucket, *[0] * new] for of_bucket in owed]
        self._done = taken.done
        self._begin = Counters(0 * self._rows_per_batch, np.pad(had, ((0, 0), (0, new))))
        self._streams = streams
        self._weights = [weights[stream.name] for stream in streams]
        self._unit = PACE * math.lcm(*self._rows_per_batch.tolist())
        self._intervals: tuple[Interval, ...] = ()  # those that are known by now
        # Streams that had a weight before keep their offset.
        begun = self._epochs_after(self._begin.rows)
        of_streams = itertools.zip_longest(self._weights, begun, taken.offsets)
        self._offsets = [
            (taken.epoch - own if offset is None else offset) if weight else None
            for weight, own, offset in of_streams
        ]

    @property
    def weighted(self) -> np.ndarray:
        """See `Schedule`."""
        return np.array(self._weights, bool)

    def at(self, step: int) -> tuple[int, list[tuple[int, int, int]]]:
        """See `Schedule`."""
        return self._interval(step).at(step)

    def before(self, step: int) -> Counters:
        """See `Schedule`."""
        return self._begin if step == self.start else self._interval(step - 1).before(step)

    def epoch_of(self, step: int) -> int:
        """See `Schedule`."""
        epochs = zip(self.epochs(step), self._offsets, strict=True)
        return min(epoch + offset for epoch, offset in epochs if offset is not None)

    def taken(self, step: int, *, replan: bool) -> Taken:
        """What the mixture from `step` on goes on from; with `replan`, it has new streams."""
        now = Taken(self.epoch_of(step), self._offsets)
        if replan:
            return now
        owed, done = self._owed, self._done
        if step > self.start:
            interval = self._interval(step - 1)
            owed, done = interval.owed_at(step), interval.done_at(step)
        return now._replace(rows=self.before(step).rows, owed=owed, done=done)

    def _interval(self, step: int) -> Interval:
        while True:
            known = self._intervals
            end = known[-1].end if known else self.start
            if end is None or step < end:
                starts = [interval.start for interval in known]
                return known[bisect.bisect_right(starts, step) - 1]
            begin, owed, done = self._begin, self._owed, self._done
            if known:
                begin, owed = known[-1].before(end), known[-1].owed_at(end)
                done = known[-1].done_at(end)
            self._intervals = (*known, self._next_interval(end, begin, owed, done))

    def _find_rates(self, passes: Sequence[Rows]) -> list[list[int]]:
        """For each bucket, the rows of each stream in a unit of time.

        The weight of a stream gives the pace of its pass, and the pace gives the rows of each
        bucket.
        """
        rates: list[list[int]] = [[] for _ in self._rows_per_batch]
        for rows, weight in zip(passes, self._weights, strict=True):
            pace = self._unit * weight.numerator // (weight.denominator * rows.size)
            for of_bucket, count in zip(rates, rows.counts.tolist(), strict=True):
                of_bucket.append(pace * count)
        return rates

    def _next_interval(
        self, start: int, begin: Counters, owed: Sequence[Sequence[int]], done: int
    ) -> Interval:
        """The interval from a step on.

        It ends when a stream has taken the rest of its epochs in progress. Rows owed to streams are
        carried over to the next interval: otherwise, a small rate would never have a row in short
        intervals.
        """
        passes = [
            stream.whole if (rows >= stream.whole.start).all() else stream.passes[0]
            for stream, rows in zip(self._streams, begin.rows.T, strict=True)
        ]
        of_streams = enumerate(zip(passes, self._weights, strict=True))
        rests = [n for n, (rows, weight) in of_streams if weight and not rows.repeats]
        rates = self._find_rates(passes)
        in_batches = [
            [
                sum(of_bucket) // n
                for of_bucket, n in zip(of_rows, self._rows_per_batch.tolist(), strict=True)
            ]
            for of_rows in (rates, owed)
        ]
        per_step = sum(in_batches[0])
        sizes = [
            stream.whole.size for stream, w in zip(self._streams, self._weights, strict=True) if w
        ]
        quota = Quota(in_batches[0], in_batches[1], UNIT)
        interval = Interval(
            start,
            begin,
            owed,
            self._rows_per_batch,
            self._order(
                quota, max(round(Fraction(per_step * sum(sizes), self._unit)), 1), done=done
            ),
            [Quota(rate, had, UNIT) for rate, had in zip(rates, owed, strict=True)],
            rates,
            per_step,
        )
        if not rests:
            return interval
        ends = np.stack([passes[number].counts for number in rests], axis=1)

        def is_over(step: int) -> bool:
            return bool((interval.before(step).rows[:, rests] >= ends).all(axis=0).any())

        return dataclasses.replace(interval, end=find_first(is_over, start))


def find_first(holds: Callable[[int], bool], after: int) -> int:
    """The first step after `after` at which a condition holds; it must then hold for ever."""
    low, high = after, after + 1
    while not holds(high):
        low, high = high, 3 * high - 2 * low
    return bisect.bisect_left(range(high), True, lo=low + 1, key=holds)
