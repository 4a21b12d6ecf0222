"""The audit: whether each batch that a run trained on is the one that was planned.

The run logs a digest of each batch; `plans.json` has all that planned them. Where every digest is
that of the plan made again, what was trained on is what the plan says; and that each epoch of the
plan has each position once is counted here, over the batches, and not taken from it.
"""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
from etils import epath

from pipeline.planning.chain import Chain
from pipeline.training.history import read_history

# Examples and steps that are named one by one.
SHOWN = 10


class NotAsPlanned(ValueError):
    """What a run did is not what was planned; the message names the step."""


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


def audit(workdir: epath.Path, tell: Callable[[str], None]) -> None:
    """Compares every batch of a run with its plan, and says what became of every example.

    Args:
        workdir: of a run of train.py, finished or stopped.
        tell: is told what was found.

    Raises:
        NotAsPlanned: a batch that ran is not the batch that was planned, a step is missing or was
            run twice, or an epoch of the plan is no partition.
        FileNotFoundError: there is no run.
        ValueError: what is there cannot be read, or the batches cannot be planned again.
    """
    corpus, plan = read_history(workdir)
    for step, changes in plan.changes:
        said = ", ".join(f"{name}={_short(value)}" for name, value in changes.items())
        tell(f"plan from step {step:,} on: {said or 'planned anew'}")
    logged = _read_log(workdir)
    sizes = np.asarray(corpus.lengths).astype(np.int64)
    times = np.zeros(len(sizes), np.int64)
    seen: dict[str, int] = {}
    epoch, parts = 0, [np.zeros((0, 3), np.int64)]
    for step, digest in enumerate(logged.digests):
        planned = plan.batch(step)
        if planned.epoch != epoch:
            _close(plan, sizes, times, epoch, parts, tell, whole=True)
            epoch, parts = planned.epoch, []
        if digest != planned.digest:
            before = f", but that of step {seen[digest]:,}, again" if digest in seen else ""
            raise NotAsPlanned(
                f"step {step:,} did not run the batch that was planned: the log has {digest}"
                f"{before}; the plan {planned.digest} ({planned.bucket}, epoch {epoch})"
            )
        seen[digest] = step
        parts.append(planned.segments[:, 1:])
    steps = len(logged.digests)
    whole = steps == plan.first_step(epoch + 1)
    _close(plan, sizes, times, epoch, parts, tell, whole=whole)
    _tell_the_rest(plan, sizes, times, logged, tell)
    tell(f"all {steps:,} batches are those that were planned, each once and in order")


def _close(plan: Chain, sizes, times, epoch: int, parts: list[np.ndarray], tell, *, whole: bool):
    """Counts an epoch: each position at most once and, if it is whole, all that are due."""
    example, start, size = np.concatenate(parts).T
    order = np.lexsort((start, example))
    example, start, size = example[order], start[order], size[order]
    end = start + size
    again = (np.diff(example) == 0) & (end[:-1] > start[1:])
    if len(example) and (again.any() or (end > sizes[example]).any()):
        at = int(np.flatnonzero(np.append(again, False) | (end > sizes[example]))[0])
        raise NotAsPlanned(
            f"epoch {epoch} of the plan has positions of example {example[at]:,} twice, or such as "
            "it does not have. This is a defect of Lockstep: please report it"
        )
    covered = np.bincount(example, size, len(sizes)).astype(np.int64)
    times += covered > 0
    if not whole:
        tell(f"epoch {epoch}, not over: {covered.sum():,} positions, none twice")
        return
    # The plan with which the epoch began, and those that took over inside it.
    first, after = plan.first_step(epoch), plan.first_step(epoch + 1)
    links = [link for link in plan.links if link.step <= first][-1:]
    links += [link for link in plan.links if first < link.step <= after]
    due = sizes.copy()
    due[links[0].left_out] = 0
    excused = np.zeros(len(sizes), bool)
    said = []
    for number, link in enumerate(links):
        longest, overflow = link.plan.buckets[-1].length, link.plan.overflow
        over = sizes > longest
        over[link.left_out] = False
        if number:
            excused[link.left_out] = True
            excused |= over if overflow != "split" else False
        elif overflow != "split":
            due[over] = longest if overflow == "truncate" else 0
        if overflow != "split" and over.any() and link.step < after:
            how = "cut" if overflow == "truncate" else "dropped"
            which = _some(np.flatnonzero(over))
            said.append(f"documents longer than {longest:,} are {how} ({overflow=}): {which}")
    wrong = np.flatnonzero(np.where(excused, covered > due, covered != due))
    if len(wrong):
        raise NotAsPlanned(
            f"epoch {epoch} of the plan has {covered[wrong[0]]:,} of the {due[wrong[0]]:,} "
            f"positions of example {wrong[0]:,} ({len(wrong):,} such examples). This is a defect "
            "of Lockstep: please report it"
        )
    lost = int((sizes - covered).sum())
    tell(
        f"epoch {epoch}: {covered.sum():,} of {sizes.sum():,} positions, each once"
        + f"; {lost:,} in no batch" * bool(lost)
    )
    for each in dict.fromkeys(said):
        tell(f"  {each}")


def _tell_the_rest(plan: Chain, sizes, times, logged: Logged, tell) -> None:
    """What was left out, and why; what was repeated, and how often."""
    for step, changes in plan.changes:
        if more := changes.get("leave_out"):
            tell(f"left out from step {step:,} on, as asked: {_some(np.array(more))}")
    if empty := np.count_nonzero(sizes == 0):
        tell(f"left out: {empty:,} documents with nothing to train on")
    if logged.skipped:
        tell(
            f"left out: the batches of steps {_some(np.array(logged.skipped))} (skip_steps): "
            f"{_documents(plan, logged.skipped)}"
        )
    if logged.lost:
        tell(
            f"without an update, as the loss was not finite: steps {_some(np.array(logged.lost))}: "
            f"{_documents(plan, logged.lost)}"
        )
    for number, count in enumerate(np.bincount(times).tolist()):
        if number > 1 and count:
            tell(f"repeated: {count:,} documents in {number} epochs each")


def _read_log(workdir: epath.Path) -> Logged:
    """The steps of `metrics.jsonl`, checked to be each there once, as many as were saved.

    Raises:
        NotAsPlanned: they are not.
    """
    logged = Logged([], [], [])
    path = workdir / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1]  # what a kill cut short is no line
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
            step, digest = values["step"], values.get("batch", values.get("skipped"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"line {number} of {path} cannot be read: {error!r}") from error
        if digest is None:  # an evaluation
            continue
        due = len(logged.digests)
        if step != due:
            what = f"step {due:,} is missing" if step > due else f"step {step:,} was run twice"
            raise NotAsPlanned(f"{what}: line {number} of metrics.jsonl is of step {step:,}")
        if "skipped" in values:
            logged.skipped.append(step)
        elif values.get("loss") is None or values.get("gradient_norm", 0) is None:
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


def _documents(plan: Chain, steps: list[int]) -> str:
    found = np.unique(np.concatenate([plan.batch(step).segments[:, 1] for step in steps]))
    return f"documents {_some(found)}"


def _short(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "+".join("x".join(map(str, each)) for each in value)
    return _some(np.array(value)) if isinstance(value, list) else str(value)


def _some(numbers: np.ndarray) -> str:
    """The first of some numbers, and how many there are if that is more."""
    shown = ", ".join(map(str, numbers[:SHOWN].tolist()))
    return shown if len(numbers) <= SHOWN else f"{shown}, … ({len(numbers):,} in all)"
