"""Assembly: the batch of each step, made of the rows that the schedule gives it.

Within a batch, rows are ordered so that devices have about the same work.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from pipeline.planning.balance import balance
from pipeline.planning.bucket import Bucket
from pipeline.planning.cache import WindowCache
from pipeline.planning.layout import ranges
from pipeline.planning.lengths import weigh
from pipeline.planning.options import Options
from pipeline.planning.planned import PlannedBatch
from pipeline.planning.schedule import Schedule
from pipeline.planning.stream import Rows, Stream

# In a mixture, steps that are read in order are assembled this many at a time. Each step alone
# would take about four times as long; where steps are read at random, so would all of a block.
TOGETHER = 32

# The assembled blocks that are kept: readers are in a few at a time.
KEPT = 4


class Assembly:
    """The batches of a stage."""

    def __init__(self, streams: Sequence[Stream], schedule: Schedule, options: Options):
        self._streams, self._schedule, self._options = streams, schedule, options
        self._asked = -1  # the step of the last call of `batch`
        self._block = range(0)  # the last steps that were looked up
        self._blocks = WindowCache(KEPT)

    def block(self, step: int) -> range:
        """The steps around a step between which the plan cannot change: the step alone."""
        return range(step, step + 1)

    def batch(self, step: int) -> PlannedBatch:
        """The batch of a step."""
        in_order = 0 <= step - self._asked <= TOGETHER // 2
        self._asked = step
        if not self._streams[0].mixed or not in_order:
            bucket, taken = self._schedule.at(step)
            rows, shape = self.gather(bucket, taken), self._options.buckets[bucket]
            epoch = self._schedule.epoch_of(step)
            return self.make_batch(Selection(step, shape, rows, epoch=epoch))
        if step not in (steps := self._block):
            steps = self._block = self._schedule.block_around(step, TOGETHER)
        return self.make_batch(self._blocks.get(steps, 1, self._assemble, steps)[step])

    def _assemble(self, steps: range) -> dict[int, "Selection"]:
        every = (each for of_bucket in self.select(steps).values() for each in of_bucket)
        return {each.step: each for each in every}

    def select(self, steps: range) -> dict[int, list["Selection"]]:
        """The rows of some steps of an epoch, by the number of the bucket, gathered at once."""
        wanted = {step: self._schedule.at(step) for step in steps}
        epoch, found = self._schedule.epoch_of(steps.start), {}
        for bucket in {each for each, _ in wanted.values()}:
            mine = [step for step, (each, _) in wanted.items() if each == bucket]
            # Stream, first row, number of rows, batch; the ranges of a stream are adjacent.
            taken = sorted((*each, n) for n, step in enumerate(mine) for each in wanted[step][1])
            joined: dict[int, tuple[int, int, int]] = {}
            for number, first, count, _ in taken:
                _, begin, before = joined.get(number, (number, first, 0))
                joined[number] = number, begin, before + count
            rows, shape = self.gather(bucket, joined.values()), self._options.buckets[bucket]
            owners = np.repeat([n for *_, n in taken], [count for _, _, count, _ in taken])
            edges = np.bincount(owners).cumsum()[:-1]
            numbers = np.split(owners.argsort(kind="stable"), edges)
            found[bucket] = [
                Selection(step, shape, rows, of_step, epoch)
                for step, of_step in zip(mine, numbers, strict=True)
            ]
        return found

    def gather(self, bucket: int, taken: Iterable[tuple[int, int, int]]) -> "Gathered":
        """The rows of a bucket in the ranges `taken`, which are as in `Schedule.at`."""
        return Gathered(
            [
                (number, rows)
                for number, first, count in taken
                for rows in self._streams[number].take(bucket, first, count)
            ]
        )

    def make_batch(self, selection: "Selection") -> PlannedBatch:
        """The batch of some rows."""
        _, shape, rows, mine, epoch = selection
        costs = rows.costs if mine is None else rows.costs[mine]
        order, places = balance(costs, shape.rows)
        order = order if mine is None else mine[order]
        times, segments = rows.spans(order)
        epochs = None
        if self._streams[0].mixed:
            epochs = segments[:, 0].copy()
        segments[:, 0] = places.repeat(times)
        if epochs is None:
            return PlannedBatch(shape, segments, epoch, align=self._options.align)
        numbers = rows.streams[order].repeat(times)
        tokens = np.bincount(numbers, weigh(segments[:, 3:], self._options.costs))
        sources = {
            self._streams[number].name: int(count) if count.is_integer() else count
            for number, count in enumerate(tokens.tolist())
            if count
        }
        return PlannedBatch(shape, segments, epoch, epochs, sources, self._options.align)


class Selection(NamedTuple):
    """The rows of a step."""

    step: int
    shape: Bucket
    rows: "Gathered"
    numbers: np.ndarray | None = None  # of those of `rows` that it has; None: all
    epoch: int = 0


class Gathered:
    """Rows of one bucket, from `parts`: pairs of a stream's number and its rows.

    Attributes:
        costs: int64 [rows], as `Rows.costs`.
    """

    def __init__(self, parts: Sequence[tuple[int, Rows]]):
        self._parts = parts
        self.costs = np.concatenate([rows.costs for _, rows in parts])

    @functools.cached_property
    def streams(self) -> np.ndarray:
        """The number of the stream of each row: int64 [rows]."""
        return np.repeat(
            [number for number, _ in self._parts], [len(rows) for _, rows in self._parts]
        )

    def spans(self, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The number of segments of each of the rows `order`, and their spans; see `Rows.spans`."""
        if len(self._parts) == 1:  # only these rows need be looked up
            return self._parts[0][1].spans(order)
        times, starts, spans = self._every
        times = times[order]
        return times, spans[ranges(starts[order], times)]

    @functools.cached_property
    def _every(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The number of segments of each row, its first span, and all spans."""
        each = zip(*(rows.spans() for _, rows in self._parts), strict=True)
        times, spans = map(np.concatenate, each)
        return times, times.cumsum() - times, spans
