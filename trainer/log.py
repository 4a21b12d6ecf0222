"""The log of a run with what train.py adds: seconds, statistics, TensorBoard, progress."""

import contextlib
import dataclasses
import json
import logging
import signal
from collections.abc import Mapping
from typing import Any

import jax
from etils import epath
from ml_collections import ConfigDict

from pipeline.fs import atomic_write
from pipeline.history import RunLog
from pipeline.history.metrics_files import read_past
from pipeline.history.progress import Progress
from pipeline.planning.planned import PlannedBatch
from pipeline.report import format_summary
from pipeline.steps import CompileLog
from trainer.checkpoint import Saved
from trainer.config import as_json
from trainer.evaluation import Evaluation
from trainer.model import Model
from trainer.schedule import Schedule
from trainer.stats import Clock, RunStats, goodput, peak_of
from trainer.steps import CompiledSteps
from trainer.tensorboard import TensorBoard

logger = logging.getLogger(__name__)

SUMMARY = "summary.json"


class TrainingLog(contextlib.ExitStack):
    """Records the steps of a run of train.py, over all its starts.

    Args:
        workdir: that of the run.
        config: that of the run.
        schedule: the fitted one, of the run's batches.
        saved: the checkpoint that the run resumes from.
        clock: has the seconds of this start so far, and of earlier ones.
        model: its `flops` are for the utilisation.
        steps: the compiled steps; if they are compiled after the start, that is counted.
    """

    def __init__(
        self,
        workdir: epath.Path,
        config: ConfigDict,
        schedule: Schedule,
        saved: Saved,
        clock: Clock,
        model: Model,
        steps: CompiledSteps,
    ):
        super().__init__()
        self._workdir, self._clock, self._steps, self._flops = workdir, clock, steps, model.flops
        self._content = {"config": as_json(config), "schedule": schedule.as_json()}
        if saved.step:
            logger.info(f"resumed: step {saved.step:,} of {config.steps:,}")
        self._stats = RunStats(**saved.record)
        kind = jax.devices()[0].device_kind
        peak = config.peak_flops or peak_of(kind)
        if not peak and jax.default_backend() != "cpu":
            logger.info(
                f"the FLOP/s of {kind!r} are not known, so the log has no utilisation of the "
                "devices; give --config.peak_flops"
            )
        self._peak = peak * jax.device_count()
        self._boards: list[TensorBoard] = []  # on process 0 alone
        if jax.process_index() == 0:
            self._boards.append(
                self.enter_context(TensorBoard(workdir / "tensorboard", saved.step))
            )
        self._progress = Progress("training", config.steps, saved.step, shown=False)
        self._log = self.enter_context(
            RunLog(
                workdir,
                saved.step,
                on_nonfinite=config.on_nonfinite,
                writers=self._boards,
                measure=self._measure,
            )
        )
        clock.add("lost", self._log.lost)
        self._before = clock.seconds()
        self._compiled = self.enter_context(CompileLog())

    def add(self, step: int, planned: PlannedBatch, values: Mapping[str, Any]) -> None:
        """Takes a step that the devices have begun; records the step before it, which is done."""
        self._log.add(step, planned, values)

    def skip(self, step: int, planned: PlannedBatch) -> None:
        """Records a step whose batch is left out."""
        self.flush()
        self._stats.skipped += 1
        self._log.write({"step": step, "skipped": planned.digest})

    def flush(self) -> None:
        """Waits for the last step and records it."""
        with self._clock("train"):
            self._log.flush()

    def evaluated(self, step: int) -> bool:
        """Whether an evaluation after `step` steps is recorded; the same on every host."""
        return step in self._log.evaluations

    def evaluate(self, step: int, sums: Evaluation | None) -> None:
        """Records an evaluation after `step` steps; None: it was interrupted."""
        if sums is not None:
            self._log.evaluate(step, *sums)

    def save(self) -> dict[str, Any]:
        """Saves the log beyond this process; returns the item `run` of a checkpoint.

        It has the config, the schedule and the statistics of the run.
        """
        self.flush()
        self._log.save()
        for board in self._boards:
            board.save()
        names = [f"jit({step.name})" for step in (self._steps.train, self._steps.eval)]
        compiled = sum(name in names for name in self._compiled.names)
        self._stats.compiles_after_start = compiled
        self._stats.other_compiles = len(self._compiled.names) - compiled
        self._stats.seconds = self._clock.seconds()
        return {**self._content, "record": dataclasses.asdict(self._stats)}

    def write_summary(self, steps: int) -> None:
        """Logs the summary of the run after some steps, and writes it to `summary.json`."""
        self.flush()
        self._stats.seconds = self._clock.seconds()
        summary = self._stats.summary(steps, self._log.evaluations)
        if jax.process_index() == 0:
            with atomic_write(self._workdir / SUMMARY) as file:
                file.write(f"{json.dumps(summary, indent=1)}\n".encode())
        logger.info("summary of the run:\n%s", format_summary(summary))

    def _measure(
        self, step: int, planned: PlannedBatch, values: Mapping[str, float]
    ) -> dict[str, float]:
        """Counts a step that is done; returns more numbers for its line."""
        self._stats.add(planned)
        self._stats.skipped += not values["finite"]
        before, self._before = self._before, self._clock.seconds()
        passed = {name: self._before[name] - before.get(name, 0.0) for name in self._before}
        # Mostly for the next batch, for which the host waits while this step is computed.
        waited = passed.get("wait", 0.0)
        seconds = max(passed.get("train", 0.0) + waited, 1e-9)
        numbers = {
            "waited": waited,
            "seconds": seconds,
            "tokens_per_second": planned.num_tokens / seconds,
            "goodput": goodput(self._before),
        }
        if self._peak:
            flops = self._flops(planned)
            self._stats.flops += flops
            self._stats.capacity += self._peak * seconds
            numbers["flop_utilisation"] = flops / seconds / self._peak
        shown = f"loss {values['loss']:.3f} · {planned.bucket}"
        shown += f" · padding {self._stats.padding:.2%}"
        self._progress.update(step + 1, planned.num_tokens, waited, shown)
        return numbers


def is_finished(config: ConfigDict, workdir: epath.Path, saved: Saved) -> bool:
    """Whether nothing is left to do: no step, no evaluation and no summary; says so."""
    if saved.step <= config.steps:
        evaluated = saved.step in read_past(workdir, saved.step).evaluations
        path = workdir / SUMMARY
        if not (saved.step == config.steps and evaluated and path.exists()):
            return False
        if json.loads(path.read_text())["steps"] != config.steps:
            return False
    logger.info(f"finished: all {saved.step:,} steps are done; for more, give --config.steps=N")
    return True


def say_stopped(reason: str, step: int) -> int:
    """Says that a signal ended a run after some steps; returns the exit status, by convention."""
    done = f"saved step {step:,}" if step else "it had made no step"
    logger.info(f"{reason}: {done}; run again to continue")
    return 128 + signal.Signals[reason or "SIGTERM"]
