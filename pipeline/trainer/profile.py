"""Profile: a trace of some steps of a run."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
from etils import epath

from pipeline.errors import InvalidValue
from pipeline.fs.atomic import is_local
from pipeline.history.metrics_files import copy_files


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
        if self._running:
            jax.profiler.stop_trace()
            self._running = False
            if self._scratch:
                copy_files(epath.Path(self._scratch.name), self._directory)

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
