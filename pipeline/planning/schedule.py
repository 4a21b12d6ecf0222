"""Schedules: the bucket of each step, and how many rows it takes of each stream.

A schedule is a list of intervals. In an interval all shares are constant, so a quota gives any step
without the steps before it. An interval ends where a pass of the only stream ends, whose last
batches may be short, or where one of several streams ends the rest of an epoch. At the end of a
pass, the batches of each tail are an interval of their own.
"""

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction

import numpy as np

from pipeline.planning.bucket import Bucket
from pipeline.planning.options import Options
from pipeline.planning.order import Purpose, Quota, random_bits, random_key
from pipeline.planning.stream import Pass, Stream
from pipeline.planning.tails import count_batches

# So many steps after one, it is looked whether their epoch is still the same.
KEEPS = 64

# What streams are owed is counted in parts of a row, and the pace of a stream in parts of a pass.
UNIT, PACE = 1 << 64, 1 << 160

# More rows than any step has before it.
NEVER = 1 << 62


@dataclasses.dataclass(frozen=True)
class Interval:
    """Consecutive steps in constant shares, after some batches and rows.

    Attributes:
        start: the first step.
        batches: int64 [buckets], the batches of each bucket before it.
        rows: int64 [lengths, streams], the rows of each stream before it.
        buckets: int64 [lengths], the number of the bucket of each length; at the end of a pass,
            that of a tail.
        rows_per_batch: int64 [lengths], their rows.
        length_quota: divides steps among lengths. The first step is its place number `rotation`.
        stream_quotas: for each length, divides its rows among streams.
        most_rows: int64 [lengths, streams], the rows at the end of a pass, whose last batches are
            short; or more rows than there can be.
        rotation: the places of `length_quota` before the first step.
        shares: for each length, the rows of each of several streams in a step, of `per_step`.
        owed: for each length, the rows owed to each of several streams before it, in `UNIT`s.
        end: one past the last step; None: the shares stay for ever.
    """

    start: int
    batches: np.ndarray
    rows: np.ndarray
    buckets: np.ndarray
    rows_per_batch: np.ndarray
    length_quota: Quota
    stream_quotas: Sequence[Quota]
    most_rows: np.ndarray
    rotation: int = 0
    shares: Sequence[Sequence[int]] = ()
    per_step: int = 1
    owed: Sequence[Sequence[int]] = ()
    end: int | None = None

    @functools.cached_property
    def _rotated(self) -> list[int]:
        return self.length_quota.before(self.rotation)

    def before(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """The batches of each bucket and the rows of each stream before a step, as attributes."""
        places = self.length_quota.before(self.rotation + step - self.start)
        steps = np.subtract(places, self._rotated)
        taken = (steps * self.rows_per_batch).tolist()
        each = zip(self.stream_quotas, taken, strict=True)
        rows = self.rows + np.array([quota.before(place) for quota, place in each])
        batches = self.batches.copy()
        batches[self.buckets] += steps
        return batches, np.minimum(rows, self.most_rows)

    def at(self, step: int) -> tuple[int, list[tuple[int, int, int]]]:
        """The number of a step's bucket, and its rows: (stream, first row, number of rows)."""
        place = self.rotation + step - self.start
        ((length, number, _),) = self.length_quota.between(place, place + 1)
        rows, quota = int(self.rows_per_batch[length]), self.stream_quotas[length]
        first = (number - self._rotated[length]) * rows
        most, base = self.most_rows[length].tolist(), self.rows[length].tolist()
        return int(self.buckets[length]), [
            (stream, base[stream] + begin, min(end - begin, most[stream] - base[stream] - begin))
            for stream, begin, end in quota.between(first, first + rows)
        ]

    def owed_at(self, step: int) -> list[list[int]]:
        """The rows of each length that are owed to each of several streams before a step."""
        steps = (step - self.start) * UNIT
        taken = (self.before(step)[1] - self.rows).tolist()
        return [
            [
                had + share * steps // self.per_step - rows * UNIT
                for had, share, rows in zip(*of_length, strict=True)
            ]
            for of_length in zip(self.owed, self.shares, taken, strict=True)
        ]


class Schedule:
    """Steps from `start` on; with several streams, each has its share of the batches of any few.

    Rows of a length are numbered over the whole stream. The epoch of a step is the least of the
    epochs of all streams that have a share; one that gets a share later counts its epochs from that
    of the step.

    Attributes:
        start: the first step.
        end: one past the last step; None if steps never end.
        offsets: for each stream, how many more its epochs are in the plan; None without a share.
    """

    def __init__(
        self,
        start: int,
        streams: Sequence[Stream],
        options: Options,
        shares: Mapping[str, Fraction] | None = None,
        before: "Schedule | None" = None,
        *,
        goes_on: bool = False,
    ):
        """`before` has the steps up to `start`; where it `goes_on`, streams do where they are."""
        self.start, self._streams, self._options = start, streams, options
        self._progress = _Progress(streams)
        self._groups = options.groups
        self._rows = np.array([bucket.rows for bucket in options.buckets])  # of each bucket
        self._first = np.cumsum([0, *map(len, self._groups[:-1])])  # the bucket of each length
        self._intervals: tuple[Interval, ...] = ()
        # Of one stream, the first step of whole epochs, with the batches and rows before it, and
        # the intervals of the latest epoch.
        self._whole: tuple[int, np.ndarray, np.ndarray] | None = None
        self._whole_epoch: list[Interval] = []
        self.end: int | None = None
        self._latest_epoch = 0, 0, 0  # with the first step and the end of those known
        self._around = range(0)
        self.offsets: tuple[int | None, ...] = (0,)
        if shares is None:
            self._add_passes()
            return
        rows = np.zeros((len(self._groups), len(streams)), np.int64)
        owed = [[0] * len(streams) for _ in rows]
        if before is not None and goes_on:
            joined = len(streams) - len(before.offsets)
            rows = np.pad(before.before(start)[1], ((0, 0), (0, joined)))
            owed = [[*each, *[0] * joined] for each in before._interval_up_to(start).owed_at(start)]
        self._shares = [shares[stream.name] for stream in streams]
        epoch, offsets = (before.epoch_of(start), before.offsets) if before else (0, ())
        self.offsets = tuple(
            (epoch - begun if had is None else had) if share else None
            for share, begun, had in itertools.zip_longest(
                self._shares, self._progress.epochs(rows).tolist(), offsets
            )
        )
        self._sizes = [
            [_size(stream, found, options.by) for found in stream.passes] for stream in streams
        ]
        self._intervals = (self._interval_in_shares(start, 0 * self._rows, rows, owed),)
        if options.ending == "stop":
            # Each stream has the rest of an epoch and, from the start of the plan, one whole.
            stock = np.stack(
                [each.starts[-1] + each.whole.rows * (each.epoch == 0) for each in streams], axis=1
            )
            too_many = first_step(lambda at: bool((self.before(at)[1] > stock).any()), start)
            self.end = too_many - 1

    # ---- one stream: an interval for each pass, and for each whole epoch

    def _add_passes(self) -> None:
        (stream,), step = self._streams, self.start
        batches = np.zeros(len(self._options.buckets), np.int64)
        for found, rows in zip(stream.passes[:-1], stream.starts, strict=False):
            self._intervals += (*self._intervals_of(found, found.first_epoch, step, batches, rows),)
            per_pass = self._count_batches(found)
            step, batches = step + int(per_pass.sum()), batches + per_pass
        self._whole = step, batches, stream.starts[-1]

    def _count_batches(self, found: Pass) -> np.ndarray:
        """The batches of each bucket in one time of a pass: int64 [buckets]."""
        return count_all_batches(found.rows, self._groups)

    def _intervals_of(
        self, found: Pass, epoch: int, start: int, batches: np.ndarray, rows: np.ndarray
    ) -> Iterator[Interval]:
        """The intervals of one time of a pass."""
        key = random_key(self._options.seed, "buckets", found.repeats)
        counts, most = self._count_batches(found), rows + found.rows
        return cut_intervals(self._options, key, epoch, counts, start, batches, rows, most)

    def _interval_of_epoch(self, step: int) -> Interval:
        """The interval of a step that is in a whole epoch of the only stream."""
        assert self._whole is not None, "there is one stream"
        latest = self._whole_epoch
        if not latest or not latest[0].start <= step < (latest[-1].end or 0):
            first, batches, rows = self._whole
            (stream,) = self._streams
            per_epoch = self._count_batches(stream.whole)
            steps = int(per_epoch.sum())
            epochs = (step - first) // steps
            latest = self._whole_epoch = [
                *self._intervals_of(
                    stream.whole,
                    stream.epoch + epochs,
                    first + epochs * steps,
                    batches + epochs * per_epoch,
                    rows + epochs * stream.whole.rows,
                )
            ]
        return _at(latest, step)

    # ---- several streams

    def _interval_in_shares(
        self, start: int, batches: np.ndarray, rows: np.ndarray, owed: Sequence[Sequence[int]]
    ) -> Interval:
        """The interval from `start` on, in which the present passes of all streams continue.

        Weights give the pace of a pass, and its pace the rows of each bucket. What streams are owed
        is kept from interval to interval: a small share of a short one would never have a row.
        """
        per_batch = self._rows.tolist()
        unit = PACE * math.lcm(*per_batch)
        shares: list[list[int]] = [[] for _ in per_batch]
        waiting = {}  # the rows after which shares change, of each stream that waits for that
        present = self._progress.count_passes(rows).tolist()
        for number, (stream, share) in enumerate(zip(self._streams, self._shares, strict=True)):
            at = present[number]
            found, size = stream.passes[at], self._sizes[number][at]
            pace = unit * share.numerator // (share.denominator * size)
            for of_bucket, count in zip(shares, found.rows.tolist(), strict=True):
                of_bucket.append(pace * count)
            if share and not found.repeats:
                waiting[number] = stream.starts[at + 1]
        in_batches = [
            [sum(each) // n for each, n in zip(of_rows, per_batch, strict=True)]
            for of_rows in (shares, owed)
        ]
        interval = Interval(
            start,
            batches,
            rows,
            self._first,
            self._rows,
            Quota(in_batches[0], in_batches[1], UNIT),
            [Quota(each, had, UNIT) for each, had in zip(shares, owed, strict=True)],
            np.full_like(rows, NEVER),
            shares=shares,
            per_step=sum(in_batches[0]),
            owed=owed,
        )
        return dataclasses.replace(interval, end=_find_end(interval, waiting))

    # ---- all steps

    def _interval(self, step: int) -> Interval:
        if self._whole is not None and step >= self._whole[0]:
            return self._interval_of_epoch(step)
        intervals = self._intervals
        while step >= (last := intervals[-1]).start and last.shares:
            if last.end is None or step < last.end:
                return last
            following = self._interval_in_shares(
                last.end, *last.before(last.end), last.owed_at(last.end)
            )
            self._intervals = intervals = (*intervals, following)
        return _at(intervals, step)

    def _interval_up_to(self, step: int) -> Interval:
        """The interval of the step before, or the first."""
        return self._interval(max(step - 1, self.start))

    def at(self, step: int) -> tuple[int, list[tuple[int, int, int]]]:
        """The number of a step's bucket, and its rows: (stream, first row, number of rows).

        Rows are those of the bucket's length. A batch with fewer rows than its bucket is filled up
        with empty rows.
        """
        return self._interval(step).at(step)

    def before(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """The batches of each bucket, and the rows of each stream, that come before a step.

        int64 [buckets] and [lengths, streams].
        """
        return self._interval_up_to(step).before(step)

    def used(self, first: int, last: int | None) -> np.ndarray:
        """The buckets of the steps `first` to `last` (None: all later steps): bool [buckets]."""
        last = self.end if last is None else last
        if last is not None:
            return self.before(max(last, first))[0] > self.before(first)[0]
        weighted = [
            stream for stream, at in zip(self._streams, self.offsets, strict=True) if at is not None
        ]
        found = np.any([self._count_batches(stream.whole) > 0 for stream in weighted], axis=0)
        if self._whole is not None and first < self._whole[0]:
            found |= self._whole[1] > self.before(first)[0]
        return found

    def epoch_of(self, step: int) -> int:
        """The epoch of a step."""
        epoch, begin, end = self._latest_epoch
        if begin <= step < end:
            return epoch
        epoch, interval = self._epoch_at(step), self._interval(step)
        end = step + 1
        if interval.end is not None and not interval.shares:
            step, end = interval.start, interval.end
        elif epoch == self._epoch_at(step + KEEPS):
            end = step + KEEPS
        self._latest_epoch = epoch, step, end
        return epoch

    def known_around(self, step: int, steps: range) -> range:
        """Those of `steps` that are known as soon as `step` is: here, all of them."""
        return steps

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
        if self.end is not None:  # a plan that ends has one epoch
            return 0
        pairs = zip(self.epochs(step), self.offsets, strict=True)
        return min(epoch + offset for epoch, offset in pairs if offset is not None)

    def first_step(self, epoch: int) -> int:
        """The first step of an epoch: at least `start`, and at most `end`."""
        if self.end is not None and self._epoch_at(self.end) < epoch:
            return self.end
        return first_step(lambda step: self._epoch_at(step) >= epoch, self.start - 1)


def count_all_batches(rows: np.ndarray, groups: Sequence[Sequence[Bucket]]) -> np.ndarray:
    """The batches of each bucket that hold so many rows of each length: int64 [buckets]."""
    each = zip(rows.tolist(), groups, strict=True)
    return np.concatenate([count_batches(count, group) for count, group in each])


def cut_intervals(
    options: Options,
    key: int,
    epoch: int,
    counts: np.ndarray,
    start: int,
    batches: np.ndarray,
    rows: np.ndarray,
    most: np.ndarray,
) -> Iterator[Interval]:
    """The intervals of some batches of one stream: those of all lengths, which rotate; then tails.

    `counts` has the batches of each bucket. They begin at step `start`, after `batches` of each
    bucket and `rows` of each length, and end after the rows `most`: the last may be short. The
    random bits of `key`, others in each `epoch`, rotate them.
    """
    groups, rows_of_bucket = options.groups, np.array([each.rows for each in options.buckets])
    first = np.cumsum([0, *map(len, groups[:-1])])  # the bucket of each length
    whole, rotation = counts[first], 0
    if options.shuffle and whole.any():
        bits = int(random_bits(key, Purpose.BUCKETS, 1, epoch=epoch)[0])
        rotation = bits % int(whole.sum())
    parts = [(first, whole, rotation)]
    for length, group in enumerate(groups):
        for place in range(1, len(group)):
            buckets, steps = first.copy(), 0 * first
            buckets[length] += place
            steps[length] = counts[buckets[length]]
            parts.append((buckets, steps, 0))
    for buckets, steps, rotation in parts:
        if steps.any():
            end, per_batch = start + int(steps.sum()), rows_of_bucket[buckets]
            yield Interval(
                start,
                batches,
                rows[:, None],
                buckets,
                per_batch,
                Quota(steps.tolist()),
                [Quota([1])] * len(rows),
                most[:, None],
                rotation,
                end=end,
            )
            start, rows = end, np.minimum(rows + steps * per_batch, most)
            batches = batches.copy()
            batches[buckets] += steps


class _Progress:
    """Where some streams are after some rows, int64 [lengths, streams], for all at once."""

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


def _at(intervals: Sequence[Interval], step: int) -> Interval:
    """The interval of a step."""
    return intervals[bisect.bisect_right(intervals, step, key=lambda each: each.start) - 1]


def first_step(holds: Callable[[int], bool], after: int, near: int = 0) -> int:
    """The first step after `after` at which a condition holds, which then holds for ever."""
    low, high, far = after, max(near, after + 1), 1
    while not holds(high):
        low, high, far = high, high + far, 2 * far
    far = 1
    while high - far > low and holds(high - far):
        high, far = high - far, 2 * far
    return bisect.bisect_left(range(high), True, lo=max(low, high - far) + 1, key=holds)


def _find_end(interval: Interval, waiting: Mapping[int, np.ndarray]) -> int | None:
    """The first step before which one of the `waiting` streams has had so many rows.

    The quota is close to the shares, so only steps nearby are tried.
    """
    if not waiting:
        return None
    streams, ends = [*waiting], np.stack([*waiting.values()], axis=1)

    def is_over(step: int) -> bool:
        return bool((interval.before(step)[1][:, streams] >= ends).all(axis=0).any())

    missing = (ends - interval.rows[:, streams]).T.tolist()
    near = min(
        max(
            rows * interval.per_step // of_bucket[stream]
            for rows, of_bucket in zip(of_stream, interval.shares, strict=True)
            if of_bucket[stream]
        )
        for stream, of_stream in zip(streams, missing, strict=True)
    )
    return first_step(is_over, interval.start, interval.start + near)


def _size(stream: Stream, found: Pass, by: str) -> int:
    """The tokens, examples or positions with loss in the rows of a pass."""
    layout = found.layout
    if by == "examples":
        return int(layout.counts[1:].sum()) - layout.pieces.num_later
    tokens = int(layout.real.sum())
    return max(int(tokens * stream.lengths.loss_share), 1) if by == "loss" else tokens
