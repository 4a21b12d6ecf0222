import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline import Bucket
from pipeline.steps.timing import Stopwatch

SMALL, LARGE = Bucket(2, 64), Bucket(1, 128)


def make(seconds, compiling=0.0):
    """A stopwatch whose steps take `seconds(bucket)`, and the first of a shape `compiling` more."""
    seen, now = set(), [0.0]

    def step(bucket):
        now[0] += seconds(bucket) + compiling * (bucket not in seen)
        seen.add(bucket)

    def load(bucket):
        now[0] += 1000
        return bucket

    return Stopwatch(step, load, lambda: now[0])


def test_seconds_and_compilation_are_told_apart():
    stopwatch = make(lambda bucket: 0.5 * bucket.rows, compiling=9)
    stopwatch.measure([SMALL, LARGE], rounds=3)
    stopwatch.measure([SMALL], rounds=1)
    found = stopwatch.timings()
    assert [found[each].seconds for each in (SMALL, LARGE)] == pytest.approx([1.0, 0.5])
    assert [found[each].compiling for each in (SMALL, LARGE)] == pytest.approx([9, 9])
    assert (found[SMALL].steps, found[LARGE].steps, found[LARGE].memory) == (4, 3, None)


def test_a_few_slow_steps_do_not_change_the_median_but_widen_the_interval():
    def measured(seconds):
        turns = iter(seconds)
        stopwatch = make(lambda bucket: 100.0 + next(turns), compiling=9)
        stopwatch.measure([SMALL], rounds=len(seconds) - 1)
        return stopwatch.timings()[SMALL]

    found = measured([0, 1, 1, 51, 1, 1, 1, 1])
    assert (found.steps, found.seconds, found.low) == (7, 101, 101)
    found = measured([0, *np.random.default_rng(0).normal(1, 0.1, 25)])
    assert 100.9 < found.low < found.seconds < found.high < 101.1


def test_a_shape_that_needs_more_memory_than_there_is_is_not_run(monkeypatch):
    ran = []

    def step(batch):
        ran.append(batch.shape)
        return batch

    step.lower = jax.jit(lambda batch: batch * 2).lower
    monkeypatch.setattr("pipeline.steps.timing.device_memory", lambda: 100)
    stopwatch = Stopwatch(step, lambda bucket: jnp.ones(bucket.shape))
    stopwatch.measure([SMALL], rounds=2)
    assert not ran
    assert "on a device that has" in str(stopwatch.failures[SMALL])
