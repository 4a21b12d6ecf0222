"""Tails: smaller batches for the last rows of an epoch, and nothing else is changed by them."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import Bucket, Plan
from pipeline.planning.tails import count_batches, count_surplus
from tests.planning.corpora import digests, lognormal
from tests.properties.accounts import batches_of

LENGTHS = lognormal(300, least=0)
PAIRS = np.stack([LENGTHS, np.roll(LENGTHS, 7) // 2], axis=1)
PLAIN = (Bucket(8, 32), Bucket(16, 64))
TAILED = (Bucket(8, 32), Bucket(2, 32), Bucket(16, 64), Bucket(6, 64), Bucket(4, 64))


@given(st.integers(0, 40), st.sets(st.integers(1, 12), min_size=1, max_size=4))
def test_the_last_rows_have_the_fewest_empty_rows_and_then_the_fewest_batches(rows, sizes):
    sizes = sorted(sizes, reverse=True)
    group = [Bucket(size, 8) for size in sizes]
    found = count_batches(rows, group)
    whole, last = divmod(rows, sizes[0])
    # The rows of every choice of batches up to the size of the largest, and its batches.
    ways = itertools.product(*(range(sizes[0] // size + 1) for size in sizes))
    every = [(np.dot(way, sizes), sum(way)) for way in ways]
    least = min((total - last, number) for total, number in every if total >= last)
    assert (np.dot(found, sizes) - rows, sum(found) - whole) == least
    assert found[0] >= whole
    # What moves to a longer bucket is the least that leaves no empty row.
    surplus = count_surplus(rows, group)
    assert surplus == min(last - total for total, _ in every if total <= last)
    assert np.dot(count_batches(rows - surplus, group), sizes) == rows - surplus


KINDS = {
    "plain": {},
    "pairs": {"data": (PAIRS, (Bucket(8, (64, 32)),), (Bucket(8, (64, 32)), Bucket(2, (64, 32))))},
    "all": {"window": 50, "tiers": 4, "align": 16, "max_segments": 4},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [300, 120, 3])
def test_tails_come_last_and_epochs_have_the_same_shapes(kind, count):
    options = dict(KINDS[kind])
    lengths, whole, buckets = options.pop("data", (LENGTHS, PLAIN, TAILED))
    plan = Plan(lengths[:count], buckets, **options)
    shapes = []
    for epoch in range(3):
        batches = batches_of(plan, epoch)
        for batch in batches:
            full = len(np.unique(batch.segments[:, 0])) == batch.bucket.rows
            assert full or batch is batches[-1] or batch.bucket == whole[-1]
        is_tail = [batch.bucket not in whole for batch in batches]
        assert is_tail == sorted(is_tail)
        shapes.append(sorted(str(batch.bucket) for batch in batches))
    assert shapes[0] == shapes[1] == shapes[2]
    assert kind != "pairs" or count < 300 or {*shapes[0]} == {*map(str, buckets)}
    assert plan.padding <= Plan(lengths[:count], whole, **options).padding


def test_without_tails_nothing_is_changed_and_with_them_the_whole_batches_of_one_length_stay():
    plain, tailed = Plan(LENGTHS, [Bucket(16, 64)]), Plan(LENGTHS, TAILED[2:])
    steps = LENGTHS.sum() // (16 * 64)
    every = digests(plain, range(plain.num_batches()))
    assert len({*every} & {*digests(tailed, range(steps))}) >= steps - 1
