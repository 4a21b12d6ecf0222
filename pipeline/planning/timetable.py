"""Timetables: the bucket of each step, and which rows of which source fill it.

There are two kinds. `EpochOrder` takes whole batches of one source, epoch by epoch: an epoch ends
with its under-filled batch. `Shares` takes rows of several sources by quota, past the ends of their
epochs.
"""

from typing import Any

import numpy as np

from pipeline.planning.order import interleave
from pipeline.planning.source import Source
from pipeline.planning.windows import Windows


class EpochOrder:
    """Whole batches of one source: the remainder of an epoch, then whole epochs.

    Steps count from 0, where the stage begins.

    Args:
        source: the source.
        rows: the rows of a batch of each bucket.

    Attributes:
        steps: how many there are; None, as they never end.
        first_epoch: the first epoch that begins here.
    """

    steps: int | None = None

    def __init__(self, source: Source, rows: list[int]):
        self._source, self._rows = source, np.array(rows)
        self._remainder = 0 if source.remainder is None else source.remainder.steps
        self.first_epoch = source.epoch
        self._latest: tuple[Any, Any] = None, None

    def _locate(self, step: int) -> tuple[Windows, int, int, np.ndarray]:
        """The windows that hold a step, the epoch, the step in it, and rows taken before these."""
        source = self._source
        if source.remainder is not None and step < self._remainder:
            return source.remainder, source.epoch - 1, step, 0 * self._rows
        epoch, within = divmod(step - self._remainder, source.whole.steps)
        return (
            source.whole,
            source.epoch + epoch,
            within,
            (source.remainder_rows + epoch * source.whole.rows),
        )

    def at(self, step: int) -> tuple[int, list[tuple[int, int, int]], int]:
        """The bucket of a step; source, first row and number of rows of each source; the epoch.

        Rows of a bucket are counted over the whole stream of a source. There may be fewer than in a
        batch: the last batch of a window is filled up with empty rows.
        """
        windows, epoch, within, taken = self._locate(step)
        order = windows.order(epoch)
        place = int(order.steps.searchsorted(within, side="right"))
        begin = int(order.steps[place - 1]) if place else 0
        buckets, numbers = self._order(windows, order.epoch, place)
        bucket, number = int(buckets[within - begin]), int(numbers[within - begin])
        ends, height = order.rows[bucket], int(self._rows[bucket])
        first = (int(ends[place - 1]) if place else 0) + number * height
        count = min(height, int(ends[place]) - first)
        return bucket, [(0, int(taken[bucket]) + first, count)], epoch

    def _order(self, windows: Windows, epoch: int, place: int) -> tuple[np.ndarray, np.ndarray]:
        """For each step of a window its bucket, and which of that bucket's batches it is."""
        key, latest = (windows is self._source.whole, epoch, place), self._latest
        if latest[0] != key:
            batches, offsets = windows.batches_at(epoch, place), windows.offsets(epoch, place)
            latest = self._latest = key, interleave(batches, offsets)
        return latest[1]

    def before(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Batches of each bucket below `step`; rows of each source's stream that are taken by then.

        int64 [buckets] and [buckets, sources].
        """
        windows, epoch, within, rows = self._locate(step)
        order = windows.order(epoch)
        place = int(np.searchsorted(order.steps, within, side="right"))
        batches = windows.batches_at(epoch, slice(place)).sum(axis=1)
        if windows is self._source.whole:
            batches += (epoch - self._source.epoch) * windows.batches
            if self._source.remainder is not None:
                batches += self._source.remainder.batches
        begin = int(order.steps[place - 1]) if place else 0
        begun = order.rows[:, place - 1] if place else 0 * rows
        if within == begin:
            return batches, (rows + begun)[:, None]
        here = np.bincount(self._order(windows, order.epoch, place)[0][: within - begin])
        here = np.pad(here, (0, len(rows) - len(here)))
        taken = np.minimum(here * self._rows, order.rows[:, place] - begun)
        return batches + here, (rows + begun + taken)[:, None]

    def used(self, first: int, last: int | None) -> np.ndarray:
        """Which buckets the steps from `first` to `last` have, bool [buckets]; None: to the end."""
        first_whole = max(first, self._remainder)
        if last is None or last - first_whole >= self._source.whole.steps:
            last = first_whole + self._source.whole.steps
        return self.before(max(last, first))[0] > self.before(first)[0]

    def epoch_of(self, step: int) -> int:
        """The epoch that a step belongs to."""
        return self._locate(step)[1]

    def first_step(self, epoch: int) -> int:
        """The step at which an epoch begins, of those that begin here."""
        return self._remainder + (epoch - self.first_epoch) * self._source.whole.steps
