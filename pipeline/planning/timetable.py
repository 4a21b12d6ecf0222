"""Timetables: the bucket of each step, and the rows that it takes from each source.

With several sources, each has its weight in the batches of any few steps. A source has a number of
rows of each bucket in an epoch, and its weight gives the pace of its epochs. So the steps of each
bucket, and the rows that a bucket takes from each source, are fixed shares, and a quota gives any
step without the steps before it. The shares change only where a source comes to the end of its
remainder: there a new interval begins.
"""

import bisect
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np

from pipeline.planning.options import Options
from pipeline.planning.order import Quota, interleave
from pipeline.planning.source import Source
from pipeline.planning.windows import Windows


class EpochTimetable:
    """Whole batches of one source: first of the remainder, then of whole epochs.

    An epoch ends with the batch that is not full. Steps count from 0, the first step of the stage;
    rows of a bucket are numbered over the whole stream of a source.

    Attributes, as those of every timetable:
        steps: the number of steps; None if they never end.
        first_epoch: the first epoch that begins in this stage.
    """

    steps: int | None = None

    def __init__(self, source: Source):
        self._source = source
        self._rows_per_batch = np.array([bucket.rows for bucket in source.options.buckets])
        self._none = np.zeros_like(source.whole.rows)
        self._remainder = 0 if source.remainder is None else source.remainder.steps
        self.first_epoch = source.epoch
        self._latest: tuple[Any, Any] = None, None

    def _locate(self, step: int) -> tuple[Windows, int, int, int, np.ndarray]:
        """The windows with a step, its epoch, their place, the step in them, and rows before."""
        source = self._source
        if source.remainder is not None and step < self._remainder:
            windows, epoch, within, rows = source.remainder, source.epoch - 1, step, self._none
        else:
            epochs, within = divmod(step - self._remainder, source.whole.steps)
            windows, epoch = source.whole, source.epoch + epochs
            rows = source.remainder_rows + epochs * source.whole.rows
        order = windows.order(epoch)
        place = int(order.steps.searchsorted(within, side="right")) - 1
        return windows, epoch, place, within - int(order.steps[place]), rows

    def at(self, step: int) -> tuple[int, list[tuple[int, int, int]], int]:
        """The number of a step's bucket, the rows that it takes, and its epoch.

        The rows are a list of (source, first row, number of rows). A batch with fewer rows than its
        bucket is filled up with empty rows.
        """
        windows, epoch, place, within, rows = self._locate(step)
        buckets, numbers = self._order(windows, epoch, place)
        bucket, number = int(buckets[within]), int(numbers[within])
        rows_per_batch = int(self._rows_per_batch[bucket])
        begin, end = windows.order(epoch).starts[bucket, place : place + 2].tolist()
        first = begin + number * rows_per_batch
        return bucket, [(0, int(rows[bucket]) + first, min(rows_per_batch, end - first))], epoch

    def _order(self, windows: Windows, epoch: int, place: int) -> tuple[np.ndarray, np.ndarray]:
        """The bucket of each step of a window, and its number among the bucket's batches there."""
        key = windows is self._source.whole, windows.order(epoch).epoch, place
        latest = self._latest
        if latest[0] != key:
            before, after = windows.order(epoch).batches[:, place : place + 2].T
            latest = self._latest = key, interleave(after - before, windows.offsets(epoch, place))
        return latest[1]

    def before(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """The batches of each bucket, and the rows of each source, that come before a step.

        int64 [buckets] and [buckets, sources].
        """
        windows, epoch, place, within, rows = self._locate(step)
        order = windows.order(epoch)
        batches, rows = order.batches[:, place].copy(), rows + order.starts[:, place]
        if windows is self._source.whole:
            batches += (epoch - self._source.epoch) * windows.batches
            if self._source.remainder is not None:
                batches += self._source.remainder.batches
        if not within:
            return batches, rows[:, None]
        here = np.bincount(self._order(windows, epoch, place)[0][:within], minlength=len(rows))
        room = order.starts[:, place + 1] - order.starts[:, place]
        return batches + here, (rows + np.minimum(here * self._rows_per_batch, room))[:, None]

    def used(self, first: int, last: int | None) -> np.ndarray:
        """The buckets of the steps `first` to `last` (None: all later steps): bool [buckets]."""
        first_whole = max(first, self._remainder)
        if last is None or last - first_whole >= self._source.whole.steps:
            last = first_whole + self._source.whole.steps
        return self.before(max(last, first))[0] > self.before(first)[0]

    def epoch_of(self, step: int) -> int:
        """The epoch of a step."""
        source = self._source
        if step < self._remainder:
            return source.epoch - 1
        return source.epoch + (step - self._remainder) // source.whole.steps

    def first_step(self, epoch: int) -> int:
        """The first step of an epoch that begins in this stage."""
        return self._remainder + (epoch - self.first_epoch) * self._source.whole.steps


class Interval:
    """Consecutive steps of several sources in fixed shares, after some batches and rows.

    For each bucket, `shares` has the share of each source in the rows of all buckets, in any unit.
    """

    def __init__(
        self,
        start: int,
        batches: np.ndarray,
        rows: np.ndarray,
        shares: Sequence[Sequence[Fraction]],
        rows_per_batch: Sequence[int],
    ):
        self.start, self._batches, self._rows = start, batches, rows
        self._rows_per_batch = rows_per_batch
        totals = [sum(of_bucket, Fraction(0)) for of_bucket in shares]
        self._buckets = Quota([n / size for n, size in zip(totals, rows_per_batch, strict=True)])
        self._sources = [Quota(of_bucket) if any(of_bucket) else None for of_bucket in shares]
        self.used = np.array([quota is not None for quota in self._sources])  # by bucket

    def before(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """See `EpochTimetable`."""
        batches = np.array(self._buckets.before(step - self.start), np.int64)
        rows = self._rows.copy()
        for bucket, quota in enumerate(self._sources):
            if quota is not None:
                rows[bucket] += quota.before(int(batches[bucket]) * self._rows_per_batch[bucket])
        return self._batches + batches, rows

    def bucket(self, step: int) -> int:
        """The number of the bucket of a step."""
        return self._buckets.taker(step - self.start)


class QuotaTimetable:
    """The steps of several sources under fixed weights.

    An epoch ends when every source with a weight has had an epoch of its own. A timetable that ends
    has one epoch. `rows_before`, int64 [buckets, sources], are the rows of each stream before step
    0. Step 0 is in `epoch`, and `begins` says whether it is its first.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        shares: Mapping[str, Fraction],
        options: Options,
        *,
        rows_before: np.ndarray | None = None,
        epoch: int = 0,
        begins: bool = True,
    ):
        self._rows_per_batch = [bucket.rows for bucket in options.buckets]
        self._weights = [shares[source.name] for source in sources]
        # Rows of each source in its remainder and in an epoch: int64 [buckets, sources]. The sizes
        # are the tokens or examples in them, as `by` says.
        self._remainder = np.stack([each.remainder_rows for each in sources], axis=1)
        self._whole = np.stack([each.whole.rows for each in sources], axis=1)
        self._sizes = [
            [_size(windows, options.by) for windows in (each.remainder, each.whole)]
            for each in sources
        ]
        self._active = np.array([weight > 0 for weight in self._weights])
        self._intervals: list[Interval] = []
        rows = 0 * self._whole if rows_before is None else rows_before
        self._add_intervals(rows, repeats=options.ending == "repeat")
        self._starts = [interval.start for interval in self._intervals]
        self.steps: int | None = None
        if options.ending == "stop":
            # Each source has its remainder and, from the start of the plan, one whole epoch.
            stock = self._remainder + self._whole * [source.epoch == 0 for source in sources]
            self.steps = _first_step(lambda at: bool((self.before(at)[1] > stock).any()), 0) - 1
        self._epoch, self.first_epoch = epoch, epoch if begins else epoch + 1
        self._latest = (0, 0, epoch)  # first step, one past the last step, and number of an epoch

    def _add_intervals(self, rows: np.ndarray, *, repeats: bool) -> None:
        start, batches = 0, np.zeros(len(self._rows_per_batch), np.int64)
        while True:
            in_remainder = np.any(rows < self._remainder, axis=0)
            shares = self._shares(in_remainder)
            interval = Interval(start, batches, rows, shares, self._rows_per_batch)
            self._intervals.append(interval)
            waiting = self._active & in_remainder
            if not repeats or not waiting.any():
                return

            def is_over(
                step: int, interval: Interval = interval, waiting: np.ndarray = waiting
            ) -> bool:
                over = (interval.before(step)[1] >= self._remainder).all(axis=0)
                return bool((waiting & over).any())

            start = _first_step(is_over, start)
            batches, rows = interval.before(start)

    def _shares(self, in_remainder: np.ndarray) -> list[list[Fraction]]:
        rows = np.where(in_remainder, self._remainder, self._whole).tolist()
        pace = [
            weight / (remainder if first else whole)
            for weight, (remainder, whole), first in zip(
                self._weights, self._sizes, in_remainder, strict=True
            )
        ]
        return [[p * n for p, n in zip(pace, each, strict=True)] for each in rows]

    def _interval(self, step: int) -> Interval:
        return self._intervals[bisect.bisect_right(self._starts, step) - 1]

    def at(self, step: int) -> tuple[int, list[tuple[int, int, int]], int]:
        """See `EpochTimetable`."""
        interval = self._interval(step)
        bucket = interval.bucket(step)
        first, last = (interval.before(step + more)[1][bucket] for more in (0, 1))
        ranges = zip(first.tolist(), (last - first).tolist(), strict=True)
        rows = [(source, at, count) for source, (at, count) in enumerate(ranges) if count]
        return bucket, rows, self.epoch_of(step)

    def before(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """See `EpochTimetable`."""
        # The interval of the step before: one that begins with this step has nothing before it.
        return self._interval(max(step - 1, 0)).before(step)

    def used(self, first: int, last: int | None) -> np.ndarray:
        """See `EpochTimetable`."""
        last = self.steps if last is None else last
        if last is not None:
            return self.before(max(last, first))[0] > self.before(first)[0]
        interval = self._intervals[-1]
        earlier = self.before(max(first, interval.start))[0] > self.before(first)[0]
        return interval.used | earlier

    def _count_passes(self, step: int) -> int:
        """The number of epochs that every source with a weight has had before `step`."""
        rows = (self.before(step)[1] - self._remainder)[:, self._active]
        whole = self._whole[:, self._active]
        return max(int((rows[whole > 0] // whole[whole > 0]).min()), 0)

    def epoch_of(self, step: int) -> int:
        """See `EpochTimetable`."""
        if self.steps is not None:
            return 0
        begin, end, epoch = self._latest
        if not begin <= step < end:
            epoch = self._epoch + self._count_passes(step) - self._count_passes(0)
            begin, end = self.first_step(epoch), self.first_step(epoch + 1)
            self._latest = begin, end, epoch
        return epoch

    def first_step(self, epoch: int) -> int:
        """See `EpochTimetable`; 0 for the epoch of step 0."""
        if self.steps is not None:
            return self.steps if epoch else 0
        if epoch <= self._epoch:
            return 0
        passes = epoch - self._epoch + self._count_passes(0)
        return _first_step(lambda step: self._count_passes(step) >= passes, 0)


def _size(windows: Windows | None, by: str) -> int:
    """The tokens or examples in an epoch of some windows."""
    if windows is None:
        return 0
    if by == "tokens":
        return int(windows.real.sum())
    return int(np.count_nonzero(windows.pieces.positions_per_example().any(axis=1)))


def _first_step(holds: Callable[[int], bool], after: int) -> int:
    """The first step after `after` at which a condition holds, which then holds for ever."""
    far = 1
    while not holds(after + far):
        far *= 2
    return bisect.bisect_left(range(after + far), True, lo=after + 1, key=holds)


Timetable: TypeAlias = EpochTimetable | QuotaTimetable
