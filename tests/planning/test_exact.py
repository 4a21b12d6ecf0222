"""Rows that are filled exactly: by hand, against all subsets, and beside best fit."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import Bucket, Plan
from pipeline.planning import exact
from pipeline.planning.exact import Work, fill_exactly
from pipeline.planning.options import Options
from pipeline.planning.patterns import count_segments
from tests.planning.corpora import histograms, lognormal


def test_a_row_by_hand_is_full_where_best_fit_leaves_gaps():
    # Best fit puts 5 beside 6 and 4 beside 5, and needs a third row for 3 and 1.
    counts = np.bincount([6, 5, 5, 4, 3, 1])
    found = fill_exactly(counts.copy(), 12, counts > 0, Work())
    assert [(each.pieces, each.rows, each.fill) for each in found] == [
        (((6, 1), (5, 1), (1, 1)), 1, 12),
        (((5, 1), (4, 1), (3, 1)), 1, 12),
    ]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=11), st.integers(20, 40))
def test_the_longest_example_gets_the_fullest_row_that_others_can_make(sizes, length):
    counts = np.bincount(sizes)
    found = fill_exactly(counts.copy(), length, counts > 0, Work())
    np.testing.assert_array_equal(count_segments(found, len(counts)), counts)
    *others, longest = sorted(sizes)
    sums = [sum(some) for n in range(len(others) + 1) for some in itertools.combinations(others, n)]
    assert found[0].fill == longest + max(total for total in sums if longest + total <= length)


@given(histograms(60), st.integers(40, 64), st.integers(0, 40))
def test_each_example_is_in_one_row_that_one_of_the_openers_opens(counts, length, opens_above):
    left, opens = counts.copy(), np.arange(41) > opens_above
    found = fill_exactly(left, length, opens, Work())
    np.testing.assert_array_equal(count_segments(found, 41) + left, counts)
    for pattern in found:
        assert pattern.fill == sum(size * times for size, times in pattern.pieces) <= length
        assert pattern.segments == sum(times for _, times in pattern.pieces)
        assert opens[pattern.pieces[0][0]]
    assert not left[opens].any()


@given(histograms(200), st.sampled_from([1, 2, 4]), st.sampled_from(["dense", "segment"]))
def test_packing_costs_no_more_than_best_fit_alone(counts, align, attention):
    buckets = (Bucket(2, 24), Bucket(3, 44), Bucket(1, 64))
    options = Options(buckets=buckets, align=align, attention=attention)
    sizes, prices = np.arange(41)[:, None], [options.price(bucket) for bucket in buckets]
    for number in range(41):  # in units
        counts[number] *= number * align <= 44
    both, alone = (
        options.packer(sizes, exactly=exactly).pack(counts).cost(prices)
        for exactly in (True, False)
    )
    assert both <= alone


def test_rows_of_a_plan_are_fuller():
    lengths = lognormal(7000, np.log(500), 0.35, most=2048)
    plan = Plan(lengths, [Bucket(1, 2048)])
    assert plan.padding < 0.001
    alone = plan.options.packer(np.arange(2049)[:, None], exactly=False)
    assert alone.pack(np.bincount(lengths, minlength=2049)).rows(0) > 1.01 * plan.num_batches()


def test_what_takes_too_much_work_is_packed_by_best_fit(monkeypatch):
    counts = np.bincount(lognormal(500, most=64))
    assert fill_exactly(counts.copy(), 64, counts > 0, Work(9)) is None
    monkeypatch.setattr(Work.__init__, "__defaults__", (9,))
    packer = Options(buckets=(Bucket(1, 64),)).packer(np.arange(65)[:, None])
    alone = Options(buckets=(Bucket(1, 64),)).packer(np.arange(65)[:, None], exactly=False)
    counts = np.pad(counts, (0, 65 - len(counts)))
    assert packer.pack(counts).patterns == alone.pack(counts).patterns


def test_a_row_with_too_many_sums_at_once_is_packed_by_best_fit(monkeypatch):
    counts = np.bincount([2, 4, 8, 16, 32, 33])
    assert fill_exactly(counts.copy(), 64, counts > 0, Work())
    monkeypatch.setattr(exact, "MOST_OF_ROW", 3)
    assert fill_exactly(counts.copy(), 64, counts > 0, Work()) is None


def test_patterns_cost_no_more_where_many_sizes_remain():
    # Each row looks only at sizes that fit; this would take minutes if it looked at all.
    counts = np.bincount(np.random.default_rng(0).integers(1, 1 << 15, 100_000))
    found = fill_exactly(counts.copy(), 1 << 15, counts > 0, Work(1_000_000))
    np.testing.assert_array_equal(count_segments(found, len(counts)), counts)


@pytest.mark.parametrize(
    ("packing", "most", "seeds"), [("best_fit", None, (3, 67, 69)), ("fill", 3, (0, 4, 5))]
)
def test_rows_of_several_windows_fill_the_batches_of_shorter_buckets(packing, most, seeds):
    # In these, two ways to pack cost so alike that surplus rows decide which costs less.
    for seed in seeds:
        rng = np.random.default_rng(seed)
        lengths = np.clip(rng.lognormal(3, 0.5, 300), 1, 64).astype(int)
        shorter = [Bucket(5, int(rng.integers(20, 40))), Bucket(4, int(rng.integers(41, 60)))]
        plan = Plan(
            lengths, [*shorter, Bucket(3, 64)], window=60, packing=packing, max_segments=most
        )
        rows = plan.stages[0].streams[0].whole.counts
        assert [int(n) % each.rows for n, each in zip(rows, shorter, strict=False)] == [0, 0]


@pytest.mark.parametrize("dtype", [np.uint64, np.int64, np.uint32, np.uint8, ">u8"])
def test_lengths_of_any_integers_make_the_same_plan(dtype):
    lengths = np.array([3, 40, 9, 17, 100, 5], dtype)
    plan = Plan(lengths, [Bucket(2, 24)])
    assert plan.fingerprint == Plan(lengths.tolist(), [Bucket(2, 24)]).fingerprint
    assert plan.batch(3).digest == Plan(lengths.tolist(), [Bucket(2, 24)]).batch(3).digest
