"""The stages of a plan: its steps and epochs, and what a data state says of it."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from pipeline.errors import OutOfRange
from pipeline.planning.bucket import Bucket
from pipeline.planning.options import Options
from pipeline.planning.stage import Stage


class Stages:
    """The base class of `Plan`: everything that a plan's stages say without planning a batch.

    Attributes:
        stages: how batches are made, from which step on; one stage more for each change.
    """

    def __init__(self, stages: Iterable[Stage], first: int = 0):
        self.stages, self._first = tuple(stages), first
        self._starts = [stage.start for stage in self.stages]

    def stage_at(self, step: int) -> Stage:
        """The stage of a step; an error if the plan does not have it."""
        stage = self.stages[bisect_right(self._starts, step) - 1]
        if step < self._first:
            raise OutOfRange(
                f"step is {step:,}; steps count from 0 over all epochs"
                + f", and this plan knows steps from {self._first:,} on" * (self._first > 0)
            )
        if stage.end is not None and step >= stage.end:
            raise OutOfRange(f"step is {step:,}, and this plan ends after {stage.end:,} steps")
        return stage

    def stages_between(self, first: int, last: int) -> Iterator[tuple[Stage, int, int]]:
        """The stages of the steps `first` to `last`, each with the part of these steps it has."""
        ends = [*self._starts[1:], max(last, self._starts[-1])]
        for stage, end in zip(self.stages, ends, strict=True):
            begin, end = max(first, stage.start), min(last, end)
            if begin < end:
                yield stage, begin, end

    # ---- the data state and the history of a run

    @property
    def changes(self) -> list[tuple[int, dict[str, Any]]]:
        """The first step and the new options of each stage: JSON, for `Plan.replay`."""
        changes = [(stage.start, dict(stage.changes)) for stage in self.stages]
        if self.stages[0].weights is None and self.counts[-1] > self.counts[0]:
            changes[0][1]["examples"] = self.counts[0]
        return changes

    @property
    def entries(self) -> tuple[dict[str, Any], ...]:
        """The entries of a data state, one for each stage: JSON.

        "from" is the first step. "fingerprint" is that of the stage. "changes" (not in the first
        entry) are as in `changes`, with a digest for many examples left out.
        """
        first, *later = (stage.entry for stage in self.stages)
        return {name: first[name] for name in ("from", "fingerprint")}, *later

    def entries_at(self, step: int) -> tuple[dict[str, Any], ...]:
        """The entries of a data state after `step` batches: those of stages before that step."""
        return tuple(entry for entry in self.entries if entry["from"] < max(step, 1))

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of examples in each stage, with those that are left out."""
        return tuple(stage.num_examples for stage in self.stages)

    @property
    def fingerprint(self) -> str:
        """Everything that the batches depend on, as `name=value`, separated by semicolons.

        First the parts of the first stage; then, for each later stage, its step and the parts that
        differ.
        """
        parts = [self.entries[0]["fingerprint"]]
        for before, entry in pairwise(self.entries):
            old = before["fingerprint"].split(";")
            new = [part for part in entry["fingerprint"].split(";") if part not in old]
            pairs = [part.partition("=") for part in new]
            names = "+".join(name for name, _, _ in pairs)
            parts += [f"change@{entry['from']}={names or 'nothing'}"]
            parts += [f"{name}@{entry['from']}={value}" for name, _, value in pairs]
        return ";".join(parts)

    def files_ahead(self, step: int) -> dict[str, list[np.ndarray]]:
        """The files that batches need from a step on, for each corpus that has files, by name.

        Each array (int64) has the numbers of the files of one window. The list has the window of
        the step, those after it, and all windows of the next epoch. A corpus that is planned as a
        whole is one window. Later changes of the plan are not looked at.
        """
        stage = self.stage_at(step)
        begin = stage.tiers.block(step).start
        rows = stage.timetable.before(begin - stage.start)[1].T
        sources = zip(stage.sources, rows, strict=True)
        return {
            source.name: source.files_ahead(before)
            for source, before in sources
            if source.lengths.files is not None
        }

    # ---- epochs

    @property
    def finite(self) -> bool:
        """Whether the plan has a last step; it then has one epoch."""
        return self.stages[-1].end is not None

    def first_step(self, epoch: int) -> int:
        """The first step of an epoch. If the plan ends, epoch 1 begins after its last step."""
        if self.finite:
            return int(self.stages[-1].end or 0) if epoch else 0
        epochs = [stage.timetable.first_epoch for stage in self.stages]
        stage = self.stages[bisect_right(epochs, epoch) - 1]
        return stage.start + stage.timetable.first_step(epoch)

    def num_batches(self, epoch: int = 0) -> int:
        """Batches in an epoch; the same in every epoch of one corpus whose plan does not change.

        With several corpora, an epoch ends when each corpus with a weight has had an epoch of its
        own.
        """
        return self.first_step(epoch + 1) - self.first_step(epoch)

    # ---- figures of the stages

    @property
    def options(self) -> Options:
        """The options of the last stage."""
        return self.stages[-1].options

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the corpora of the last stage, in order; `("",)` for one corpus."""
        return tuple(source.name for source in self.stages[-1].sources)

    @property
    def num_examples(self) -> int:
        """Examples of all corpora in the last stage, with those that are left out."""
        return self.counts[-1]

    @property
    def max_position(self) -> int:
        """The largest position in any batch, from 0; a position table needs one entry more."""
        return max(source.max_position for stage in self.stages for source in stage.sources)

    def batches(self, first: int, last: int) -> dict[Bucket, int]:
        """Batches of each bucket in the steps `first` to `last`."""
        counts = {bucket: 0 for stage in self.stages for bucket in stage.options.buckets}
        for stage, begin, end in self.stages_between(first, last):
            before, after = (stage.timetable.before(at - stage.start)[0] for at in (begin, end))
            for bucket, count in zip(stage.options.buckets, after - before, strict=True):
                counts[bucket] += int(count)
        return counts

    @property
    def _used(self) -> set[Bucket]:
        """The buckets of all steps from the first on."""
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
        """Batches of each bucket in an epoch; 0 for a bucket that no step has.

        If the plan changes: in all steps up to the end of the first whole epoch of the last stage,
        and 1 for a bucket that only later steps have.
        """
        last, used = self.stages[-1], self._used
        end = last.end or last.start + last.timetable.first_step(last.timetable.first_epoch + 1)
        counts = self.batches(self._first, end)
        return {bucket: max(count, int(bucket in used)) for bucket, count in counts.items()}

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets, ascending by length; if the plan changes, only buckets that a step has."""
        every = set(self.stages[0].options.buckets)
        if self._first or len(self.stages) > 1:
            every = self._used
        return tuple(sorted(every, key=lambda bucket: (sum(bucket.lengths), bucket.shape)))

    def most_segments(self) -> dict[Bucket, int]:
        """The most segments in a row of each bucket; at least 1."""
        most = {bucket: 1 for stage in self.stages for bucket in stage.options.buckets}
        for stage in self.stages:
            windows = [w for each in stage.sources for w in (each.remainder, each.whole)]
            for each in (each for each in windows if each is not None):
                for bucket, number in zip(stage.options.buckets, each.most_segments, strict=True):
                    most[bucket] = max(most[bucket], number)
        return most
