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
        ...

    def before(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """The batches of each bucket, and the rows of each source, that come before a step.

        int64 [buckets] and [buckets, sources].
        """
        ...

    def used(self, first: int, last: int | None) -> np.ndarray:
        """The buckets of the steps `first` to `last` (None: all later steps): bool [buckets]."""
        ...

    def epoch_of(self, step: int) -> int:
        """The epoch of a step."""
        ...

    def first_step(self, epoch: int) -> int:
        """The first step of an epoch that begins in this stage."""
        ...


class EpochTimetable:
    """Whole batches of one source: first of the remainder, then of whole epochs.

    An epoch ends with the batch that is not full. Implements `Timetable`.

    Args:
        source: the source.
        rows_per_batch: the rows in a batch of each bucket.
    """

    steps: int | None = None

    def __init__(self, source: Source, rows_per_batch: Sequence[int]):
        self._source, self._rows_per_batch = source, np.array(rows_per_batch)
        self._none = np.zeros_like(source.whole.rows)
        self._remainder = 0 if source.remainder is None else source.remainder.steps
        self.first_epoch = source.epoch
        self._latest: tuple[Any, Any] = None, None

    def _locate(self, step: int) -> tuple[Windows, int, int, int, np.ndarray]:
        """The windows with a step, its epoch, the window's place, the step in it, and rows.

        The rows are those before the epoch: int64 [buckets].
        """
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
        """See `Timetable`."""
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
        """See `Timetable`."""
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
        """See `Timetable`."""
        first_whole = max(first, self._remainder)
        if last is None or last - first_whole >= self._source.whole.steps:
            last = first_whole + self._source.whole.steps
        return self.before(max(last, first))[0] > self.before(first)[0]

    def epoch_of(self, step: int) -> int:
        """See `Timetable`."""
        source = self._source
        if step < self._remainder:
            return source.epoch - 1
        return source.epoch + (step - self._remainder) // source.whole.steps

    def first_step(self, epoch: int) -> int:
        """See `Timetable`."""
        return self._remainder + (epoch - self.first_epoch) * self._source.whole.steps
