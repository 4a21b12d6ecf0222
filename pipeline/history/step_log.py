"""The log of steps: each step's values, recorded while the device computes the next step."""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Literal, get_args

import jax
import numpy as np

from pipeline.errors import NotFinite, require_one_of
from pipeline.history.clock import Clock
from pipeline.history.metrics import MetricsLog, Progress
from pipeline.history.peaks import peak_of
from pipeline.history.run_stats import RunStats
from pipeline.planning.planned import PlannedBatch

logger = logging.getLogger(__name__)

# Messages name at most this many documents.
SHOWN = 20


# What to do about a step whose loss or gradient is not finite.
OnNonfinite = Literal["stop", "skip"]


class StepLog:
    """Records every step in the metrics log, the record of the run and the progress line.

    A step runs on the device after `train_step` has returned. So `add` keeps the values of the step
    that it is given, and records those of the step before, which are ready or soon will be.

    Args:
        log: where the line of each step goes.
        progress: shows the last step.
        record: counts over the whole run.
        clock: has the phases "train", for the step and this log, and "wait", for its batch.
        flops: floating-point operations of the model's mathematics for a planned batch; None:
            unknown, and the log has no `flop_utilisation`.
        peak_flops: FLOP/s of one device; 0: those in a table of devices, where it has this one.
        on_nonfinite: "stop" or "skip": what to do about a step whose `finite` is false.
        traffic: more values for each line, as `Loader.traffic`; default none.

    Raises:
        ValueError: `on_nonfinite` is neither.
    """

    def __init__(
        self,
        log: MetricsLog,
        progress: Progress,
        record: RunStats,
        clock: Clock,
        *,
        flops: Callable[[PlannedBatch], float] | None = None,
        peak_flops: float = 0.0,
        on_nonfinite: OnNonfinite = "stop",
        traffic: Callable[[], Mapping[str, float]] = dict,
    ):
        require_one_of("on_nonfinite", on_nonfinite, get_args(OnNonfinite))
        peak = peak_flops or peak_of(jax.devices()[0].device_kind)
        self._peak = peak * jax.device_count() if peak else 0.0
        self._log, self._progress, self._record, self._clock = log, progress, record, clock
        self._flops, self._stops, self._traffic = flops, on_nonfinite == "stop", traffic
        self._train, self._wait = clock["train"], clock["wait"]
        self._last: tuple[int, PlannedBatch, dict[str, jax.Array]] | None = None

    def add(self, step: int, planned: PlannedBatch, values: dict[str, jax.Array]) -> None:
        """Takes a step that the device has begun; records the step before it.

        Args:
            step: its number.
            planned: its batch.
            values: scalars, among them `loss`. The bool `finite` says whether the step changed the
                parameters; without it, whether the loss is finite. `gradient_norm` is named if a
                step is not finite. `segments`, of `sum_segments`, goes to the log of losses.

        Raises:
            FloatingPointError: the step before was not finite, and `on_nonfinite` is "stop"; names
                the step, the bucket and the documents.
        """
        last, self._last = self._last, (step, planned, values)
        if last:
            self._write(*last)

    def flush(self) -> None:
        """Waits for the last step and records it.

        Raises:
            FloatingPointError: as `add`.
        """
        last, self._last = self._last, None
        if last:
            self._write(*last)

    def _write(self, step: int, planned: PlannedBatch, values: dict[str, jax.Array]) -> None:
        with self._clock("train"):
            arrays = jax.device_get(values)
        if (sums := arrays.pop("segments", None)) is not None:
            self._log.write_losses(step, planned, sums)
        numbers = {name: each.item() for name, each in arrays.items()}
        documents = np.unique(planned.segments[:, 1])
        train, wait = self._clock["train"], self._clock["wait"]
        waited = wait - self._wait
        seconds = max(train - self._train + waited, 1e-9)
        self._train, self._wait = train, wait
        if not numbers.pop("finite", math.isfinite(numbers["loss"])):
            self._handle_nonfinite(step, planned, documents, numbers)
            self._record.skipped_seconds += seconds
        self._record.add(planned, len(documents))
        so_far = self._clock.seconds()
        line = {
            "step": step,
            "epoch": planned.epoch,
            "bucket": str(planned.bucket),
            **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
            "documents": len(documents),
            "tokens": planned.num_tokens,
            "positions": planned.bucket.positions,
            "padding": 1 - planned.num_tokens / planned.bucket.positions,
            "batch": planned.digest,
            # Mostly for the next batch, which the host asks for while this step is computed.
            "waited": waited,
            "seconds": seconds,
            "tokens_per_second": planned.num_tokens / seconds,
            "positions_per_second": planned.bucket.positions / seconds,
            "goodput": self._record.goodput(so_far),
            **{f"seconds/{name}": so_far.get(name, 0.0) for name in ("compile", "save")},
            **self._traffic(),
        }
        if self._peak and self._flops is not None:
            flops = self._flops(planned)
            self._record.flops += flops
            self._record.capacity += self._peak * seconds
            line["flop_utilisation"] = flops / seconds / self._peak
        self._log.write(line)
        self._progress.update(
            step + 1,
            planned.num_tokens,
            waited,
            f"loss {numbers['loss']:.3f} · {planned.bucket} · padding {self._record.padding:.2%}",
        )

    def _handle_nonfinite(
        self, step: int, planned: PlannedBatch, documents: np.ndarray, values: dict[str, float]
    ) -> None:
        names = ", ".join(map(str, documents[:SHOWN])) + ", …" * (len(documents) > SHOWN)
        norm = f" and gradient norm {values['gradient_norm']}" if "gradient_norm" in values else ""
        text = (
            f"loss {values['loss']}{norm} at step {step:,}, bucket {planned.bucket}, documents "
            f"{names}"
        )
        # With a loss scale, gradients are expected to overflow until the scale has fallen.
        overflow = math.isfinite(values["loss"]) and values.get("loss_scale", 0) > 1
        if self._stops and not overflow:
            raise NotFinite(
                f"{text}. Run train.py again with --config.skip_steps='({step},)' to leave this "
                "batch out, or with --config.on_nonfinite=skip to go on without such updates; in a "
                "loop of your own, leave the step out, or give on_nonfinite='skip'"
            )
        self._record.skipped += 1
        logger.warning("no update: %s", text)
