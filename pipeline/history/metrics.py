"""Metrics of a run: seconds by phase, JSON lines, TensorBoard events, progress and profiles."""

import contextlib
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tqdm
from etils import epath

from pipeline.errors import InvalidValue, require
from pipeline.fs.atomic import as_path, atomic_write, is_local, name_full_disk
from pipeline.history.loss_log import LossLog
from pipeline.planning.planned import PlannedBatch

logger = logging.getLogger(__name__)

# Seconds between lines where there is no terminal to draw a bar on.
EVERY = 10.0


class MetricsLog:
    """A JSON line for each step in `metrics.jsonl`, and the same numbers for TensorBoard.

    The losses of segments go to a `LossLog`, where steps give them. A resumed run takes back what
    it has of steps that it will run again, so that each step is there once. Object storage cannot
    append: there lines and events are kept on this machine and uploaded whole by `flush`.

    Args:
        workdir: where to write; made if it is missing.
        step: the step that the run goes on from.
        evaluated: steps whose evaluations the run has; other evaluations will be made again.
        enabled: whether to write at all; of several hosts one does.

    Attributes:
        lost: seconds of the steps that will be run again.

    Raises:
        ImportError: tensorboardX is not installed.
    """

    def __init__(
        self,
        workdir: epath.PathLike,
        step: int,
        *,
        evaluated: Collection[str] = (),
        enabled: bool = True,
    ):
        self._enabled, self.lost = enabled, 0.0
        if not enabled:
            return
        board = require("tensorboardX", extra="train", purpose="MetricsLog")
        self._workdir, self._remote = as_path(workdir), not is_local(workdir)
        self._path = self._workdir / "metrics.jsonl"
        self._losses = LossLog(self._workdir, step)
        kept: list[tuple[bytes, dict[str, Any]]] = []
        if step and self._path.exists():
            for line in self._path.read_bytes().splitlines():
                if (values := _parsed(line)) is None:
                    continue
                if "eval_loss" in values:
                    if str(values["step"]) in evaluated:
                        kept.append((line, values))
                elif values["step"] < step:
                    kept.append((line, values))
                else:
                    self.lost += values.get("seconds", 0.0)
        text = b"".join(line + b"\n" for line, _ in kept)
        self._scratch = tempfile.TemporaryDirectory() if self._remote else None
        here = epath.Path(self._scratch.name) if self._scratch else self._workdir
        here.mkdir(parents=True, exist_ok=True)
        with atomic_write(here / "metrics.jsonl") as file:
            file.write(text)
        self._file = open(os.fspath(here / "metrics.jsonl"), "a")  # noqa: SIM115
        self._here = here
        self._board = board.SummaryWriter(
            os.fspath(here / "tensorboard"), purge_step=step, flush_secs=30
        )
        for _, values in kept:  # an evaluation after that many steps, which TensorBoard now forgets
            if values["step"] >= step:
                self._draw(values)

    def write(self, values: Mapping[str, Any]) -> None:
        """Writes one step's values; `step` is among them."""
        if not self._enabled:
            return
        with name_full_disk(self._path):
            self._file.write(json.dumps(values) + "\n")
            self._draw(values)

    def write_losses(self, step: int, planned: PlannedBatch, sums: np.ndarray) -> None:
        """Writes the losses of the segments of a step, as `LossLog.add` takes them."""
        if self._enabled:
            self._losses.add(step, planned, sums)

    def _draw(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if name != "step" and isinstance(value, (int, float)):
                self._board.add_scalar(name, value, values["step"])

    def text(self, name: str, markdown: str) -> None:
        """Shows a text in TensorBoard, at step 0."""
        if self._enabled:
            self._board.add_text(name, markdown, 0)

    def flush(self) -> None:
        """Makes what was written so far outlive the process."""
        if not self._enabled:
            return
        self._losses.flush()
        with name_full_disk(self._path):
            self._file.flush()
            self._board.flush()
        if self._remote:
            files = [self._here / "metrics.jsonl", *(self._here / "tensorboard").iterdir()]
            _copy(files, self._here, self._workdir)

    def close(self) -> None:
        """Flushes and closes the files."""
        if not self._enabled:
            return
        with (
            name_full_disk(self._path),
            contextlib.ExitStack() as stack,
        ):  # all of it, also after an error
            if self._scratch:
                stack.callback(self._scratch.cleanup)
            stack.callback(self._board.close)
            stack.callback(self._file.close)
            self.flush()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _copy(files: Iterable[epath.Path], here: epath.Path, there: epath.Path) -> None:
    """Copies files from one directory to the same places in another."""
    for path in files:
        copied = there / path.relative_to(here)
        copied.parent.mkdir(parents=True, exist_ok=True)
        with path.open("rb") as content, atomic_write(copied) as file:
            shutil.copyfileobj(content, file)


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The values of a line of the log; None of one that a kill cut short, or that is damaged."""
    try:
        values = json.loads(line)
        whole = isinstance(values["step"], int) and isinstance(
            values.get("seconds", 0), int | float
        )
    except (ValueError, KeyError, TypeError):
        return None
    return values if whole else None


class Progress:
    """The progress of a run: a bar on a terminal, elsewhere a line in the log now and then.

    Args:
        steps: steps of the run.
        step: the step that it goes on from.
        name: of the work, for the bar.
        enabled: whether to show anything; of several hosts one does.
    """

    def __init__(self, steps: int, step: int, *, name: str = "train", enabled: bool = True):
        self._enabled = enabled
        self._bar = tqdm.tqdm(
            total=steps,
            initial=step,
            desc=name,
            unit="step",
            dynamic_ncols=True,
            disable=not (enabled and sys.stderr.isatty()),
        )
        self._steps, self._first = steps, step
        self._begin = self._shown = time.perf_counter()
        self._tokens, self._waited = 0, 0.0  # since what was shown last

    def update(self, step: int, tokens: int, waited: float, text: str) -> None:
        """Shows that `step` steps are done.

        Args:
            step: steps done.
            tokens: tokens of the last of them.
            waited: seconds spent waiting for batches since the last update.
            text: what else to show.
        """
        if not self._enabled:
            return
        self._bar.update(step - self._bar.n)
        self._tokens, self._waited = self._tokens + tokens, self._waited + waited
        now = time.perf_counter()
        if now - self._shown < (EVERY if self._bar.disable else 1.0) and step < self._steps:
            return
        span = max(now - self._shown, 1e-9)
        text += f" · {self._tokens / span:,.0f} tokens/s · {self._waited / span:.1%} waiting"
        self._tokens, self._waited, self._shown = 0, 0.0, now
        if self._bar.disable:
            left = (now - self._begin) / max(step - self._first, 1) * (self._steps - step)
            done = f"step {step:,}/{self._steps:,}"
            logger.info("%s · %s · %.0f s left", done, text, left)
        else:
            self._bar.set_postfix_str(text)

    def close(self) -> None:
        """Leaves the bar as it is."""
        self._bar.close()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Profile:
    """A trace of some steps, for TensorBoard or Perfetto.

    Args:
        steps: "FIRST:LAST", the steps to trace; empty for none.
        directory: where the trace goes.

    Raises:
        ValueError: `steps` is not of that form.
    """

    def __init__(self, steps: str, directory: epath.Path):
        first, colon, last = steps.partition(":")
        if steps and not (colon and first.isdigit() and last.isdigit() and int(first) <= int(last)):
            raise InvalidValue(f"profile_steps is {steps!r}; it must be FIRST:LAST, as in 10:14")
        self._steps = range(int(first), int(last) + 1) if steps else range(0)
        self._directory, self._running = directory, False
        # JAX writes to local directories only.
        self._scratch = None if is_local(directory) else tempfile.TemporaryDirectory()

    @contextlib.contextmanager
    def step(self, step: int, before: Any = None) -> Iterator[None]:
        """Runs a step, in the trace if it is one of those asked for.

        Args:
            step: its number.
            before: what the steps before it give; a trace begins and ends when that is there.
        """
        import jax

        if step in self._steps and not self._running:
            jax.block_until_ready(before)
            place = self._scratch.name if self._scratch else os.fspath(self._directory)
            jax.profiler.start_trace(place)
            self._running = True
        elif self._running and step not in self._steps:
            jax.block_until_ready(before)
            self.close()
        with jax.profiler.StepTraceAnnotation("step", step_num=step):
            yield

    def close(self) -> None:
        """Ends the trace, if one runs."""
        import jax

        if self._running:
            jax.profiler.stop_trace()
            self._running = False
            if self._scratch:
                here = epath.Path(self._scratch.name)
                files = [folder / name for folder, _, names in here.walk() for name in names]
                _copy(map(epath.Path, files), here, self._directory)

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
