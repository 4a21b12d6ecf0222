"""Stages in a row: steps, epochs, and what the data state and the history of a run say of them."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from pipeline.packing.bucket import Bucket
from pipeline.planning.options import Options
from pipeline.planning.stage import Stage


class Stages:
    """The stages of a plan.

    Args:
        stages: in order; the first begins at step 0.
        first: the first step that will be asked for.
    """

    def __init__(self, stages: Iterable[Stage], first: int = 0):
        self.stages, self._first = tuple(stages), first
        self._starts = [stage.start for stage in self.stages]

    def stage_at(self, step: int) -> Stage:
        """The stage that `step` belongs to.

        Raises:
            IndexError: `step` is before the first step, or the plan has ended.
        """
        stage = self.stages[bisect_right(self._starts, step) - 1]
        if step < self._first:
            raise IndexError(
                f"step is {step:,}; steps count from 0 over all epochs"
                + f", and this plan knows steps from {self._first:,} on" * (self._first > 0)
            )
        if stage.end is not None and step >= stage.end:
            raise IndexError(f"step is {step:,}, and this plan ends after {stage.end:,} steps")
        return stage

    def within(self, first: int, last: int) -> Iterator[tuple[Stage, int, int]]:
        """The stages that have steps from `first` to `last`, and the first and last of these."""
        ends = [*self._starts[1:], max(last, self._starts[-1])]
        for stage, end in zip(self.stages, ends, strict=True):
            begin, end = max(first, stage.start), min(last, end)
            if begin < end:
                yield stage, begin, end

    # ---- what the data state and the history of a run say

    @property
    def changes(self) -> list[tuple[int, dict[str, Any]]]:
        """From which step on each stage holds, and what is new there: JSON, for `Plan.replay`."""
        found = [(stage.start, dict(stage.changes)) for stage in self.stages]
        if self.stages[0].weights is None and self.counts[-1] > self.counts[0]:
            found[0][1]["examples"] = self.counts[0]
        return found

    @property
    def entries(self) -> tuple[dict[str, Any], ...]:
        """For each stage: "from" which step, its "fingerprint" and, but for the first, "changes".

        JSON. Of many examples left out, their number and a digest.
        """
        first, *later = (stage.entry for stage in self.stages)
        return {name: first[name] for name in ("from", "fingerprint")}, *later

    def entries_at(self, step: int) -> tuple[dict[str, Any], ...]:
        """What the data state after `step` batches says of the plan: the entries of the past."""
        return tuple(entry for entry in self.entries if entry["from"] < max(step, 1))

    @property
    def counts(self) -> tuple[int, ...]:
        """How many examples there are in each stage."""
        return tuple(stage.num_examples for stage in self.stages)

    @property
    def fingerprint(self) -> str:
        """What the plan depends on, as `name=value` with semicolons between.

        That of the first stage; and for each later one its step and the parts that it changes.
        """
        parts = [self.entries[0]["fingerprint"]]
        for before, entry in pairwise(self.entries):
            then = before["fingerprint"].split(";")
            new = [part for part in entry["fingerprint"].split(";") if part not in then]
            names = "+".join(part.partition("=")[0] for part in new)
            parts += [f"change@{entry['from']}={names or 'nothing'}"]
            pairs = (part.partition("=") for part in new)
            parts += [f"{name}@{entry['from']}={value}" for name, _, value in pairs]
        return ";".join(parts)

    # ---- epochs

    @property
    def finite(self) -> bool:
        """Whether the steps end with the first epoch."""
        return self.stages[-1].end is not None

    def first_step(self, epoch: int) -> int:
        """The step at which an epoch begins; of a plan that ends, at which epoch 1 would."""
        if self.finite:
            return int(self.stages[-1].end or 0) if epoch else 0
        epochs = [stage.timetable.first_epoch for stage in self.stages]
        stage = self.stages[bisect_right(epochs, epoch) - 1]
        return stage.start + stage.timetable.first_step(epoch)

    def num_batches(self, epoch: int = 0) -> int:
        """Batches in an epoch; the same for every epoch of one corpus that does not change.

        An epoch of several corpora ends when each that has a weight has been through; of a plan
        that ends, there is one epoch.
        """
        return self.first_step(epoch + 1) - self.first_step(epoch)

    # ---- what the batches are like

    @property
    def options(self) -> Options:
        """The options of the last stage."""
        return self.stages[-1].options

    @property
    def names(self) -> tuple[str, ...]:
        """The names of several corpora, in order; of one, the empty name."""
        return tuple(source.name for source in self.stages[-1].sources)

    @property
    def num_examples(self) -> int:
        """Examples of the corpus, or of all corpora, in the end; those left out included."""
        return self.counts[-1]

    @property
    def max_position(self) -> int:
        """The largest position of any batch: a table of positions needs one entry more."""
        return max(source.max_position for stage in self.stages for source in stage.sources)

    def batches(self, first: int, last: int) -> dict[Bucket, int]:
        """Batches of each bucket in the steps `first` to `last`."""
        found = {bucket: 0 for stage in self.stages for bucket in stage.options.buckets}
        for stage, begin, end in self.within(first, last):
            counts = [stage.timetable.before(step - stage.start)[0] for step in (begin, end)]
            for bucket, count in zip(stage.options.buckets, counts[1] - counts[0], strict=True):
                found[bucket] += int(count)
        return found

    @property
    def _needed(self) -> set[Bucket]:
        """The buckets that any step from the first on has."""
        found: set[Bucket] = set()
        for stage, end in zip(self.stages, [*self._starts[1:], None], strict=True):
            begin = max(self._first - stage.start, 0)
            last = None if end is None else end - stage.start
            if last is None or begin < last:
                used = np.flatnonzero(stage.timetable.used(begin, last))
                found |= {stage.options.buckets[number] for number in used}
        return found

    @property
    def batches_per_bucket(self) -> dict[Bucket, int]:
        """How many batches of each bucket an epoch has; 0 for one that is never needed.

        Of a plan that changes: up to the end of the first whole epoch of the last stage; 1 for a
        bucket that only later steps need.
        """
        last, needed = self.stages[-1], self._needed
        end = last.end or last.start + last.timetable.first_step(last.timetable.first_epoch + 1)
        found = self.batches(self._first, end)
        return {bucket: max(count, int(bucket in needed)) for bucket, count in found.items()}

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets, the shortest first; of a plan that changes, those that it needs."""
        every = set(self.stages[0].options.buckets)
        if self._first or len(self.stages) > 1:
            every = self._needed
        return tuple(sorted(every, key=lambda bucket: (sum(bucket.lengths), bucket.shape)))

    def most_segments(self) -> dict[Bucket, int]:
        """The most segments that any row of each bucket has; at least 1."""
        found = {bucket: 1 for stage in self.stages for bucket in stage.options.buckets}
        for stage in self.stages:
            for windows in (w for source in stage.sources for w in source.windows):
                for kind in windows.kinds:
                    for index, bucket in enumerate(stage.options.buckets):
                        most = kind.slots.packed.most_segments(index)
                        found[bucket] = max(found[bucket], most)
        return found
