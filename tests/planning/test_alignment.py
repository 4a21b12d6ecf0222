"""Alignment: rows in which every segment begins at a multiple; all that counts positions stays."""

import numpy as np
import pytest

from pipeline import Bucket, Plan
from tests.planning.corpora import lognormal
from tests.properties.accounts import assert_batch_fits

LENGTHS = lognormal(600, 3, 1, most=120)
PAIRS = np.stack([LENGTHS, np.roll(LENGTHS, 7) // 2], axis=1)
BUCKETS = [Bucket(8, 64), Bucket(4, 128)]
TWO = [Bucket(8, (64, 32)), Bucket(4, (128, 64))]


def test_a_plan_with_optimal_packing_is_aligned_and_knows_its_bound():
    pytest.importorskip("scipy")
    plans = [Plan(LENGTHS, BUCKETS, align=16, packing=each) for each in ("best_fit", "optimal")]
    assert plans[1].padding <= plans[0].padding
    least = float(str(plans[1]).split("can have less than ")[1].split("%")[0]) / 100
    batches = [plans[1].batch(step) for step in range(plans[1].num_batches())]
    places = sum((-(-batch.segments[:, 3] // 16) * 16).sum() for batch in batches)
    assert 1 - LENGTHS.sum() / places - 1e-5 <= least <= plans[1].padding
    for batch in batches:
        assert_batch_fits(batch, {"buckets": BUCKETS, "align": 16}, plans[1])


@pytest.mark.parametrize(("lengths", "buckets"), [(LENGTHS, BUCKETS), (PAIRS, TWO)])
def test_the_cost_of_a_row_is_that_of_its_positions(lengths, buckets):
    (stream,) = Plan(lengths, buckets, align=16).stages[0].streams
    for rows in stream.take(1, 0, 8):
        times, spans = rows.spans()
        squares = (spans[:, 3:] ** 2).sum(axis=1)
        costs = np.bincount(np.arange(len(times)).repeat(times), squares)
        assert rows.costs.tolist() == costs.tolist()


def test_the_option_is_in_the_identity_and_in_digests():
    plain, one, aligned = (Plan(LENGTHS, BUCKETS, **n) for n in ({}, {"align": 1}, {"align": 16}))
    assert aligned.identity == plain.identity | {"align": 16}
    assert one.identity == plain.identity
    assert one.batch(0).digest == plain.batch(0).digest
    same = [Plan([16, 16], [Bucket(1, 32)], shuffle=False, align=n).batch(0) for n in (1, 16)]
    assert same[0].segments.tolist() == same[1].segments.tolist()
    assert same[0].digest != same[1].digest
