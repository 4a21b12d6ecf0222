"""Seconds of steps, measured in turns, for each shape of a batch on the devices."""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from pipeline.errors import DoesNotFit
from pipeline.planning.bucket import Bucket
from pipeline.steps import hosts
from pipeline.steps.compiled import device_memory, program_memory, show_bytes

logger = logging.getLogger(__name__)

# A turn of a shape takes about `TURN` seconds, and from 1 to `MOST_STEPS` steps.
TURN, MOST_STEPS = 0.05, 20

# Half the width of the interval for a median, in standard deviations of a count. In 5, 9, 15 and 25
# sorted values, it begins at number 0, 2, 4 and 8, and holds the median in 9 of 10 cases.
WIDTH = 1.6


@dataclasses.dataclass(frozen=True)
class Timing:
    """The time and memory of a step of a shape."""

    seconds: float  # the median of a step
    low: float  # the lower end of the median's interval, which holds in nine of ten cases
    high: float  # its upper end
    compiling: float  # seconds until the first step is done, without that step
    memory: int | None  # bytes on a device, as XLA reports them; None if the step has no `lower`
    steps: int  # the number of turns


class Stopwatch:
    """Measures steps of shapes, and leaves out those that fail.

    All processes of a run measure together, since each of them runs its part of a step. They agree
    on the seconds of the slowest.

    Args:
        step: `step(batch)`, whose result it waits for.
        make_batch: from a bucket to a batch of its shape, on the devices.
        clock: seconds, as `time.perf_counter`.

    `failures` has the error of each shape that was left out.
    """

    def __init__(
        self,
        step: Callable[[Any], Any],
        make_batch: Callable[[Bucket], Any],
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._step, self._make_batch, self._clock = step, make_batch, clock
        self._batches: dict[Bucket, Any] = {}
        self._first: dict[Bucket, float] = {}  # seconds of the first step, with compilation
        self._memory: dict[Bucket, int | None] = {}
        self._seconds: dict[Bucket, list[float]] = {}  # of each turn
        self.failures: dict[Bucket, Exception] = {}

    def measure(self, buckets: Iterable[Bucket], rounds: int) -> None:
        """Measures some shapes `rounds` times, in turns, after compiling the new ones."""
        for bucket in (buckets := list(dict.fromkeys(buckets))):
            if bucket not in self._first and bucket not in self.failures:
                self._compile(bucket)
        running = [bucket for bucket in buckets if bucket in self._first]
        for bucket in running * rounds:
            self._seconds.setdefault(bucket, []).append(self._turn(bucket))

    def timings(self) -> dict[Bucket, Timing]:
        """The results so far."""
        found = {}
        for bucket, turns in self._seconds.items():
            turns, seconds = sorted(turns), float(np.median(turns))
            skip = max(int((len(turns) - 1) / 2 - WIDTH * len(turns) ** 0.5 / 2), 0)
            found[bucket] = Timing(
                seconds,
                low=turns[skip],
                high=turns[-1 - skip],
                compiling=max(self._first[bucket] - seconds, 0.0),
                memory=self._memory[bucket],
                steps=len(turns),
            )
        return found

    def run(self, batch: Any) -> float:
        """Seconds of one step with any batch."""
        begin = self._clock()
        jax.block_until_ready(self._step(batch))
        return hosts.maximum(self._clock() - begin)

    def _compile(self, bucket: Bucket) -> None:
        failure: Exception | None = None
        begin = self._clock()
        try:
            self._batches[bucket] = self._make_batch(bucket)
            begin = self._clock()
            self._memory[bucket] = self._foresee_memory(bucket)
        except Exception as error:  # of XLA, of a kernel, or of the step itself
            failure = error
        if not hosts.maximum(float(failure is not None)):
            try:
                jax.block_until_ready(self._step(self._batches[bucket]))
            except Exception as error:
                failure = error
        if hosts.maximum(float(failure is not None)):
            self.failures[bucket] = failure or RuntimeError("it failed on another process")
            logger.warning("%s is left out: %s", bucket, brief(self.failures[bucket]))
            return
        self._first[bucket] = hosts.maximum(self._clock() - begin)
        logger.info("%s: compiled and run in %.1f s", bucket, self._first[bucket])

    def _foresee_memory(self, bucket: Bucket) -> int | None:
        lower = getattr(self._step, "lower", None)
        if lower is None:
            return None
        memory = program_memory(lower(self._batches[bucket]).compile())
        if (limit := device_memory()) and memory > limit:
            raise DoesNotFit(
                f"it needs {show_bytes(memory)} on a device that has {show_bytes(limit)}"
            )
        return memory

    def _turn(self, bucket: Bucket) -> float:
        """Seconds of a step, the mean of a few in a row."""
        first = self.run(self._batches[bucket])
        more = min(int(TURN / max(first, 1e-9)), MOST_STEPS) - 1
        others = [self.run(self._batches[bucket]) for _ in range(more)]
        return float(np.median([first, *others]))


def brief(error: Exception) -> str:
    """The type of an error, and the first line of its message."""
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text[:200]}"
