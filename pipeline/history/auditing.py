"""The audit: whether each batch that a run trained on is the one that was planned.

The run logs a digest of each batch; `plans.json` has all that planned them. Where every digest is
that of the plan made again, what was trained on is what the plan says; and that each epoch of the
plan has each position once is counted here, over the batches, and not taken from it.
"""

import dataclasses
import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from etils import epath

from pipeline.errors import InvalidValue, Missing
from pipeline.history.loss_archive import NAME, losses
from pipeline.history.plans import read_history
from pipeline.planning import figures
from pipeline.planning.bucket import Bucket
from pipeline.planning.lengths import as_lengths
from pipeline.planning.plan import Plan
from pipeline.planning.planned import PlannedBatch
from pipeline.planning.source import Source

# Examples and steps that are named one by one.
SHOWN = 10


class NotAsPlanned(InvalidValue):
    """What a run did is not what was planned; the message names the step."""


class Account:
    """The positions of one corpus that epochs had, and how many epochs each example was in.

    Args:
        source: the corpus, as the last stage of the plan has it.
        report: is called with a line for each epoch.
    """

    def __init__(self, source: Source, report: Callable[[str], None]):
        self.times = np.zeros(len(source.lengths), np.int64)
        self._of = f" of {source.name}" if source.name else ""
        self._source, self._report = source, report
        self._pieces: dict[int, list[np.ndarray]] = {}
        self._left: dict[int, int] = {}
        self._closed: set[int] = set()

    def add(self, epoch: int, pieces: np.ndarray) -> None:
        """Counts some pieces, int64 [n, 3 or 4] without their rows; closes the epoch if it is over.

        Raises:
            NotAsPlanned: as `close`.
        """
        if epoch not in self._pieces:
            self._pieces[epoch], self._left[epoch] = (
                [],
                int(self._source.expected_positions(epoch).sum()),
            )
        self._pieces[epoch].append(pieces)
        self._left[epoch] -= int(pieces[:, 2:].sum())
        if not self._left[epoch]:
            self.close(epoch, over=True)

    def open(self, first: int, over: int) -> list[int]:
        """The epochs that are not closed, those from `first` on that are over included."""
        unseen = [epoch for epoch in range(first, over) if epoch not in self._closed]
        return sorted(
            {
                *self._pieces,
                *(each for each in unseen if self._source.expected_positions(each).any()),
            }
        )

    def close(self, epoch: int, *, over: bool) -> None:
        """Checks an epoch: each position at most once and, if it is over, all that are due.

        Raises:
            NotAsPlanned: a position is there twice, or is missing.
        """
        due = self._source.expected_positions(epoch)
        sides = due.shape[1]
        none = np.zeros((0, 2 + sides), np.int64)
        pieces = np.concatenate([none, *self._pieces.pop(epoch, [])])
        self._left.pop(epoch, None)
        self._closed.add(epoch)
        lengths = as_lengths(self._source.lengths.given).reshape(due.shape)
        covered = np.stack(
            [self._once(epoch, pieces, side, lengths[:, side]) for side in range(sides)],
            axis=1,
        )
        self.times += covered.any(axis=1)
        total = int(covered.sum())
        wrong = (covered != due if over else covered > due).any(axis=1)
        if wrong.any():
            first = int(wrong.argmax())
            raise NotAsPlanned(
                f"epoch {epoch}{self._of} of the plan has {covered[first].sum():,} of the "
                f"{due[first].sum():,} positions of example {first:,} ({np.count_nonzero(wrong):,} "
                "such examples). This is a defect of Lockstep: please report it"
            )
        if not over:
            self._report(f"epoch {epoch}{self._of}, not over: {total:,} positions, none twice")
            return
        there = int(lengths[: self._source.count_examples(epoch)].sum(dtype=np.int64))
        lost = f"; {there - total:,} in no batch" * (total < there)
        self._report(f"epoch {epoch}{self._of}: {total:,} positions, each once{lost}")

    def _once(self, epoch: int, pieces: np.ndarray, side: int, lengths: np.ndarray) -> np.ndarray:
        """Positions of each example on one side that some pieces have, none of them twice."""
        example, start, size = pieces[:, [0, 1, 2 + side]].T
        order = np.lexsort((start, example))
        example, start, size = example[order], start[order], size[order]
        end = start + size
        wrong = end > lengths[example]
        wrong[:-1] |= (np.diff(example) == 0) & (end[:-1] > start[1:])
        if wrong.any():
            raise NotAsPlanned(
                f"epoch {epoch}{self._of} of the plan has positions of example "
                f"{example[wrong.argmax()]:,} twice, or some that it does not have. This is a "
                "defect of Lockstep: please report it"
            )
        return np.bincount(example, size, len(lengths)).astype(np.int64)


class Ledger:
    """Counts the epochs of every corpus of a plan.

    Args:
        plan: which; it may change on the way.
        report: is called with a line for each epoch.
        first_epoch: the first epoch of which batches are counted.
    """

    def __init__(self, plan: Plan, report: Callable[[str], None], first_epoch: int = 0):
        self._plan, self._first_epoch = plan, first_epoch
        sources = plan.stages[-1].sources
        self._ends = np.array([source.first + len(source.lengths) for source in sources])
        self._first = [source.first for source in sources]
        self._accounts = [Account(source, report) for source in sources]

    @property
    def times(self) -> np.ndarray:
        """In how many epochs of its corpus each example was: int64 [examples]."""
        return np.concatenate([account.times for account in self._accounts])

    def add(self, planned: PlannedBatch) -> None:
        """Counts the next batch.

        Raises:
            NotAsPlanned: an epoch has a position twice, or not all that are due.
        """
        source = np.searchsorted(self._ends, planned.segments[:, 1], side="right")
        epochs = planned.epoch_of_segments
        for number in np.unique(source).tolist():
            for epoch in np.unique(epochs[source == number]).tolist():
                pieces = planned.segments[(source == number) & (epochs == epoch), 1:]
                pieces[:, 0] -= self._first[number]
                self._accounts[number].add(epoch, pieces)

    def finish(self, steps: int) -> None:
        """Checks the epochs in progress, after so many batches.

        Raises:
            NotAsPlanned: as `add`.
        """
        over = figures.whole_epochs(self._plan, steps)
        for account, whole in zip(self._accounts, over.values(), strict=True):
            for epoch in account.open(self._first_epoch, whole):
                account.close(epoch, over=epoch < whole)


def some(numbers: np.ndarray) -> str:
    """The first of some numbers, and how many there are if that is more."""
    shown = ", ".join(map(str, numbers[:SHOWN].tolist()))
    return shown if len(numbers) <= SHOWN else f"{shown}, … ({len(numbers):,} in all)"


@dataclasses.dataclass(frozen=True)
class Logged:
    """What a run's log says of its batches.

    Attributes:
        digests: of each step's batch, in order.
        skipped: the steps whose batch was left out, because the config said so.
        lost: the steps that ran without an update, because a loss was not finite.
    """

    digests: list[str]
    skipped: list[int]
    lost: list[int]


def audit(workdir: epath.Path, report: Callable[[str], None]) -> None:
    """Compares every batch of a run with its plan, and says what became of every example.

    Args:
        workdir: of a run, finished or stopped, with `plans.json` and `metrics.jsonl`.
        report: is called with each line of what was found.

    Raises:
        NotAsPlanned: a batch that ran is not the batch that was planned, a step is missing or was
            run twice, or an epoch of the plan is no partition.
        FileNotFoundError: there is no run.
        ValueError: what is there cannot be read, or the batches cannot be planned again.
    """
    corpus, plan = read_history(workdir)
    for step, changes in plan.changes:
        said = ", ".join(f"{name}={_short(value)}" for name, value in changes.items())
        report(f"plan from step {step:,} on: {said or 'planned anew'}")
    sources = plan.stages[-1].sources
    if len(sources) > 1:
        first = [f"{source.first} {source.name}" for source in sources]
        report(f"documents are counted over all corpora, from {', from '.join(first)}")
    logged = _read_log(workdir)
    ledger = Ledger(plan, report)
    seen: dict[str, int] = {}
    for step, digest in enumerate(logged.digests):
        if plan.finite and step >= plan.num_batches():
            raise NotAsPlanned(f"step {step:,} ran, and the plan ends before it")
        planned = plan.batch(step)
        if digest != planned.digest:
            before = f", but that of step {seen[digest]:,}, again" if digest in seen else ""
            raise NotAsPlanned(
                f"step {step:,} did not run the batch that was planned: the log has {digest}"
                f"{before}; the plan {planned.digest} ({planned.bucket}, epoch {planned.epoch})"
            )
        seen[digest] = step
        ledger.add(planned)
    steps = len(logged.digests)
    ledger.finish(steps)
    asked = [(step, changes["exclude"]) for step, changes in plan.changes if "exclude" in changes]
    for step, numbers in asked:
        reason = _reason(workdir, step, numbers)
        report(f"left out from step {step:,} on, as asked: {some(np.array(numbers))}{reason}")
    _report_omissions(plan, np.asarray(corpus.lengths), ledger.times, logged, report)
    report(f"all {steps:,} batches are those that were planned, each once and in order")


def _reason(workdir: epath.Path, step: int, numbers: list[int]) -> str:
    """Why documents are left out from a step on, where the losses before it say so."""
    if not (workdir / NAME).exists():
        return ""
    found = losses(workdir)
    documents, _, excess = found.select(found.step < step).documents()
    least = excess[np.isin(documents, numbers)].min(initial=np.inf)
    if not 0 < least < np.inf:
        return ""
    return (
        f"; until then their losses were at least {least:.3f} above the usual, and those of "
        f"{np.mean(excess < least):.1%} of all documents less"
    )


def _report_omissions(
    plan: Plan,
    lengths: np.ndarray,
    times: np.ndarray,
    logged: Logged,
    report: Callable[[str], None],
) -> None:
    """What was left out, and why; what was repeated, and how often."""
    for stage in plan.stages:
        done = {"truncate": "cut", "drop": "dropped"}.get(str(stage.options.overflow))
        numbers = [source.whole.pieces.overlong + source.first for source in stage.sources]
        if done and any(map(len, numbers)):
            longest = " and ".join(f"{each:,}" for each in stage.options.buckets[-1].lengths)
            report(
                f"from step {stage.start:,} on, documents longer than {longest} are {done} "
                f"(overflow={stage.options.overflow!r}): {some(np.concatenate(numbers))}"
            )
    if empty := np.count_nonzero((lengths if lengths.ndim == 1 else lengths[:, 1]) == 0):
        report(f"left out: {empty:,} documents with nothing to train on")
    if logged.skipped:
        report(
            f"left out: the batches of steps {some(np.array(logged.skipped))} (skip_steps): "
            f"{_documents(plan, logged.skipped)}"
        )
    if logged.lost:
        report(
            f"without an update, as the loss was not finite: steps {some(np.array(logged.lost))}: "
            f"{_documents(plan, logged.lost)}"
        )
    for number, count in enumerate(np.bincount(times).tolist()):
        if number > 1 and count:
            report(f"repeated: {count:,} documents in {number} epochs each")


def _read_log(workdir: epath.Path) -> Logged:
    """The steps of `metrics.jsonl`, checked to be each there once, as many as were saved.

    Raises:
        NotAsPlanned: they are not.
    """
    logged = Logged([], [], [])
    path = workdir / "metrics.jsonl"
    if not path.exists():
        raise Missing(
            f"there is no {path.name} in {os.fspath(workdir)}, so nothing says which batches ran; "
            "pipeline.history.RunLog writes it"
        )
    lines = path.read_bytes().split(b"\n")[:-1]  # what a kill cut short is no line
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
            step, digest = values["step"], values.get("batch", values.get("skipped"))
            if type(step) is not int or not isinstance(digest, str | None):
                raise InvalidValue(f"its step is {step!r:.80} and its batch {digest!r:.80}")
            loss = values["loss"] if "batch" in values else None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidValue(f"line {number} of {path} cannot be read: {error!r}") from error
        if digest is None:  # an evaluation
            continue
        due = len(logged.digests)
        if step != due:
            what = f"step {due:,} is missing" if step > due else f"step {step:,} was run twice"
            raise NotAsPlanned(f"{what}: line {number} of metrics.jsonl is of step {step:,}")
        if "skipped" in values:
            logged.skipped.append(step)
        elif loss is None or values.get("gradient_norm", 0) is None:
            logged.lost.append(step)
        logged.digests.append(digest)
    folder = workdir / "checkpoints"
    names = [each.name for each in folder.iterdir()] if folder.exists() else []
    saved = max((int(name) for name in names if name.isdigit()), default=0)
    if len(logged.digests) < saved:
        raise NotAsPlanned(
            f"step {len(logged.digests):,} is missing: the log ends there, and the last checkpoint "
            f"is of step {saved:,}"
        )
    return logged


def _documents(plan: Plan, steps: list[int]) -> str:
    found = np.unique(np.concatenate([plan.batch(step).segments[:, 1] for step in steps]))
    return f"documents {some(found)}"


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}:{weight}" for name, weight in value.items())
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "+".join(str(Bucket(*each)) for each in value)
    return some(np.array(value)) if isinstance(value, list) else str(value)
