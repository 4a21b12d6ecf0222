import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import Bucket, Plan
from pipeline.planning.best_fit import best_fit
from pipeline.planning.options import Options
from pipeline.report import measure_epoch
from tests.planning.corpora import histograms


def pack(lengths, buckets, **options):
    """Packs examples of these lengths as a plan does."""
    counts = np.bincount(lengths)
    return (
        Options(buckets=tuple(buckets), **options)
        .packer(np.arange(len(counts))[:, None])
        .pack(counts)
    )


def as_rows(found):
    return [
        np.repeat(*zip(*pattern.pieces, strict=True)).tolist()
        for pattern in found
        for _ in range(pattern.rows)
    ]


def slow_best_fit(counts, length, opens_above):
    """Best-fit decreasing one segment at a time; segments that open no row may be left over."""
    rows = []
    for size in range(len(counts) - 1, 0, -1):
        for _ in range(counts[size]):
            if open_rows := [row for row in rows if sum(row) + size <= length]:
                max(open_rows, key=sum).append(size)
            elif size > opens_above:
                rows.append([size])
    return rows


@pytest.mark.parametrize("shift", [2, 15])  # rooms in several words of bits, as in long rows
@given(histograms(60), st.integers(40, 43), st.integers(0, 40))
def test_histogram_packing_makes_the_rows_of_packing_one_by_one(shift, counts, length, opens_above):
    left, sizes = counts.copy(), np.arange(41)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.planning.best_fit.SHIFT", shift)
        patch.setattr("pipeline.planning.best_fit.MASK", (1 << shift) - 1)
        at_once = as_rows(best_fit(left, length, sizes > opens_above))
    one_by_one = slow_best_fit(counts, length, opens_above)
    assert sorted(map(sum, at_once)) == sorted(map(sum, one_by_one))
    placed = np.bincount([size for row in at_once for size in row], minlength=41)
    np.testing.assert_array_equal(placed + left, counts)


def test_rows_with_much_room_are_packed_again_into_a_longer_bucket():
    def rows(length, **options):
        packed = pack([length] * 6, [Bucket(1, 8), Bucket(1, 16)], **options)
        return [packed.rows(index) for index in range(2)]

    assert rows(5) == [0, 2]  # three of 5 in each row of 16
    assert rows(7) == [6, 0]
    assert rows(5, max_segments=1) == [6, 0]
    # Of what stays, rows that make no whole batch go too: 1 of 5 rows of 8, beside the 3 of 5.
    packed = pack([5] * 3 + [8] * 5, [Bucket(2, 8), Bucket(1, 16)])
    assert packed.rows(0) == 4


def test_rows_of_pairs_stay_where_no_longer_bucket_holds_both_sides():
    sizes = np.array([[0, 0], [2, 2], [3, 2]])
    options = Options(buckets=(Bucket(1, (4, 10)), Bucket(1, (10, 10))))
    packer = options.packer(sizes, [Bucket(1, (4, 10)), Bucket(1, (10, 4))])
    packed = packer.pack(np.array([0, 1, 1]))
    np.testing.assert_array_equal(packed.counts, [0, 1, 1])
    assert (packed.rows(0), packed.rows(1)) == (2, 0)


def used_of(plan):
    return list(measure_epoch(plan).used.values())


@pytest.mark.parametrize("ratio", [0.8, 0.97, 1.0, 1.1])
def test_sentence_pairs_fill_the_fuller_side_and_the_other_as_far_as_their_ratio_allows(
    ratio, translations
):
    pairs = translations(ratio=ratio)
    plan = Plan(pairs, [Bucket(16, (256, 256))], overflow="drop")
    totals = pairs.sum(axis=0)
    fuller, fills = int(totals.argmax()), used_of(plan)
    assert fills[fuller] >= 0.97
    assert fills[1 - fuller] >= totals.min() / totals.max() - 0.02
    # And much better than that: within one point, empty rows of the last batch included.
    assert 1 - plan.padding >= totals.sum() / (2 * totals.max()) - 0.01


def test_long_pairs_that_are_all_of_different_sizes_are_packed_as_well():
    rng = np.random.default_rng(0)
    inputs = np.clip(rng.lognormal(6, 1, 5000), 1, 8192)
    pairs = np.stack([inputs, np.clip(inputs * np.exp(rng.normal(0, 0.3, 5000)), 1, 8192)], 1)
    assert max(used_of(Plan(pairs.astype(int), [Bucket(1, (8192, 8192))]))) >= 0.98
    # Of other ratios and shapes, too: no candidate is left standing that fits nowhere.
    pairs = rng.integers(1, 8192, (8000, 2))
    assert min(used_of(Plan(pairs, [Bucket(1, (16384, 16384))]))) >= 0.97
