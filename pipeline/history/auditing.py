"""The audit: whether a run trained on the batches that were planned, and on each position once.

The run logs a digest of each batch, and `plans.json` has all inputs of the plan. So each batch is
planned again and compared.
"""

import json
import os
from collections.abc import Callable

from etils import epath

from pipeline.errors import InvalidValue, Missing, name_some
from pipeline.fs.atomic import as_path
from pipeline.history.coverage import Coverage, NotAsPlanned
from pipeline.history.log_parts import read_log
from pipeline.history.plans import describe_changes, read_history


def audit(workdir: epath.PathLike, report: Callable[[str], None] = print) -> None:
    """Compares every batch of a run with its plan, and counts the positions of every epoch.

    `workdir` is that of a run, finished or stopped; `report` is called with each line.

    Raises:
        NotAsPlanned: a batch that ran is not the batch that was planned, a step is missing or was
            run twice, or an epoch of the plan is not a partition.
    """
    workdir = as_path(workdir)
    _, plan = read_history(workdir)
    for step, changes in plan.changes:
        report(f"plan from step {step:,} on: {describe_changes(changes) or 'planned again'}")
    digests, without_update = _read_log(workdir)
    coverage = Coverage(plan, report)
    for step, digest in enumerate(digests):
        planned = plan.batch(step)
        if digest != planned.digest:
            then = digests.index(digest)
            before = f", but that of step {then:,}, again" if then < step else ""
            raise NotAsPlanned(
                f"step {step:,} did not run the batch that was planned: the log has {digest}"
                f"{before}; the plan has {planned.digest} ({planned.bucket}, epoch {planned.epoch})"
            )
        coverage.add(planned)
    coverage.finish()
    if without_update:
        steps = "step" if len(without_update) == 1 else "steps"
        report(f"without an update: {steps} {name_some(without_update)}")
    report(f"all {len(digests):,} batches are those that were planned, each once and in order")


def _read_log(workdir: epath.Path) -> tuple[list[str], list[int]]:
    """The digests of all batches, and the steps without an update."""
    digests, without_update = list[str](), list[int]()
    path = workdir / "metrics.jsonl"
    if not path.exists():
        raise Missing(
            f"there is no {path.name} in {os.fspath(workdir)}, which lists the batches that ran; "
            "pipeline.history.RunLog writes it"
        )
    lines = read_log(path).split(b"\n")[:-1]  # without a line that a kill cut short
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
            step, digest = values["step"], values.get("batch", values.get("skipped"))
            if type(step) is not int or not isinstance(digest, str | None):
                raise InvalidValue(f"its step is {step!r:.80} and its batch {digest!r:.80}")
            loss = values["loss"] if "batch" in values else None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidValue(f"line {number} of {path} cannot be read: {error!r}") from error
        if digest is None:  # an evaluation, or a line of the user's own
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
    return digests, without_update
