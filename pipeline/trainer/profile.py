"""Profile: a trace of some steps of a run."""

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
from etils import epath

from pipeline.errors import InvalidValue
from pipeline.history.metrics_files import copy_files


class Profile(contextlib.ExitStack):
    """A trace of the steps "FIRST:LAST" (or ""), for TensorBoard or Perfetto, in `directory`."""

    def __init__(self, steps: str, directory: epath.Path):
        super().__init__()
        first, colon, last = steps.partition(":")
        if steps and not (colon and first.isdigit() and last.isdigit() and int(first) <= int(last)):
            raise InvalidValue(f"profile_steps is {steps!r}; it must be FIRST:LAST, such as 10:14")
        self._steps = range(int(first), int(last) + 1) if steps else range(0)
        self._directory, self._running = directory, False

    @contextlib.contextmanager
    def step(self, step: int, before: Any = None) -> Iterator[None]:
        """Runs a step, in the trace if it is one of the steps to trace.

        The trace begins and ends when `before`, the results of earlier steps, are ready.
        """
        if (step in self._steps) != self._running:
            jax.block_until_ready(before)
            self.close()
            self._running = not self._running
            if self._running:
                self.enter_context(_trace(self._directory))
        with jax.profiler.StepTraceAnnotation("step", step_num=step):
            yield


@contextlib.contextmanager
def _trace(directory: epath.Path) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as scratch:  # JAX writes to local directories only
        try:
            with jax.profiler.trace(scratch):
                yield
        finally:
            copy_files(epath.Path(scratch), directory)
