"""Coverage: a plan of any kind passes, and each fault in its batches is named."""

import dataclasses

import numpy as np
import pytest

from pipeline import Bucket, Plan
from pipeline.history.coverage import Coverage, NotAsPlanned
from tests.planning.corpora import lognormal

SHORT, LONG = (Bucket(8, 16), Bucket(4, 32)), (Bucket(4, 64),)
SIZES = lognormal(120)
MIXED = {"a": SIZES, "b": lognormal(70, seed=1)}
PAIRS = np.stack([lognormal(90, most=32, seed=2), lognormal(90, 2, most=24, seed=3)], axis=1)
EQUAL = {"weights": {"a": 1, "b": 1}}


KINDS = {
    "split": lambda: Plan(SIZES, SHORT),
    "truncated": lambda: Plan(SIZES, SHORT, overflow="truncate"),
    "dropped": lambda: Plan(SIZES, SHORT, overflow="drop", tiers=4),
    "pairs": lambda: Plan(PAIRS, (Bucket(4, (32, 24)),)),
    "changed": lambda: (
        Plan(SIZES, SHORT)
        .after(3, lengths=[*SIZES, *MIXED["b"]], exclude=[5])
        .after(7, buckets=LONG, seed=1)
    ),
    "mixed and changed": lambda: Plan(MIXED, SHORT, **EQUAL).after(5, buckets=LONG, tiers=4),
}


@pytest.fixture(params=KINDS)
def batches(request):
    """A plan of each kind, and its batches until two epochs of each corpus are over."""
    plan, found = KINDS[request.param](), []
    while min(plan.whole_epochs(len(found)).values()) < 2:
        found.append(plan.batch(len(found)))
    return plan, found


def check(plan, found):
    coverage = Coverage(plan, lambda line: None)
    for planned in found:
        coverage.add(planned)
    coverage.finish()


def missing(segments, epochs, at):
    return np.delete(segments, at, axis=0), np.delete(epochs, at)


def twice(segments, epochs, at):
    return np.append(segments, segments[[at]], axis=0), np.append(epochs, epochs[at])


def shifted(segments, epochs, at):
    segments[at, 2] += 1
    return segments, epochs


def shorter(segments, epochs, at):
    segments[at, 3] -= 1
    return segments, epochs


def draw(plan, found, seed):
    """A random step, a segment of its batch in epoch 0, the epoch's name, and the example."""
    rng, streams = np.random.default_rng(seed), plan.stages[-1].streams
    step, first = 0, np.zeros(0)
    while not len(first):
        step = int(rng.integers(len(found) - 1))
        first = np.flatnonzero(found[step].epoch_of_segments == 0)
    at = int(rng.choice(first))
    example = int(found[step].segments[at, 1])
    stream = next(each for each in reversed(streams) if each.first <= example)
    name = f"epoch 0 of {stream.name}" if stream.name else "epoch 0"
    return step, at, name, example - stream.first


@pytest.mark.parametrize("fault", [missing, twice, shifted, shorter])
def test_a_fault_is_named_by_its_epoch_and_example(batches, fault):
    plan, found = batches
    for seed in range(8):
        step, at, name, example = draw(plan, found, seed)
        wrong, planned = [*found], found[step]
        segments, epochs = fault(planned.segments.copy(), planned.epoch_of_segments, at)
        wrong[step] = dataclasses.replace(planned, segments=segments, epochs=epochs)
        with pytest.raises(NotAsPlanned, match=rf"^{name} of the plan .* of example {example:,} "):
            check(plan, wrong)


def test_a_piece_of_an_epoch_that_is_over_is_named(batches):
    plan, found = batches
    for seed in range(8):
        step, at, name, example = draw(plan, found, seed)
        segments = np.append(found[-1].segments, found[step].segments[[at]], axis=0)
        epochs = np.append(found[-1].epoch_of_segments, 0)
        last = dataclasses.replace(found[-1], segments=segments, epochs=epochs)
        with pytest.raises(NotAsPlanned, match=rf"^{name} of the plan .* example {example:,} "):
            check(plan, [*found[:-1], last])
