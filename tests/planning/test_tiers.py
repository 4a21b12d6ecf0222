"""Tiers: what a block of steps has, and how evenly its rows cost."""

import itertools

import numpy as np
import pytest

from pipeline import Bucket, Plan
from pipeline.report import measure_epoch
from pipeline.report.findings import about_tiers, tabulate_tiers
from pipeline.report.tiers import row_costs, time_over_ideal
from tests.properties.accounts import batches_of

LENGTHS = np.clip(np.random.default_rng(0).lognormal(3, 1.2, 900), 1, 256).astype(int)
PAIRS = np.stack([LENGTHS, np.maximum(LENGTHS // 2, 1)], axis=1)
ONE, TWO = [Bucket(4, 256)], [Bucket(8, 64), Bucket(4, 256)]
KINDS = {
    "one bucket": (LENGTHS, ONE, {}),
    "two buckets": (LENGTHS, TWO, {}),
    "tails": (LENGTHS, [*TWO, Bucket(2, 256), Bucket(1, 256)], {"window": 300}),
    "windows": (LENGTHS, TWO, {"window": 100}),
    "in order": (LENGTHS, ONE, {"shuffle": False}),
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


def costs_of(batch):
    squares = (batch.segments[:, 3:] ** 2).sum(axis=1)
    return np.bincount(batch.segments[:, 0], squares, batch.bucket.rows)


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
    plan = Plan(LENGTHS, ONE, tiers=4)
    assert plan.num_batches() >= 24
    for first in range(0, 24, 4):
        costs = sorted((costs_of(plan.batch(step)) for step in range(first, first + 4)), key=sum)
        for cheaper, dearer in itertools.pairwise(costs):
            assert cheaper.max() <= dearer.min()


def test_the_costliest_batch_of_a_block_is_not_always_at_the_same_place():
    plan = Plan(LENGTHS, ONE, tiers=4)
    sums = [costs_of(plan.batch(step)).sum() for step in range(24)]
    assert len({int(np.argmax(sums[first : first + 4])) for first in range(0, 24, 4)}) > 1


def test_the_report_compares_numbers_of_tiers_and_says_which_to_choose():
    plans = {k: Plan(LENGTHS, [Bucket(32, 256)], tiers=k) for k in (1, 4)}
    found = [measure_epoch(plan).over_ideal for plan in plans.values()]
    for k, plan in plans.items():
        batches = batches_of(plan)
        costs = [row_costs(each.bucket, each.segments) for each in batches]
        ratios = [time_over_ideal(costs, groups) for groups in (8, 32)]
        seen = [each["ratio"] for each in found[0] if each["tiers"] == k]
        assert seen == pytest.approx(ratios, abs=0.002)
    assert {each["tiers"] for each in found[1]} == {4}
    (text,) = about_tiers(found[0])
    assert "needs no tiers" in text
    choice = int(text.partition(" times with tiers=")[2].partition(".")[0])
    assert choice in (4, 16)


def test_rows_that_cost_the_same_need_no_tiers():
    plan = Plan(np.full(400, 256), [Bucket(8, 256)])
    (text,) = about_tiers(measure_epoch(plan).over_ideal)
    assert "8 groups of rows take 1.000 times the least time, and tiers gain nothing" in text


def test_the_report_shows_the_time_over_ideal_for_each_number_of_groups():
    plan = Plan(LENGTHS, [Bucket(128, 256)])
    found = measure_epoch(plan)
    assert {(each["tiers"], each["groups"]) for each in found.over_ideal} == set(
        itertools.product((1, 4, 16), (8, 32, 128))
    )
    heads, *rows = tabulate_tiers(found)
    assert heads[1:] == ["8 groups", "32 groups", "128 groups"]
    assert [row[0] for row in rows] == ["tiers=1", "tiers=4", "tiers=16"]
    assert {len(row) for row in rows} == {4}


def test_a_plan_changes_between_blocks():
    lengths, buckets = LENGTHS[:120], [Bucket(2, 256)]
    plan = Plan(lengths, buckets, tiers=8)
    with pytest.raises(ValueError, match=r"step is 5, in the middle of .* 0 to 7.* at step 8"):
        plan.after(5, seed=4)
    assert [plan.next_block(step) for step in (0, 1, 7, 8)] == [0, 8, 8, 8]
    with pytest.raises(ValueError, match="step is -1"):
        plan.next_block(-1)
    mixture, buckets, options = KINDS["a mixture"]
    plan = Plan(mixture, buckets, tiers=8, **options)
    with pytest.raises(ValueError, match="change the plan at step 8"):
        plan.after(5, weights={"a": 3, "b": 1})
