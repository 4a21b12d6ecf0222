"""The plan: for each global step, the bucket and the segments of each of its rows."""

import os
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from pipeline.packing.bucket import Bucket
from pipeline.planning import figures
from pipeline.planning.checks import require_index, require_whole
from pipeline.planning.lengths import begin
from pipeline.planning.options import WINDOW, Options, Weights, as_phases
from pipeline.planning.planned import PlannedBatch, assemble
from pipeline.planning.stage import Stage, begin_of, corpora
from pipeline.planning.stages import Stages
from pipeline.planning.table import heading, table

# Batches over which a printed plan compares the work of hosts.
SHOWN = 64


class Plan(Stages):
    """All batches of all epochs, decided from lengths alone.

    A pure function of its arguments: the same on every host, in every process, at every time.
    Each epoch has every position once, but for what is left out and what overflow takes. No batch
    needs an earlier one: `batch(step)` is random access.

    >>> plan = Plan([5, 3, 4, 2, 1], [Bucket(rows=2, length=8)], shuffle=False)
    >>> plan.num_batches(), plan.batch(0).bucket
    (1, Bucket(rows=2, length=8))
    >>> plan.batch(0).segments.tolist()  # row, example, start, length
    [[0, 0, 0, 5], [0, 1, 0, 3], [1, 2, 0, 4], [1, 3, 0, 2], [1, 4, 0, 1]]

    Pairs, for sequence to sequence, have inputs and targets, which share a row at the same time:

    >>> plan = Plan([[5, 2], [3, 3], [3, 1]], [Bucket(2, (8, 4))], shuffle=False, overflow="drop")
    >>> plan.batch(0).segments.tolist()  # row, example, start, inputs, targets
    [[0, 0, 0, 5, 2], [0, 2, 0, 3, 1], [1, 1, 0, 3, 3]]

    With weights, batches have several corpora. Sampling is deterministic: shares hold to within a
    few rows over any stretch of steps, and each corpus has epochs of its own:

    >>> both = {"code": [5, 3, 4, 4], "prose": [9, 7]}
    >>> plan = Plan(both, [Bucket(rows=2, length=16)], weights={"code": 1, "prose": 1})
    >>> [plan.batch(step).sources for step in (0, 1)]
    [{'code': 16, 'prose': 16}, {'code': 16, 'prose': 16}]

    Args:
        lengths: positions of each example, an integer array `[n]`, of pairs `[n, 2]` (inputs and
            targets), or a corpus; with weights, several of them by name, or `Corpora`, whose
            examples count on from one corpus to the next.
        buckets: the shapes, ascending by length; of pairs by the sum of both, the last holding
            all others.
        weights: how much of each corpus there is, by name, in any unit; or phases,
            `[(0, {…}), (2000, {…})]`: the first step of each, and the weights from there on. A
            corpus may join at a later phase, and then comes after the others. None: one corpus,
            each example once an epoch.
        by: what weights count: "tokens", real positions, or "examples".
        ending: what happens when one of several corpora ends: "repeat" it, shuffled anew, for ever;
            "stop" before the first step that it cannot fill; or "renormalise", where the others go
            on in the proportion of their weights, each once, until all have ended.
        seed: decides every shuffle; 0 ≤ seed < 2**63.
        shuffle: shuffle examples, rows, batches and buckets anew in every epoch. Without it every
            epoch is the same, rows in the order of their longest example.
        packing: "best_fit"; "optimal", column generation, which needs scipy and some seconds or
            minutes once (with more than 2,048 different lengths it is best fit), not for pairs; or
            "none" for one example in a row.
        overflow: for examples longer than the longest bucket: "split" (not for pairs, whose
            targets would lose their inputs), "truncate", "drop" or "error". None: "split", and
            "error" for pairs.
        window: the most pieces that are planned together, divided by the number of corpora at step
            0; bounds memory and time to first batch.
        max_segments: the most segments in a row; None for no limit.
        leave_out: examples that are left out: as for `after`.
        patterns: a file that stores what "optimal" found, an input of the plan from then on; made
            if it is not there. None: a corpus stores it beside itself, and for lengths alone it is
            found anew, which on another machine may be another plan.

    Attributes:
        stages: how batches are made, from which step on.

    Raises:
        ValueError: an argument is not as above, no example has a position to train on, or
            `patterns` is of another plan.
        ImportError: packing is "optimal", patterns have to be found, and scipy is missing.
    """

    def __init__(
        self,
        lengths,
        buckets: Iterable[Bucket],
        *,
        weights: Weights | None = None,
        by: str = "tokens",
        ending: str = "repeat",
        seed: int = 0,
        shuffle: bool = True,
        packing: str = "best_fit",
        overflow: str | None = None,
        window: int = WINDOW,
        max_segments: int | None = None,
        leave_out: Any = (),
        patterns: str | os.PathLike | None = None,
    ):
        options = Options(
            buckets=tuple([buckets] if isinstance(buckets, Bucket) else buckets),
            seed=seed,
            shuffle=shuffle,
            packing=packing,
            overflow=overflow,
            window=window,
            max_segments=max_segments,
            by=by,
            ending=ending,
            patterns=None if patterns is None else os.fspath(patterns),
        )
        if weights is None:
            super().__init__([Stage.first(lengths, options, None, leave_out)])
            return
        (_, shares), *later = as_phases(weights, tuple(corpora(lengths)))
        first = Stage.first(lengths, options, shares, leave_out)
        super().__init__(_with_phases([first], later, lengths))
        if self.finite and not self.num_batches():
            raise ValueError(
                "the plan has no step: a corpus cannot fill its share of even one batch. Use "
                "ending='repeat' or 'renormalise', smaller batches, or another weight"
            )

    @classmethod
    def _of(cls, stages: Iterable[Stage], first: int = 0) -> "Plan":
        plan = cls.__new__(cls)
        Stages.__init__(plan, stages, first)
        return plan

    def batch(self, step: int) -> PlannedBatch:
        """The batch of global step `step`, counted from 0 over all epochs.

        Each stage has a source for each corpus, an endless stream of rows for each bucket, and a
        timetable, which says the bucket of a step and which rows of which sources it takes (and
        whether steps end). With several corpora an epoch ends when each has been through.

        Raises:
            TypeError: `step` is not a whole number.
            IndexError: `step` is negative, before the steps of `onward`, or the plan has ended.
        """
        stage = self.stage_at(step := require_index(step))
        index, takes, epoch = stage.timetable.at(step - stage.start)
        parts = []
        for number, first, count in takes:
            source = stage.sources[number]
            parts += [(source.name, rows) for rows in source.rows(index, first, count)]
        return assemble(stage.options.buckets[index], parts, epoch)

    def after(
        self,
        step: int,
        *,
        lengths: Any = None,
        leave_out: Any = (),
        weights: Mapping[str, float] | None = None,
        **changes: Any,
    ) -> "Plan":
        """The plan that goes on from `step` with other options, and that may change again.

        Nothing is lost or repeated: what is left of the epochs in progress at `step` is planned
        anew, and then whole epochs. The cost is that of planning an epoch, whatever the step.

        >>> plan = Plan([5, 3, 4, 2, 1], [Bucket(rows=1, length=8)])
        >>> later = plan.after(1, buckets=[Bucket(rows=2, length=8)]).after(7, leave_out=[0])
        >>> later.num_batches(0), later.num_batches(1), later.batch(1).bucket
        (2, 1, Bucket(rows=2, length=8))

        Other weights alone change nothing else: every corpus goes on where it stands.

        Args:
            step: the first step that may differ, from 0; not before an earlier change of options.
            lengths: those of the examples so far, in the same order, and of others after them; or
                a corpus that has them, `Corpora` of the one so far and more. The epoch in progress
                has the others, too. Of several corpora: all of them, and new ones at the end. None:
                no others.
            leave_out: examples that are left out from then on, beside those already left out:
                their numbers; or a function of the corpus (of the lengths, if the plan was made
                from lengths) that gives them, or a bool for each example.
            weights: of several corpora, by name, those that hold from then on; phases that would
                have begun later are left out. None: as they were, phases to come included.
            **changes: `buckets`, and any other keyword of `Plan` except `ending`. The rest of the
                epoch is planned anew even where they are as before.

        Raises:
            ValueError: an argument is not as above, the plan ends before `step`, or what `Plan`
                raises.
        """
        step = require_whole("step", step, 0)
        past = [stage for stage in self.stages if stage.start <= step]
        later = self.stages[len(past) :]
        if fixed := [each for each in later if {*each.changes} - {"weights", "examples"}]:
            raise ValueError(
                f"step is {step:,}; a change is not before step {fixed[-1].start:,}, at which the "
                "last is"
            )
        last = past[-1]
        if last.end is not None and step > last.end:
            raise ValueError(f"step is {step:,}, and the plan ends after {last.end:,} steps")
        following = last.next(
            step, lengths=lengths, leave_out=leave_out, weights=weights, **changes
        )
        if last.weights is not None and not following.changes:
            return self
        phases = [(each.start, each.weights) for each in later if weights is None and each.weights]
        stages = _with_phases([*past, following], phases, self.stages[-1].given)
        return self._of(stages, self._first)

    @classmethod
    def replay(cls, lengths: Any, changes: Iterable[tuple[int, Mapping[str, Any]]]) -> "Plan":
        """Rebuilds a plan from its `changes`.

        >>> plan = Plan([5, 3, 4], [Bucket(1, 8)], seed=3).after(2, seed=4)
        >>> Plan.replay([5, 3, 4], plan.changes).fingerprint == plan.fingerprint
        True

        Args:
            lengths: as for `Plan`, of all examples there are in the end.
            changes: from which step on, and what changes there; JSON. Of the first, all options.

        Raises:
            ValueError: what `Plan` and `after` raise.
        """
        plan: Plan | None = None
        for step, given in changes:
            each = dict(given)
            if "buckets" in each:
                each["buckets"] = [Bucket(*shape) for shape in each["buckets"]]
            count = each.pop("examples", None)
            weights = each.get("weights")
            if isinstance(weights, Mapping) and (count is not None or plan is None):
                each["lengths"] = begin_of(lengths, weights)
            elif count is not None:
                each["lengths"] = begin(lengths, count)
            if plan is None:
                plan = cls(each.pop("lengths", lengths), each.pop("buckets"), **each)
            else:
                plan = plan.after(step, **each)
        if plan is None:
            raise ValueError("changes is empty; the first has the options that a plan begins with")
        return plan

    def onward(self, step: int) -> "Plan":
        """The same plan for steps from `step` on only, with the buckets that these need."""
        return self._of(self.stages, max(require_index(step), self._first))

    def until(self, step: int) -> "Plan":
        """The same plan without the changes that begin after `step`."""
        return self._of([stage for stage in self.stages if stage.start <= step], self._first)

    @property
    def num_tokens(self) -> int:
        """Real positions in a whole epoch of the last stage."""
        return figures.num_tokens(self)

    @property
    def padding(self) -> float:
        """The share of padding in a whole epoch of the last stage, empty rows included."""
        return figures.padding(self)

    def __repr__(self) -> str:
        return f"Plan({self.fingerprint})"

    def __str__(self) -> str:
        texts = []
        for number, stage in enumerate(self.stages):
            following = self.stages[number + 1 : number + 2]
            if following and following[0].sources[0] is stage.sources[0]:
                continue  # only weights change: one table for all such stages
            prefix = self._of(self.stages[: number + 1])
            phase = figures.phases(prefix)[0]
            if phase is not self.stages[0]:
                texts.append(heading(self.stages[self.stages.index(phase) - 1], phase))
            first, last = figures.epoch_steps(prefix)
            texts.append(table(prefix, map(prefix.batch, range(first, min(first + SHOWN, last)))))
        return "\n".join(texts)


def _with_phases(
    stages: list[Stage], phases: Iterable[tuple[int, Mapping[str, Fraction]]], given: Any
) -> list[Stage]:
    """The stages, and one for each phase of weights; with ending="stop", up to the plan's end."""
    for start, shares in phases:
        last = stages[-1]
        if last.options.ending == "stop" and last.end is not None and last.end <= start:
            break
        joined = begin_of(given, shares) if len(shares) > len(last.sources) else None
        stages.append(last.next(start, lengths=joined, weights=shares))
    return stages
