"""Plans of pairs: how full both sides are; for the rest, test_plan.py."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import Bucket, Plan
from pipeline.planning.figures import count_losses
from pipeline.planning.vectors import best_fit_vectors
from pipeline.report import measure_epoch
from tests.properties.accounts import batches_of

pair_lists = st.lists(
    st.tuples(st.integers(0, 80), st.integers(0, 40)), min_size=1, max_size=150
).filter(lambda pairs: any(i + t > 0 and t <= 32 and i <= 64 for i, t in pairs))


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


@given(pair_lists)
def test_rows_hold_what_was_taken_from_the_counts(pairs):
    fitting = [(0, 0), *(pair for pair in pairs if pair[1] <= 32 and pair[0] <= 64)]
    sizes = np.unique(fitting, axis=0)
    counts, opens = np.arange(len(sizes)) % 7, np.arange(len(sizes)) % 3 > 0
    left, placed = counts.copy(), np.zeros_like(counts)
    opens[0], counts[0], left[0] = False, 0, 0
    for pattern in best_fit_vectors(left, (64, 32), sizes, opens, sizes.sum(axis=1)):
        numbers, times = np.transpose(pattern.pieces)
        np.add.at(placed, numbers, times * pattern.rows)
        inside = times @ sizes[numbers]
        assert (inside <= (64, 32)).all()
        assert pattern.fill == inside.sum()
    np.testing.assert_array_equal(placed, counts - left)
    assert not left[opens].any()  # what opens rows is all placed
