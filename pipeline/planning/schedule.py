"""Schedules: the bucket of each step, and how many rows it takes of each stream.

A schedule is a list of intervals. In an interval all shares are constant, so a quota gives any step
without the steps before it. An interval ends where a pass of the only stream ends, whose last
batches may be short, or where one of several streams ends its pass of what was left of an epoch.
"""

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import numpy as np

from pipeline.planning.options import Options
from pipeline.planning.order import Purpose, Quota, random_bits, random_key
from pipeline.planning.stream import Pass, Stream

# So many steps after one, it is looked whether their epoch is still the same.
KEEPS = 64

# What streams are owed is counted in parts of a row, and the pace of a stream in parts of a pass.
UNIT, PACE = 1 << 64, 1 << 160


@dataclasses.dataclass(frozen=True)
class Interval:
    """Consecutive steps in constant shares, after some batches and rows.

    Attributes:
        start: the first step.
        batches: int64 [buckets], the batches of each bucket before it.
        rows: int64 [buckets, streams], the rows of each stream before it.
        rows_per_batch: int64 [buckets].
        buckets: the quota of the buckets in the steps. The first of its places that is a step is
            number `skipped`.
        streams: for each bucket, the quota of the streams in its rows; None without rows.
        ends: int64 [buckets], of the only stream the rows at the end; the last batches are short.
        shares: for each bucket, the rows of each of several streams in a step, of `per_step`.
        due: for each bucket, the rows due to each of several streams before it, in `UNIT`s.
        end: one past the last step; None: the shares stay for ever.
    """

    start: int
    batches: np.ndarray
    rows: np.ndarray
    rows_per_batch: np.ndarray
    buckets: Quota
    skipped: int = 0
    ends: np.ndarray | None = None
    streams: Sequence[Quota | None] = ()
    shares: Sequence[Sequence[int]] = ()
    per_step: int = 1
    due: Sequence[Sequence[int]] = ()
    end: int | None = None

    def before(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """The batches of each bucket and the rows of each stream before a step, as attributes."""
        batches = np.array(self.buckets.before(self.skipped + step - self.start), np.int64)
        batches -= self._skipped
        places = batches * self.rows_per_batch
        if self.ends is not None:
            rows = np.minimum(self.rows[:, 0] + places, self.ends)[:, None]
        else:
            rows = self.rows.copy()
            for bucket, (quota, place) in enumerate(
                zip(self.streams, places.tolist(), strict=True)
            ):
                if quota is not None and place:
                    rows[bucket] += quota.before(place)
        return self.batches + batches, rows

    @functools.cached_property
    def _skipped(self) -> np.ndarray:
        return np.array(self.buckets.before(self.skipped), np.int64)

    def at(self, step: int) -> tuple[int, list[tuple[int, int, int]]]:
        """The number of a step's bucket, and its rows: (stream, first row, number of rows)."""
        place = self.skipped + step - self.start
        bucket = self.buckets.taker(place)
        if self.ends is not None:
            number = self.buckets.before(place)[bucket] - int(self._skipped[bucket])
            rows = int(self.rows_per_batch[bucket])
            first = int(self.rows[bucket, 0]) + number * rows
            return bucket, [(0, first, min(rows, int(self.ends[bucket]) - first))]
        quota, rows = self.streams[bucket], int(self.rows_per_batch[bucket])
        assert quota is not None, "a bucket with steps has rows"
        first = self.buckets.of(bucket, place) * rows
        before, after = quota.before(first), quota.before(first + rows)
        base = self.rows[bucket].tolist()
        return bucket, [
            (stream, start + begin, end - begin)
            for stream, (start, begin, end) in enumerate(zip(base, before, after, strict=True))
            if end > begin
        ]

    def row(self, stream: int, bucket: int, step: int) -> int:
        """The rows of one of several streams in a bucket before a step."""
        batches = self.buckets.of(bucket, step - self.start)
        quota, place = self.streams[bucket], batches * int(self.rows_per_batch[bucket])
        assert quota is not None, "a stream with a share has rows"
        return int(self.rows[bucket, stream]) + quota.of(stream, place)


class Schedule:
    """The steps of some streams; with several, each has its weight in the batches of any few steps.

    Steps count from 0, the first step of a stage; rows of a bucket are numbered over the whole
    stream. The epoch of a step is the least of the epochs of all streams that have a weight; one
    that gets a weight later counts its epochs from that of the step.

    Attributes:
        steps: the number of steps; None if they never end.
        offsets: for each stream, how many more its epochs are in the plan; None without a weight.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        options: Options,
        shares: Mapping[str, Fraction] | None = None,
        *,
        rows: np.ndarray | None = None,
        offsets: Sequence[int | None] = (0,),
        epoch: int = 0,
    ):
        """`rows`, int64 [buckets, streams], come before step 0, which is in `epoch`."""
        self._streams, self._options = streams, options
        self._progress = _Progress(streams)
        self._rows_per_batch = np.array([bucket.rows for bucket in options.buckets])
        self._intervals: tuple[Interval, ...] = ()
        self._repeats: Interval | None = None  # the latest interval of whole epochs
        self.steps: int | None = None
        self._latest_epoch = epoch, 0, 0  # with the first step and the end of those known
        self._around = range(0)
        self.offsets = tuple(offsets)
        if shares is None:
            self._add_passes()
            return
        if rows is None:
            rows = np.zeros((len(options.buckets), len(streams)), np.int64)
        self._weights = [shares[stream.name] for stream in streams]
        self.offsets = tuple(
            (epoch - begun if had is None else had) if weight else None
            for weight, begun, had in itertools.zip_longest(
                self._weights, self._progress.epochs(rows).tolist(), offsets
            )
        )
        self._sizes = [
            [_size(stream, found, options.by) for found in stream.passes] for stream in streams
        ]
        self._start_rows = rows
        due = [[0] * len(streams) for _ in rows]
        self._intervals = (self._interval_in_shares(0, 0 * self._rows_per_batch, rows, due),)
        if options.ending == "stop":
            # Each stream has what is left of an epoch and, from the start of the plan, one whole.
            stock = np.stack(
                [each.starts[-1] + each.whole.rows * (each.epoch == 0) for each in streams], axis=1
            )
            self.steps = first_step(lambda at: bool((self.before(at)[1] > stock).any()), 0) - 1

    # ---- one stream: an interval for each pass, and for each whole epoch

    def _add_passes(self) -> None:
        (stream,), step, batches = self._streams, 0, 0 * self._rows_per_batch
        for found, rows in zip(stream.passes, stream.starts, strict=True):
            per_pass = self._count_batches(found)
            quota = Quota(per_pass.tolist())
            interval = self._interval_of(found, quota, found.first_epoch, step, batches, rows)
            self._intervals += (interval,)
            step, batches = step + int(per_pass.sum()), batches + per_pass

    def _count_batches(self, found: Pass) -> np.ndarray:
        return -(-found.rows // self._rows_per_batch)

    def _interval_of(
        self,
        found: Pass,
        quota: Quota,
        epoch: int,
        start: int,
        batches: np.ndarray,
        rows: np.ndarray,
    ) -> Interval:
        """One time of a pass; buckets rotate in each one."""
        skipped, steps = 0, int(self._count_batches(found).sum())
        if self._options.shuffle:
            key = random_key(self._options.seed, "buckets", found.spans is None)
            bits = int(random_bits(key, Purpose.BUCKETS, 1, epoch=epoch)[0])
            skipped = bits % steps
        return Interval(
            start,
            batches,
            rows[:, None],
            self._rows_per_batch,
            quota,
            skipped,
            ends=rows + found.rows,
            end=start + steps,
        )

    def _whole_epoch(self, step: int) -> Interval:
        """The interval of a step that is in a whole epoch of the only stream."""
        latest = self._repeats
        if latest is None or not latest.start <= step < (latest.end or 0):
            first, (stream,) = self._intervals[-1], self._streams
            per_epoch = self._count_batches(stream.whole)
            steps = int(per_epoch.sum())
            epochs = (step - first.start) // steps
            latest = self._repeats = self._interval_of(
                stream.whole,
                first.buckets,
                stream.epoch + epochs,
                first.start + epochs * steps,
                first.batches + epochs * per_epoch,
                first.rows[:, 0] + epochs * stream.whole.rows,
            )
        return latest

    # ---- several streams

    def _interval_in_shares(
        self, start: int, batches: np.ndarray, rows: np.ndarray, due: Sequence[Sequence[int]]
    ) -> Interval:
        """The interval from `start` on, in which the present passes of all streams go on.

        Weights give the pace of a pass, and its pace the rows of each bucket. What streams are owed
        counts from step 0: a small share of a short interval would never have a row.
        """
        per_batch = self._rows_per_batch.tolist()
        unit = PACE * math.lcm(*per_batch)
        shares: list[list[int]] = [[] for _ in per_batch]
        waiting = {}  # the rows after which shares change, of each stream that waits for that
        present = self._progress.count_passes(rows).tolist()
        for number, (stream, weight) in enumerate(zip(self._streams, self._weights, strict=True)):
            at = present[number]
            found, size = stream.passes[at], self._sizes[number][at]
            pace = unit * weight.numerator // (weight.denominator * size)
            for of_bucket, count in zip(shares, found.rows.tolist(), strict=True):
                of_bucket.append(pace * count)
            if weight and found.spans is not None:
                waiting[number] = stream.starts[at + 1]
        taken = (rows - self._start_rows).tolist()
        owed = [
            [a - b * UNIT for a, b in zip(*each, strict=True)]
            for each in zip(due, taken, strict=True)
        ]
        in_batches = [
            [sum(each) // n for each, n in zip(of_rows, per_batch, strict=True)]
            for of_rows in (shares, owed)
        ]
        interval = Interval(
            start,
            batches,
            rows,
            self._rows_per_batch,
            Quota(in_batches[0], in_batches[1], UNIT),
            streams=[
                Quota(each, of_bucket, UNIT) if any(each) else None
                for each, of_bucket in zip(shares, owed, strict=True)
            ],
            shares=shares,
            per_step=sum(in_batches[0]),
            due=due,
        )
        return (
            dataclasses.replace(interval, end=_find_end(interval, waiting)) if waiting else interval
        )

    def _following(self, interval: Interval, end: int) -> Interval:
        """The interval after one of several streams."""
        steps = (end - interval.start) * UNIT
        due = [
            [had + share * steps // interval.per_step for had, share in zip(*each, strict=True)]
            for each in zip(interval.due, interval.shares, strict=True)
        ]
        return self._interval_in_shares(end, *interval.before(end), due)

    # ---- all steps

    def _interval(self, step: int) -> Interval:
        intervals = self._intervals
        while step >= (last := intervals[-1]).start:
            if last.ends is not None:
                return self._whole_epoch(step)
            if last.end is None or step < last.end:
                return last
            self._intervals = intervals = (*intervals, self._following(last, last.end))
        return intervals[bisect.bisect_right(intervals, step, key=lambda each: each.start) - 1]

    def at(self, step: int) -> tuple[int, list[tuple[int, int, int]]]:
        """The number of a step's bucket, and its rows: (stream, first row, number of rows).

        A batch with fewer rows than its bucket is filled up with empty rows.
        """
        return self._interval(step).at(step)

    def before(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """The batches of each bucket, and the rows of each stream, that come before a step.

        int64 [buckets] and [buckets, streams].
        """
        return self._interval(max(step - 1, 0)).before(step)

    def used(self, first: int, last: int | None) -> np.ndarray:
        """The buckets of the steps `first` to `last` (None: all later steps): bool [buckets]."""
        last = self.steps if last is None else last
        if last is not None:
            return self.before(max(last, first))[0] > self.before(first)[0]
        weighted = [
            stream for stream, at in zip(self._streams, self.offsets, strict=True) if at is not None
        ]
        found = np.any([stream.whole.rows > 0 for stream in weighted], axis=0)
        if len(self._streams) == 1 and first < (start := self._intervals[-1].start):
            found |= self.before(start)[0] > self.before(first)[0]
        return found

    def epoch_of(self, step: int) -> int:
        """The epoch of a step."""
        epoch, begin, end = self._latest_epoch
        if begin <= step < end:
            return epoch
        epoch, interval = self._epoch_at(step), self._interval(step)
        end = step + 1
        if interval.ends is not None and interval.end is not None:
            step, end = interval.start, interval.end
        elif epoch == self._epoch_at(step + KEEPS):
            end = step + KEEPS
        self._latest_epoch = epoch, step, end
        return epoch

    def epoch_around(self, step: int) -> range:
        """The steps of the epoch of a step, as far as they are steps of the schedule."""
        around = self._around
        if step not in around:
            epoch = self.epoch_of(step)
            around = self._around = range(self.first_step(epoch), self.first_step(epoch + 1))
        return around

    def epochs(self, step: int) -> list[int]:
        """The least epoch of each stream that is not over before a step."""
        return self._progress.epochs(self.before(step)[1]).tolist()

    def _epoch_at(self, step: int) -> int:
        pairs = zip(self.epochs(step), self.offsets, strict=True)
        return min(epoch + offset for epoch, offset in pairs if offset is not None)

    def first_step(self, epoch: int) -> int:
        """The first step of an epoch; of one that began before 0, of one after the end `steps`."""
        if self.steps is not None and self._epoch_at(self.steps) < epoch:
            return self.steps
        return first_step(lambda step: self._epoch_at(step) >= epoch, -1)


class _Progress:
    """Where some streams are after some rows, int64 [buckets, streams], for all at once."""

    def __init__(self, streams: Sequence[Stream]):
        most = max(len(stream.passes) for stream in streams)
        self._skipped = np.array([most - len(stream.passes) for stream in streams])
        shape = most, len(streams[0].whole.rows), len(streams)
        # Passes are aligned at the last; streams with fewer begin with some that are over.
        self._starts, self._first_epochs = np.zeros(shape, np.int64), np.zeros(shape[::2], np.int64)
        for number, (stream, skipped) in enumerate(zip(streams, self._skipped, strict=True)):
            self._starts[skipped:, :, number] = stream.starts
            self._first_epochs[skipped:, number] = [each.first_epoch for each in stream.passes]
        self._whole = np.stack([stream.whole.rows for stream in streams], axis=1)

    def count_passes(self, rows: np.ndarray) -> np.ndarray:
        """The number of passes of each stream that are over: int64 [streams]."""
        return (rows >= self._starts[1:]).all(axis=1).sum(axis=0) - self._skipped

    def epochs(self, rows: np.ndarray) -> np.ndarray:
        """The least epoch of each stream that is not over: int64 [streams]."""
        at = self.count_passes(rows) + self._skipped
        times = (rows - self._starts[-1]) // np.maximum(self._whole, 1)
        times = times.min(axis=0, initial=1 << 62, where=self._whole > 0)
        of_pass = self._first_epochs[at, np.arange(len(at))]
        return of_pass + times * (at == len(self._starts) - 1)


def first_step(holds: Callable[[int], bool], after: int, near: int = 0) -> int:
    """The first step after `after` at which a condition holds, which then holds for ever."""
    low, high, far = after, max(near, after + 1), 1
    while not holds(high):
        low, high, far = high, high + far, 2 * far
    far = 1
    while high - far > low and holds(high - far):
        high, far = high - far, 2 * far
    return bisect.bisect_left(range(high), True, lo=max(low, high - far) + 1, key=holds)


def _find_end(interval: Interval, waiting: Mapping[int, np.ndarray]) -> int:
    """The first step before which one of the `waiting` streams has had so many rows.

    The quota is close to the shares, so only steps nearby are tried.
    """
    ends = {
        stream: [
            (bucket, end)
            for bucket, end in enumerate(rows.tolist())
            if end > interval.rows[bucket, stream]
        ]
        for stream, rows in waiting.items()
    }

    def estimate(stream: int) -> int:
        return max(
            (end - int(interval.rows[bucket, stream])) * interval.per_step // share
            for bucket, end in ends[stream]
            if (share := interval.shares[bucket][stream])
        )

    def find(stream: int, near: int) -> int:
        return first_step(
            lambda step: all(interval.row(stream, n, step) >= end for n, end in ends[stream]),
            interval.start,
            interval.start + near,
        )

    near = {stream: estimate(stream) for stream in waiting}
    first = min(waiting, key=lambda stream: near[stream])
    step = find(first, near[first])
    while True:
        rows = interval.before(step - 1)[1]
        earlier = [stream for stream, end in waiting.items() if (rows[:, stream] >= end).all()]
        if not earlier:
            return step
        step = min(find(stream, near[stream]) for stream in earlier)


def _size(stream: Stream, found: Pass, by: str) -> int:
    """The tokens, examples or positions with loss in the rows of a pass."""
    layout = found.layout
    if by == "examples":
        return int(layout.counts[1:].sum()) - layout.pieces.num_later
    tokens = int(layout.real.sum())
    return max(int(tokens * stream.lengths.loss_share), 1) if by == "loss" else tokens
