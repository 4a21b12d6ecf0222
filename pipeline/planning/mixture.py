"""Mixtures: the schedule of several corpora, each with its share of the rows of any few steps.

The steps of a mixture are in intervals, which end where a stream ends the rest of an epoch. In an
interval, each stream has a constant rate, so a quota gives any step without the steps before it.
`find_rates` is the rule that gives streams their rates, from weights. All else keeps count, to a
part of a row, of what each stream has had and is owed.
"""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from pipeline.planning.options import Options
from pipeline.planning.quota import Order, Quota
from pipeline.planning.rows import Rows
from pipeline.planning.schedule import Counters, Schedule, find_first
from pipeline.planning.stream import Stream

# What streams are owed is counted in units of 1 / UNIT row; their pace, in units of 1 / PACE pass.
UNIT, PACE = 1 << 64, 1 << 160


def find_rates(passes: Sequence[Rows], weights: Sequence[Fraction], unit: int) -> list[list[int]]:
    """For each bucket, the rows of each stream in the time in which all take `unit` positions.

    The weight of a stream gives the pace of its pass, and the pace gives the rows of each bucket.
    Positions are those of `Rows.size`, which may count examples. `fit.typical_lengths` follows the
    same rule, before there are rows.
    """
    paces = [
        unit * weight.numerator // (weight.denominator * rows.size)
        for rows, weight in zip(passes, weights, strict=True)
    ]
    of_buckets = zip(*(rows.counts.tolist() for rows in passes), strict=True)
    return [
        [pace * count for pace, count in zip(paces, of_bucket, strict=True)]
        for of_bucket in of_buckets
    ]


class Progress(NamedTuple):
    """What the streams of a mixture have had before a step, and what they are owed."""

    counters: Counters
    owed: Sequence[Sequence[int]]  # for each bucket, the rows owed to each stream, times `UNIT`
    done: int  # the steps of the cycle in progress, if there is a curriculum


class Taken(NamedTuple):
    """What a mixture has given out before a step, at which another one takes over."""

    epoch: int = 0  # of the step
    # What to add to each stream's epochs for those of the plan; None without a weight.
    offsets: Sequence[int | None] = ()
    progress: Progress | None = None  # None: the streams are new


NOTHING = Taken()


@dataclasses.dataclass(frozen=True)
class Interval:
    """Consecutive steps of a mixture with constant rates."""

    start: int  # the first step
    begin: Progress  # before it
    rows_per_batch: np.ndarray  # int64 [buckets]
    bucket_order: Order  # divides steps among buckets
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
        begin = self.begin.counters
        return Counters(begin.batches + steps, begin.rows + rows)

    def progress(self, step: int) -> Progress:
        """The progress before a step."""
        steps, counters = (step - self.start) * UNIT, self.before(step)
        taken = (counters.rows - self.begin.counters.rows).tolist()
        owed = [
            [
                had + rate * steps // self.per_step - n * UNIT
                for had, rate, n in zip(*of_bucket, strict=True)
            ]
            for of_bucket in zip(self.begin.owed, self.rates, taken, strict=True)
        ]
        return Progress(counters, owed, self.bucket_order.done(step - self.start))

    def at(self, step: int) -> tuple[int, list[tuple[int, int, int]]]:
        """See `Schedule.at`."""
        place = step - self.start
        ((shape, number, _),) = self.bucket_order.between(place, place + 1)
        rows, base = int(self.rows_per_batch[shape]), self.begin.counters.rows[shape].tolist()
        ranges = self.stream_quotas[shape].between(number * rows, (number + 1) * rows)
        return shape, [(stream, base[stream] + low, high - low) for stream, low, high in ranges]


class Mixture(Schedule):
    """The steps of several streams.

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
        self._streams = streams
        self._weights = [weights[stream.name] for stream in streams]
        self._unit = PACE * math.lcm(*self._rows_per_batch.tolist())
        self._intervals: tuple[Interval, ...] = ()  # those that are known by now
        none = np.zeros((len(options.buckets), 0), np.int64)
        nothing = Progress(Counters(none, none), [()] * len(none), 0)
        (_, rows), owed, done = taken.progress or nothing
        new = len(streams) - rows.shape[1]
        counters = Counters(0 * self._rows_per_batch, np.pad(rows, ((0, 0), (0, new))))
        self._begin = Progress(counters, [[*of_bucket, *[0] * new] for of_bucket in owed], done)
        # Streams that had a weight before keep their offset.
        begun = self._epochs_after(self._begin.counters.rows)
        of_streams = itertools.zip_longest(self._weights, begun, taken.offsets)
        self._offsets = [
            (taken.epoch - begun_epoch if offset is None else offset) if weight else None
            for weight, begun_epoch, offset in of_streams
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
        if step == self.start:
            return self._begin.counters
        return self._interval(step - 1).before(step)

    def epoch_of(self, step: int) -> int:
        """See `Schedule`."""
        epochs = zip(self.epochs(step), self._offsets, strict=True)
        return min(epoch + offset for epoch, offset in epochs if offset is not None)

    def taken(self, step: int, *, replan: bool) -> Taken:
        """What the mixture from `step` on goes on from; with `replan`, it has new streams."""
        progress = None
        if not replan:
            begins = step == self.start
            progress = self._begin if begins else self._interval(step - 1).progress(step)
        return Taken(self.epoch_of(step), self._offsets, progress)

    def _interval(self, step: int) -> Interval:
        while True:
            intervals = self._intervals
            end = intervals[-1].end if intervals else self.start
            if end is None or step < end:
                starts = [interval.start for interval in intervals]
                return intervals[bisect.bisect_right(starts, step) - 1]
            begin = intervals[-1].progress(end) if intervals else self._begin
            self._intervals = (*intervals, self._next_interval(end, begin))

    def _next_interval(self, start: int, begin: Progress) -> Interval:
        """The interval from a step on.

        It ends when a stream has taken the rest of its epochs in progress. Rows owed to streams are
        carried over to the next interval: otherwise, a small rate would never have a row in short
        intervals.
        """
        passes = [
            stream.whole if (rows >= stream.whole.start).all() else stream.passes[0]
            for stream, rows in zip(self._streams, begin.counters.rows.T, strict=True)
        ]
        rates = find_rates(passes, self._weights, self._unit)
        batches, owed_batches = (
            [
                sum(of_bucket) // rows
                for of_bucket, rows in zip(of_rows, self._rows_per_batch.tolist(), strict=True)
            ]
            for of_rows in (rates, begin.owed)
        )
        weighted = np.flatnonzero(self.weighted).tolist()
        size = sum(self._streams[number].whole.size for number in weighted)
        cycle = max(round(Fraction(sum(batches) * size, self._unit)), 1)
        interval = Interval(
            start,
            begin,
            self._rows_per_batch,
            self._order(Quota(batches, owed_batches, UNIT), cycle, done=begin.done),
            [Quota(rate, owed, UNIT) for rate, owed in zip(rates, begin.owed, strict=True)],
            rates,
            per_step=sum(batches),
        )
        rests = [number for number in weighted if not passes[number].repeats]
        if not rests:
            return interval
        ends = np.stack([passes[number].counts for number in rests], axis=1)

        def is_over(step: int) -> bool:
            return bool((interval.before(step).rows[:, rests] >= ends).all(axis=0).any())

        return dataclasses.replace(interval, end=find_first(is_over, start))
