"""Tiers: the batches of a few consecutive steps, with rows that cost about the same in each batch.

Attention within segments makes a row with one long document cost many times a row of short ones,
and every device waits for the one with the costliest row. So the rows of a block of steps are
sorted by cost and cut into batches: a tier is a batch of such rows. The tiers come in random order,
and the block as a whole has the rows that it has without tiers.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from pipeline.planning.assignment import Rows
from pipeline.planning.options import Options
from pipeline.planning.order import Purpose, permutation, random_bits
from pipeline.planning.source import Source
from pipeline.planning.timetable import Timetable

# Readers on several threads are in at most two blocks at a time.
CACHED_BLOCKS = 3

# Rows of sources, each with the name of its source; "" for the only source.
Parts: TypeAlias = list[tuple[str, Rows]]


class Tiers:
    """The rows of every step of a stage.

    A block is `options.tiers` consecutive steps of the plan, counted from step 0. Blocks are cut
    where an epoch or the stage begins or ends. With one step in a block, every batch has the rows
    of its step in the timetable.

    Within a bucket, rows are sorted by the sum of the squared lengths of their segments. All other
    costs of a row depend on its static length only, so the order is that of the whole cost.
    """

    def __init__(
        self, start: int, sources: Sequence[Source], timetable: Timetable, options: Options
    ):
        self._start, self._sources, self._timetable = start, sources, timetable
        self._options = options
        self._cache: dict[int, tuple[int, Parts, int]] = {}  # by step

    def block(self, step: int) -> range:
        """The steps of the plan that share their rows with `step`; none if the stage ends there."""
        count, timetable = self._options.tiers, self._timetable
        local = step - self._start
        if local == timetable.steps:
            return range(step, step)
        if count == 1:
            return range(step, step + 1)
        epoch = timetable.epoch_of(local)
        begin = timetable.first_step(epoch) if epoch >= timetable.first_epoch else 0
        end = timetable.first_step(epoch + 1)
        first = step // count * count
        return range(max(first, self._start + max(begin, 0)), min(first + count, self._start + end))

    def at(self, step: int) -> tuple[int, Parts, int]:
        """The number of a step's bucket, its rows, and its epoch."""
        if (found := self._cache.get(step)) is not None:
            return found
        block = self.block(step)
        if len(block) <= 1:
            bucket, ranges, epoch = self._timetable.at(step - self._start)
            return bucket, self._take(bucket, ranges), epoch
        steps = self._sort(block)
        self._cache.update(zip(block, steps, strict=True))
        for oldest in list(self._cache)[: -CACHED_BLOCKS * self._options.tiers]:
            self._cache.pop(oldest, None)
        return steps[step - block.start]

    def before(self, step: int) -> tuple[np.ndarray, list[tuple[np.ndarray, int]] | None]:
        """The rows that come before a step, int64 [buckets, sources], and what of them is left.

        In the middle of a block these are the rows of the whole block. Left are, for each source,
        the spans in batches of the block's other steps, and the first epoch after those that have
        begun.
        """
        block = self.block(step)
        rows = self._timetable.before(block.start - self._start)[1]
        if block.start == step:
            return rows, None
        columns = 3 + len(self._options.buckets[-1].lengths)
        left = {source.name: [np.zeros((0, columns), np.int64)] for source in self._sources}
        had = {source.name: [np.zeros((0, columns), np.int64)] for source in self._sources}
        for each in block:
            for name, part in self.at(each)[1]:
                (had if each < step else left)[name].append(_as_spans(part))
        for number, source in enumerate(self._sources):  # the last rows before the block
            for bucket in np.flatnonzero(rows[:, number]).tolist():
                (part,) = source.take(bucket, int(rows[bucket, number]) - 1, 1)
                had[source.name].append(_as_spans(part))
        begun = [int(np.concatenate(each)[:, 0].max(initial=-1)) + 1 for each in had.values()]
        spans = [np.concatenate(each) for each in left.values()]
        rows_before = self._timetable.before(block.stop - self._start)[1]
        return rows_before, list(zip(spans, begun, strict=True))

    def _take(self, bucket: int, ranges: Iterable[tuple[int, int, int]]) -> Parts:
        """The rows of a bucket in some ranges, as the timetable gives them."""
        parts: Parts = []
        for number, first, count in ranges:
            source = self._sources[number]
            parts += [(source.name, rows) for rows in source.take(bucket, first, count)]
        return parts

    def _sort(self, block: range) -> list[tuple[int, Parts, int]]:
        """`at` for each step of a block: the rows of each bucket, sorted by cost and cut again."""
        steps = [self._timetable.at(step - self._start) for step in block]
        found: list[Any] = [None] * len(block)
        for bucket in sorted({bucket for bucket, _, _ in steps}):
            places = [place for place, step in enumerate(steps) if step[0] == bucket]
            # The ranges of one source follow each other in its stream, so they are one range.
            first: dict[int, int] = {}
            count: Counter[int] = Counter()
            for number, begin, rows in (each for place in places for each in steps[place][1]):
                first.setdefault(number, begin)
                count[number] += rows
            parts = self._take(bucket, [(n, first[n], count[n]) for n in sorted(first)])
            rows_per_batch = np.array([sum(rows for _, _, rows in steps[n][1]) for n in places])
            order = np.arange(len(places))
            if self._options.shuffle:
                bits = random_bits(
                    self._options.seed, Purpose.TIERS, len(order), window=block.start, bucket=bucket
                )
                order = permutation(bits)
            costs = np.concatenate([rows.costs for _, rows in parts])
            tiers = np.split((-costs).argsort(kind="stable"), np.cumsum(rows_per_batch[order])[:-1])
            for place, tier in zip(order.tolist(), tiers, strict=True):
                at = places[place]
                found[at] = bucket, select(parts, tier), steps[at][2]
        return found


def select(parts: Parts, numbers: np.ndarray) -> Parts:
    """Some of the rows of `parts`, by their numbers over all parts, in any order."""
    if len(parts) == 1:
        ((name, rows),) = parts
        return [(name, rows.select(numbers))]
    found: Parts = []
    numbers = np.sort(numbers)
    begin = 0
    for name, rows in parts:
        low, high = numbers.searchsorted((begin, begin + len(rows))).tolist()
        if low < high:
            found.append((name, rows.select(numbers[low:high] - begin)))
        begin += len(rows)
    return found


def _as_spans(rows: Rows) -> np.ndarray:
    """The positions in some rows, as for `merge_spans`."""
    numbers = np.arange(len(rows))
    spans, epochs = rows.segments(numbers, numbers)
    spans[:, 0], spans[:, 1] = epochs, spans[:, 1] - rows.first
    return spans
