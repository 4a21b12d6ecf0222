"""The plan: for each global step, the bucket and the segments of each of its rows."""

from collections.abc import Iterable, Mapping
from typing import Any, Unpack

from pipeline.errors import InvalidValue, require_index, require_whole, suggest_keywords
from pipeline.planning import figures
from pipeline.planning.bucket import Bucket, as_buckets
from pipeline.planning.cascade import Packing
from pipeline.planning.lengths import AnyLengths, Exclude, as_corpora, select_corpora, take_first
from pipeline.planning.options import WINDOW, By, Changes, Ending, Options, Weights, as_phases
from pipeline.planning.pieces import Overflow
from pipeline.planning.planned import PlannedBatch, assemble
from pipeline.planning.stage import Stage, add_phases
from pipeline.planning.stages import Stages
from pipeline.planning.table import heading, represent, table


class Plan(Stages):
    """All batches of all epochs, decided from lengths alone.

    A plan is a pure function of its arguments: it is the same on every host and in every process.
    Each epoch has every position once, except for positions that `exclude` or `overflow` exclude.
    `batch(step)` is random access: no batch needs an earlier one.

    >>> plan = Plan([5, 3, 4, 2, 1], [Bucket(rows=2, length=8)], shuffle=False)
    >>> plan.num_batches(), plan.batch(0).bucket
    (1, Bucket(rows=2, length=8))
    >>> plan.batch(0).segments.tolist()  # row, example, start, length
    [[0, 0, 0, 5], [0, 1, 0, 3], [1, 2, 0, 4], [1, 3, 0, 2], [1, 4, 0, 1]]

    For sequence-to-sequence models, examples are pairs of inputs and targets:

    >>> plan = Plan([[5, 2], [3, 3], [3, 1]], [Bucket(2, (8, 4))], shuffle=False, overflow="drop")
    >>> plan.batch(0).segments.tolist()  # row, example, start, inputs, targets
    [[0, 0, 0, 5, 2], [0, 2, 0, 3, 1], [1, 1, 0, 3, 3]]

    With `weights`, batches mix several corpora. Sampling is deterministic: over any range of steps,
    each corpus has its share to within a batch or two, and each has epochs of its own.

    >>> both = {"code": [5, 3, 4, 4], "prose": [9, 7]}
    >>> plan = Plan(both, [Bucket(rows=2, length=16)], weights={"code": 1, "prose": 1})
    >>> [plan.batch(step).sources for step in (0, 1)]
    [{'code': 16, 'prose': 16}, {'code': 16, 'prose': 16}]

    Args:
        lengths: positions of each example: an integer array `[n]`, for pairs `[n, 2]` (inputs and
            targets), or a corpus. With `weights`, several of these by name, or `Corpora`; examples
            are numbered consecutively over all corpora.
        buckets: the batch shapes, ascending by length; for pairs, ascending by the sum of both
            lengths, and the last holds all others.
        weights: the weight of each corpus by name, in any unit; or phases `[(0, {…}), (2000, {…})]`
            of first steps and weights. A corpus may join at a later phase; it then comes after the
            others. Default None: one corpus, each example once per epoch.
        by: the unit of weights: "tokens" (real positions; default) or "examples".
        ending: what to do when one of several corpora ends. "repeat" (default) repeats it for ever,
            shuffled again; "stop" ends the plan before the first step that the corpus cannot fill.
        seed: the seed of every shuffle, 0 ≤ seed < 2**63; default 0.
        shuffle: whether each epoch shuffles examples, rows, batches and buckets again; default
            True. False makes every epoch the same, with rows in the order of their longest example.
        packing: "best_fit" (default); "optimal", column generation, which needs scipy and takes
            seconds to minutes (not for pairs; with more than 2,048 different lengths it is best
            fit); or "none", one example per row. A corpus stores what "optimal" finds beside
            itself; for an array of lengths the search runs again, and may find other rows on
            another machine.
        overflow: what to do with examples longer than the longest bucket: "split" them (not for
            pairs, whose targets would lose their inputs), "truncate" or "drop" them, or raise an
            "error". Default None: "split", for pairs "error".
        window: the most pieces (examples or their parts) that are packed together, shared by the
            corpora of step 0; bounds memory and the time to the first batch. Default 4,194,304. A
            larger corpus of several files has windows of whole files.
        max_segments: the most segments in a row. Default None: no limit.
        tiers: the number of consecutive steps whose rows are sorted by the cost of their attention
            and dealt to these steps again, in each bucket, so that the rows of a batch cost about
            the same; default 1. The steps together have the same rows for every number.
        exclude: examples to leave out, as for `after`. Default: none.

    Raises:
        ValueError: an argument is not as above, or no example has a position to train on.
        ImportError: packing is "optimal", no patterns are stored, and scipy is missing.
    """

    @suggest_keywords
    def __init__(
        self,
        lengths: AnyLengths,
        buckets: Iterable[Bucket],
        *,
        weights: Weights | None = None,
        by: By = "tokens",
        ending: Ending = "repeat",
        seed: int = 0,
        shuffle: bool = True,
        packing: Packing = "best_fit",
        overflow: Overflow | None = None,
        window: int = WINDOW,
        max_segments: int | None = None,
        tiers: int = 1,
        exclude: Exclude = (),
    ):
        options = Options(
            buckets=as_buckets(buckets),
            seed=seed,
            shuffle=shuffle,
            packing=packing,
            overflow=overflow,
            window=window,
            max_segments=max_segments,
            tiers=tiers,
            by=by,
            ending=ending,
        )
        if weights is None:
            super().__init__([Stage.begin(lengths, options, None, exclude)])
            return
        (_, shares), *later = as_phases(weights, tuple(as_corpora(lengths)))
        first = Stage.begin(lengths, options, shares, exclude)
        super().__init__(add_phases([first], later, lengths))
        if self.finite and not self.num_batches():
            raise InvalidValue(
                "the plan has no step: a corpus cannot fill its share of even one batch. Use "
                "ending='repeat', smaller batches, or another weight"
            )

    @classmethod
    def _from_stages(cls, stages: Iterable[Stage], first: int = 0) -> "Plan":
        plan = cls.__new__(cls)
        Stages.__init__(plan, stages, first)
        return plan

    def batch(self, step: int) -> PlannedBatch:
        """The batch of global step `step`, counted from 0 over all epochs.

        Raises:
            TypeError: `step` is not a whole number.
            IndexError: `step` is negative, before the steps of `onward`, or the plan has ended.
        """
        stage = self.stage_at(step := require_index(step))
        index, parts, epoch = stage.tiers.at(step)
        return assemble(stage.options.buckets[index], parts, epoch)

    def after(
        self,
        step: int,
        *,
        lengths: AnyLengths | None = None,
        exclude: Exclude = (),
        weights: Mapping[str, float] | None = None,
        **changes: Unpack[Changes],
    ) -> "Plan":
        """The plan that goes on with other options from `step` on, and may change again.

        No position is lost or repeated: the positions that remain of the epochs in progress at
        `step` are planned anew, and whole epochs follow. The cost is that of planning an epoch,
        whatever the step.

        >>> plan = Plan([5, 3, 4, 2, 1], [Bucket(rows=1, length=8)])
        >>> later = plan.after(1, buckets=[Bucket(rows=2, length=8)]).after(7, exclude=[0])
        >>> later.num_batches(0), later.num_batches(1), later.batch(1).bucket
        (2, 1, Bucket(rows=2, length=8))

        If only `weights` change, every corpus goes on where it is.

        Args:
            step: the first step that may differ, from 0; not before an earlier change of options.
            lengths: the lengths of all examples, in the same order with new ones after them; or a
                corpus with them, such as `Corpora` of the present one and others. New examples join
                the epoch in progress. With several corpora: all corpora, new ones at the end.
                Default None: no new examples.
            exclude: more examples to leave out from `step` on: their numbers; or a function of
                the corpus (for an array, of the lengths) that returns numbers, or a bool for each
                example.
            weights: with several corpora, the weights by name from `step` on; later phases are
                removed. Default None: the present weights and later phases.
            **changes: `buckets`, and any other keyword of `Plan` except `ending`. The rest of the
                epoch is planned anew even if a value stays the same.

        Raises:
            ValueError: an argument is not as above, the plan ends before `step`, or `Plan` raises
                it.
        """
        step = require_whole("step", step, 0)
        past = [stage for stage in self.stages if stage.start <= step]
        later = self.stages[len(past) :]
        if fixed := [each for each in later if {*each.changes} - {"weights", "examples"}]:
            raise InvalidValue(
                f"step is {step:,}, and the last change of options is at step "
                f"{fixed[-1].start:,}; give that step or a later one"
            )
        last = past[-1]
        if last.end is not None and step > last.end:
            raise InvalidValue(f"step is {step:,}, and the plan ends after {last.end:,} steps")
        following = last.change(step, lengths=lengths, exclude=exclude, weights=weights, **changes)
        if last.weights is not None and not following.changes:
            return self
        phases = [(each.start, each.weights) for each in later if weights is None and each.weights]
        stages = add_phases([*past, following], phases, self.stages[-1].given)
        return self._from_stages(stages, self._first)

    @classmethod
    def replay(cls, lengths: Any, changes: Iterable[tuple[int, Mapping[str, Any]]]) -> "Plan":
        """Rebuilds a plan from its `changes`.

        >>> plan = Plan([5, 3, 4], [Bucket(1, 8)], seed=3).after(2, seed=4)
        >>> Plan.replay([5, 3, 4], plan.changes).fingerprint == plan.fingerprint
        True

        Args:
            lengths: the lengths of all examples of the last stage, as for `Plan`.
            changes: the first step and the new options of each stage, the first with all options.

        Raises:
            ValueError: `changes` is empty, or `Plan` or `after` raises it.
        """
        plan: Plan | None = None
        for step, given in changes:
            each = dict(given)
            if "buckets" in each:
                each["buckets"] = [Bucket(*shape) for shape in each["buckets"]]
            count = each.pop("examples", None)
            weights = each.get("weights")
            if isinstance(weights, Mapping) and (count is not None or plan is None):
                each["lengths"] = select_corpora(lengths, weights)
            elif count is not None:
                each["lengths"] = take_first(lengths, count)
            if plan is None:
                plan = cls(each.pop("lengths", lengths), each.pop("buckets"), **each)
            else:
                plan = plan.after(step, **each)
        if plan is None:
            raise InvalidValue(
                "changes is empty; give at least the entry of step 0, with all options"
            )
        return plan

    def onward(self, step: int) -> "Plan":
        """The same plan with only the steps from `step` on, and only their buckets."""
        return self._from_stages(self.stages, max(require_index(step), self._first))

    def until(self, step: int) -> "Plan":
        """The same plan without the changes that begin after `step`."""
        stages = [stage for stage in self.stages if stage.start <= step]
        return self._from_stages(stages, self._first)

    @property
    def num_tokens(self) -> int:
        """Real positions in a whole epoch of the last stage; for pairs, inputs plus targets."""
        return figures.num_tokens(self)

    @property
    def padding(self) -> float:
        """The share of padding in a whole epoch of the last stage, from 0 to 1, with empty rows."""
        return figures.padding(self)

    def __repr__(self) -> str:
        return represent(self)

    def __str__(self) -> str:
        texts = []
        for number, stage in enumerate(self.stages):
            following = self.stages[number + 1 : number + 2]
            if following and following[0].sources[0] is stage.sources[0]:
                continue  # one table for stages that differ only in weights
            prefix = self._from_stages(self.stages[: number + 1])
            phase = figures.phases(prefix)[0]
            if phase is not self.stages[0]:
                texts.append(heading(self.stages[self.stages.index(phase) - 1], phase))
            texts.append(table(prefix))
        return "\n".join(texts)
