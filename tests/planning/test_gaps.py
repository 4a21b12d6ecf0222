"""Rows without gaps: whole documents where they fit, few and long pieces elsewhere."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import Bucket, Plan, fit_buckets
from pipeline.planning import gaps
from tests.planning.corpora import histograms
from tests.properties.accounts import assert_each_position_once, batches_of

# No document is short, so best fit leaves a tenth of rows of 512 empty.
LENGTHS = (120 + np.random.default_rng(0).lognormal(np.log(300), 0.5, 2000)).astype(int)
ROWS = [Bucket(8, 512)]


def pieces_of(plan, epoch=0):
    """The example, first position and length of each segment of an epoch, in this order."""
    segments = np.concatenate([batch.segments[:, 1:] for batch in batches_of(plan, epoch)])
    return segments[np.lexsort(segments.T[1::-1])]


def test_a_plan_by_hand():
    plan = Plan([6, 6, 6], [Bucket(2, 9)], shuffle=False, packing="fill")
    # Two rows of 9: the third document is cut after its first three positions.
    assert plan.batch(0).segments.tolist() == [
        [0, 0, 0, 6],
        [0, 2, 0, 3],
        [1, 2, 3, 3],
        [1, 1, 0, 6],
    ]
    assert plan.padding == 0
    assert plan.cuts == 1
    assert "cut to fill rows: 1 example\n" in f"{plan}\n"
    whole = Plan([6, 6, 6], [Bucket(2, 9)], shuffle=False)
    assert whole.num_batches() == 2
    assert whole.cuts == 0


@pytest.mark.parametrize(
    ("lengths", "most", "options"),
    [
        (LENGTHS[:1000], 0.007, {"window": 400}),
        (LENGTHS[LENGTHS <= 512], 0.008, {"shuffle": False}),
        (np.full(1000, 300), 0.008, {}),
        (np.random.default_rng(1).integers(1, 512, 1500), 0.005, {"tiers": 3}),
    ],
)
def test_rows_have_hardly_any_padding_and_pieces_are_long(lengths, most, options):
    plan = Plan(lengths, [Bucket(1, 512)], packing="fill", **options)
    whole = Plan(lengths, [Bucket(1, 512)], **options)
    assert plan.padding <= min(most, whole.padding)
    assert_each_position_once(plan, lengths)
    pieces = pieces_of(plan)
    longer = np.maximum(-(-lengths // 512) - 1, 0).sum()  # parts of longer documents
    assert len(pieces) == len(lengths) + longer + plan.cuts
    assert plan.cuts < plan.num_batches()
    # Ends of documents longer than a row may be shorter, and no piece but these.
    short = pieces[pieces[:, 2] < gaps.LEAST_PIECE]
    assert all(size == lengths[n] or lengths[n] > 512 for n, _, size in short.tolist())


def test_epochs_cut_other_documents_in_the_same_number_of_rows():
    lengths = LENGTHS[LENGTHS <= 512]
    plan = Plan(lengths, ROWS, packing="fill")
    first, second = (
        {(n, start) for n, start, _ in pieces_of(plan, epoch).tolist() if start} for epoch in (0, 1)
    )
    assert len(first) == len(second) == plan.cuts
    assert len(first & second) < 0.75 * len(first)
    assert plan.num_batches(0) == plan.num_batches(1)
    still = Plan(lengths, ROWS, packing="fill", shuffle=False)
    np.testing.assert_array_equal(pieces_of(still, 0), pieces_of(still, 1))


SHORT = [Bucket(1, 50)], [Bucket(1, 40)], [Bucket(3, 40), Bucket(1, 40), Bucket(4, 64)]


@settings(max_examples=40)
@given(histograms(40), st.sampled_from(SHORT), st.sampled_from([None, 1, 2, 5]))
def test_any_documents_are_cut_into_long_pieces_where_that_saves_rows(counts, buckets, most):
    lengths = np.repeat(np.arange(41), counts)
    plan, whole = (
        Plan(lengths, buckets, packing=packing, max_segments=most)
        for packing in ("fill", "best_fit")
    )
    assert_each_position_once(plan, lengths)
    pieces = pieces_of(plan)
    assert len(pieces) == len(lengths) + plan.cuts
    of_cut = pieces[:, 2] < lengths[pieces[:, 0]]
    assert (pieces[of_cut, 2] >= buckets[0].length // 8).all()
    if len(buckets) == 1:
        (bucket,) = buckets
        saved = whole.num_batches() - plan.num_batches()
        assert saved * bucket.length >= plan.cuts * gaps.least_piece(bucket.length)
        assert saved > 0 or (saved, plan.cuts) == (0, 0)


def test_buckets_for_full_rows_have_the_cost_of_full_rows():
    given = {"tokens_per_batch": 4096, "max_buckets": 4, "max_length": 1024}
    for attention, number in (("segment", 1), ("dense", 4)):
        buckets = fit_buckets(LENGTHS, packing="fill", attention=attention, **given)
        assert len(buckets) <= number
        assert Plan(LENGTHS, buckets, packing="fill").padding < 0.01
