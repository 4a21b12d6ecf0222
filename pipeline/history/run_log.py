"""The log of a run: each step's values, recorded while the device computes the next step."""

import contextlib
import dataclasses
import json
import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import jax
import numpy as np
from etils import epath

from pipeline.errors import InvalidState, InvalidValue, NotFinite, name_some, require_one_of
from pipeline.fs.atomic import as_path, atomic_write
from pipeline.history.loss_archive import LossLog
from pipeline.history.metrics_files import MetricsFiles, Writer
from pipeline.history.progress import Progress
from pipeline.history.run_stats import Clock, RunStats, goodput, peak_of
from pipeline.planning.planned import PlannedBatch

logger = logging.getLogger(__name__)

# The reaction to a step whose loss or gradient is not finite.
OnNonfinite = Literal["stop", "skip"]


class RunLog:
    """Records the steps of a run: lines, TensorBoard events, losses, progress, statistics.

        with RunLog(workdir, first, steps, state=state) as log:
            for step in range(first, steps):
                with log.clock("wait"):
                    batch = next(loader)
                with log.clock("train"):
                    params, values = train_step(params, batch)
                log.add(step, loader.planned, values)
            state = log.save()  # for the checkpoint
            log.write_summary(steps)

    It touches files only inside the `with` block; `clock` and `stats` work before it. On several
    hosts, all make the log, and process 0 writes. A run that resumes removes the lines and events
    of the steps from `first` on, runs them again, and calls `writers` again.

    Args:
        workdir: the directory of `metrics.jsonl`, `losses/`, `summary.json` and, if tensorboardX is
            installed, `tensorboard/`; made if missing.
        first: the step that the run resumes from, or 0.
        steps: the number of steps of the run.
        state: the result of `save` in the checkpoint that the run resumes from; default: none.
        peak_flops: FLOP/s of one device; 0: those in a table of devices, if it has this one.
        on_nonfinite: "stop" or "skip", for a step whose `finite` is false.
        writers: functions of a step and a dict of numbers, for trackers such as W&B, called on
            process 0 for each line with its numbers by name. Default: none.

    Attributes:
        clock: `with log.clock("wait"): …` counts seconds of a phase. "train" is for steps, "wait"
            for their batches; others may have any name.
        stats: counts over all starts of the run.
    """

    def __init__(
        self,
        workdir: epath.PathLike,
        first: int,
        steps: int,
        *,
        state: Mapping[str, Any] | None = None,
        peak_flops: float = 0.0,
        on_nonfinite: OnNonfinite = "stop",
        writers: Iterable[Writer] = (),
    ):
        require_one_of("on_nonfinite", on_nonfinite, get_args(OnNonfinite))
        if strange := set(state or {}) - set(RunStats.__dataclass_fields__):
            raise InvalidValue(f"state has {', '.join(sorted(strange))}; give the result of `save`")
        self.stats = RunStats(**(state or {}))
        self.clock = Clock(self.stats.seconds)
        self._workdir, self._first, self._steps = as_path(workdir), first, steps
        self._leads = jax.process_index() == 0
        kind = jax.devices()[0].device_kind
        peak = peak_flops or peak_of(kind)
        if not peak and jax.default_backend() != "cpu":
            logger.info(
                f"the FLOP/s of {kind!r} are not known, so the log has no utilisation of the "
                "devices; give --config.peak_flops"
            )
        self._peak = peak * jax.device_count()
        self._stops, self._writers = on_nonfinite == "stop", [*writers]
        self._last: tuple[int, PlannedBatch, Mapping[str, Any], float | None] | None = None
        self._stack: contextlib.ExitStack | None = None

    def __enter__(self) -> "RunLog":
        with contextlib.ExitStack() as stack:
            if self._leads:
                self._losses = LossLog(self._workdir, self._first)
                evaluated = self.stats.evaluations
                self._files = MetricsFiles(self._workdir, self._first, evaluated, self._writers)
                stack.callback(self._files.close)
                stack.callback(self._losses.flush)
                self.clock.add("lost", self._files.lost)
                self._progress = Progress(self._steps, self._first)
            self._before = self.clock.seconds()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._stack is not None, "entered"
        with self._stack:
            if kind is None:
                self.flush()

    def add(
        self,
        step: int,
        planned: PlannedBatch,
        values: Mapping[str, Any],
        *,
        flops: float | None = None,
    ) -> None:
        """Takes a step that the device has begun; records the step before it, which is ready.

        `values` are scalars, on devices or not, for the line of the step. They include `loss`. The
        bool `finite` is False if the step did not change the parameters; by default, if the loss is
        not finite. `segments`, from `sum_segments`, becomes the losses of documents. `flops` are
        the operations of the model's mathematics for the batch, for `flop_utilisation`.

        Raises:
            FloatingPointError: the step before was not finite, and `on_nonfinite` is "stop"; the
                message names the step, the bucket and the documents.
        """
        self.flush()
        _check_values(values)
        self._last = step, planned, values, flops

    def flush(self) -> None:
        """Waits for the last step and records it; raises like `add`."""
        if self._stack is None:
            raise InvalidState("the log is not open; use it as in: with RunLog(…) as log: …")
        last, self._last = self._last, None
        if last is not None:
            self._record(*last)

    def write(self, values: Mapping[str, Any]) -> None:
        """Writes a line of your own after that of the last step; `step` is among its values."""
        if "step" not in values:
            raise InvalidValue(
                f"the line has {', '.join(values) or 'nothing'}, and no step; give the step "
                "that it is about, as in {'step': step}"
            )
        self.flush()
        try:
            if self._leads:
                self._files.write(values)
        except TypeError as error:  # of JSON
            raise InvalidValue(f"the line cannot be JSON: {error}; give Python numbers") from error

    def evaluate(
        self,
        step: int,
        total: float,
        weight: float,
        text_bytes: int | None = None,
    ) -> None:
        """Records an evaluation after `step` steps; None stands for NaN, which JSON lacks.

        `total` is the sum of the weighted losses, in nats, `weight` that of the weights, and
        `text_bytes` the size of the text in UTF-8.
        """
        values = {"eval_loss": total / weight}
        if text_bytes:
            values["bits_per_byte"] = total / math.log(2) / text_bytes
        finite = {name: each if math.isfinite(each) else None for name, each in values.items()}
        self.stats.evaluations[str(step)] = finite
        text = ", ".join(f"{name} {each:.4f}" for name, each in finite.items() if each is not None)
        logger.info(f"step {step:,}: {text or 'not finite'}")
        self.write({"step": step, **finite})

    def save(self) -> dict[str, Any]:
        """Saves the log beyond this process; returns the state for a checkpoint, as JSON."""
        self.flush()
        with self.clock("save"):
            if self._leads:
                self._losses.flush()
                self._files.flush()
        self.stats.seconds = self.clock.seconds()
        return dataclasses.asdict(self.stats)

    def write_summary(self, steps: int) -> None:
        """Logs the summary of the run after some steps, and writes it to `summary.json`."""
        if self._last is not None:
            self.flush()
        self.stats.seconds = self.clock.seconds()
        text = json.dumps(self.stats.summary(steps), indent=1)
        if self._leads:
            with atomic_write(self._workdir / "summary.json") as file:
                file.write(f"{text}\n".encode())
        logger.info("%s", text)

    def _record(
        self, step: int, planned: PlannedBatch, values: Mapping[str, Any], flops: float | None
    ) -> None:
        with self.clock("train"):
            arrays = jax.device_get(dict(values))
        sums = arrays.pop("segments", None)
        if sums is not None and self._leads:
            self._losses.add(step, planned, sums)
        numbers = {name: np.asarray(each).item() for name, each in arrays.items()}
        before, self._before = self._before, self.clock.seconds()
        passed = {name: self._before[name] - before.get(name, 0.0) for name in self._before}
        waited = passed.get("wait", 0.0)
        seconds = max(passed["train"] + waited, 1e-9)
        if not numbers.pop("finite", math.isfinite(numbers["loss"])):
            self._handle_nonfinite(step, planned, numbers)
        self.stats.add(planned)
        line: dict[str, Any] = {
            "step": step,
            "epoch": planned.epoch,
            "bucket": str(planned.bucket),
            "documents": len(np.unique(planned.segments[:, 1])),
            "tokens": planned.num_tokens,
            "positions": planned.bucket.positions,
            "padding": 1 - planned.num_tokens / planned.bucket.positions,
            "batch": planned.digest,
            # Mostly for the next batch, for which the host waits while this step is computed.
            "waited": waited,
            "seconds": seconds,
            "tokens_per_second": planned.num_tokens / seconds,
            "goodput": goodput(self._before),
        }
        if self._peak and flops is not None:
            self.stats.flops += flops
            self.stats.capacity += self._peak * seconds
            line["flop_utilisation"] = flops / seconds / self._peak
        if clash := line.keys() & numbers.keys():
            raise InvalidValue(
                f"values has {', '.join(sorted(clash))}, which the line has already; rename yours"
            )
        line |= {name: each if math.isfinite(each) else None for name, each in numbers.items()}
        if self._leads:
            self._files.write(line)
            shown = f"loss {numbers['loss']:.3f} · {planned.bucket}"
            shown += f" · padding {self.stats.padding:.2%}"
            self._progress.update(step + 1, planned.num_tokens, waited, shown)

    def _handle_nonfinite(self, step: int, planned: PlannedBatch, values: dict[str, float]) -> None:
        norm = f" and gradient norm {values['gradient_norm']}" if "gradient_norm" in values else ""
        text = f"loss {values['loss']}{norm} at step {step:,}, bucket {planned.bucket}, "
        text += f"documents {name_some(np.unique(planned.segments[:, 1]), most=20)}"
        # With a loss scale, gradients are expected to overflow until the scale has fallen.
        overflow = math.isfinite(values["loss"]) and values.get("loss_scale", 0) > 1
        if self._stops and not overflow:
            raise NotFinite(
                f"{text}. Run train.py again with --config.skip_steps='({step},)' to skip this "
                "batch, or with --config.on_nonfinite=skip to continue without such updates; in "
                "your own loop, skip the step, or give on_nonfinite='skip'"
            )
        self.stats.skipped += 1
        logger.warning("no update: %s", text)


def _check_values(values: Mapping[str, Any]) -> None:
    """Refuses values that lack the loss, or are not scalars; does not wait for them."""
    if "loss" not in values:
        raise InvalidValue(
            f"values has {', '.join(values) or 'nothing'}, and no loss; give the loss of the step, "
            "as in {'loss': loss}"
        )
    for name, value in values.items():
        is_number = hasattr(value, "dtype") or isinstance(value, (int, float))
        if name != "segments" and not (is_number and np.size(value) == 1):
            what = f"has shape {np.shape(value)}" if is_number else f"is {value!r:.60}"
            raise InvalidValue(
                f"the value {name} {what}, and a line of the log has scalars; give its mean or "
                "sum, or leave it out"
            )
