"""The audit: whether a run trained on the batches that were planned, and on each position once.

The run logs a digest of each batch, and `plans.json` has all inputs of the plan. So each batch is
planned again and compared. The positions of each epoch are counted over the batches here, and not
taken from the plan.
"""

import dataclasses
import json
import os
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from etils import epath

from pipeline.errors import InvalidValue, Missing, name_some
from pipeline.fs.atomic import as_path
from pipeline.history.plans import describe_changes, find_corpora, read_history
from pipeline.planning import figures
from pipeline.planning.following import FollowedPlan
from pipeline.planning.lengths import as_lengths
from pipeline.planning.pieces import cut
from pipeline.planning.plan import Plan
from pipeline.planning.planned import PlannedBatch
from pipeline.planning.stream import count_examples, expected_positions


class NotAsPlanned(InvalidValue):
    """The batches of a run are not those that were planned; the message names the step."""


class Ledger:
    """Counts the positions in each epoch of each corpus of a plan, batch by batch.

    The plan may have changes. `report` is called with a line for each epoch, from the first of its
    corpus on: 0, or that of `first_epochs`, by name.
    """

    def __init__(
        self,
        plan: Plan,
        report: Callable[[str], None],
        first_epochs: Mapping[str, int] = types.MappingProxyType({}),
    ):
        self.plan, self._report, self._first_epochs = plan, report, first_epochs
        # By corpus and epoch: pieces so far, as example, start and sizes; and positions to come.
        self._pieces: dict[tuple[int, int], list[np.ndarray]] = {}
        self._left: dict[tuple[int, int], int] = {}

    def add(self, planned: PlannedBatch) -> None:
        """Counts the next batch; `NotAsPlanned` if an epoch has a position twice, or lacks one."""
        number, several = find_corpora(self.plan, planned.segments[:, 1]), len(self.plan.names)
        owner = planned.epoch_of_segments * several + number
        for each in np.unique(owner).tolist():
            epoch, which = divmod(each, several)
            key, pieces = (which, epoch), planned.segments[owner == each, 1:]
            if key not in self._left:
                due = expected_positions(self.plan.streams_of(which), epoch)
                self._left[key] = int(due.sum())
            self._pieces.setdefault(key, []).append(pieces)
            self._left[key] -= int(pieces[:, 2:].sum())
            if not self._left[key]:
                self._close(which, epoch, over=True)

    def finish(self, steps: int) -> None:
        """Checks the epochs in progress after `steps` batches; raises like `add`."""
        for which, (name, whole) in enumerate(figures.whole_epochs(self.plan, steps).items()):
            epochs = range(self._first_epochs.get(name, 0), whole)
            due = {epoch for epoch in epochs if self._left.get((which, epoch), 1)}
            for epoch in sorted(due | {epoch for at, epoch in self._pieces if at == which}):
                self._close(which, epoch, over=epoch < whole)

    def _close(self, which: int, epoch: int, *, over: bool) -> None:
        """Checks an epoch: each position at most once and, if it is over, all that are due."""
        stream = self.plan.stages[-1].streams[which]
        name = f"epoch {epoch}{f' of {stream.name}' if stream.name else ''}"
        due = expected_positions(self.plan.streams_of(which), epoch)
        lengths = as_lengths(stream.lengths.given).reshape(due.shape)
        if (which, epoch) not in self._pieces and not due.any():  # it joins later
            return
        none = np.zeros((0, 2 + due.shape[1]), np.int64)
        pieces = np.concatenate([none, *self._pieces.pop((which, epoch), [])])
        pieces[:, 0] -= stream.first
        covered, wrong = _cover(pieces, lengths)
        wrong |= (covered != due if over else covered > due).any(axis=1)
        if wrong.any():
            first = int(wrong.argmax())
            raise NotAsPlanned(
                f"{name} of the plan does not have each of the {due[first].sum():,} positions of "
                f"example {first:,} once ({np.count_nonzero(wrong):,} such examples). This "
                "is a defect of Lockstep: please report it"
            )
        total = int(covered.sum())
        if not over:
            self._report(f"{name}, not over: {total:,} positions, none twice")
            return
        there = int(
            lengths[: count_examples(self.plan.streams_of(which), epoch)].sum(dtype=np.int64)
        )
        lost = f"; {there - total:,} in no batch" * (total < there)
        self._report(f"{name}: {total:,} positions, each once{lost}")


class FollowedLedger:
    """Counts the positions of corpora some of which grow, batch by batch; see `Ledger`.

    The first epoch of a growing corpus has each sealed position at most once; a chapter that is
    over has each of its own positions. A `Ledger` counts later epochs, and other corpora.
    """

    def __init__(self, plan: FollowedPlan, report: Callable[[str], None]):
        self._plan, self._report, self._steps = plan, report, 0
        self._pieces: dict[str, list[np.ndarray]] = {name: [] for name in plan.parts}
        self._others = Ledger(plan, report, dict.fromkeys(plan.parts, 1))

    def add(self, planned: PlannedBatch) -> None:
        """Counts the next batch; raises like `Ledger.add`."""
        owner, epochs = find_corpora(self._plan, planned.segments[:, 1]), planned.epoch_of_segments
        others = np.ones(len(owner), bool)
        for name, found in self._pieces.items():
            mine = (owner == self._plan.names.index(name)) & (epochs == 0)
            found.append(planned.segments[mine, 1:])
            others &= ~mine
        self._others.plan = self._plan.plan_of(self._steps)
        segments = planned.segments[others]
        self._others.add(dataclasses.replace(planned, segments=segments, epochs=epochs[others]))
        self._steps += 1

    def finish(self, steps: int) -> None:
        """Checks the first epochs, and others, after `steps` batches; raises like `add`."""
        if not steps:
            return
        places = self._plan.entries_at(steps)[0]["places"]
        for name, pieces in self._pieces.items():
            self._finish_first(name, places[name], np.concatenate(pieces))
        self._others.finish(steps)

    def _finish_first(self, name: str, place: Mapping[str, Any], pieces: np.ndarray) -> None:
        """Checks the first epoch of a corpus, whose chapters before `place` are over."""
        parts, which = self._plan.parts[name], self._plan.names.index(name)
        found = [parts.lengths(number) for number in range(place["last"][0])]
        if not found:
            return
        lengths = np.concatenate([each for each in found if each is not None])
        over = place["example"]
        room, overflow = self._plan.options.buckets[-1].lengths, self._plan.options.overflow
        due = cut(lengths, room, overflow).positions_per_example()
        pieces[:, 0] -= self._plan.stages[-1].streams[which].first
        covered, wrong = _cover(pieces, lengths.reshape(due.shape))
        wrong |= (covered > due).any(axis=1)
        if len(self._plan.changes) == 1:  # else others may have been dropped before
            wrong[:over] |= (covered[:over] != due[:over]).any(axis=1)
        if wrong.any():
            raise NotAsPlanned(
                f"the first epoch of the plan{f' of {name}' * bool(name)} does not have each "
                f"position of example {int(wrong.argmax()):,} once ({np.count_nonzero(wrong):,} "
                "such examples). This is a defect of Lockstep: please report it"
            )
        self._report(
            f"epoch 0 of {name or 'a corpus'}, which grows: {covered.sum():,} positions, none "
            f"twice; those of the first {over:,} examples, whose chapters are over, each once"
        )


def _cover(pieces: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The number of positions of each example in some pieces, and whether any is wrong.

    A position is wrong if it comes twice, or does not exist. Returns int64 [examples, sides], like
    `lengths`, and bool [examples].
    """
    example, start, *sizes = pieces[np.lexsort((pieces[:, 1], pieces[:, 0]))].T
    covered, wrong = np.zeros(lengths.shape, np.int64), np.zeros(len(lengths), bool)
    for side, size in enumerate(sizes):
        end = start + size
        beyond = end > lengths[example, side]
        twice = (example[:-1] == example[1:]) & (end[:-1] > start[1:])
        wrong[example[beyond]] = wrong[example[1:][twice]] = True
        covered[:, side] = np.bincount(example, size, len(lengths))
    return covered, wrong


def audit(workdir: epath.PathLike, report: Callable[[str], None] = print) -> None:
    """Compares every batch of a run with its plan, and counts the positions of every epoch.

    `workdir` is that of a run, finished or stopped; `report` is called with each line.

    Raises:
        NotAsPlanned: a batch that ran is not the batch that was planned, a step is missing or was
            run twice, or an epoch of the plan is not a partition.
        FileNotFoundError: there is no run.
        ValueError: the files cannot be read, or the batches cannot be planned again.
    """
    workdir = as_path(workdir)
    _, plan = read_history(workdir)
    for step, changes in plan.changes:
        report(f"plan from step {step:,} on: {describe_changes(changes) or 'planned again'}")
    digests, without_update, said = _read_log(workdir)
    ledger: Ledger | FollowedLedger
    if isinstance(plan, FollowedPlan):
        ledger = FollowedLedger(plan, report)
    else:
        ledger = Ledger(plan, report)
    for step, digest in enumerate(digests):
        if plan.finite and step >= plan.num_batches():
            raise NotAsPlanned(f"step {step:,} ran, but the plan ends before it")
        planned = plan.batch(step)
        if digest != planned.digest:
            then = digests.index(digest)
            before = f", but that of step {then:,}, again" if then < step else ""
            raise NotAsPlanned(
                f"step {step:,} did not run the batch that was planned: the log has {digest}"
                f"{before}; the plan has {planned.digest} ({planned.bucket}, epoch {planned.epoch})"
            )
        ledger.add(planned)
    ledger.finish(len(digests))
    for text in said:
        report(text)
    if without_update:
        report(f"without an update: steps {name_some(without_update)}")
    report(f"all {len(digests):,} batches are those that were planned, each once and in order")


def _read_log(workdir: epath.Path) -> tuple[list[str], list[int], list[str]]:
    """The digests of all batches; the steps without an update; and messages about buckets."""
    digests, without_update, said = list[str](), list[int](), list[str]()
    path = workdir / "metrics.jsonl"
    if not path.exists():
        raise Missing(
            f"there is no {path.name} in {os.fspath(workdir)}, which lists the batches that ran; "
            "pipeline.history.RunLog writes it"
        )
    lines = path.read_bytes().split(b"\n")[:-1]  # without a line that a kill cut short
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
            step, digest = values["step"], values.get("batch", values.get("skipped"))
            if type(step) is not int or not isinstance(digest, str | None):
                raise InvalidValue(f"its step is {step!r:.80} and its batch {digest!r:.80}")
            loss = values["loss"] if "batch" in values else None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidValue(f"line {number} of {path} cannot be read: {error!r}") from error
        if digest is None:  # an evaluation, or a message about buckets
            said += [f"step {step:,}: {values['refit']}"] if "refit" in values else []
            continue
        due = len(digests)
        if step != due:
            what = f"step {due:,} is missing" if step > due else f"step {step:,} was run twice"
            raise NotAsPlanned(f"{what}: line {number} of metrics.jsonl is for step {step:,}")
        if loss is None or values.get("gradient_norm", 0) is None:
            without_update.append(step)
        digests.append(digest)
    folder = workdir / "checkpoints"
    names = [each.name for each in folder.iterdir()] if folder.exists() else []
    saved = max((int(name) for name in names if name.isdigit()), default=0)
    if len(digests) < saved:
        raise NotAsPlanned(
            f"step {len(digests):,} is missing: the log ends there, but the last checkpoint is for "
            f"step {saved:,}"
        )
    return digests, without_update, said
