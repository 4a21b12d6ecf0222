"""Schedules: the bucket of each step, and the rows it takes from each stream.

A schedule is a list of intervals, made when their steps are needed. Shares are constant in an
interval, so a quota gives any step without the steps before it. The intervals of a single stream
are the rest of epochs in progress and each whole epoch; their last batches may be short. With
several streams, an interval ends where one of them ends the rest of an epoch.

An interval is a pure function of the rows taken before it, so any number of threads may make it.
"""

import abc
import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from pipeline.planning.options import Options
from pipeline.planning.order import Purpose, Quota, random_bits, random_key
from pipeline.planning.stream import Leg, Stream

# What streams are owed is counted in units of 1 / UNIT row; their pace, in units of 1 / PACE pass.
UNIT, PACE = 1 << 64, 1 << 160

# More rows than are ever taken.
NEVER = 1 << 62

# The epochs of a single stream whose intervals are kept: readers are in a few at a time.
KEPT = 8


class Taken(NamedTuple):
    """The batches and rows taken before a step."""

    step: int
    batches: np.ndarray  # int64 [buckets]
    rows: np.ndarray  # int64 [buckets, streams]
    owed: Sequence[Sequence[int]]  # for each bucket, those owed to several streams, times `UNIT`


@dataclasses.dataclass(frozen=True)
class Interval:
    """Consecutive steps with constant shares."""

    begin: Taken  # what was taken before it
    rows_per_batch: np.ndarray  # int64 [buckets]
    bucket_quota: Quota  # divides steps among buckets
    stream_quotas: Sequence[Quota]  # for each bucket, divides its rows among streams
    # int64 [buckets, streams], the rows at the end of a pass, whose last batches may be short; or
    # `NEVER`.
    most_rows: np.ndarray
    # Of several streams: for each bucket, the rows of each in a step, times `per_step`; and one
    # past the last step, or None if the interval never ends.
    shares: Sequence[Sequence[int]] = ()
    per_step: int = 1
    end: int | None = None

    @property
    def start(self) -> int:
        """The first step."""
        return self.begin.step

    def before(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """`batches` and `rows` of `taken(step)`."""
        steps = np.array(self.bucket_quota.before(step - self.start))
        taken = (steps * self.rows_per_batch).tolist()
        each = zip(self.stream_quotas, taken, strict=True)
        rows = self.begin.rows + np.array([quota.before(place) for quota, place in each])
        return self.begin.batches + steps, np.minimum(rows, self.most_rows)

    def at(self, step: int) -> tuple[int, list[tuple[int, int, int]]]:
        """See `Schedule.at`."""
        place = step - self.start
        ((bucket, number, _),) = self.bucket_quota.between(place, place + 1)
        rows, quota = int(self.rows_per_batch[bucket]), self.stream_quotas[bucket]
        first = number * rows
        most, base = self.most_rows[bucket].tolist(), self.begin.rows[bucket].tolist()
        return (
            bucket,
            [
                (
                    stream,
                    base[stream] + begin,
                    min(end - begin, most[stream] - base[stream] - begin),
                )
                for stream, begin, end in quota.between(first, first + rows)
            ],
        )

    def taken(self, step: int) -> Taken:
        """The batches and rows taken before a step."""
        (batches, rows), owed = self.before(step), self.begin.owed
        if self.shares:
            steps, taken = (step - self.start) * UNIT, (rows - self.begin.rows).tolist()
            owed = [
                [
                    had + share * steps // self.per_step - n * UNIT
                    for had, share, n in zip(*of_bucket, strict=True)
                ]
                for of_bucket in zip(owed, self.shares, taken, strict=True)
            ]
        return Taken(step, batches, rows, owed)


class Schedule(abc.ABC):
    """Steps from `start` on, for ever. Rows of a bucket are numbered from those of the stream on.

    Attributes:
        start: the first step.
        offsets: what to add to each stream's epochs for those of the plan; None without a weight.
    """

    offsets: tuple[int | None, ...] = (0,)

    def __init__(self, start: int, streams: Sequence[Stream], options: Options, begin: Taken):
        """`begin` is what was taken of the streams before `start`."""
        self.start, self._options, self._begin = start, options, begin
        self._rows = np.array([bucket.rows for bucket in options.buckets])
        # The epoch of the first row of each stream, and that of its first whole epoch.
        self._first, self._later = np.array(
            [[stream.legs[0].epoch, stream.legs[-1].epoch] for stream in streams]
        ).T
        # The rows of each bucket and stream before whole epochs, and those of a whole epoch.
        self._rest = np.stack([stream.legs[-1].start for stream in streams], axis=1)
        self._whole = np.stack([stream.whole.rows for stream in streams], axis=1)

    @abc.abstractmethod
    def _interval(self, step: int) -> Interval:
        """The interval of a step."""

    @abc.abstractmethod
    def epoch_of(self, step: int) -> int:
        """The epoch of a step."""

    @property
    def repeated(self) -> list[int]:
        """The numbers of the buckets of whole epochs."""
        weighted = [offset is not None for offset in self.offsets]
        return np.flatnonzero(self._whole[:, weighted].any(axis=1)).tolist()

    def at(self, step: int) -> tuple[int, list[tuple[int, int, int]]]:
        """A step's bucket by number, and its rows: (stream, first row, how many)."""
        return self._interval(step).at(step)

    def taken(self, step: int) -> Taken:
        """The batches and rows taken before a step."""
        return self._begin if step == self.start else self._interval(step - 1).taken(step)

    def epochs(self, step: int) -> list[int]:
        """The least epoch of each stream that is not over before a step."""
        rows = self._interval(max(step - 1, self.start)).before(step)[1]  # faster than `taken`
        return self._epochs_after(rows)

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
        return find_first(lambda at: bool((self.taken(at).rows > once).any()), self.start) - 1

    def block_around(self, step: int, size: int) -> range:
        """The steps of the block of a step, within its epoch; blocks of `size` begin at step 0."""
        epoch, first = self.epoch_of(step), step // size * size
        begin, end = max(first, self.start), first + size
        begin += bisect.bisect_left(range(begin, step), epoch, key=self.epoch_of)
        if self.epoch_of(end - 1) > epoch:
            end = step + 1 + bisect.bisect(range(step + 1, end), epoch, key=self.epoch_of)
        return range(begin, end)


class Single(Schedule):
    """The steps of one stream: the rest of its epochs in progress, then one whole epoch each."""

    def __init__(self, start: int, stream: Stream, options: Options):
        none = np.zeros(len(options.buckets), np.int64)
        super().__init__(start, [stream], options, Taken(start, none, none[:, None], ()))
        *rest, self._repeated = stream.legs
        self._batches = self._count_batches(self._repeated)  # of a whole epoch
        self._resumed = rest[0] if rest else None
        self._batches_before = self._count_batches(rest[0]) if rest else none  # whole epochs
        self._steps = int(self._batches.sum())
        self._epoch_start = start + int(self._batches_before.sum())
        self._intervals: tuple[Interval, ...] = ()  # those made last

    def _count_batches(self, leg: Leg) -> np.ndarray:
        """The batches of each bucket that hold the rows of a leg: int64 [buckets]."""
        return -(-leg.planned.rows // self._rows)

    def _interval(self, step: int) -> Interval:
        times = (step - self._epoch_start) // self._steps
        leg, counts, begin = self._repeated, self._batches, self._begin
        if self._resumed is not None and step < self._epoch_start:
            leg, counts, times = self._resumed, self._batches_before, 0
        else:
            rows = leg.start + times * leg.planned.rows
            batches = self._batches_before + times * counts
            first = self._epoch_start + times * self._steps
            begin = Taken(first, batches, rows[:, None], ())
        kept = self._intervals
        if found := [each for each in kept if each.start == begin.step]:
            return found[0]
        interval = self._make_interval(leg, counts, begin, leg.epoch + times)
        self._intervals = (interval, *kept[: KEPT - 1])
        return interval

    def _make_interval(self, leg: Leg, counts: np.ndarray, begin: Taken, epoch: int) -> Interval:
        """The interval of a leg's rows, in an epoch; `counts` has the batches of each bucket."""
        first, steps = 0, int(counts.sum())
        if self._options.shuffle:
            key = random_key(self._options.seed, "buckets", leg.planned.repeats)
            first = int(random_bits(key, Purpose.BUCKETS, 1, epoch=epoch)[0]) % steps
        return Interval(
            begin,
            self._rows,
            Quota(counts.tolist(), first=first),
            [Quota([1])] * len(counts),
            begin.rows + leg.planned.rows[:, None],
        )

    def epoch_of(self, step: int) -> int:
        """See `Schedule`."""
        if self._resumed is not None and step < self._epoch_start:
            return self._resumed.epoch
        return self._repeated.epoch + (step - self._epoch_start) // self._steps


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
        before: "Mixture | None" = None,
        taken: Taken | None = None,
    ):
        """`before` is the schedule of the steps before `start`, of which streams go on at `taken`.

        None: they are new streams.
        """
        none = np.zeros(len(options.buckets), np.int64)
        had = taken or Taken(start, none, none[:, None][:, :0], [()] * len(none))
        new = len(streams) - had.rows.shape[1]
        rows = np.pad(had.rows, ((0, 0), (0, new)))
        owed = [[*of_bucket, *[0] * new] for of_bucket in had.owed]
        super().__init__(start, streams, options, Taken(start, none, rows, owed))
        self._streams = streams
        self._weights = [weights[stream.name] for stream in streams]
        self._unit = PACE * math.lcm(*self._rows.tolist())
        self._intervals: tuple[Interval, ...] = ()  # those that are known by now
        self.offsets = self._find_offsets(before)

    def _find_offsets(self, before: "Mixture | None") -> tuple[int | None, ...]:
        """`offsets`, where streams that had a weight before keep theirs."""
        if before is None:
            return tuple(0 if weight else None for weight in self._weights)
        begun = self._epochs_after(self._begin.rows)
        epoch = before.epoch_of(self.start)
        each = itertools.zip_longest(self._weights, begun, before.offsets)
        return tuple(
            (epoch - own if had is None else had) if weight else None for weight, own, had in each
        )

    def _interval(self, step: int) -> Interval:
        while True:
            known = self._intervals
            end = known[-1].end if known else self.start
            if end is None or step < end:
                starts = [interval.start for interval in known]
                return known[bisect.bisect_right(starts, step) - 1]
            begin = known[-1].taken(end) if known else self._begin
            self._intervals = (*known, self._next_interval(begin))

    def _find_shares(self, legs: Sequence[Leg]) -> list[list[int]]:
        """For each bucket, the rows of each stream in a unit of time.

        The weight of a stream gives the pace of its leg, and the pace gives the rows of each
        bucket.
        """
        shares: list[list[int]] = [[] for _ in self._rows]
        for leg, weight in zip(legs, self._weights, strict=True):
            pace = self._unit * weight.numerator // (weight.denominator * leg.planned.size)
            for of_bucket, count in zip(shares, leg.planned.rows.tolist(), strict=True):
                of_bucket.append(pace * count)
        return shares

    def _next_interval(self, taken: Taken) -> Interval:
        """The interval after some rows.

        It ends when a stream has taken the rest of its epochs in progress. Rows owed to streams are
        carried over to the next interval: otherwise, a small share would never have a row in short
        intervals.
        """
        legs = [
            stream.legs[-1] if (rows >= stream.legs[-1].start).all() else stream.legs[0]
            for stream, rows in zip(self._streams, taken.rows.T, strict=True)
        ]
        each = enumerate(zip(legs, self._weights, strict=True))
        rests = [n for n, (leg, weight) in each if weight and not leg.planned.repeats]
        shares = self._find_shares(legs)
        in_batches = [
            [sum(each) // n for each, n in zip(of_rows, self._rows.tolist(), strict=True)]
            for of_rows in (shares, taken.owed)
        ]
        interval = Interval(
            taken,
            self._rows,
            Quota(in_batches[0], in_batches[1], UNIT),
            [Quota(each, had, UNIT) for each, had in zip(shares, taken.owed, strict=True)],
            np.full_like(taken.rows, NEVER),
            shares=shares,
            per_step=sum(in_batches[0]),
        )
        if not rests:
            return interval
        ends = np.stack([legs[number].planned.rows for number in rests], axis=1)

        def is_over(step: int) -> bool:
            return bool((interval.before(step)[1][:, rests] >= ends).all(axis=0).any())

        return dataclasses.replace(interval, end=find_first(is_over, interval.start))

    def epoch_of(self, step: int) -> int:
        """See `Schedule`."""
        rows = self._interval(step).before(step)[1]
        epochs = zip(self._epochs_after(rows), self.offsets, strict=True)
        return min(epoch + offset for epoch, offset in epochs if offset is not None)


def find_first(holds: Callable[[int], bool], after: int) -> int:
    """The first step after `after` at which a condition holds; it must then hold for ever."""
    low, high = after, after + 1
    while not holds(high):
        low, high = high, 3 * high - 2 * low
    return bisect.bisect_left(range(high), True, lo=low + 1, key=holds)
