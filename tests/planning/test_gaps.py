"""Rows without gaps: whole documents where they fit, few and long pieces elsewhere."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import Bucket, Plan, fit_buckets
from pipeline.planning import gaps
from pipeline.planning.cascade import pack
from pipeline.planning.patterns import best_fit, count_rows
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


# ---- packing


def as_documents(chains, cuts):
    """The documents of some chains; each is there from its begin to its end."""
    had, table = np.zeros(cuts.sizes, int), cuts.table
    for chain in chains:
        halves = []
        for pattern in chain:
            for size, times in pattern.pieces:
                if size < cuts.sizes:
                    had[size] += times * pattern.rows
                else:
                    halves += [size - cuts.sizes] * times
        for way in halves[::2]:
            had[table[way // 2, 0]] += chain[0].rows
        # A document that a row begins is the first that the next row goes on with.
        assert halves == [each for way in halves[::2] for each in (way, way + 1)]
        assert all(way % 2 == 0 for way in halves[::2])
        assert len(halves) == 2 * (len(chain) - 1)
    return had


def size_of(size, cuts):
    if size < cuts.sizes:
        return size
    way, is_second = divmod(size - cuts.sizes, 2)
    whole, first = cuts.table[way].tolist()
    return whole - first if is_second else first


def assert_rows_are_counted(chains, cuts):
    for chain in chains:
        for row in chain:
            assert row.fill == sum(size_of(size, cuts) * times for size, times in row.pieces)
            assert row.segments == sum(times for _, times in row.pieces)
            assert row.rows == chain[0].rows


@given(histograms(300), st.integers(40, 60), st.integers(0, 30) | st.integers(0, 2000))
def test_chains_without_some_of_their_rows_have_all_other_documents(counts, length, rows):
    chains = gaps.fill_rows(counts, length, cuts := gaps.Cuts(41), None)
    every = sum(map(count_rows, chains))
    left, moved = gaps.remove_rows(chains, rows := min(rows, every), cuts)
    np.testing.assert_array_equal(as_documents(left, cuts) + moved, counts)
    assert sum(map(count_rows, left)) == every - rows
    assert_rows_are_counted(left, cuts)


@given(histograms(300), st.integers(40, 60), st.sampled_from([None, 1, 2, 5]))
def test_chains_have_all_documents_and_rows_are_full_but_for_their_last_ones(counts, length, most):
    chains = gaps.fill_rows(counts, length, cuts := gaps.Cuts(41), most)
    np.testing.assert_array_equal(as_documents(chains, cuts), counts)
    assert_rows_are_counted(chains, cuts)
    for chain in chains:
        assert all(row.segments <= (most or length) for row in chain)
        assert all(row.fill >= length - length // 4 for row in chain[:-1])
        assert all(row.fill <= length for row in chain)
    table = cuts.table
    assert (np.minimum(table[:, 1], table[:, 0] - table[:, 1]) >= length // 8).all()
    rows = sum(map(count_rows, chains))
    whole = count_rows(best_fit(counts.copy(), length, np.arange(41) > 0, most))
    number = gaps.count_cuts(chains)
    assert (whole - rows) * length >= number * gaps.least_piece(length)
    assert rows < whole or (rows == whole and number == 0)


# ---- plans


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


@given(histograms(40), st.integers(1, 6), st.sampled_from([40, 64]))
def test_with_a_limit_on_segments_rows_are_never_more_than_those_of_best_fit(counts, most, length):
    buckets = [Bucket(1, length)]
    filled = pack(counts, buckets, max_segments=most, fill=True)
    assert filled.rows(0) <= pack(counts, buckets, max_segments=most).rows(0)
    assert max(pattern.segments for pattern in filled.patterns[0]) <= most


def test_buckets_for_full_rows_have_the_cost_of_full_rows():
    given = {"tokens_per_batch": 4096, "max_buckets": 4, "max_length": 1024}
    for attention, number in (("segment", 1), ("dense", 4)):
        buckets = fit_buckets(LENGTHS, packing="fill", attention=attention, **given)
        assert len(buckets) <= number
        assert Plan(LENGTHS, buckets, packing="fill").padding < 0.01
