import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import Bucket, Plan, fit_buckets
from pipeline.planning.cascade import row_cost
from pipeline.planning.figures import count_losses

OPTIONS = {"tokens_per_batch": 4096, "max_buckets": 3, "length_multiple": 16}


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 200)), min_size=1, max_size=60).filter(
        lambda pairs: any(map(any, pairs))
    ),
    st.sampled_from(["best_fit", "none"]),
    st.sampled_from(["dense", "segment"]),
    st.integers(1, 4),
)
def test_buckets_for_pairs_hold_all_pairs_within_the_budget(
    pairs, packing, attention, row_multiple
):
    buckets = fit_buckets(
        np.array(pairs), **OPTIONS, packing=packing, attention=attention, row_multiple=row_multiple
    )
    assert 1 <= len(buckets) <= 3
    for bucket in buckets:
        assert bucket.positions <= 4096
        assert bucket.rows % row_multiple == 0
        assert all(length % 16 == 0 for length in bucket.lengths)
    plan = Plan(np.array(pairs), buckets, packing=packing, overflow="error")
    assert count_losses(plan.stages[-1])["overlong"] == 0


def test_two_kinds_of_pairs_get_a_bucket_each_and_not_a_grid():
    rng = np.random.default_rng(0)
    long, short = rng.integers(200, 256, 3000), rng.integers(20, 32, 3000)
    pairs = np.concatenate([np.stack([long, short], 1), np.stack([short, long], 1)])
    buckets = fit_buckets(pairs, **OPTIONS, packing="none")
    assert [bucket.length for bucket in buckets] == [(32, 256), (256, 32), (256, 256)]
    plan = Plan(pairs, buckets, packing="none", overflow="drop")
    assert plan.batches_per_bucket[buckets[-1]] <= 1


@pytest.mark.parametrize("packing", ["none", "best_fit"])
@pytest.mark.parametrize("attention", ["dense", "segment"])
def test_two_buckets_are_nearly_as_cheap_as_the_best_two_of_a_grid(packing, attention):
    """Compares the rows of whole plans with those of every set of two of some shapes."""
    rng, sigma = np.random.default_rng(0), {"none": 0.7, "best_fit": 0.8}[packing]
    sides = [
        np.clip(rng.lognormal(mean, sigma, 600), 1, most).astype(int)
        for mean, most in ((3.5, 128), (3, 64))
    ]
    pairs = np.stack(sides, axis=1)

    def cost(buckets):
        plan = Plan(pairs, buckets, packing=packing)
        dense = attention == "dense" and packing != "none"
        kind = {"attention": "dense" if dense else "segment", "width": 64}
        batches = plan.batches_per_bucket
        return sum(n * b.rows * row_cost(*b.lengths, **kind) for b, n in batches.items())

    chosen = fit_buckets(
        pairs,
        tokens_per_batch=1024,
        max_buckets=2,
        length_multiple=32,
        packing=packing,
        attention=attention,
        width=64,
    )
    shapes = [*itertools.product((32, 64, 96, 128), (32, 64))]
    every = [Bucket(1024 // sum(shape), shape) for shape in shapes]
    sets = [(every[-1],)] if len(chosen) == 1 else [(each, every[-1]) for each in every[:-1]]
    assert cost(chosen) <= 1.02 * min(map(cost, sets))
