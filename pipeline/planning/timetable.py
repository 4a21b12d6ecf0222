"""Timetables: the bucket of each step, and the rows that it takes from each source."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from pipeline.planning.order import interleave
from pipeline.planning.source import Source
from pipeline.planning.windows import Windows


class Timetable(Protocol):
    """The steps of a stage, by random access; step 0 is the first step of the stage.

    `EpochTimetable` is for one source, `QuotaTimetable` for several. Rows of a bucket are numbered
    over the whole stream of a source.

    Attributes:
        steps: the number of steps; None if they never end.
        first_epoch: the first epoch that begins in this stage.
    """

    steps: int | None
    first_epoch: int

    def at(self, step: int) -> tuple[int, list[tuple[int, int, int]], int]:
        """The number of a step's bucket, the rows that it takes, and its epoch.

        The rows are a list of (source, first row, number of rows). A batch with fewer rows than its
        bucket is filled up with empty rows.
        """

    def before(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """The batches of each bucket, and the rows of each source, that come before a step.

        int64 [buckets] and [buckets, sources].
        """

    def used(self, first: int, last: int | None) -> np.ndarray:
        """The buckets of the steps `first` to `last` (None: all later steps): bool [buckets]."""

    def epoch_of(self, step: int) -> int:
        """The epoch of a step."""

    def first_step(self, epoch: int) -> int:
        """The first step of an epoch that begins in this stage."""


class EpochTimetable:
    """Whole batches of one source: those of the remainder, then those of whole epochs.

    An epoch ends with the batch that is not full. Implements `Timetable`.

    Args:
        source: the source.
        heights: the rows in a batch of each bucket.
    """

    steps: int | None = None

    def __init__(self, source: Source, heights: Sequence[int]):
        self._source, self._heights = source, np.array(heights)
        self._remainder = 0 if source.remainder is None else source.remainder.steps
        self.first_epoch = source.epoch
        self._latest: tuple[Any, Any] = None, None

    def _locate(self, step: int) -> tuple[Windows, int, int, np.ndarray]:
        """The windows with a step, its epoch, its place in the epoch, and the rows before that."""
        source = self._source
        if source.remainder is not None and step < self._remainder:
            return source.remainder, source.epoch - 1, step, 0 * self._heights
        epochs, place = divmod(step - self._remainder, source.whole.steps)
        rows = source.remainder_rows + epochs * source.whole.rows
        return source.whole, source.epoch + epochs, place, rows

    def at(self, step: int) -> tuple[int, list[tuple[int, int, int]], int]:
        """See `Timetable`."""
        windows, epoch, within, before = self._locate(step)
        order = windows.order(epoch)
        place = int(order.steps.searchsorted(within, side="right"))
        begin = int(order.steps[place - 1]) if place else 0
        buckets, numbers = self._order(windows, order.epoch, place)
        bucket, number = int(buckets[within - begin]), int(numbers[within - begin])
        ends, height = order.rows[bucket], int(self._heights[bucket])
        first = (int(ends[place - 1]) if place else 0) + number * height
        count = min(height, int(ends[place]) - first)
        return bucket, [(0, int(before[bucket]) + first, count)], epoch

    def _order(self, windows: Windows, epoch: int, place: int) -> tuple[np.ndarray, np.ndarray]:
        """The bucket of each step of a window, and its number among the bucket's batches there."""
        key, latest = (windows is self._source.whole, epoch, place), self._latest
        if latest[0] != key:
            batches, offsets = windows.batches_at(epoch, place), windows.offsets(epoch, place)
            latest = self._latest = key, interleave(batches, offsets)
        return latest[1]

    def before(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Timetable`."""
        windows, epoch, within, rows = self._locate(step)
        order = windows.order(epoch)
        place = int(np.searchsorted(order.steps, within, side="right"))
        batches = windows.batches_at(epoch, slice(place)).sum(axis=1)
        if windows is self._source.whole:
            batches += (epoch - self._source.epoch) * windows.batches
            if self._source.remainder is not None:
                batches += self._source.remainder.batches
        begin = int(order.steps[place - 1]) if place else 0
        first = order.rows[:, place - 1] if place else 0 * rows
        if within == begin:
            return batches, (rows + first)[:, None]
        here = self._order(windows, order.epoch, place)[0][: within - begin]
        here = np.bincount(here, minlength=len(rows))
        in_window = np.minimum(here * self._heights, order.rows[:, place] - first)
        return batches + here, (rows + first + in_window)[:, None]

    def used(self, first: int, last: int | None) -> np.ndarray:
        """See `Timetable`."""
        first_whole = max(first, self._remainder)
        if last is None or last - first_whole >= self._source.whole.steps:
            last = first_whole + self._source.whole.steps
        return self.before(max(last, first))[0] > self.before(first)[0]

    def epoch_of(self, step: int) -> int:
        """See `Timetable`."""
        return self._locate(step)[1]

    def first_step(self, epoch: int) -> int:
        """See `Timetable`."""
        return self._remainder + (epoch - self.first_epoch) * self._source.whole.steps
