"""Shares: the timetable of several sources, each of which has its weight at every step.

A source has so many rows of each bucket in an epoch, and its weight says how fast its epochs go
by. So the steps of each bucket, and the rows that a bucket takes of each source, are in fixed
shares, dealt by quota: any step is found without those before it. Shares change only where a source
is through with a remainder, or ends; there a new stretch begins.
"""

import bisect
import dataclasses
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from pipeline.planning.options import Options
from pipeline.planning.order import Quota
from pipeline.planning.source import Source
from pipeline.planning.windows import Windows


class Even:
    """Steps in which every source has its share at any time.

    Args:
        due: of each bucket, the rows that are due to each source, in any one unit.
        height: of each bucket, the rows in a batch.
    """

    def __init__(self, due: Sequence[Sequence[Fraction]], height: Sequence[int]):
        self._height = height
        self._sources = [Quota(each) if any(each) else None for each in due]
        self._none = [0] * len(due[0])
        self._buckets = Quota(
            [sum(each, Fraction(0)) / rows for each, rows in zip(due, height, strict=True)]
        )

    @property
    def needed(self) -> np.ndarray:
        """Whether each bucket ever has a batch: bool [buckets]."""
        return np.array([quota is not None for quota in self._sources])

    def before(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """As `EpochOrder.before`."""
        batches = self._buckets.before(step)
        rows = [
            self._none if quota is None else quota.before(number * height)
            for quota, number, height in zip(self._sources, batches, self._height, strict=True)
        ]
        return np.array(batches, np.int64), np.array(rows, np.int64)

    def bucket(self, step: int) -> int:
        """The bucket of a step."""
        return self._buckets.taker(step)


class Ends:
    """What sources that have ended still have, less than a batch each: bucket by bucket.

    Args:
        rows: int64 [buckets, sources].
        height: of each bucket, the rows in a batch; the last may have fewer.
    """

    def __init__(self, rows: np.ndarray, height: Sequence[int]):
        self._rows, self._height = rows, np.array(height)
        self._ends = np.cumsum(-(-rows.sum(axis=1) // self._height))
        self.steps = int(self._ends[-1])

    @property
    def needed(self) -> np.ndarray:
        """See `Even`."""
        return np.any(self._rows > 0, axis=1)

    def before(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Even`."""
        number = np.diff(self._ends, prepend=0)
        batches = np.clip(step - (self._ends - number), 0, number)
        places = (batches * self._height)[:, None]
        before = np.cumsum(self._rows, axis=1) - self._rows
        return batches, np.clip(places - before, 0, self._rows)

    def bucket(self, step: int) -> int:
        """See `Even`."""
        return int(np.searchsorted(self._ends, step, side="right"))


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Steps in which the shares stay the same.

    Attributes:
        start: its first step.
        batches: batches of each bucket before it.
        rows: int64 [buckets, sources], rows before it, counted over the streams of the sources.
        ended: the sources that have ended before it: bool [sources].
        deal: what its steps hold.
    """

    start: int
    batches: np.ndarray
    rows: np.ndarray
    ended: np.ndarray
    deal: Even | Ends

    def before(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """`batches` and `rows`, as above, before `step`."""
        batches, rows = self.deal.before(step - self.start)
        return self.batches + batches, self.rows + rows


class Shares:
    """The steps of several sources under fixed weights.

    Args:
        sources: in order.
        weights: of each source; one is above 0.
        options: the buckets, what weights count, and what happens when a source ends: "repeat" it;
            "stop" before the first step that one cannot fill; or "renormalise", where the others go
            on in the proportion of their weights until all have ended. What then is left of each,
            less than a batch, makes the last steps.
        taken: the rows of each source's stream before step 0: int64 [buckets, sources]; None: none.
        ended: the sources that have ended before: bool [sources]; None: none.
        epoch: the epoch in progress.
        begins: whether it begins here.

    Attributes:
        steps: how many there are; None if they never end.
        first_epoch: the first epoch that begins here.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Sequence[Fraction],
        options: Options,
        *,
        taken: np.ndarray | None = None,
        ended: np.ndarray | None = None,
        epoch: int = 0,
        begins: bool = True,
    ):
        self._height = [bucket.rows for bucket in options.buckets]
        count = len(self._height)
        self._weights = weights
        self._taken = np.zeros((count, len(sources)), np.int64) if taken is None else taken
        # The rows that each source has before its first whole epoch, and in an epoch: int64
        # [buckets, sources]; and what weights count in them, tokens or examples.
        self._remainder = np.stack([each.remainder_rows for each in sources], axis=1)
        self._whole = np.stack([each.whole.rows for each in sources], axis=1)
        self._sizes = [[_size(w, options.by) for w in (s.remainder, s.whole)] for s in sources]
        self._active = np.array([weight > 0 for weight in weights])
        self.steps: int | None = None
        self._stretches: list[Stretch] = []
        none = np.zeros(len(sources), bool)
        self._lay_out(sources, options.ending, none if ended is None else ended)
        self._in_progress, self.first_epoch = epoch, epoch if begins else epoch + 1
        self._range = (0, 0, epoch)  # of the steps asked last: first, one past the last, epoch

    def _lay_out(self, sources: Sequence[Source], ending: str, ended: np.ndarray) -> None:
        """Finds the stretches."""
        once = np.array([source.epoch == 0 for source in sources])
        stock = self._remainder + self._whole * once  # where sources end
        start, batches, rows = 0, np.zeros(len(self._height), np.int64), self._taken
        while True:
            active = self._active & ~ended
            if not active.any():
                ends = Ends(np.where(ended, stock - rows, 0), self._height)
                self._stretches.append(Stretch(start, batches, rows, ended, ends))
                self.steps = start + ends.steps
                return
            resting = np.any(rows < self._remainder, axis=0)
            deal = self._even(active, resting)
            stretch = Stretch(start, batches, rows, ended, deal)
            self._stretches.append(stretch)
            if ending == "repeat":
                waiting = active & resting
                if not waiting.any():
                    return

                def through(step: int, waiting=waiting, stretch=stretch) -> bool:
                    over = (stretch.before(step)[1] >= self._remainder).all(axis=0)
                    return bool((waiting & over).any())

                start = _first(through, start)
            else:

                def missing(step: int, active=active, stretch=stretch) -> np.ndarray:
                    return active & (stretch.before(step)[1] > stock).any(axis=0)

                start = _first(lambda step: bool(missing(step).any()), start) - 1
                if ending == "stop":
                    self.steps = start
                    return
                ended = ended | missing(start + 1)
            batches, rows = stretch.before(start)

    def _even(self, active: np.ndarray, resting: np.ndarray) -> Even:
        rows = np.where(resting, self._remainder, self._whole).tolist()
        speed = [
            weight / (sizes[0 if rests else 1] or 1) if used else Fraction(0)
            for weight, sizes, rests, used in zip(
                self._weights, self._sizes, resting, active, strict=True
            )
        ]
        due = [[v * n for v, n in zip(speed, each, strict=True)] for each in rows]
        return Even(due, self._height)

    def _at(self, step: int) -> Stretch:
        starts = [stretch.start for stretch in self._stretches]
        return self._stretches[bisect.bisect_right(starts, step) - 1]

    def at(self, step: int) -> tuple[int, list[tuple[int, int, int]], int]:
        """See `EpochOrder`."""
        stretch = self._at(step)
        bucket = stretch.deal.bucket(step - stretch.start)
        first, last = (stretch.before(step + more)[1][bucket] for more in (0, 1))
        takes = zip(first.tolist(), (last - first).tolist(), strict=True)
        found = [(source, at, count) for source, (at, count) in enumerate(takes) if count]
        return bucket, found, self.epoch_of(step)

    def before(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """See `EpochOrder`."""
        # A stretch that begins with the step adds nothing.
        return self._at(max(step - 1, 0)).before(step)

    def used(self, first: int, last: int | None) -> np.ndarray:
        """See `EpochOrder`."""
        last = self.steps if last is None else last
        if last is not None:
            return self.before(max(last, first))[0] > self.before(first)[0]
        end = self._stretches[-1].start
        found = self._stretches[-1].deal.needed
        return found | (self.before(max(first, end))[0] > self.before(first)[0])

    def ended(self, step: int) -> np.ndarray:
        """The sources that have ended before a step: bool [sources]."""
        return self._at(max(step - 1, 0)).ended if step else self._stretches[0].ended

    def passes(self, step: int) -> int:
        """How often every source that has a weight has been through before `step`."""
        rows = (self.before(step)[1] - self._remainder)[:, self._active]
        whole = self._whole[:, self._active]
        return max(int((rows[whole > 0] // whole[whole > 0]).min()), 0)

    def epoch_of(self, step: int) -> int:
        """See `EpochOrder`. An epoch ends when every source has been through; the end ends one."""
        if self.steps is not None:
            return 0
        begin, end, epoch = self._range
        if not begin <= step < end:
            epoch = self._in_progress + self.passes(step) - self.passes(0)
            begin, end = self.first_step(epoch), self.first_step(epoch + 1)
            self._range = begin, end, epoch
        return epoch

    def first_step(self, epoch: int) -> int:
        """See `EpochOrder`; 0 for the epoch in progress."""
        if self.steps is not None:
            return self.steps if epoch else 0
        if epoch <= self._in_progress:
            return 0
        passes = epoch - self._in_progress + self.passes(0)
        return _first(lambda step: self.passes(step) >= passes, 0)


def _size(windows: Windows | None, by: str) -> int:
    """What weights count in an epoch of some windows."""
    if windows is None:
        return 0
    if by == "tokens":
        return int(windows.real.sum())
    return int(np.count_nonzero(windows.pieces.due().any(axis=1)))


def _first(holds, after: int) -> int:
    """The first step after `after` from which on a condition holds; it must in the end."""
    far = 1
    while not holds(after + far):
        far *= 2
    return bisect.bisect_left(range(after + far), True, lo=after + 1, key=holds)
