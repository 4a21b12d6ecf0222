"""Seconds of steps, measured in turns, for each shape of a batch on the devices."""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

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


class Trial(NamedTuple):
    """A measurement to make: a shape, with the step of one of the choices."""

    choice: int
    bucket: Bucket

    def __str__(self) -> str:
        return f"{self.bucket} of choice {self.choice}"


@dataclasses.dataclass(frozen=True)
class Timing:
    """The time and memory of a step of a shape.

    Attributes:
        seconds: the median of a step.
        low: the lower end of the median's interval, which holds in nine of ten cases.
        high: its upper end.
        compiling: seconds until the first step is done, without that step.
        memory: bytes on a device, as XLA reports them; None if the step has no `lower`.
        steps: the number of timed steps.
    """

    seconds: float
    low: float
    high: float
    compiling: float
    memory: int | None
    steps: int


class Stopwatch:
    """Measures steps of shapes, and leaves out those that fail.

    All processes of a run measure together, since each of them runs its part of a step. They agree
    on the seconds of the slowest.

    Args:
        make_step: from the number of a choice to `step(batch)`.
        make_batch: from a bucket to a batch of its shape, on the devices.
        clock: seconds, as `time.perf_counter`.

    Attributes:
        failures: the error of each trial that was left out.
    """

    def __init__(
        self,
        make_step: Callable[[int], Callable[[Any], Any]],
        make_batch: Callable[[Bucket], Any],
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._make_step, self._make_batch, self._clock = make_step, make_batch, clock
        self._steps: dict[int, Callable[[Any], Any]] = {}
        self._batches: dict[Bucket, Any] = {}
        self._first: dict[Trial, float] = {}  # seconds of the first step, with compilation
        self._memory: dict[Trial, int | None] = {}
        self._rounds: list[dict[Trial, float]] = []
        self.failures: dict[Trial, Exception] = {}

    def measure(self, trials: Iterable[Trial], rounds: int) -> None:
        """Measures some trials `rounds` times, in turns, after compiling the new ones."""
        for trial in (trials := list(dict.fromkeys(trials))):
            if trial not in self._first and trial not in self.failures:
                self._compile(trial)
        running = [trial for trial in trials if trial in self._first]
        for _ in range(rounds if running else 0):
            self._rounds.append({trial: self._turn(trial) for trial in running})

    def timings(self) -> dict[Trial, Timing]:
        """The results so far."""
        found = {}
        for trial, (count, seconds, low, high) in typical(self._rounds).items():
            compiling = max(self._first[trial] - seconds, 0.0)
            found[trial] = Timing(seconds, low, high, compiling, self._memory[trial], count)
        return found

    def run(self, choice: int, batch: Any) -> float:
        """Seconds of one step with any batch."""
        begin = self._clock()
        jax.block_until_ready(self._steps[choice](batch))
        return hosts.maximum(self._clock() - begin)

    def _compile(self, trial: Trial) -> None:
        failure: Exception | None = None
        begin = self._clock()
        try:
            if trial.bucket not in self._batches:
                self._batches[trial.bucket] = self._make_batch(trial.bucket)
                begin = self._clock()
            if trial.choice not in self._steps:
                self._steps[trial.choice] = self._make_step(trial.choice)
                begin = self._clock()
            self._memory[trial] = self._foresee_memory(trial)
        except Exception as error:  # of XLA, of a kernel, or of the step itself
            failure = error
        if not hosts.maximum(float(failure is not None)):
            try:
                jax.block_until_ready(self._steps[trial.choice](self._batches[trial.bucket]))
            except Exception as error:
                failure = error
        if hosts.maximum(float(failure is not None)):
            self.failures[trial] = failure or RuntimeError("it failed on another process")
            logger.warning("%s is left out: %s", trial.bucket, brief(self.failures[trial]))
            return
        self._first[trial] = hosts.maximum(self._clock() - begin)
        logger.info("%s: compiled and run in %.1f s", trial.bucket, self._first[trial])

    def _foresee_memory(self, trial: Trial) -> int | None:
        lower = getattr(self._steps[trial.choice], "lower", None)
        if lower is None:
            return None
        memory = program_memory(lower(self._batches[trial.bucket]).compile())
        if (limit := device_memory()) and memory > limit:
            raise DoesNotFit(
                f"it needs {show_bytes(memory)} on a device that has {show_bytes(limit)}"
            )
        return memory

    def _turn(self, trial: Trial) -> float:
        """Seconds of a step, the mean of a few in a row."""
        first = self.run(trial.choice, self._batches[trial.bucket])
        more = min(int(TURN / max(first, 1e-9)), MOST_STEPS) - 1
        others = [self.run(trial.choice, self._batches[trial.bucket]) for _ in range(more)]
        return float(np.median([first, *others]))


def typical(
    rounds: Sequence[Mapping[Trial, float]],
) -> dict[Trial, tuple[int, float, float, float]]:
    """For each trial, the number of its rounds, its median seconds, and their interval.

    If the machine was busy in a round, all trials of it took longer than in others. So each round
    has a level, the median over its trials of their seconds over their own medians, and seconds are
    divided by it: a median polish (Tukey, 1977).

    >>> a, b, c = "abc"
    >>> rounds = [{a: 1.0, b: 2.0, c: 3.0}, {a: 2.0, b: 4.0, c: 6.0}, {a: 1.0, b: 2.0, c: 9.0}]
    >>> typical(rounds)[c][:2]
    (3, 3.0)
    """
    if not rounds:
        return {}
    names = list(dict.fromkeys(trial for each in rounds for trial in each))
    table = np.array([[each.get(trial, np.nan) for trial in names] for each in rounds])
    level = np.ones((len(rounds), 1))
    several = np.isfinite(table).sum(axis=1) > 2  # with fewer, a slow step would look busy
    for _ in range(10):
        middle = np.nanmedian(table / level, axis=0)
        level[several] = np.nanmedian(table / middle, axis=1, keepdims=True)[several]
        level /= np.median(level)
    found = {}
    for trial, column in zip(names, (table / level).T, strict=True):
        values = np.sort(column[np.isfinite(column)])
        skip = max(int((len(values) - 1) / 2 - WIDTH * len(values) ** 0.5 / 2), 0)
        interval = float(values[skip]), float(values[-1 - skip])
        found[trial] = (len(values), float(np.median(values)), *interval)
    return found


def brief(error: Exception) -> str:
    """The type of an error, and the first line of its message."""
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text[:200]}"
