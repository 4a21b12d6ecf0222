"""Rows without gaps: whole documents where they fit, few and long pieces elsewhere."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import Bucket, Plan, fit_buckets
from pipeline.planning import gaps
from pipeline.planning.options import Options
from tests.planning.corpora import histograms
from tests.properties.accounts import assert_each_position_once, batches_of

# No document is short, so best fit leaves a tenth of rows of 512 empty.
LENGTHS = (120 + np.random.default_rng(0).lognormal(np.log(300), 0.5, 2000)).astype(int)


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
    # One row of 16 less would need nine cuts, of which each must save two positions.
    assert Plan([13] * 8 + [14] * 5, [Bucket(1, 16)], packing="fill").cuts == 0


@given(histograms(30), st.integers(2, 5))
def test_each_position_comes_once_where_rows_move_to_a_longer_bucket(counts, rows):
    lengths = np.repeat(np.arange(41), counts)
    plan = Plan(lengths, [Bucket(rows, 48), Bucket(1, 64)], packing="fill")
    assert_each_position_once(plan, lengths)


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
    pieces = np.concatenate([batch.segments[:, 1:] for batch in batches_of(plan)])
    longer = np.maximum(-(-lengths // 512) - 1, 0).sum()  # parts of longer documents
    assert len(pieces) == len(lengths) + longer + plan.cuts
    assert plan.cuts < plan.num_batches()
    # Ends of documents longer than a row may be shorter, and no piece but these.
    short = pieces[pieces[:, 2] < gaps.LEAST_PIECE]
    assert all(size == lengths[n] or lengths[n] > 512 for n, _, size in short.tolist())


@given(histograms(40), st.integers(1, 6), st.sampled_from([40, 64]))
def test_with_a_limit_on_segments_rows_are_never_more_than_those_of_best_fit(counts, most, length):
    options, sizes = {"buckets": (Bucket(1, length),), "max_segments": most}, np.arange(41)[:, None]
    filled, whole = (
        Options(packing=packing, **options).packer(sizes).pack(counts)
        for packing in ("fill", "best_fit")
    )
    assert filled.rows(0) <= whole.rows(0)
    assert max(pattern.segments for pattern in filled.patterns[0]) <= most


def test_buckets_for_full_rows_have_the_cost_of_full_rows():
    given = {"tokens_per_batch": 4096, "max_buckets": 4, "max_length": 1024}
    for attention, number in (("segment", 1), ("dense", 4)):
        buckets = fit_buckets(LENGTHS, packing="fill", attention=attention, **given)
        assert len(buckets) <= number
        assert Plan(LENGTHS, buckets, packing="fill").padding < 0.01
