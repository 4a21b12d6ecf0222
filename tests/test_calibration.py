"""Calibration: the width that the seconds of steps show."""

import numpy as np
import pytest

import pipeline
from pipeline import Bucket, Plan
from pipeline.planning.balance import row_costs
from pipeline.planning.cascade import row_cost

LENGTHS = np.clip(np.random.default_rng(0).lognormal(5, 1.2, 4_000), 1, 2048).astype(int)
ONE, FOUR = [Bucket(8, 2048)], [Bucket(2048 * 8 // n, n) for n in (256, 512, 1024, 2048)]
WIDTH = 300


def noisy(costs):
    """Seconds of steps of some costs: a little noise, and one step in ten far too slow."""
    rng = np.random.default_rng(1)
    slow = np.where(rng.random(len(costs)) < 0.1, 5, 1)
    return 1e-6 * np.array(costs) * rng.normal(1, 0.02, len(costs)) * slow


def test_the_width_is_found_from_steps_whose_attention_skips_other_segments():
    plan = Plan(LENGTHS, ONE)
    batches = [plan.batch(step) for step in range(plan.num_batches())]
    seconds = noisy([row_costs(each.bucket, each.segments, WIDTH).sum() for each in batches])
    found = pipeline.calibrate(batches, seconds, attention="segment")
    assert found == pytest.approx(WIDTH, rel=0.15)


def test_the_width_is_found_from_steps_whose_attention_is_over_whole_rows():
    plan = Plan(LENGTHS, FOUR)
    batches = [plan.batch(step) for step in range(plan.num_batches())]
    shapes = [each.bucket for each in batches]
    seconds = noisy([b.rows * row_cost(b.length, attention="dense", width=WIDTH) for b in shapes])
    assert pipeline.calibrate(batches, seconds) == pytest.approx(WIDTH, rel=0.05)


def test_the_width_of_a_model_of_pairs_counts_scores_of_both_sides_and_across():
    pairs = np.stack([LENGTHS, np.maximum(LENGTHS // 3, 1)], axis=1)
    plan = Plan(pairs, [Bucket(8, (2048, 1024))])
    batches = [plan.batch(step) for step in range(plan.num_batches())]
    sides = [each.segments[:, 3:].T.astype(float) for each in batches]
    scores = np.array([(a * a + b * b + a * b).sum() for a, b in sides])
    seconds = 8 * 3072 + scores / (6 * WIDTH)
    assert pipeline.calibrate(batches, seconds, attention="segment") == WIDTH


@pytest.mark.parametrize("steps", [0, 1, 8])
def test_seconds_that_do_not_grow_with_attention_are_refused(steps):
    plan = Plan(LENGTHS, FOUR)
    batches = [plan.batch(step) for step in range(steps)]
    with pytest.raises(ValueError, match=rf"{steps} steps do not grow .* give more steps"):
        pipeline.calibrate(batches, [1 / each.bucket.length for each in batches])
