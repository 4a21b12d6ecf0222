"""The timeline: which bucket each step of a mixture has, and which rows of which source fill it.

A source's own plan says how many rows of each bucket its epoch has; weights say how fast its
epochs go by. So the steps of each bucket, and the rows that a bucket takes of each source, are in
fixed shares: steps take turns, rows are dealt by quota, and both are found for any step without
those before it. Shares change only where a phase begins or a source ends; there a new stretch
begins.
"""

import bisect
import dataclasses
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from pipeline.planning.quota import Quota
from pipeline.planning.turns import Turns

ENDINGS = ("repeat", "stop", "renormalise")


class Even:
    """Steps in which every source has its share at any time.

    Args:
        rows: of each bucket, the rows that are due to each source, in any one unit.
        fill: of each bucket, the real positions in a row of each source.
        height: of each bucket, the rows in a batch.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[Fraction]],
        fill: Sequence[Sequence[Fraction]],
        height: Sequence[int],
    ):
        self._height = height
        self._quotas = [Quota(each) if any(each) else None for each in rows]
        self._none = [0] * len(rows[0])
        due = [[n * f for n, f in zip(*each, strict=True)] for each in zip(rows, fill, strict=True)]
        shares = [sum(each, Fraction(0)) for each in zip(*due, strict=True)]
        real = sum(shares, Fraction(0))
        turns = [sum(each, Fraction(0)) / n for each, n in zip(rows, height, strict=True)]
        # What a step of each bucket holds of each source, beside the source's share of it.
        effects = [
            [
                (own - sum(each) * share / real) / (turn or 1)
                for own, share in zip(each, shares, strict=True)
            ]
            for each, turn in zip(due, turns, strict=True)
        ]
        step = real / sum(turns)
        self._turns = Turns(turns, [[value / step for value in each] for each in effects])

    @property
    def needed(self) -> list[bool]:
        """Whether each bucket ever has a batch."""
        return [quota is not None for quota in self._quotas]

    def before(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Of each bucket its batches below `step`, and the rows of each source in them."""
        batches = self._turns.before(step)
        rows = [self._rows(index, number) for index, number in enumerate(batches.tolist())]
        return batches, np.array(rows, np.int64)

    def at(self, step: int) -> tuple[int, np.ndarray, np.ndarray]:
        """The bucket of `step`; of each source its rows before, and how many this step takes."""
        index = self._turns.taker(step)
        batch = int(self._turns.before(step)[index])
        first, last = (np.array(self._rows(index, batch + more)) for more in (0, 1))
        return index, first, last - first

    def _rows(self, index: int, batches: int) -> list[int]:
        quota = self._quotas[index]
        return quota.before(batches * self._height[index]) if quota else self._none


class Remainder:
    """What is left of sources that have ended: bucket by bucket, the rows of one after another's.

    Args:
        rows: int64 [buckets, sources], the rows that are left.
        height: of each bucket, the rows in a batch; the last may have fewer.
    """

    def __init__(self, rows: np.ndarray, height: Sequence[int]):
        self._rows, self._height = rows, np.array(height)
        self._ends = np.cumsum(-(-rows.sum(axis=1) // self._height))
        self.steps = int(self._ends[-1])

    @property
    def needed(self) -> list[bool]:
        """See `Even`."""
        return [bool(rows.any()) for rows in self._rows]

    def before(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Even`."""
        number = np.diff(self._ends, prepend=0)
        batches = np.clip(step - (self._ends - number), 0, number)
        places = (batches * self._height)[:, None]
        before = np.cumsum(self._rows, axis=1) - self._rows
        return batches, np.clip(places - before, 0, self._rows)

    def at(self, step: int) -> tuple[int, np.ndarray, np.ndarray]:
        """See `Even`."""
        index = int(np.searchsorted(self._ends, step, side="right"))
        first, last = (self.before(step + more)[1][index] for more in (0, 1))
        return index, first, last - first


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Steps in which the shares stay the same.

    Attributes:
        start: its first step.
        batches: of each bucket, batches before it.
        rows: int64 [buckets, sources], rows before it.
        deal: what its steps hold.
    """

    start: int
    batches: np.ndarray
    rows: np.ndarray
    deal: Even | Remainder

    def before(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """`batches` and `rows`, as above, before `step`."""
        batches, rows = self.deal.before(step - self.start)
        return self.batches + batches, self.rows + rows


@dataclasses.dataclass(frozen=True)
class Stock:
    """What each source has to give.

    Attributes:
        rows: int64 [buckets, sources], the rows.
        real: int64 [buckets, sources], the real positions in them.
        sizes: what weights count, tokens or examples; int64 [sources].
    """

    rows: np.ndarray
    real: np.ndarray
    sizes: np.ndarray

    @property
    def nothing(self) -> "Stock":
        """As much of nothing."""
        return Stock(0 * self.rows, 0 * self.real, 0 * self.sizes)

    @property
    def fill(self) -> list[list[Fraction]]:
        """Of each bucket, the real positions in a row of each source."""
        pairs = zip(self.real.tolist(), self.rows.tolist(), strict=True)
        return [[Fraction(r, n or 1) for r, n in zip(*each, strict=True)] for each in pairs]

    def where(self, chosen: np.ndarray, other: "Stock") -> "Stock":
        """Of the sources that are chosen this, of others the other."""
        pairs = zip(
            (self.rows, self.real, self.sizes), (other.rows, other.real, other.sizes), strict=True
        )
        return Stock(*(np.where(chosen, *each) for each in pairs))


class Timeline:
    """The steps of a mixture, from counts of rows alone.

    Args:
        whole: an epoch of each source.
        rests: what each source has before its first whole epoch; None for nothing.
        height: of each bucket, the rows in a batch.
        phases: the first step, from 0 on, and the weight of each source from there on.
        ending: "repeat" a source that ends; "stop" before the first step that one cannot fill; or
            "renormalise", and the others go on in the proportion of their weights until all have
            ended. What then is left of each, less than a batch, makes the last steps.

    Attributes:
        steps: how many there are; None if they never end.
        epoch: steps until each source has been through once, what it has before that included; all
            steps, where they end.
    """

    def __init__(
        self,
        whole: Stock,
        height: Sequence[int],
        phases: Sequence[tuple[int, Sequence[Fraction]]],
        ending: str,
        rests: Stock | None = None,
    ):
        self._rows = rows = whole.rows
        self._height, self._whole, self._rests = height, whole, rests or whole.nothing
        # Sources that are not yet in whole epochs.
        self._resting = np.array(self._rests.rows.any(axis=0))
        self.steps: int | None = None
        self._stretches: list[Stretch] = []
        ended = np.zeros(rows.shape[1], bool)
        for (start, weights), following in zip(phases, [*phases[1:], None], strict=True):
            until = None if following is None else following[0]
            while self.steps is None and (until is None or start < until):
                active = [
                    Fraction(0) if over else w for w, over in zip(weights, ended, strict=True)
                ]
                before = self.before(start) if start else (np.zeros_like(rows[:, 0]), 0 * rows)
                if not any(active):
                    rest = Remainder(np.where(ended, rows - before[1], 0), height)
                    self._stretches.append(Stretch(start, *before, rest))
                    self.steps = start + rest.steps
                    break
                self._stretches.append(Stretch(start, *before, self._even(active)))
                if ending == "repeat":
                    then, over = self._through(active)
                    if not over.any() or (until is not None and then >= until):
                        break
                    start, self._resting = then, self._resting & ~over
                    continue
                end, done = self._end(active)
                if until is not None and end >= until:
                    break
                if ending == "stop":
                    self.steps = end
                    break
                start, ended = end, ended | done
        last = np.array([weight > 0 for weight in phases[-1][1]])
        self.epoch = self._once(last) if self.steps is None else self.steps

    def _even(self, weights: Sequence[Fraction]) -> Even:
        stock = self._rests.where(self._resting, self._whole)
        sizes = stock.sizes.tolist()
        speed = [weight / (size or 1) for weight, size in zip(weights, sizes, strict=True)]
        due = [[v * int(n) for v, n in zip(speed, each, strict=True)] for each in stock.rows]
        return Even(due, stock.fill, self._height)

    def _through(self, weights: Sequence[Fraction]) -> tuple[int, np.ndarray]:
        """The next step by which sources are through what was left of them, and which they are."""
        resting = self._resting & np.array([weight > 0 for weight in weights])

        def over(step: int) -> np.ndarray:
            return resting & np.all(self.before(step)[1] >= self._rests.rows, axis=0)

        start = self._stretches[-1].start
        if not resting.any():
            return start, resting
        far = 1
        while not over(start + far).any():
            far *= 2
        steps = range(start, start + far + 1)
        first = steps[bisect.bisect_left(steps, True, key=lambda step: bool(over(step).any()))]
        return first, over(first)

    def _end(self, weights: Sequence[Fraction]) -> tuple[int, np.ndarray]:
        """The step before which the last stretch must end, and which sources end there."""
        stretch = self._stretches[-1]
        active = np.array([weight > 0 for weight in weights])

        def missing(step: int) -> np.ndarray:
            return active & (stretch.before(step)[1] > self._rows).any(axis=0)

        far = stretch.start + int(self._rows.sum()) + len(self._rows) + 1
        steps = range(stretch.start, far)
        first = steps[bisect.bisect_left(steps, True, key=lambda step: bool(missing(step).any()))]
        return first - 1, missing(first)

    def _once(self, sources: np.ndarray) -> int:
        """The steps until each of the sources has been through once."""

        def done(step: int) -> bool:
            rows = self._rests.rows + self._rows
            return bool((self.before(step)[1] >= rows)[:, sources].all())

        far = 1
        while not done(far):
            far *= 2
        return bisect.bisect_left(range(far), True, key=done)

    @property
    def needed(self) -> list[bool]:
        """Whether each bucket may have a batch, in whichever phase."""
        each = [stretch.deal.needed for stretch in self._stretches]
        return [True in bucket for bucket in zip(*each, strict=True)]

    def _at(self, step: int) -> Stretch:
        starts = [stretch.start for stretch in self._stretches]
        return self._stretches[bisect.bisect_right(starts, step) - 1]

    def before(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Of each bucket its batches below `step`, and the rows of each source in them."""
        # A stretch that begins with the step adds nothing.
        return self._at(max(step - 1, 0)).before(step)

    def at(self, step: int) -> tuple[int, np.ndarray, np.ndarray]:
        """The bucket of `step`; of each source its rows before, and how many this step takes.

        Rows are those of this bucket, counted over all epochs of a source.

        Raises:
            IndexError: `step` is negative, or the mixture has ended.
        """
        if step < 0 or (self.steps is not None and step >= self.steps):
            raise IndexError(
                f"step is {step:,}; steps count from 0"
                + ("" if self.steps is None else f", and this mixture ends after {self.steps:,}")
            )
        stretch = self._at(step)
        index, first, taken = stretch.deal.at(step - stretch.start)
        return index, stretch.rows[index] + first, taken
