"""The log of a run: each step's values, recorded while the device computes the next step."""

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, get_args

import jax
import numpy as np
from etils import epath

from pipeline.errors import (
    InvalidState,
    InvalidValue,
    NotFinite,
    name_some,
    require_one_of,
    require_whole,
)
from pipeline.fs.atomic import as_path
from pipeline.history.loss_archive import LossLog
from pipeline.history.metrics_files import MetricsFiles, Writer, read_past
from pipeline.planning.planned import PlannedBatch
from pipeline.steps import hosts

logger = logging.getLogger(__name__)

# The reaction to a step whose loss or gradient is not finite.
OnNonfinite = Literal["stop", "skip"]

Measure = Callable[[int, PlannedBatch, Mapping[str, float]], Mapping[str, float]]


class RunLog:
    """Records the steps of a run: a line for each, and the losses of its documents.

        with RunLog(workdir, first) as log:
            for step in range(first, steps):
                params, values = train_step(params, next(loader))
                log.add(step, loader.planned, values)
                if (step + 1) % save_every == 0:
                    log.save()  # before the checkpoint

    It touches files only inside the `with` block. On several hosts, all make the log, and process 0
    writes. A run that resumes removes the lines of the steps from `first` on, runs them again, and
    calls `writers` again.

    Args:
        workdir: the directory of `metrics.jsonl` and `losses/`; made if missing.
        first: the step that the run resumes from, or 0.
        on_nonfinite: "stop" or "skip", for a step whose `finite` is false.
        writers: functions of a step and a dict of numbers, for trackers such as W&B, called on
            process 0 for each line with its numbers by name. Default: none.
        measure: a function of a step, its planned batch and its values as numbers, called when the
            step is done; it returns more numbers for the line. Default: none.

    Attributes:
        evaluations: the values that `evaluate` recorded, by step, also of earlier starts; the same
            on every host.
        lost: the sum of `seconds` in the lines that were removed, if they have it.
    """

    def __init__(
        self,
        workdir: epath.PathLike,
        first: int = 0,
        *,
        on_nonfinite: OnNonfinite = "stop",
        writers: Iterable[Writer] = (),
        measure: Measure = lambda step, planned, values: {},
    ):
        require_one_of("on_nonfinite", on_nonfinite, get_args(OnNonfinite))
        self.evaluations: dict[int, dict[str, float | None]] = {}
        self.lost = 0.0
        self._workdir, self._first = as_path(workdir), require_whole("first", first, 0)
        self._leads = jax.process_index() == 0
        self._stops, self._writers, self._measure = on_nonfinite == "stop", [*writers], measure
        self._last: tuple[int, PlannedBatch, Mapping[str, Any]] | None = None
        self._stack: contextlib.ExitStack | None = None

    def __enter__(self) -> "RunLog":
        with contextlib.ExitStack() as stack:
            # Process 0 leaves the evaluations of the past as they are, so all read the same.
            hosts.main_process_first("opening the log", lambda: self._open(stack))
            self._stack = stack.pop_all()
        return self

    def _open(self, stack: contextlib.ExitStack) -> None:
        past = read_past(self._workdir, self._first)
        self.evaluations, self.lost = past.evaluations, past.lost
        if self._leads:
            self._losses = LossLog(self._workdir, self._first)
            self._files = MetricsFiles(self._workdir, past.lines, self._writers)
            stack.callback(self._files.close)
            stack.callback(self._losses.flush)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._stack is not None, "entered"
        with self._stack:
            if kind is None:
                self.flush()

    def add(self, step: int, planned: PlannedBatch, values: Mapping[str, Any]) -> None:
        """Takes a step that the device has begun; records the step before it, which is ready.

        `values` are scalars, on devices or not, for the line of the step. They include `loss`. The
        bool `finite` is False if the step did not change the parameters; by default, if the loss is
        not finite. `segments`, from `sum_segments`, becomes the losses of documents.

        Raises:
            FloatingPointError: the step before was not finite, and `on_nonfinite` is "stop"; the
                message names the step, the bucket and the documents.
        """
        self.flush()
        _check_values(values)
        self._last = step, planned, values

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
        self.evaluations[step] = finite
        text = ", ".join(f"{name} {each:.4f}" for name, each in finite.items() if each is not None)
        logger.info(f"step {step:,}: {text or 'not finite'}")
        self.write({"step": step, **finite})

    def save(self) -> None:
        """Saves everything added so far beyond the life of this process."""
        self.flush()
        if self._leads:
            self._losses.flush()
            self._files.flush()

    def _record(self, step: int, planned: PlannedBatch, values: Mapping[str, Any]) -> None:
        # Process 0 alone writes the losses of segments, so the others do not fetch them.
        fetched = {k: each for k, each in values.items() if self._leads or k != "segments"}
        arrays = jax.device_get(fetched)
        sums = arrays.pop("segments", None)
        if sums is not None:
            self._losses.add(step, planned, sums)
        numbers = {name: np.asarray(each).item() for name, each in arrays.items()}
        finite = bool(numbers.pop("finite", math.isfinite(numbers["loss"])))
        if not finite:
            self._handle_nonfinite(step, planned, numbers)
        line: dict[str, Any] = {
            "step": step,
            "epoch": planned.epoch,
            "bucket": str(planned.bucket),
            "documents": len(np.unique(planned.segments[:, 1])),
            "tokens": planned.num_tokens,
            "positions": planned.bucket.positions,
            "padding": 1 - planned.num_tokens / planned.bucket.positions,
            "batch": planned.digest,
            **self._measure(step, planned, {**numbers, "finite": finite}),
        }
        if clash := line.keys() & numbers.keys():
            raise InvalidValue(
                f"values has {', '.join(sorted(clash))}, which the line has already; rename yours"
            )
        line |= {name: each if math.isfinite(each) else None for name, each in numbers.items()}
        if self._leads:
            self._files.write(line)

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
