"""The deal of rows to batches: every row once, and batches that are alike."""

import numpy as np
import pytest

from benchmarks.balance import spread_of_means
from pipeline import Bucket, Plan
from pipeline.planning.order import GROUP, deal, random_bits

# Like word problems of grade-school maths: a few hundred different lengths around 150.
SHORT = np.clip(np.random.default_rng(0).gamma(9, 150 / 9, 7473).round(), 40, 450).astype(int)
OTHER = np.random.default_rng(1).permutation(SHORT)


def draw(seed):
    return lambda purpose, count: random_bits(seed, purpose, count)


def totals(segments, height, seed):
    """The segments of each full batch."""
    full = len(segments) // height
    order = deal(segments, height, draw(seed))[: full * height]
    return segments[order].reshape(full, height).sum(axis=1)


def test_golden_deal_so_that_a_changed_algorithm_raises_the_version():
    order = deal(np.array([1, 1, 1, 2, 2, 2, 3, 4, 9]), 4, draw(7))
    assert order.tolist() == [1, 0, 3, 8, 5, 4, 2, 6, 7]


def test_neighbouring_batches_are_not_correlated_and_no_batch_is_special():
    segments = np.sort(np.random.default_rng(1).poisson(5, 256) + 1)
    found = np.array([totals(segments, 4, seed) for seed in range(400)], float)
    found -= found.mean()
    pairs = np.stack([found[:, :-1].ravel(), found[:, 1:].ravel()])
    assert abs(np.corrcoef(pairs)[0, 1]) < 0.05  # by chance -1/63
    assert np.abs(found.mean(axis=0)).max() < 4 * found.std() / np.sqrt(len(found))


@pytest.mark.parametrize("segments", [np.arange(1, 11), np.ones(10, int)])
def test_any_row_may_be_in_any_batch_and_in_the_last_one_that_is_not_full(segments):
    places = np.zeros((10, 3), int)  # the batches of each row, over 600 deals
    for seed in range(600):
        places[deal(segments, 4, draw(seed)), np.arange(10) // 4] += 1
    assert (places > 0).all()


def test_any_few_consecutive_rows_are_alike_where_a_plan_takes_single_rows():
    segments = np.sort(np.random.default_rng(1).poisson(5, 4000) + 1)
    dealt = segments[deal(segments, None, draw(0))]
    few = dealt[3:3903].reshape(-1, 10).sum(axis=1)
    assert few.std() < 0.8 * segments.std() * np.sqrt(10)
    # A place in a group does not tell how many segments a row has.
    places = dealt.reshape(-1, GROUP).mean(axis=0)
    assert np.ptp(places) < 6 * segments.std() / np.sqrt(1000)


@pytest.mark.parametrize(
    ("lengths", "buckets", "options"),
    [
        (SHORT, [Bucket(16, 512)], {}),
        (SHORT, [Bucket(16, 1024)], {"tiers": 4}),
        (SHORT, [Bucket(4, 2048)], {}),
        (SHORT, [Bucket(32, 256), Bucket(8, 1024)], {}),
        ({"a": SHORT, "b": OTHER}, [Bucket(16, 1024)], {"weights": {"a": 1, "b": 3}}),
    ],
)
def test_mean_lengths_of_batches_vary_less_than_by_chance(lengths, buckets, options):
    plan = Plan(lengths, buckets, **options)
    tiers, by_bucket = plan.options.tiers, {}
    first, last = plan.epoch_steps
    # With tiers, batches of one cost differ, but not the blocks.
    for step in range(first, last - tiers, tiers):
        block = [plan.batch(each) for each in range(step, step + tiers)]
        sizes = np.concatenate([batch.segments[:, 3] for batch in block])
        by_bucket.setdefault(block[0].bucket, []).append(sizes)
    assert all(spread_of_means(batches[:-1]) < 1 for batches in by_bucket.values())
