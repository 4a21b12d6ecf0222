"""Plans of pairs: how full both sides are; for the rest, test_plan.py."""

import numpy as np
import pytest

from pipeline import Bucket, Plan
from pipeline.planning.figures import count_losses
from pipeline.report import measure_epoch
from tests.properties.accounts import batches_of


def used_of(plan):
    return list(measure_epoch(plan).used.values())


@pytest.mark.parametrize("ratio", [0.8, 0.97, 1.0, 1.1])
def test_sentence_pairs_fill_the_fuller_side_and_the_other_as_far_as_their_ratio_allows(
    ratio, translations
):
    pairs = translations(ratio=ratio)
    plan = Plan(pairs, [Bucket(16, (256, 256))], overflow="drop")
    totals = pairs.sum(axis=0)
    fuller, fills = int(totals.argmax()), used_of(plan)
    assert fills[fuller] >= 0.97
    assert fills[1 - fuller] >= totals.min() / totals.max() - 0.02
    # And much better than that: within one point, empty rows of the last batch included.
    assert 1 - plan.padding >= totals.sum() / (2 * totals.max()) - 0.01


def test_long_pairs_that_are_all_of_different_sizes_are_packed_as_well():
    rng = np.random.default_rng(0)
    inputs = np.clip(rng.lognormal(6, 1, 5000), 1, 8192)
    pairs = np.stack([inputs, np.clip(inputs * np.exp(rng.normal(0, 0.3, 5000)), 1, 8192)], 1)
    assert max(used_of(Plan(pairs.astype(int), [Bucket(1, (8192, 8192))]))) >= 0.98
    # Of other ratios and shapes, too: no candidate is left standing that fits nowhere.
    pairs = rng.integers(1, 8192, (8000, 2))
    assert min(used_of(Plan(pairs, [Bucket(1, (16384, 16384))]))) >= 0.97


def test_a_plan_of_pairs_by_hand():
    pairs = [[6, 2], [2, 6], [5, 5], [3, 3], [0, 4], [0, 0], [9, 1]]
    plan = Plan(pairs, [Bucket(2, (8, 8))], shuffle=False, overflow="truncate")
    assert [batch.segments.tolist() for batch in batches_of(plan)] == [
        # 6 + 2 and 2 + 6; 5 + 3 of both
        [[0, 0, 0, 6, 2], [0, 1, 0, 2, 6], [1, 2, 0, 5, 5], [1, 3, 0, 3, 3]],
        # inputs of 9 cut to 8, and the pair that has targets alone; one without any is in no row
        [[0, 6, 0, 8, 1], [0, 4, 0, 0, 4]],
    ]
    none = {"silent": 0, "lost_loss": 0, "silent_pieces": 0}
    found = {"excluded": 0, "empty": 1, "overlong": 1, "lost": 1}
    assert count_losses(plan.stages[-1]) == none | found
    less = plan.after(0, exclude=[1, 5])  # the empty pair is in no batch anyway
    assert count_losses(less.stages[-1]) == none | found | {"excluded": 1}
    assert plan.max_position == 7
    assert plan.padding == pytest.approx(1 - 45 / 64)
