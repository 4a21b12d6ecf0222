"""Tiers and hosts: what a block of steps has, and how evenly its rows cost."""

import itertools

import numpy as np
import pytest

from pipeline import Bucket, Plan
from pipeline.planning.balance import balance
from tests.planning.corpora import costs_of, lognormal

LENGTHS = lognormal(900, 3, 1.2, most=256)
PAIRS = np.stack([LENGTHS, np.maximum(LENGTHS // 2, 1)], axis=1)
ONE, TWO = [Bucket(4, 256)], [Bucket(8, 64), Bucket(4, 256)]
KINDS = {
    "one bucket": (LENGTHS, ONE, {}),
    "two buckets": (LENGTHS, TWO, {}),
    "windows": (LENGTHS, TWO, {"window": 300}),
    "a mixture": ({"a": LENGTHS[:300], "b": LENGTHS[300:]}, TWO, {"weights": {"a": 1, "b": 2}}),
    "pairs": (PAIRS, [Bucket(4, (256, 128))], {}),
}


def rows_of(plan, steps):
    """The rows of some steps, without their order: the bucket and the segments of each."""
    found = []
    for batch in map(plan.batch, steps):
        for row in np.unique(batch.segments[:, 0]):
            segments = batch.segments[batch.segments[:, 0] == row, 1:]
            found.append((str(batch.bucket), segments.tolist()))
    return sorted(found)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_a_block_have_the_rows_that_they_have_without_tiers(kind):
    lengths, buckets, options = KINDS[kind]
    plain, tiers = (Plan(lengths, buckets, tiers=k, **options) for k in (1, 4))
    for first in range(0, 3 * plain.num_batches(), 4):
        steps = range(first, first + 4)
        assert rows_of(tiers, steps) == rows_of(plain, steps)
        assert [tiers.batch(s).bucket for s in steps] == [plain.batch(s).bucket for s in steps]
        assert [tiers.batch(s).epoch for s in steps] == [plain.batch(s).epoch for s in steps]


def test_rows_of_a_batch_cost_no_less_than_all_rows_of_a_cheaper_one():
    plan, places = Plan(LENGTHS, ONE, tiers=4), set()
    assert plan.num_batches() >= 24
    for first in range(0, 24, 4):
        costs = [costs_of(plan.batch(step)) for step in range(first, first + 4)]
        places.add(int(np.argmax([cost.sum() for cost in costs])))
        for cheaper, dearer in itertools.pairwise(sorted(costs, key=sum)):
            assert cheaper.max() <= dearer.min()
    assert len(places) > 1  # the costliest one of a block is not always at the same place


def test_a_plan_changes_between_blocks():
    plan = Plan(LENGTHS[:120], [Bucket(2, 256)], tiers=8)
    with pytest.raises(ValueError, match=r"step is 5, in the middle of .* 0 to 7.* at step 8"):
        plan.after(5, seed=4)
    assert [plan.next_block(step) for step in (0, 1, 7, 8)] == [0, 8, 8, 8]
    with pytest.raises(ValueError, match="step is -1"):
        plan.next_block(-1)
    lengths, buckets, options = KINDS["a mixture"]
    with pytest.raises(ValueError, match="change the plan at step 8"):
        Plan(lengths, buckets, tiers=8, **options).after(5, weights={"a": 3, "b": 1})


def test_empty_rows_are_spread_over_the_batch():
    _, places = balance(np.array([9, 9, 9, 9]), total=8)
    assert np.bincount(places // 4).tolist() == [2, 2]


@pytest.mark.parametrize("kind", ["one", "pairs"])
def test_hosts_get_even_attention_work_in_real_batches(kind, translations):
    if kind == "pairs":
        plan = Plan(translations(20_000), [Bucket(64, (128, 128))], overflow="drop")
    else:
        plan = Plan(lognormal(20_000, 4, 1, most=512), [Bucket(64, 512)])
    for cost in (costs_of(plan.batch(step)) for step in range(5)):
        for hosts in (2, 4, 8):
            share = cost.reshape(hosts, -1).sum(axis=1)
            random = np.sort(cost)[::-1].reshape(hosts, -1).sum(axis=1)
            assert share.max() / share.mean() < 1.15
            assert share.max() < random.max()
