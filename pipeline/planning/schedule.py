"""Schedules: the bucket of each step, and the rows it takes from each stream.

A schedule is a list of intervals, made in order when their steps are needed. Shares are constant in
an interval, so a quota gives any step without the steps before it. With one stream, a pass is one
interval of full batches, then one for each tail; the last batches may be short. With several
streams, an interval ends where one of them ends the rest of an epoch. If a corpus grows, an
interval ends before the first step that needs a further window.

An interval is a pure function of the rows taken before it, so any number of threads may make it.
"""

import bisect
import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from pipeline.planning.growing import Chapter, Window
from pipeline.planning.options import Options
from pipeline.planning.order import Purpose, Quota, random_bits, random_key
from pipeline.planning.stream import Pass, Stream
from pipeline.planning.tails import count_batches

# The epoch of a step is kept for this many steps, if the last of them has the same epoch.
KEEPS = 64

# What streams are owed is counted in units of 1 / UNIT row; their pace, in units of 1 / PACE pass.
UNIT, PACE = 1 << 64, 1 << 160

# More rows than are ever taken.
NEVER = 1 << 62


class Taken(NamedTuple):
    """The batches and rows taken before a step.

    Attributes:
        step: the step.
        batches: int64 [buckets], the batches of each bucket.
        rows: int64 [lengths, streams], the rows of each stream.
        owed: for each length, the rows owed to each of several streams, times `UNIT`.
        windows: for each stream that grows, the number of *available* windows, from which rows may
            have been taken; 0 for other streams.
    """

    step: int
    batches: np.ndarray
    rows: np.ndarray
    owed: Sequence[Sequence[int]]
    windows: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Interval:
    """Consecutive steps with constant shares.

    Attributes:
        begin: what was taken before it; the same windows are available to all its steps.
        buckets: int64 [lengths], the number of the bucket of each length; at the end of a pass,
            that of a tail.
        rows_per_batch: int64 [lengths], the rows of these buckets.
        length_quota: divides steps among lengths. The first step is its place number `rotation`.
        stream_quotas: for each length, divides its rows among streams.
        most_rows: int64 [lengths, streams], the rows at the end of a pass, whose last batches may
            be short; otherwise `NEVER`.
        rotation: the places of `length_quota` before the first step.
        shares: for each length, the rows of each of several streams in a step, times `per_step`.
        end: one past the last step; None if the interval never ends.
    """

    begin: Taken
    buckets: np.ndarray
    rows_per_batch: np.ndarray
    length_quota: Quota
    stream_quotas: Sequence[Quota]
    most_rows: np.ndarray
    rotation: int = 0
    shares: Sequence[Sequence[int]] = ()
    per_step: int = 1
    end: int | None = None

    @property
    def start(self) -> int:
        """The first step."""
        return self.begin.step

    @functools.cached_property
    def _rotated(self) -> list[int]:
        return self.length_quota.before(self.rotation)

    def before(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """`batches` and `rows` of `taken(step)`."""
        places = self.length_quota.before(self.rotation + step - self.start)
        steps = np.subtract(places, self._rotated)
        taken = (steps * self.rows_per_batch).tolist()
        each = zip(self.stream_quotas, taken, strict=True)
        rows = self.begin.rows + np.array([quota.before(place) for quota, place in each])
        batches = self.begin.batches.copy()
        batches[self.buckets] += steps
        return batches, np.minimum(rows, self.most_rows)

    def at(self, step: int) -> tuple[int, list[tuple[int, int, int]]]:
        """The bucket and the rows of a step; see `Schedule.at`."""
        place = self.rotation + step - self.start
        ((length, number, _),) = self.length_quota.between(place, place + 1)
        rows, quota = int(self.rows_per_batch[length]), self.stream_quotas[length]
        first = (number - self._rotated[length]) * rows
        most, base = self.most_rows[length].tolist(), self.begin.rows[length].tolist()
        return int(self.buckets[length]), [
            (stream, base[stream] + begin, min(end - begin, most[stream] - base[stream] - begin))
            for stream, begin, end in quota.between(first, first + rows)
        ]

    def taken(self, step: int) -> Taken:
        """The batches and rows taken before a step."""
        (batches, rows), owed = self.before(step), self.begin.owed
        if self.shares:
            steps, taken = (step - self.start) * UNIT, (rows - self.begin.rows).tolist()
            owed = [
                [
                    had + share * steps // self.per_step - n * UNIT
                    for had, share, n in zip(*of_length, strict=True)
                ]
                for of_length in zip(owed, self.shares, taken, strict=True)
            ]
        return Taken(step, batches, rows, owed, self.begin.windows)


class Schedule:
    """Steps from `start` on; with several streams, each has its share of the rows of any few steps.

    Rows of a length are numbered from the beginning of the stream. The epoch of a step is the least
    of the epochs of all streams with a weight; a stream that gets a weight later counts its epochs
    from the epoch of that step.

    If a corpus grows, the schedule ends with a chapter, whose last batches may be short.

    Attributes:
        start: the first step.
        end: one past the last step; None if steps never end, or while their end is not known.
        offsets: for each stream, the number to add to its epochs for those of the plan; None if it
            has no weight.
        ended: the number of the stream whose chapter ends the schedule, and what was taken by then.
    """

    def __init__(
        self,
        start: int,
        streams: Sequence[Stream],
        options: Options,
        weights: Mapping[str, Fraction] | None = None,
        before: "Schedule | None" = None,
        *,
        taken: Taken | None = None,
        until: int | None = None,
    ):
        """`before` is the schedule of the steps before `start`.

        `taken` is what was taken before `start`, if streams began earlier. The chapter of a single
        corpus ends at step `until`, or at the end of the window of the step before it.
        """
        self.start, self._streams, self._options, self._until = start, streams, options, until
        self._groups = options.groups
        self._rows = np.array([bucket.rows for bucket in options.buckets])  # of each bucket
        self._bucket_of = np.cumsum([0, *map(len, self._groups[:-1])])  # the first of each length
        self._unit = PACE * math.lcm(*self._rows.tolist())
        self._intervals: tuple[Interval, ...] = ()
        # With one stream, what is taken before whole epochs; and the intervals of the latest pass.
        self._before_epochs: Taken | None = None
        self._intervals_of_pass: list[Interval] = []
        self.end: int | None = None
        self._latest_epoch = 0, range(0)  # and some steps in it
        self._around = range(0)
        self.offsets: tuple[int | None, ...] = (0,)
        # For each stream, the rows before whole epochs and in one of them, or NEVER if it grows and
        # so is in its first epoch. Then the epoch of its first row, and the first whole epoch.
        rows = np.zeros((len(self._groups), len(streams)), np.int64)
        self._rest, self._whole = rows.copy(), np.full_like(rows, NEVER)
        self._first_epochs = np.zeros((2, len(streams)), np.int64)
        for number, stream in enumerate(streams):
            if stream.passes:
                self._rest[:, number], self._whole[:, number] = stream.starts[-1], stream.whole.rows
                self._first_epochs[:, number] = stream.passes[0].first_epoch, stream.epoch
        owed, windows = [[0] * len(streams) for _ in rows], [0] * len(streams)
        if taken is not None and weights is not None:
            joined = len(streams) - len(taken.windows)
            rows = np.pad(taken.rows, ((0, 0), (0, joined)))
            owed = [[*each, *[0] * joined] for each in taken.owed]
            windows = [*taken.windows, *[0] * joined]
        self._begin = Taken(start, 0 * self._rows, rows, owed, windows)
        self.ended = 0, self._begin
        self._weights = [Fraction(1) if weights is None else weights[each.name] for each in streams]
        self._growing = {
            number: stream
            for number, (stream, weight) in enumerate(zip(streams, self._weights, strict=True))
            if weight and isinstance(stream, Chapter)
        }
        if weights is None:
            if not self._growing:
                batches = self._count_batches(self._rest[:, 0])
                step = start + int(batches.sum())
                self._before_epochs = Taken(step, batches, self._rest, owed, windows)
            return
        nothing = (0,) * len(streams)
        epoch, offsets = (before.epoch_of(start), before.offsets) if before else (0, nothing)
        each = zip(self._weights, self._epochs_after(rows), strict=True)
        self.offsets = tuple(
            (epoch - begun if had is None else had) if weight else None
            for (weight, begun), had in itertools.zip_longest(each, offsets)
        )
        if options.ending == "stop":
            # A stream ends with its epoch in progress; one without any, with its first epoch.
            stock = np.stack(
                [each.starts[-1] + each.whole.rows * (each.epoch == 0) for each in streams], axis=1
            )
            too_many = find_first(lambda at: bool((self.taken(at).rows > stock).any()), start)
            self.end = too_many - 1

    # ---- one stream: intervals of each pass, and of each whole epoch

    def _count_batches(self, rows: np.ndarray) -> np.ndarray:
        """The batches of each bucket that hold `rows` of each length: int64 [buckets]."""
        each = zip(rows.tolist(), self._groups, strict=True)
        return np.concatenate([count_batches(count, group) for count, group in each])

    def _cut(
        self,
        counts: np.ndarray,
        taken: Taken,
        most: np.ndarray,
        *of_rotation: Any,
        quotas: Sequence[Quota] = (),
        due: Sequence[Sequence[int]] = (),
    ) -> Iterator[Interval]:
        """The intervals of some batches: one of full batches of all lengths, then one of each tail.

        Args:
            counts: the batches of each bucket.
            taken: what was taken before them.
            most: as `most_rows` of an interval: their last batches may be short.
            of_rotation: the name of the random bits that give the first place, and an epoch.
            quotas: with several streams, `stream_quotas` of the intervals.
            due: with several streams, the rows newly due to each in all intervals, times `UNIT`.
        """
        whole, rotation, (name, epoch) = counts[self._bucket_of], 0, of_rotation
        if self._options.shuffle and whole.any():
            key = random_key(self._options.seed, "buckets", name)
            bits = int(random_bits(key, Purpose.BUCKETS, 1, epoch=epoch)[0])
            rotation = bits % int(whole.sum())
        parts = [(self._bucket_of, whole, rotation)]
        for length, group in enumerate(self._groups):
            for place in range(1, len(group)):
                buckets, steps = self._bucket_of.copy(), 0 * self._bucket_of
                buckets[length] += place
                steps[length] = counts[buckets[length]]
                parts.append((buckets, steps, 0))
        for buckets, steps, rotation in parts:
            if steps.any():
                end = taken.step + int(steps.sum())
                interval = Interval(
                    taken,
                    buckets,
                    self._rows[buckets],
                    Quota(steps.tolist()),
                    quotas or [Quota([1])] * len(self._groups),
                    most,
                    rotation,
                    shares=due,
                    per_step=int(counts.sum()) * UNIT,
                    end=end,
                )
                yield interval
                taken = interval.taken(end)

    def _interval_of_pass(self, step: int) -> Interval:
        """The interval of a step of the only stream."""
        latest, before = self._intervals_of_pass, self._before_epochs
        assert before is not None, "there is one stream"
        if not latest or not latest[0].start <= step < (latest[-1].end or 0):
            (stream,) = self._streams
            whole = step >= before.step
            found, begin = (stream.whole, before) if whole else (stream.passes[0], self._begin)
            counts, rows = self._count_batches(found.rows), found.rows[:, None]
            steps = int(counts.sum())
            times = (step - begin.step) // steps  # passes that are over
            begin = begin._replace(
                step=begin.step + times * steps,
                batches=begin.batches + times * counts,
                rows=begin.rows + times * rows,
            )
            epoch = found.first_epoch + times
            latest = [*self._cut(counts, begin, begin.rows + rows, found.repeats, epoch)]
            self._intervals_of_pass = latest
        return _at(latest, step)

    # ---- several streams

    def _find_shares(
        self, taken: Taken, windows: Sequence[int]
    ) -> tuple[list[list[int]], dict[int, np.ndarray]]:
        """For each length, the rows of each stream in a unit of time; and where shares change.

        The weight of a stream gives the pace of its present pass, and the pace gives the rows of
        each length. The present pass of a corpus that grows is the last of its available `windows`.
        Shares change when a stream has taken the rows of a pass that does not repeat; these rows
        are returned by the number of the stream.
        """
        shares: list[list[int]] = [[] for _ in self._groups]
        waiting = {}
        begun = np.all(taken.rows >= self._rest, axis=0).tolist()  # whole epochs
        for number, (stream, weight) in enumerate(zip(self._streams, self._weights, strict=True)):
            found: Pass | Window
            if isinstance(stream, Chapter):
                found = stream.last(windows[number])
            else:
                found = stream.whole if begun[number] else stream.passes[0]
                if weight and not begun[number]:
                    waiting[number] = stream.starts[-1]
            pace = self._unit * weight.numerator // (weight.denominator * found.size)
            for of_length, count in zip(shares, found.rows.tolist(), strict=True):
                of_length.append(pace * count)
        return shares, waiting

    def _interval_in_shares(self, taken: Taken) -> Interval:
        """The interval in which the present passes of all streams continue.

        Rows owed to streams are carried over to the next interval: otherwise, a small share would
        never have a row in short intervals.
        """
        shares, waiting = self._find_shares(taken, taken.windows)
        in_batches = [
            [sum(each) // n for each, n in zip(of_rows, self._rows.tolist(), strict=True)]
            for of_rows in (shares, taken.owed)
        ]
        interval = Interval(
            taken,
            self._bucket_of,
            self._rows,
            Quota(in_batches[0], in_batches[1], UNIT),
            [Quota(each, had, UNIT) for each, had in zip(shares, taken.owed, strict=True)],
            np.full_like(taken.rows, NEVER),
            shares=shares,
            per_step=sum(in_batches[0]),
        )
        return dataclasses.replace(interval, end=_find_end(interval, waiting))

    # ---- corpora that grow

    def _run_out(self, taken: Taken, windows: Sequence[int]) -> tuple[int, list[list[int]]]:
        """The stream that runs out of available rows first; and the rows due to all streams then.

        If several do, the first by name. The rows due are for each length, times `UNIT`.
        """
        shares, _ = self._find_shares(taken, windows)
        left, times = {}, {}
        for number, chapter in self._growing.items():
            known = chapter.last(windows[number]).rows_after
            left[number] = (known - taken.rows[:, number]).tolist()
            each = zip(left[number], taken.owed, shares, strict=True)
            until = [
                (count * UNIT - owed[number]) * self._unit // share[number]
                for count, owed, share in each
                if share[number]
            ]
            times[number] = max(min(until, default=0), 0)
        first = min(times, key=lambda number: (times[number], self._streams[number].name))
        due = [
            [had + share * times[first] // self._unit for had, share in zip(*each, strict=True)]
            for each in zip(taken.owed, shares, strict=True)
        ]
        for number, time in times.items():
            if time == times[first]:  # all its rows, despite rounding
                for of_length, count in zip(due, left[number], strict=True):
                    of_length[number] = count * UNIT
        return first, due

    def _intervals_in_hand(self, taken: Taken) -> Iterator[Interval]:
        """The intervals until a corpus that grows runs out of available rows.

        They have full batches. If the rows do not fill one, the corpus gains a window. At the end
        of its chapter, they have its last rows, with rows due to other streams, and may be short.
        """
        windows, per_batch = [*taken.windows], self._rows[self._bucket_of].tolist()
        stops = self._until is not None and taken.step >= self._until
        batches = 0 * self._rows
        while True:
            first, due = self._run_out(taken, windows)
            rows = [[max(each, 0) for each in of_length] for of_length in due]
            sums = zip(map(sum, rows), per_batch, strict=True)
            batches[self._bucket_of] = [total // (UNIT * count) for total, count in sums]
            if batches.any() or stops or self._growing[first].window(windows[first]) is None:
                break
            windows[first] += 1
        most = np.full_like(taken.rows, NEVER)
        if batches.any():
            numbers = (batches[self._bucket_of] * per_batch).tolist()
            places = [_share_out(each, number) for each, number in zip(rows, numbers, strict=True)]
        else:
            most[:, first] = self._growing[first].last(windows[first]).rows_after
            batches = self._count_batches(most[:, first] - taken.rows[:, first])
            if not batches.any():
                self.ended = first, taken._replace(windows=windows)
            places = [[each // UNIT for each in of_length] for of_length in rows]
            for of_length, count in zip(places, per_batch, strict=True):
                of_length[first] += count - sum(of_length)  # places that stay empty
        newly = [
            [end - had for end, had in zip(*each, strict=True)]
            for each in zip(due, taken.owed, strict=True)
        ]
        before, quotas = taken._replace(windows=windows), [Quota(each) for each in places]
        return self._cut(batches, before, most, "windows", taken.step, quotas=quotas, due=newly)

    # ---- all steps

    def _reach(self, step: int) -> tuple[Interval, ...]:
        """The intervals up to that of a step, or to the end of the chapter."""
        intervals = self._intervals
        while (end := intervals[-1].end if intervals else self.start) is not None and step >= end:
            taken = intervals[-1].taken(end) if intervals else self._begin
            if self._growing:
                following = tuple(self._intervals_in_hand(taken))
            else:
                following = (self._interval_in_shares(taken),)
            if not following:  # the chapter ends
                self.end = taken.step
                break
            self._intervals = intervals = intervals + following
        return intervals

    def has(self, step: int) -> bool:
        """Whether there is a step from `start` on; waits until that is known."""
        if self._growing and self.end is None:
            self._reach(step)
        return self.end is None or step < self.end

    def _interval(self, step: int) -> Interval:
        if self._before_epochs is not None:
            return self._interval_of_pass(step)
        return _at(self._reach(step), step)

    def taken(self, step: int) -> Taken:
        """The batches and rows taken before a step."""
        return self._begin if step == self.start else self._interval(step - 1).taken(step)

    def at(self, step: int) -> tuple[int, list[tuple[int, int, int]]]:
        """The number of a step's bucket, and its rows: (stream, first row, number of rows).

        Rows are numbered by length, over all buckets of it. If a batch has fewer rows than its
        bucket, the others are empty.
        """
        return self._interval(step).at(step)

    def used(self, first: int, last: int | None) -> np.ndarray:
        """The buckets of the steps `first` to `last` (None: all later steps): bool [buckets].

        While a corpus grows, all buckets, as later steps are not known.
        """
        if self._growing:
            return np.ones(len(self._rows), bool)
        last = self.end if last is None else last
        if last is not None:
            return self.taken(max(last, first)).batches > self.taken(first).batches
        weighted = [
            stream for stream, at in zip(self._streams, self.offsets, strict=True) if at is not None
        ]
        found = np.any([self._count_batches(stream.whole.rows) > 0 for stream in weighted], axis=0)
        if self._before_epochs is not None and first < self._before_epochs.step:
            found |= self._before_epochs.batches > self.taken(first).batches
        return found

    def epoch_of(self, step: int) -> int:
        """The epoch of a step."""
        epoch, steps = self._latest_epoch
        if step in steps:
            return epoch
        epoch, interval = self._epoch_at(step), self._interval(step)
        end = step + 1
        if interval.end is not None and not interval.shares:
            step, end = interval.start, interval.end
        elif epoch == self._epoch_at(later := min(step + KEEPS, interval.end or step + KEEPS)):
            end = later
        self._latest_epoch = epoch, range(step, end)
        return epoch

    def interval_around(self, step: int) -> range:
        """The steps of the interval of a step, within the schedule."""
        interval = self._interval(step)
        ends = [end for end in (interval.end, self.end) if end is not None]
        return range(interval.start, min(ends, default=sys.maxsize))

    def epoch_around(self, step: int) -> range:
        """The steps of the epoch of a step, within the schedule.

        While a corpus grows, those of the interval: rows of later steps may not be sealed yet.
        """
        if self._growing:
            return self.interval_around(step)
        around = self._around
        if step not in around:
            epoch = self.epoch_of(step)
            around = self._around = range(self.first_step(epoch), self.first_step(epoch + 1))
        return around

    def epochs(self, step: int) -> list[int]:
        """The least epoch of each stream that is not over before a step."""
        _, rows = self._interval(max(step - 1, self.start)).before(step)  # faster than `taken`
        return self._epochs_after(rows)

    def _epochs_after(self, rows: np.ndarray) -> list[int]:
        """The least epoch of each stream that is not over after some rows."""
        times = (rows - self._rest) // np.maximum(self._whole, 1)
        times = times.min(axis=0, initial=NEVER, where=self._whole > 0)
        first, whole = self._first_epochs
        return np.where((rows >= self._rest).all(axis=0), whole + times, first).tolist()

    def _epoch_at(self, step: int) -> int:
        if self.end is not None or self._growing:  # there is only one epoch
            return 0
        pairs = zip(self.epochs(step), self.offsets, strict=True)
        return min(epoch + offset for epoch, offset in pairs if offset is not None)

    def first_step(self, epoch: int) -> int:
        """The first step of an epoch: at least `start`, and at most `end`."""
        if self.end is not None and self._epoch_at(self.end) < epoch:
            return self.end
        return find_first(lambda step: self._epoch_at(step) >= epoch, self.start - 1)


def _share_out(due: Sequence[int], places: int) -> list[int]:
    """`places` divided in proportion to the rows `due`, which are at least as many.

    Divides by the method of largest remainders.

    >>> _share_out([7, 9], 3)
    [1, 2]
    """
    total = sum(due) or 1
    exact = [divmod(each * places, total) for each in due]
    found = [count for count, _ in exact]
    by_remainder = sorted(range(len(due)), key=lambda n: (-exact[n][1], n))
    for n in by_remainder[: places - sum(found)]:
        found[n] += 1
    return found


def _at(intervals: Sequence[Interval], step: int) -> Interval:
    """The interval of a step."""
    return intervals[bisect.bisect_right(intervals, step, key=lambda each: each.start) - 1]


def find_first(holds: Callable[[int], bool], after: int, near: int = 0) -> int:
    """The first step after `after` at which a condition holds; it must then hold for ever."""
    low, high, far = after, max(near, after + 1), 1
    while not holds(high):
        low, high, far = high, high + far, 2 * far
    far = 1
    while high - far > low and holds(high - far):
        high, far = high - far, 2 * far
    return bisect.bisect_left(range(high), True, lo=max(low, high - far) + 1, key=holds)


def _find_end(interval: Interval, waiting: Mapping[int, np.ndarray]) -> int | None:
    """The first step before which one of the `waiting` streams has taken its rows; else None.

    Quotas stay close to the shares, so only steps near the estimate are tried.
    """
    if not waiting:
        return None
    streams, ends = [*waiting], np.stack([*waiting.values()], axis=1)

    def is_over(step: int) -> bool:
        return bool((interval.before(step)[1][:, streams] >= ends).all(axis=0).any())

    missing = (ends - interval.begin.rows[:, streams]).T.tolist()
    near = min(
        max(
            rows * interval.per_step // of_length[stream]
            for rows, of_length in zip(of_stream, interval.shares, strict=True)
            if of_length[stream]
        )
        for stream, of_stream in zip(streams, missing, strict=True)
    )
    return find_first(is_over, interval.start, interval.start + near)
