"""Schedules: the bucket of each step, and the rows it takes from each stream.

A schedule is a list of intervals, made in order when their steps are needed. Shares are constant in
an interval, so a quota gives any step without the steps before it. With one stream, a leg is one
interval of full batches, then one for each tail; the last batches may be short. With several
streams, an interval ends where one of them ends the rest of an epoch. If a corpus grows, an
interval ends before the first step that needs a further window.

A mark is what was taken where a chapter of a stream ends. The intervals from a mark on depend on
nothing before it; so do those of each whole epoch of a single stream. These are a
section. A run resumes from a mark, and only a few sections are kept.

An interval is a pure function of the rows taken before it, so any number of threads may make it.
"""

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from pipeline.planning.options import Options
from pipeline.planning.order import Purpose, Quota, random_bits, random_key
from pipeline.planning.stream import Stream
from pipeline.planning.tails import count_batches

# What streams are owed is counted in units of 1 / UNIT row; their pace, in units of 1 / PACE pass.
UNIT, PACE = 1 << 64, 1 << 160

# More rows than are ever taken.
NEVER = 1 << 62

# The sections that are kept: readers are in a few chapters or epochs at a time.
SECTIONS = 8


class Taken(NamedTuple):
    """The batches and rows taken before a step."""

    step: int
    batches: np.ndarray  # int64 [buckets]
    rows: np.ndarray  # int64 [lengths, streams]
    owed: Sequence[Sequence[int]]  # for each length, those owed to several streams, times `UNIT`
    legs: Sequence[int]  # of each stream, the last leg of which rows may have been taken


@dataclasses.dataclass(frozen=True)
class Interval:
    """Consecutive steps with constant shares."""

    begin: Taken  # what was taken before it; all its steps have the same `legs`
    buckets: np.ndarray  # int64 [lengths], the bucket of each, which may be a tail
    rows_per_batch: np.ndarray  # int64 [lengths], the rows of these buckets
    length_quota: Quota  # divides steps among lengths
    stream_quotas: Sequence[Quota]  # for each length, divides its rows among streams
    # int64 [lengths, streams], the rows at the end of a pass, whose last batches may be short; or
    # `NEVER`.
    most_rows: np.ndarray
    # For each length, the rows of each of several streams in a step, times `per_step`.
    shares: Sequence[Sequence[int]] = ()
    per_step: int = 1
    end: int | None = None  # one past the last step; None if the interval never ends

    @property
    def start(self) -> int:
        """The first step."""
        return self.begin.step

    def before(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """`batches` and `rows` of `taken(step)`."""
        steps = np.array(self.length_quota.before(step - self.start))
        taken = (steps * self.rows_per_batch).tolist()
        each = zip(self.stream_quotas, taken, strict=True)
        rows = self.begin.rows + np.array([quota.before(place) for quota, place in each])
        batches = self.begin.batches.copy()
        batches[self.buckets] += steps
        return batches, np.minimum(rows, self.most_rows)

    def at(self, step: int) -> tuple[int, int, list[tuple[int, int, int]]]:
        """See `Schedule.at`."""
        place = step - self.start
        ((length, number, _),) = self.length_quota.between(place, place + 1)
        rows, quota = int(self.rows_per_batch[length]), self.stream_quotas[length]
        first = number * rows
        most, base = self.most_rows[length].tolist(), self.begin.rows[length].tolist()
        return (
            length,
            int(self.buckets[length]),
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
                    for had, share, n in zip(*of_length, strict=True)
                ]
                for of_length in zip(owed, self.shares, taken, strict=True)
            ]
        return Taken(step, batches, rows, owed, self.begin.legs)


@dataclasses.dataclass(frozen=True)
class Section:
    """Intervals from a mark to the next one; with one stream, also those of one whole epoch.

    It knows the epochs of the streams: of one that grows, as far as they are known at the mark.
    """

    begin: Taken
    rest: np.ndarray  # int64 [lengths, streams], the rows before whole epochs, or `NEVER`
    whole: np.ndarray  # int64 [lengths, streams], the rows of a whole epoch; 0 if there is none
    first: np.ndarray  # int64 [streams], the epoch of the first row
    later: np.ndarray  # int64 [streams], the first whole epoch
    intervals: tuple[Interval, ...] = ()  # those that are known by now

    def epochs(self, rows: np.ndarray) -> list[int]:
        """The least epoch of each stream that is not over after some rows [lengths, streams]."""
        times = (rows - self.rest) // np.maximum(self.whole, 1)
        times = times.min(axis=0, initial=NEVER, where=self.whole > 0)
        return np.where((rows >= self.rest).all(axis=0), self.later + times, self.first).tolist()

    @functools.cached_property
    def starts(self) -> list[int]:
        """The first step of each of its intervals."""
        return [interval.start for interval in self.intervals]

    @functools.cached_property
    def end(self) -> float:
        """One past the last step of its intervals; infinity if they never end."""
        if not self.intervals:
            return self.begin.step
        return math.inf if (end := self.intervals[-1].end) is None else end

    @functools.cached_property
    def epoch(self) -> int:
        """With one stream, the epoch of all its steps."""
        (epoch,) = self.epochs(self.begin.rows)
        return epoch


class Schedule:
    """Steps from `start` on; with several streams, each has its share of the rows of any few steps.

    Rows of a length are numbered from the beginning of the stream. The epoch of a step is the least
    of the epochs of all streams with a weight; a stream that gets a weight later counts its epochs
    from the epoch of that step.

    Attributes:
        start: the first step.
        end: one past the last step; None if steps never end.
        offsets: what to add to each stream's epochs for those of the plan; None without a weight.
        marks: what was taken at the start and where chapters end, as far as it is known.
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
        offsets: Sequence[int | None] | None = None,
    ):
        """`before` is the schedule of the steps before `start`, of which streams go on at `taken`.

        `offsets` are known if `start` is a mark of it.
        """
        self.start, self._streams, self._options = start, streams, options
        self._groups = options.groups
        self._rows = np.array([bucket.rows for bucket in options.buckets])  # of each bucket
        self._bucket_of = np.cumsum([0, *map(len, self._groups[:-1])])  # the first of each length
        self._unit = PACE * math.lcm(*self._rows.tolist())
        self._sections: tuple[Section, ...] = ()  # those made last
        self.end: int | None = None
        self.offsets: tuple[int | None, ...] = (0,)
        self._weights = [Fraction(1) if weights is None else weights[each.name] for each in streams]
        had = taken or Taken(start, self._rows, np.zeros((len(self._groups), 0), np.int64), (), ())
        new = [0] * (len(streams) - len(had.legs))
        # A corpus that grows and has no weight has no rows, and so is owed none.
        each = zip(self._weights, streams, strict=True)
        owes = [bool(weight) or one.parts is None for weight, one in each]
        owed = [
            [due * n for due, n in zip([*of_length, *new], owes, strict=True)]
            for of_length in had.owed or [()] * len(had.rows)
        ]
        rows = np.pad(had.rows, ((0, 0), (0, len(new))))
        self.marks: tuple[Taken, ...] = (
            Taken(start, 0 * self._rows, rows, owed, [*had.legs, *new]),
        )
        self._one = weights is None
        if weights is None:
            return
        if offsets is None:
            offsets = self._find_offsets(before)
        self.offsets = tuple(offsets)
        if options.ending == "stop":
            # A stream ends with its epoch in progress; one without any, with its first epoch.
            whole = [each.leg(len(each.legs) - 1) for each in streams]
            stock = np.stack([leg.start + leg.rows * (leg.epoch == 0) for leg in whole], axis=1)
            too_many = find_first(lambda at: bool((self.taken(at).rows > stock).any()), start)
            self.end = too_many - 1

    def _find_offsets(self, before: "Schedule | None") -> list[int | None]:
        """`offsets`, where streams that had a weight before keep theirs."""
        if before is None:
            return [0 if weight else None for weight in self._weights]
        begun = self._open_section(self.marks[0]).epochs(self.marks[0].rows)
        epoch, offsets = before.epoch_of(self.start), before.offsets
        each = itertools.zip_longest(self._weights, begun, offsets)
        return [
            (epoch - own if had is None else had) if weight else None for weight, own, had in each
        ]

    # ---- intervals

    def _count_batches(self, rows: np.ndarray) -> np.ndarray:
        """The batches of each bucket that hold `rows` of each length: int64 [buckets]."""
        each = zip(rows.tolist(), self._groups, strict=True)
        return np.concatenate([count_batches(count, group) for count, group in each])

    def _cut(
        self,
        counts: np.ndarray,
        taken: Taken,
        most: np.ndarray,
        *names: Any,
        quotas: Sequence[Quota] = (),
        due: Sequence[Sequence[int]] = (),
    ) -> Iterator[Interval]:
        """The intervals of some batches: one of full batches of all lengths, then one of each tail.

        `counts` has the batches of each bucket, and `most` is as `most_rows`. `names` select the
        random bits that give the first place: a name and an epoch. With several streams, `quotas`
        are `stream_quotas`, and `due` the rows newly due to each, times `UNIT`.
        """
        whole, first, (name, epoch) = counts[self._bucket_of], 0, names
        if self._options.shuffle and whole.any():
            key = random_key(self._options.seed, "buckets", name)
            bits = int(random_bits(key, Purpose.BUCKETS, 1, epoch=epoch)[0])
            first = bits % int(whole.sum())
        parts = [(self._bucket_of, whole, first)]
        for length, group in enumerate(self._groups):
            for place in range(1, len(group)):
                buckets, steps = self._bucket_of.copy(), 0 * self._bucket_of
                buckets[length] += place
                steps[length] = counts[buckets[length]]
                parts.append((buckets, steps, 0))
        for buckets, steps, first in parts:
            if steps.any():
                end = taken.step + int(steps.sum())
                interval = Interval(
                    taken,
                    buckets,
                    self._rows[buckets],
                    Quota(steps.tolist(), first=first),
                    quotas or [Quota([1])] * len(self._groups),
                    most,
                    shares=due,
                    per_step=int(counts.sum()) * UNIT,
                    end=end,
                )
                yield interval
                taken = interval.taken(end)

    # ---- one stream

    def _skip_epochs(self, mark: Taken, step: int) -> Taken:
        """What was taken before the whole epoch of a step; if none follow the mark, the mark."""
        leg = self._streams[0].leg(mark.legs[0])
        if not leg.repeats:
            return mark
        counts = self._count_batches(leg.rows)
        steps = int(counts.sum())
        times = (step - mark.step) // steps
        return mark._replace(
            step=mark.step + times * steps,
            batches=mark.batches + times * counts,
            rows=mark.rows + times * leg.rows[:, None],
        )

    def _continue_one(self, taken: Taken) -> tuple[tuple[Interval, ...], Taken]:
        """The next intervals of the only stream, up to the end of an epoch; or a mark."""
        (stream,), (number,), rows = self._streams, taken.legs, taken.rows[:, 0]
        leg = stream.leg(number)
        times = stream.count_times(rows - leg.start)[0] if leg.repeats else 0
        end = leg.end + times * leg.rows
        counts = self._count_batches(end - rows)
        if not counts.any():
            return (), taken._replace(legs=[number + 1])
        bits = leg.repeats, leg.epoch + times
        return tuple(self._cut(counts, taken, end[:, None], *bits)), taken

    # ---- several streams

    def _find_shares(self, legs: Sequence[int]) -> list[list[int]]:
        """For each length, the rows of each stream in a unit of time.

        The weight of a stream gives the pace of its leg, and the pace gives the rows of each
        length.
        """
        shares: list[list[int]] = [[] for _ in self._groups]
        for stream, weight, number in zip(self._streams, self._weights, legs, strict=True):
            if not weight:
                for of_length in shares:
                    of_length.append(0)
                continue
            leg = stream.leg(number)
            pace = self._unit * weight.numerator // (weight.denominator * leg.size)
            for of_length, count in zip(shares, leg.rows.tolist(), strict=True):
                of_length.append(pace * count)
        return shares

    def _continue(self, taken: Taken) -> tuple[tuple[Interval, ...], Taken]:
        """The next intervals; if there are none, a mark."""
        if self._one and not self._streams[0].grows_at(taken.legs[0]):
            return self._continue_one(taken)
        legs, waiting, growing = [*taken.legs], dict[int, np.ndarray](), list[int]()
        for number, (stream, weight) in enumerate(zip(self._streams, self._weights, strict=True)):
            if not weight or (leg := stream.leg(legs[number])).repeats:
                continue
            if stream.grows_at(legs[number]):
                growing.append(number)
            elif (taken.rows[:, number] >= leg.end).all():
                legs[number] += 1
            else:
                waiting[number] = leg.end
        taken = taken._replace(legs=legs)
        if growing:
            return self._intervals_in_hand(taken, growing)
        return (self._interval_in_shares(taken, waiting),), taken

    def _interval_in_shares(self, taken: Taken, waiting: Mapping[int, np.ndarray]) -> Interval:
        """The interval in which the legs of all streams continue.

        It ends when a stream has taken its rows in `waiting`, which do not repeat. Rows owed to
        streams are carried over to the next interval: otherwise, a small share would never have a
        row in short intervals.
        """
        shares = self._find_shares(taken.legs)
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
        if not waiting:
            return interval
        streams, ends = [*waiting], np.stack([*waiting.values()], axis=1)

        def is_over(step: int) -> bool:
            return bool((interval.before(step)[1][:, streams] >= ends).all(axis=0).any())

        return dataclasses.replace(interval, end=find_first(is_over, interval.start))

    def _run_out(
        self, taken: Taken, legs: Sequence[int], growing: Sequence[int]
    ) -> tuple[int, list[list[int]]]:
        """The stream that first runs out of rows of its leg, and what is `owed` to all then."""
        shares = self._find_shares(legs)
        left, times = {}, {}
        for number in growing:
            leg = self._streams[number].leg(legs[number])
            left[number] = (leg.end - taken.rows[:, number]).tolist()
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

    def _intervals_in_hand(
        self, taken: Taken, growing: Sequence[int]
    ) -> tuple[tuple[Interval, ...], Taken]:
        """The intervals until a corpus that grows runs out of the rows of its leg.

        They have full batches. If the rows do not fill one, the corpus goes on to its next leg. At
        the end of its chapter, they have its last rows, with rows due to other streams, and may be
        short.
        """
        legs, per_batch = [*taken.legs], self._rows[self._bucket_of].tolist()
        batches, flushes = 0 * self._rows, False
        while True:
            first, due = self._run_out(taken, legs, growing)
            stream = self._streams[first]
            leg = stream.leg(legs[first])
            rows = [[max(each, 0) for each in of_length] for of_length in due]
            sums = zip(map(sum, rows), per_batch, strict=True)
            batches[self._bucket_of] = [total // (UNIT * count) for total, count in sums]
            if batches.any():
                break
            if flushes := leg.ends or stream.leg(legs[first] + 1).repeats:
                break
            legs[first] += 1
        most = np.full_like(taken.rows, NEVER)
        if not flushes:
            numbers = (batches[self._bucket_of] * per_batch).tolist()
            places = [_share_out(each, number) for each, number in zip(rows, numbers, strict=True)]
        else:
            most[:, first] = leg.end
            batches = self._count_batches(most[:, first] - taken.rows[:, first])
            if not batches.any():
                legs[first] += 1
                owed = [[*of_length] for of_length in taken.owed]
                for of_length in owed:
                    of_length[first] = 0
                return (), taken._replace(legs=legs, owed=owed)
            places = [[each // UNIT for each in of_length] for of_length in rows]
            for of_length, count in zip(places, per_batch, strict=True):
                of_length[first] += count - sum(of_length)  # places that stay empty
        newly = [
            [end - had for end, had in zip(*each, strict=True)]
            for each in zip(due, taken.owed, strict=True)
        ]
        before, quotas = taken._replace(legs=legs), [Quota(each) for each in places]
        intervals = self._cut(
            batches, before, most, "windows", taken.step, quotas=quotas, due=newly
        )
        return tuple(intervals), taken

    # ---- all steps

    def _reach(self, step: int) -> tuple[Section, Interval]:
        """The section and the interval of a step."""
        for section in self._sections:
            if section.begin.step <= step < section.end:
                break
        else:
            section = self._make_section(step)
        return section, section.intervals[bisect.bisect_right(section.starts, step) - 1]

    def _make_section(self, step: int) -> Section:
        """The section of a step, with intervals up to that step."""
        while True:
            mark = begin = self._mark_before(step)
            if self._one:
                begin = self._skip_epochs(mark, step)
            section = next((each for each in self._sections if each.begin is begin), None)
            section, following = section or self._open_section(begin), begin
            while step >= section.end:
                last = section.intervals[-1:]
                more, following = self._continue(last[0].taken(int(section.end)) if last else begin)
                if not more:
                    break
                section = dataclasses.replace(section, intervals=section.intervals + more)
            others = [each for each in self._sections if each.begin is not begin]
            self._sections = (section, *others[: SECTIONS - 1])
            if step < section.end:
                return section
            if (marks := self.marks)[-1] is mark:
                self.marks = (*marks, following)

    def _mark_before(self, step: int) -> Taken:
        """The last of the marks known by now that is not after a step."""
        return self.marks[bisect.bisect_right(self.marks, step, key=lambda each: each.step) - 1]

    def mark(self, step: int) -> Taken:
        """The last mark before a step, which has been taken."""
        self._reach(step)  # this may add marks
        return self._mark_before(step)

    def taken(self, step: int) -> Taken:
        """The batches and rows taken before a step."""
        return self.marks[0] if step == self.start else self._reach(step - 1)[1].taken(step)

    def at(self, step: int) -> tuple[int, int, list[tuple[int, int, int]]]:
        """A step's length and bucket by number, and its rows: (stream, first row, how many)."""
        return self._reach(step)[1].at(step)

    @property
    def repeated(self) -> list[int]:
        """The numbers of the buckets of whole epochs, if steps never end and no corpus grows."""
        if self.end is not None:
            return []
        each = zip(self._streams, self.offsets, strict=True)
        whole = [self._count_batches(stream.whole.rows) for stream, at in each if at is not None]
        return np.flatnonzero(np.sum(whole, axis=0)).tolist()

    def epoch_of(self, step: int) -> int:
        """The epoch of a step."""
        if self.end is not None:  # there is only one epoch
            return 0
        section, interval = self._reach(step)
        if self._one:
            return section.epoch
        _, rows = interval.before(step)  # faster than `taken`
        epochs = zip(section.epochs(rows), self.offsets, strict=True)
        return min(epoch + offset for epoch, offset in epochs if offset is not None)

    def grows(self, step: int) -> bool:
        """Whether a step has rows of a corpus that still grows."""
        legs = self.mark(step).legs
        each = zip(self._streams, self._weights, legs, strict=True)
        return any(weight and stream.grows_at(leg) for stream, weight, leg in each)

    def may_wait(self, step: int) -> bool:
        """Whether a step may need parts that the step before it did not need."""
        if step in (self.start, self.mark(step).step):
            return True
        return self.grows(step) and step == self._reach(step)[1].start

    def block_around(self, step: int, size: int) -> range:
        """The steps of the block of a step; blocks of `size` steps begin at step 0.

        They are within its epoch and from the last mark on. While a corpus grows, they are within
        the interval: rows of later steps may not be sealed yet.
        """
        epoch, first = self.epoch_of(step), step // size * size
        begin, ends = self.mark(step).step, [first + size, self.end]
        if self.grows(step):
            _, interval = self._reach(step)
            begin, ends = interval.start, [*ends, interval.end]
        begin, end = max(first, begin), min(each for each in ends if each is not None)
        begin += bisect.bisect_left(range(begin, step), epoch, key=self.epoch_of)
        if self.epoch_of(end - 1) > epoch:
            end = step + 1 + bisect.bisect(range(step + 1, end), epoch, key=self.epoch_of)
        return range(begin, end)

    def epochs(self, step: int) -> list[int]:
        """The least epoch of each stream that is not over before a step, as far as known then."""
        section, interval = self._reach(max(step - 1, self.start))
        return section.epochs(interval.before(step)[1])

    def _open_section(self, begin: Taken) -> Section:
        """The section from a mark on, without an interval."""
        rest = np.full_like(begin.rows, NEVER)
        whole, epochs = 0 * rest, np.zeros((2, rest.shape[1]), np.int64)
        each = zip(self._streams, self._weights, begin.legs, strict=True)
        for number, (stream, weight, leg) in enumerate(each):
            if stream.parts is not None and not weight:
                continue
            epochs[:, number] = stream.leg(0).epoch
            if (last := stream.leg(leg) if stream.parts is not None else stream.legs[-1]).repeats:
                rest[:, number], whole[:, number] = last.start, last.rows
                epochs[1, number] = last.epoch
        return Section(begin, rest, whole, epochs[0], epochs[1])

    def first_step(self, epoch: int) -> int:
        """The first step of an epoch: at least `start`, and at most `end`."""
        if self.end is not None and epoch > 0:
            return self.end
        return find_first(lambda step: self.epoch_of(step) >= epoch, self.start - 1)


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


def find_first(holds: Callable[[int], bool], after: int) -> int:
    """The first step after `after` at which a condition holds; it must then hold for ever."""
    low, high = after, after + 1
    while not holds(high):
        low, high = high, 3 * high - 2 * low
    return bisect.bisect_left(range(high), True, lo=low + 1, key=holds)
