"""The timetable of several sources, in which each has its weight in the batches of any few steps.

A source has a number of rows of each bucket in an epoch, and its weight gives the pace of its
epochs. So the steps of each bucket, and the rows that a bucket takes from each source, are fixed
shares, and a quota gives any step without the steps before it. The shares change only where a
source comes to the end of its remainder: there a new interval begins.
"""

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

from pipeline.planning.options import Options
from pipeline.planning.order import Quota
from pipeline.planning.source import Source
from pipeline.planning.windows import Windows


class QuotaSteps:
    """Steps without end, in which every source has its share.

    Args:
        shares: for each bucket, the share of each source in the rows of all buckets, in any unit.
        rows_per_batch: the rows in a batch of each bucket.

    Attributes:
        used: bool [buckets], the buckets that have a batch.
    """

    def __init__(self, shares: Sequence[Sequence[Fraction]], rows_per_batch: Sequence[int]):
        self._rows_per_batch = rows_per_batch
        self._sources = [Quota(each) if any(each) else None for each in shares]
        self._none = [0] * len(shares[0])
        self._buckets = Quota(
            [
                sum(each, Fraction(0)) / rows
                for each, rows in zip(shares, rows_per_batch, strict=True)
            ]
        )
        self.used = np.array([quota is not None for quota in self._sources])

    def before(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Timetable.before`."""
        batches = self._buckets.before(step)
        rows = [
            self._none if quota is None else quota.before(number * rows)
            for quota, number, rows in zip(
                self._sources, batches, self._rows_per_batch, strict=True
            )
        ]
        return np.array(batches, np.int64), np.array(rows, np.int64)

    def bucket(self, step: int) -> int:
        """The number of the bucket of a step."""
        return self._buckets.taker(step)


@dataclasses.dataclass(frozen=True)
class Interval:
    """Consecutive steps with the same shares.

    Attributes:
        start: the first step.
        batches: int64 [buckets], batches before it.
        rows: int64 [buckets, sources], rows before it, numbered over the streams of the sources.
        content: its steps, counted from 0.
    """

    start: int
    batches: np.ndarray
    rows: np.ndarray
    content: QuotaSteps

    def before(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """The batches and rows before `step`, as in the attributes."""
        batches, rows = self.content.before(step - self.start)
        return self.batches + batches, self.rows + rows


class QuotaTimetable:
    """The steps of several sources under fixed weights. Implements `Timetable`.

    An epoch ends when every source with a weight has had an epoch of its own. A timetable that ends
    has one epoch.

    Args:
        sources: the sources.
        weights: the weight of each source, at least 0; one of them above 0.
        options: the options `buckets`, `by` and `ending`, as for `Plan`.
        rows_before: int64 [buckets, sources], rows of each source's stream before step 0; None for
            none.
        epoch: the epoch of step 0.
        begins: whether this epoch begins with step 0.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Sequence[Fraction],
        options: Options,
        *,
        rows_before: np.ndarray | None = None,
        epoch: int = 0,
        begins: bool = True,
    ):
        self._rows_per_batch = [bucket.rows for bucket in options.buckets]
        self._weights = weights
        # Rows of each source in its remainder and in an epoch: int64 [buckets, sources]. The sizes
        # are the tokens or examples in them, as `by` says.
        self._remainder = np.stack([each.remainder_rows for each in sources], axis=1)
        self._whole = np.stack([each.whole.rows for each in sources], axis=1)
        self._sizes = [
            [_size(windows, options.by) for windows in (each.remainder, each.whole)]
            for each in sources
        ]
        self._active = np.array([weight > 0 for weight in weights])
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
            interval = Interval(start, batches, rows, self._quota_steps(in_remainder))
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

    def _quota_steps(self, in_remainder: np.ndarray) -> QuotaSteps:
        rows = np.where(in_remainder, self._remainder, self._whole).tolist()
        pace = [
            weight / (remainder if first else whole)
            for weight, (remainder, whole), first in zip(
                self._weights, self._sizes, in_remainder, strict=True
            )
        ]
        shares = [[p * n for p, n in zip(pace, each, strict=True)] for each in rows]
        return QuotaSteps(shares, self._rows_per_batch)

    def _interval(self, step: int) -> Interval:
        return self._intervals[bisect.bisect_right(self._starts, step) - 1]

    def at(self, step: int) -> tuple[int, list[tuple[int, int, int]], int]:
        """See `Timetable`."""
        interval = self._interval(step)
        bucket = interval.content.bucket(step - interval.start)
        first, last = (interval.before(step + more)[1][bucket] for more in (0, 1))
        ranges = zip(first.tolist(), (last - first).tolist(), strict=True)
        rows = [(source, at, count) for source, (at, count) in enumerate(ranges) if count]
        return bucket, rows, self.epoch_of(step)

    def before(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Timetable`."""
        # The interval of the step before: one that begins with this step has nothing before it.
        return self._interval(max(step - 1, 0)).before(step)

    def used(self, first: int, last: int | None) -> np.ndarray:
        """See `Timetable`."""
        last = self.steps if last is None else last
        if last is not None:
            return self.before(max(last, first))[0] > self.before(first)[0]
        interval = self._intervals[-1]
        earlier = self.before(max(first, interval.start))[0] > self.before(first)[0]
        return interval.content.used | earlier

    def _count_passes(self, step: int) -> int:
        """The number of epochs that every source with a weight has had before `step`."""
        rows = (self.before(step)[1] - self._remainder)[:, self._active]
        whole = self._whole[:, self._active]
        return max(int((rows[whole > 0] // whole[whole > 0]).min()), 0)

    def epoch_of(self, step: int) -> int:
        """See `Timetable`."""
        if self.steps is not None:
            return 0
        begin, end, epoch = self._latest
        if not begin <= step < end:
            epoch = self._epoch + self._count_passes(step) - self._count_passes(0)
            begin, end = self.first_step(epoch), self.first_step(epoch + 1)
            self._latest = begin, end, epoch
        return epoch

    def first_step(self, epoch: int) -> int:
        """See `Timetable`; 0 for the epoch of step 0."""
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
