"""The plan: for each global step, the bucket and the segments of each of its rows."""

import functools
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self, Unpack

import numpy as np

from pipeline.errors import (
    InvalidType,
    InvalidValue,
    OutOfRange,
    require_index,
    require_whole,
    suggest_option,
)
from pipeline.planning import changes as changes_lib
from pipeline.planning.bucket import Bucket
from pipeline.planning.figures import Counts, count_steps, describe
from pipeline.planning.identity import fingerprint_of
from pipeline.planning.lengths import AnyLengths, Exclude
from pipeline.planning.options import Changes, Options, PlanOptions, Weights
from pipeline.planning.planned import PlannedBatch
from pipeline.planning.stage import Stage
from pipeline.planning.stream import Stream

# The keywords of `Plan`.
PLANNING = ("weights", "exclude", *PlanOptions.__annotations__)


class Plan:
    """All batches of all epochs, decided from lengths alone.

    A plan is a pure function of its arguments: it is the same on every host and in every process.
    Each epoch has every position once, except those that `exclude` or `overflow` leave out.
    `batch(step)` is random access: no batch needs an earlier one.

    >>> plan = Plan([5, 3, 4, 2, 1], [Bucket(rows=2, length=8)], shuffle=False)
    >>> plan.num_batches(), plan.batch(0).bucket
    (1, Bucket(rows=2, length=8))
    >>> plan.batch(0).segments.tolist()  # row, example, start, length
    [[0, 0, 0, 5], [0, 1, 0, 3], [1, 2, 0, 4], [1, 3, 0, 2], [1, 4, 0, 1]]

    Examples may have several sides, such as the inputs and targets of pairs:

    >>> plan = Plan([[5, 2], [3, 3], [3, 1]], [Bucket(2, (8, 4))], shuffle=False, overflow="drop")
    >>> plan.batch(0).segments.tolist()  # row, example, start, inputs, targets
    [[0, 0, 0, 5, 2], [0, 2, 0, 3, 1], [1, 1, 0, 3, 3]]

    With `weights`, batches mix several corpora, which have epochs of their own. Over any range of
    steps, each corpus has its share of the rows to within a batch or two.

    >>> both = {"code": [5, 3, 4, 4], "prose": [9, 7]}
    >>> plan = Plan(both, [Bucket(rows=2, length=16)], weights={"code": 1, "prose": 1})
    >>> [plan.batch(step).sources for step in (0, 1)]
    [{'code': 16, 'prose': 16}, {'code': 16, 'prose': 16}]

    Args:
        lengths: positions of each example: an integer array `[n]`, or `[n, sides]` (for pairs
            inputs and targets), or a dict of one array `[n]` for each side; or a corpus. With
            `weights`, several of these by name, or `Corpora`; examples are numbered consecutively
            over all corpora. Examples whose lengths are all 0 are left out.
        buckets: the batch shapes, ascending by length; with several sides, ascending by the sum of
            the lengths, and the last is the longest on all.
        weights: the weight of each corpus by name, in any unit; or phases `[(0, {…}), (2000, {…})]`
            of first steps and weights, which do not begin within a block of `tiers` steps. A corpus
            may join at a later phase; it then comes after the others. Default None: one corpus,
            each example once per epoch.
        by: the unit of weights: "tokens" (real positions; default) or "examples". Of sides other
            than inputs and targets, tokens of the one that carries the loss count. A corpus that
            ends is repeated, reshuffled; see `first_repeat`.
        seed: the seed of every shuffle, 0 ≤ seed < 2**63; default 0.
        shuffle: whether each epoch shuffles examples, rows, batches and buckets again; default
            True. False makes every epoch the same (but for rows that `tiers` deal to other steps),
            with rows in the order of their longest example.
        packing: "best_fit" (default): whole examples in rows of best fit, or in rows that are
            filled exactly, whichever costs less; "fill", which also cuts examples, the longest
            first, to fill the gaps that best fit leaves (not for several sides or groups, nor with
            `align`; pieces have at least 32 positions, or an eighth of a row below 256); or "none",
            one example per row.
        overflow: what to do with examples longer than the longest bucket: "split" them (not for
            pairs, whose targets would lose their inputs), "truncate" or "drop" them, or raise an
            "error". Default None: "split", for pairs "error". A group is never cut: where it is too
            long, "split" and "truncate" are errors.
        window: the approximate number of pieces (examples or their parts) that are packed together;
            limits memory and the time to the first batch; default 4,194,304. A larger corpus has
            several windows, each of runs from all of it, or of files. Several corpora divide the
            number, but each has windows of at least 65,536 pieces, if that is less than `window`.
        max_segments: the most segments in a row. Default None: no limit.
        align: every segment begins at a column that is a multiple of this, for kernels that work on
            chunks or lanes (64, 128); default 1. Lengths of buckets must be multiples of it. One
            number is for all sides; numbers by name, as in `{"patches": 4}`, leave others at 1.
            Columns between segments are padding.
        cost: what a position costs, for each side by name, such as `{"inputs": 1, "patches": 0.5,
            "images": 0}`. Figures weigh positions by it; a side that costs nothing only limits what
            a row holds. Default 1 for every side.
        attention: the attention of the model, "dense" or "segment"; and
        width: its width. They give the cost of a row, as for `fit_buckets`: rows with much room
            move to a longer bucket where that costs less. Default None: as the buckets were fitted
            for, and of others "dense" and 1,024.
        tiers: the number of consecutive steps whose rows are sorted by the cost of their attention
            and dealt to these steps again, in each bucket, so that the rows of a batch cost about
            the same; default 1. Together, the steps have the same rows for every value.
        curriculum: "short_first": in each cycle, batches of the shortest bucket come first, then
            those of the next longer one, and so on; only the order of buckets changes. Default
            None: buckets are spread evenly.
        cycles: how often in an epoch the curriculum begins again; default 1. In a mixture, how
            often in the steps that take as many tokens as all its corpora have (with
            `by="examples"`, as many examples): over a cycle shares are met, within it they are not.
        read_shares: the number of shares into which each window is divided, by its files: a row has
            examples of one share, and the rows of a batch are in the order of the shares, so that a
            host that builds some adjacent rows reads about its share of the files, whatever the
            number of hosts. A power of two up to `window // 16384`; docs/scale.md has the costs.
            Default 1: a row may have examples of all files of a window.
        exclude: examples to leave out, as for `after`. Default: none.

    Attributes:
        stages: the options and the schedule, from a first step on; one more for each change.
        first: the first step that it has: 0, or that of `onward`.

    Raises:
        ValueError: an argument is not as above, or no example has a position to train on.
    """

    def __init__(
        self,
        lengths: AnyLengths,
        buckets: Iterable[Bucket],
        *,
        weights: Weights | None = None,
        exclude: Exclude = (),
        **options: Unpack[PlanOptions],
    ):
        for name in options:
            if name not in PlanOptions.__annotations__:
                names = [*PLANNING, "lengths", "buckets"]
                raise InvalidType(f"Plan() has no option {suggest_option(name, names)}")
        shapes: Any = buckets  # checked by the options
        checked = Options(buckets=shapes, **options)
        self._set(changes_lib.begin(lengths, checked, weights, exclude))

    def _set(self, history: Sequence[changes_lib.Change], first: int = 0) -> None:
        self._history, self.first = history, first
        self.stages = tuple(stage for stage, _ in history)
        self._starts = [stage.start for stage in self.stages]

    @classmethod
    def _of(cls, history: Sequence[changes_lib.Change], first: int) -> Self:
        """The plan with some history, and the steps from `first` on."""
        plan = cls.__new__(cls)
        plan._set(history, first)
        return plan

    def batch(self, step: int) -> PlannedBatch:
        """The batch of global step `step`, counted from 0 over all epochs.

        Raises:
            TypeError: `step` is not a whole number.
            IndexError: `step` is negative or before those of `onward`.
        """
        return self.stage_at(step := require_index(step)).assembly.batch(step)

    def after(
        self,
        step: int,
        *,
        lengths: AnyLengths | None = None,
        exclude: Exclude = (),
        weights: Mapping[str, float] | None = None,
        **changes: Unpack[Changes],
    ) -> "Plan":
        """The plan with other options from `step` on; it may change again.

        No position is lost or repeated: the positions that remain of the epochs in progress at
        `step` are planned again, and whole epochs follow. This takes as long as planning an epoch,
        at any step, and up to 72 bytes of memory for each example that remains. Another `overflow`
        brings back nothing in the epochs in progress: positions that they truncated or dropped stay
        so until the next epoch.

        >>> plan = Plan([5, 3, 4, 2, 1], [Bucket(rows=1, length=8)])
        >>> later = plan.after(1, buckets=[Bucket(rows=2, length=8)]).after(7, exclude=[0])
        >>> later.num_batches(0), later.num_batches(1), later.batch(1).bucket
        (2, 1, Bucket(rows=2, length=8))

        If only `weights` change, every corpus keeps its place.

        Args:
            step: the first step that may differ, from 0; not before an earlier change of options,
                nor in the middle of `tiers` steps that are dealt together (see `next_block`).
            lengths: the lengths of all examples, in the same order with new ones after them; or a
                corpus with them, such as `Corpora` of the present one and others. New examples join
                the epoch in progress. With several corpora: all corpora, new ones at the end.
                Default None: no new examples.
            exclude: more examples to leave out from `step` on: their numbers, or a bool for each
                example; or a function of the corpus (for an array, of the lengths) that returns
                one of these.
            weights: with several corpora, the weights by name from `step` on; later phases are
                removed. Default None: the present weights and later phases.
            **changes: `buckets`, and any other keyword of `Plan`. The rest of the epoch is planned
                again even if a value stays the same.

        Raises:
            ValueError: an argument is not as above, or `Plan` raises it.
        """
        step = require_whole("step", step, 0)
        check_first(step, self.first)
        given: Any = {"lengths": lengths, "exclude": exclude, "weights": weights, **changes}
        return self._of(changes_lib.after(self._history, step, **given), self.first)

    @classmethod
    def replay(cls, lengths: Any, changes: Iterable[tuple[int, Mapping[str, Any]]]) -> "Plan":
        """Rebuilds a plan from its `changes`, and the lengths of all examples of its last stage.

        >>> plan = Plan([5, 3, 4], [Bucket(1, 8)], seed=3).after(2, seed=4)
        >>> Plan.replay([5, 3, 4], plan.changes).fingerprint == plan.fingerprint
        True

        Raises:
            ValueError: `changes` is empty, or `Plan` or `after` raises it.
        """
        plan: Plan | None = None
        for step, keywords in changes_lib.read(changes, lengths):
            plan = cls(**keywords) if plan is None else plan.after(step, **keywords)
        if plan is None:
            raise InvalidValue(
                "changes is empty; give at least the entry of step 0, with all options"
            )
        return plan

    def next_block(self, step: int) -> int:
        """The first step from `step` on at which the plan can change; without tiers, `step`."""
        step = require_whole("step", step, 0)
        block = self.last_stage(step).assembly.block(step)
        return step if block.start == step else block.stop

    def onward(self, step: int) -> "Plan":
        """The same plan with only the steps from `step` on, and their buckets."""
        return self._of(self._history, max(require_index(step), self.first))

    # ---- stages

    def last_stage(self, step: int) -> Stage:
        """The last of `stages` that begins at or before a step."""
        return self.stages[max(bisect_right(self._starts, step), 1) - 1]

    def stage_at(self, step: int) -> Stage:
        """The stage of a step; an error if the plan does not have it."""
        check_first(step, self.first)
        return self.last_stage(step)

    def streams_of(self, corpus: int, step: int | None = None) -> list[Stream]:
        """The streams of a corpus, by its number, of the stages that begin before a step."""
        stages = [stage for stage in self.stages if step is None or stage.start < max(step, 1)]
        streams = [stage.streams[corpus] for stage in stages if corpus < len(stage.streams)]
        return list(dict.fromkeys(streams))  # some stages share one

    # ---- the data state and the history of a run

    @property
    def changes(self) -> list[tuple[int, dict[str, Any]]]:
        """The first step and the new options of each stage: JSON, for `Plan.replay`."""
        return changes_lib.as_json(self._history)

    @property
    def entries(self) -> tuple[Mapping[str, Any], ...]:
        """The entries of a data state, one for each stage: first step, identity, fingerprint."""
        return tuple(stage.entry for stage in self.stages)

    @property
    def examples_per_stage(self) -> tuple[int, ...]:
        """The number of examples in each stage, including those left out."""
        return tuple(stage.members.count for stage in self.stages)

    @functools.cached_property
    def identity(self) -> Any:
        """Everything that the batches depend on, as JSON; if the plan changes, a list by stage."""
        if len(self.stages) == 1:
            return self.stages[0].identity
        return [{"from": stage.start, **stage.identity} for stage in self.stages]

    @functools.cached_property
    def fingerprint(self) -> str:
        """A short digest of `identity`: plans with the same one have the same batches."""
        return fingerprint_of(self.identity)

    def files_ahead(
        self, step: int, rows: Mapping[Bucket, np.ndarray] | None = None
    ) -> dict[str, list[np.ndarray]]:
        """The files that batches need from a step on, for each corpus that has files, by name.

        Each array (int64) has the numbers of the files of a window: that of the step, those after
        it, and all windows of the next epoch. Later changes of the plan are ignored.

        With `read_shares`, `rows` may have the numbers of some rows of the batches of each bucket,
        such as those of one host; then files that only other rows need are left out. A bucket that
        it lacks has no rows. Default None: all rows.
        """
        stage = self.stage_at(step)
        mine = list[np.ndarray]()
        for bucket in stage.options.buckets:
            mine.append(np.full(bucket.rows, rows is None))
            if rows is not None:
                mine[-1][rows.get(bucket, [])] = True
        begin = stage.assembly.block(step).start
        before = stage.schedule.before(begin).rows.T
        return {
            stream.name: stream.files_ahead(taken, mine)
            for stream, taken in zip(stage.streams, before, strict=True)
            if stream.lengths.files is not None
        }

    # ---- epochs

    def first_step(self, epoch: int) -> int:
        """The first step of an epoch."""
        begun = [stage.schedule.epoch_of(stage.start) for stage in self.stages]
        number = max(bisect_left(begun, epoch) - 1, 0)
        step = self.stages[number].schedule.first_step(epoch)
        return min([step, *self._starts[number + 1 : number + 2]])

    @property
    def first_whole_epoch(self) -> int:
        """The first epoch that begins in the last stage."""
        stage = self.stages[-1]
        epoch = stage.schedule.epoch_of(stage.start)
        return epoch + (self.first_step(epoch) < stage.start)

    def num_batches(self, epoch: int = 0) -> int:
        """Batches in an epoch; the same in every epoch of one corpus whose plan does not change.

        Of several corpora, an epoch ends when each one with a weight has had an epoch of its own.
        """
        return self.first_step(epoch + 1) - self.first_step(epoch)

    def first_repeat(self) -> int:
        """The first step with a row of a second epoch: so many steps have no position twice.

        With `tiers`, the first of the steps that share this row.

        >>> plan = Plan({"a": [4] * 6, "b": [4] * 2}, [Bucket(1, 4)], weights={"a": 1, "b": 1})
        >>> plan.first_repeat(), plan.batch(4).sources, plan.batch(4).epochs.tolist()
        (4, {'b': 4}, [1])
        """
        for stage, following in itertools.zip_longest(self.stages, self._starts[1:]):
            step = stage.assembly.block(stage.schedule.first_repeat()).start
            if following is None or step < following:
                return step
        raise AssertionError("whole epochs of the last stage repeat")

    @property
    def epoch_steps(self) -> tuple[int, int]:
        """The first step of the epoch of `num_tokens`, and one past its last step."""
        last, epoch = self.stages[-1], self.first_whole_epoch
        if last.weights is not None:
            epoch = last.schedule.epoch_of(last.start)
        return self.first_step(epoch), self.first_step(epoch + 1)

    def whole_epochs(self, step: int) -> dict[str, int]:
        """The number of epochs of each corpus that end before `step`, by name."""
        epochs_of = dict.fromkeys(self.names, 0)
        stage = self.last_stage(step - 1)
        # Within a block, epochs that end in it are not over. No step after `step` is looked up.
        block = stage.assembly.block(max(step - 1, 0))
        epochs = stage.schedule.epochs(block.start if step < block.stop else step)
        return epochs_of | dict(zip((stream.name for stream in stage.streams), epochs, strict=True))

    # ---- figures

    def count(self, first: int, last: int) -> Counts:
        """The numbers of batches, rows and tokens in the steps `first` to `last`."""
        return count_steps(self.stages, first, last)

    @property
    def options(self) -> Options:
        """The options of the last stage."""
        return self.stages[-1].options

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the corpora of the last stage, in order; `("",)` for one corpus."""
        return tuple(self.stages[-1].members.corpora)

    @property
    def num_examples(self) -> int:
        """Examples of all corpora in the last stage, including those left out."""
        return self.examples_per_stage[-1]

    @property
    def max_position(self) -> int:
        """The largest position in any batch, from 0; a position table needs one entry more."""
        return max(stage.max_position for stage in self.stages)

    @property
    def batches_per_bucket(self) -> dict[Bucket, int]:
        """Batches of each bucket in an epoch; 0 for a bucket that no step has.

        If the plan changes: in all steps up to the end of the first whole epoch of the last stage,
        and 1 for a bucket that only later steps have.
        """
        last = self.stages[-1]
        end = self.first_step(self.first_whole_epoch + 1)
        counts = self.count(self.first, end).batches
        used = {last.options.buckets[number] for number in last.schedule.repeated}
        every = (bucket for stage in self.stages for bucket in stage.options.buckets)
        return {bucket: max(counts.get(bucket, 0), int(bucket in used)) for bucket in every}

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets, ascending by length; if the plan changes, only buckets that a step has.

        Of equal lengths, those with more rows come first.
        """
        every = {bucket for stage in self.stages for bucket in stage.options.buckets}
        if self.first or len(self.stages) > 1:
            every = {bucket for bucket, number in self.batches_per_bucket.items() if number}
        return tuple(sorted(every, key=lambda bucket: bucket.sort_key))

    def most_segments(self) -> dict[Bucket, int]:
        """The most segments that a row of each bucket may have; at least 1."""
        return self._most_in_row("most_segments")

    def most_continuations(self) -> dict[Bucket, int]:
        """The most continuations of groups that a row of each bucket may have; at least 1."""
        return self._most_in_row("most_continuations")

    def _most_in_row(self, name: str) -> dict[Bucket, int]:
        most = {bucket: 1 for stage in self.stages for bucket in stage.options.buckets}
        for stage in self.stages:
            for rows in (rows for stream in stage.streams for rows in stream.passes):
                numbers = getattr(rows.windows, name)
                for bucket, number in zip(stage.options.buckets, numbers, strict=True):
                    most[bucket] = max(most[bucket], number)
        return most

    @property
    def num_tokens(self) -> int:
        """Real positions in a whole epoch of the last stage, those of a side times its cost.

        Of several corpora: an estimate, by the mean fill of rows, for the epoch in which the last
        stage begins.
        """
        return self.count(*self.epoch_steps).num_tokens

    @property
    def padding(self) -> float:
        """The share of padding in the epoch of `num_tokens`, from 0 to 1, including empty rows."""
        return self.count(*self.epoch_steps).padding

    @property
    def cuts(self) -> int:
        """The number of pieces that an epoch of each corpus cuts to fill rows, with "fill".

        >>> Plan([6, 6, 6], [Bucket(rows=2, length=9)], packing="fill").cuts
        1
        """
        return self.stages[-1].cuts

    def __repr__(self) -> str:
        return f"Plan(buckets={self.buckets}, fingerprint={self.fingerprint!r})"

    def __str__(self) -> str:
        return describe(self._history, self.count(*self.epoch_steps))


def check_first(step: int, first: int) -> None:
    """Refuses a step before the first one of a plan."""
    if step < first:
        raise OutOfRange(
            f"step is {step:,}; steps count from 0 over all epochs"
            + f", and this plan has only steps from {first:,} on" * (first > 0)
        )
