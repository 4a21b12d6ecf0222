"""Assembly: the batch of each step, made of the rows that the schedule gives it.

Within a batch, rows are ordered so that devices have about the same work.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from pipeline.planning.balance import balance
from pipeline.planning.bucket import Bucket
from pipeline.planning.cache import WindowCache
from pipeline.planning.layout import FlatRows
from pipeline.planning.lengths import weigh
from pipeline.planning.options import Options
from pipeline.planning.planned import PlannedBatch
from pipeline.planning.schedule import Schedule
from pipeline.planning.stream import Stream

# In a mixture, steps that are read in order are assembled this many at a time. Each step alone
# would take about four times as long; where steps are read at random, so would all of a block.
TOGETHER = 32

# The assembled blocks that are kept: readers are in a few at a time.
KEPT = 4

# Rows of one shape, and which of them each of some steps has: step -> int64 [rows].
Division = tuple[FlatRows, Mapping[int, np.ndarray]]

# A batch: its bucket, rows of that shape, which of them it has, and its epoch; see `make_batch`.
Selection = tuple[Bucket, FlatRows, np.ndarray, int]


class StepBatches(Protocol):
    """The batches of all steps from one on."""

    def batch(self, step: int) -> PlannedBatch:
        """The batch of a step."""
        ...

    def block(self, step: int) -> range:
        """The steps around a step between which the plan cannot change."""
        ...


class Assembly:
    """The batches of the rows that a schedule gives to steps."""

    def __init__(
        self, streams: Sequence[Stream], schedule: Schedule, options: Options, *, mixed: bool
    ):
        """`mixed`: whether batches say what each corpus has in them."""
        self._streams, self._schedule, self._options = streams, schedule, options
        self._mixed, self._firsts = mixed, [stream.first for stream in streams]

    def block(self, step: int) -> range:
        """See `StepBatches`: the step alone."""
        return range(step, step + 1)

    def batch(self, step: int) -> PlannedBatch:
        """See `StepBatches`."""
        shape, taken = self._schedule.at(step)
        rows, bucket = self.take(shape, taken), self._options.buckets[shape]
        return self.make_batch(bucket, rows, np.arange(len(rows)), self._schedule.epoch_of(step))

    def take(self, shape: int, taken: Iterable[tuple[int, int, int]]) -> FlatRows:
        """The rows of a shape in the ranges `taken`, which are as in `Schedule.at`."""
        return FlatRows.join(
            rows
            for number, first, count in taken
            for rows in self._streams[number].take(shape, first, count)
        )

    def divide(self, steps: range) -> dict[int, Division]:
        """The rows of some steps, by their shape, taken at once."""
        wanted, divisions = {step: self._schedule.at(step) for step in steps}, dict[int, Division]()
        for shape in {shape for shape, _ in wanted.values()}:
            # Stream, first row, number of rows, step; the ranges of a stream are adjacent.
            mine = [step for step in steps if wanted[step][0] == shape]
            taken = sorted((*rows, n) for n, step in enumerate(mine) for rows in wanted[step][1])
            joined: dict[int, tuple[int, int, int]] = {}
            for number, first, count, _ in taken:
                _, begin, before = joined.get(number, (number, first, 0))
                joined[number] = number, begin, before + count
            owners = np.repeat([n for *_, n in taken], [count for _, _, count, _ in taken])
            edges = np.bincount(owners).cumsum()[:-1]
            numbers = np.split(owners.argsort(kind="stable"), edges)
            of_steps = dict(zip(mine, numbers, strict=True))
            divisions[shape] = self.take(shape, joined.values()), of_steps
        return divisions

    def make_batch(
        self, bucket: Bucket, rows: FlatRows, numbers: np.ndarray, epoch: int
    ) -> PlannedBatch:
        """The batch that has the rows `numbers`."""
        numbers = rows.in_order(numbers)
        units = self._options.count_units(bucket)
        order, places = balance(rows.costs[numbers], bucket.rows, units)
        times, segments = rows.pick(numbers[order])
        epochs = segments[:, 0].copy()
        segments[:, 0] = places.repeat(times)
        if not self._mixed:
            return PlannedBatch(bucket, segments, epoch, align=self._options.align)
        owner = np.searchsorted(self._firsts, segments[:, 1], side="right") - 1
        tokens = np.bincount(owner, weigh(segments[:, 3:], self._options.cost))
        sources = {
            self._streams[number].name: int(count) if count.is_integer() else count
            for number, count in enumerate(tokens.tolist())
            if count
        }
        return PlannedBatch(bucket, segments, epoch, epochs, sources, self._options.align)


class Blocks:
    """The batches of an assembly, whose rows are taken for a block of steps at a time.

    A block is `size` consecutive steps of the plan, counted from step 0. Blocks are cut where the
    schedule begins and where an epoch ends.
    """

    def __init__(self, assembly: Assembly, schedule: Schedule, options: Options, size: int):
        self._assembly, self._schedule, self._options = assembly, schedule, options
        self._size, self._block = size, range(0)  # the last block that was looked up
        self._blocks = WindowCache(KEPT)

    def _around(self, step: int) -> range:
        if step not in (block := self._block):
            block = self._block = self._schedule.block_around(step, self._size)
        return block

    def batch(self, step: int) -> PlannedBatch:
        """See `StepBatches`."""
        if len(steps := self._around(step)) == 1:
            return self._assembly.batch(step)
        return self._assembly.make_batch(*self._blocks.get(steps, 1, self._make, steps)[step])

    def _make(self, steps: range) -> dict[int, Selection]:
        """The rows of each of a block of steps."""
        epoch, selections = self._schedule.epoch_of(steps.start), dict[int, Selection]()
        for shape, division in self._assembly.divide(steps).items():
            rows, of_steps = self._deal(shape, division, steps.start)
            bucket = self._options.buckets[shape]
            selections |= {step: (bucket, rows, which, epoch) for step, which in of_steps.items()}
        return selections

    def _deal(self, shape: int, division: Division, first: int) -> Division:
        """Which rows each of a block of steps has, from step `first` on."""
        return division


class Together(Blocks):
    """The batches of an assembly, faster if they are read in order."""

    def __init__(self, assembly: Assembly, schedule: Schedule, options: Options):
        super().__init__(assembly, schedule, options, TOGETHER)
        self._asked = -1  # the step of the last call of `batch`

    def block(self, step: int) -> range:
        """See `StepBatches`."""
        return self._assembly.block(step)

    def batch(self, step: int) -> PlannedBatch:
        """See `StepBatches`."""
        in_order = 0 <= step - self._asked <= TOGETHER // 2
        self._asked = step
        return super().batch(step) if in_order else self._assembly.batch(step)
