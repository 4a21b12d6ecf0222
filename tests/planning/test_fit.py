import collections
import itertools
import logging
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import Bucket, Plan, fit_buckets
from pipeline.planning import lengths as lengths_lib
from pipeline.planning.cascade import row_cost
from pipeline.planning.fit import WORTH_PACKED, typical_lengths
from tests.planning.corpora import lognormal

LENGTHS = lognormal(20_000, 4.2, 0.9, least=3, most=512)


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=40),
    st.integers(1, 4),
    st.sampled_from([1, 4, 8]),
)
def test_unpacked_buckets_are_as_good_as_the_best_of_all_sets(lengths, most, multiple):
    lengths = np.array(lengths)
    buckets = fit_buckets(
        lengths, tokens_per_batch=1024, max_buckets=most, length_multiple=multiple, packing="none"
    )

    def cost(ends):
        return sum(min(end for end in ends if end >= length) for length in lengths)

    ends = sorted({-(-int(n) // multiple) * multiple for n in lengths})
    best = min(
        cost([*chosen, ends[-1]])
        for count in range(min(most, len(ends)))
        for chosen in itertools.combinations(ends[:-1], count)
    )
    assert cost([bucket.length for bucket in buckets]) <= best * 1.001
    assert len(buckets) <= min(most, len(ends))


def test_rows_keep_the_multiple_and_the_budget():
    for bucket in fit_buckets(LENGTHS, tokens_per_batch=10_000, max_buckets=4, row_multiple=3):
        assert bucket.rows % 3 == 0
        assert 10_000 - 3 * bucket.length < bucket.positions <= 10_000


def test_the_cost_of_several_buckets_is_far_below_that_of_one(caplog):
    # Lognormal lengths up to 8,192 at width 1,024: 1.7 against 2.3 units a token.
    lengths = lognormal(50_000, 6, 1.2, least=8, most=8192)

    def cost(buckets):
        plan = Plan(lengths, buckets)
        rows = {b: n * b.rows for b, n in plan.batches_per_bucket.items()}
        return sum(n * (b.length + b.length**2 / 6144) for b, n in rows.items()) / lengths.sum()

    options = {"tokens_per_batch": 65_536, "max_buckets": 4}
    several, one = (cost(fit_buckets(lengths, **options | {"max_buckets": n})) for n in (4, 1))
    assert one == pytest.approx(1 + 8192 / 6144, rel=0.01)
    assert several < 0.75 * one
    # But where attention skips other segments.
    with caplog.at_level(logging.INFO, "pipeline.planning.fit"):
        assert len(fit_buckets(lengths, attention="segment", **options)) == 1
    assert "one bucket is enough" in caplog.text


def test_a_further_bucket_of_packed_rows_must_save_what_the_formula_may_be_off():
    lengths = lognormal(20_000, 4.2, 0.9, least=3, most=2048)

    def cost(most):
        buckets = fit_buckets(lengths, tokens_per_batch=16_384, max_buckets=most)
        batches = Plan(lengths, buckets).batches_per_bucket
        return len(buckets), sum(n * b.rows * row_cost(b.length) for b, n in batches.items())

    (one, first), *others = [cost(most) for most in (1, 2, 3, 4)]
    for count, each in others:
        assert each <= first * (1 - WORTH_PACKED * (count - one)) * 1.01


@pytest.mark.parametrize(
    ("sizes", "packing", "multiple"),
    [((3, 60), "none", 16), ((3, 60), "best_fit", 128), ((3, 2048), "best_fit", 128)],
)
def test_lengths_are_multiples_of_less_than_128_where_that_saves_padding(sizes, packing, multiple):
    lengths = np.random.default_rng(0).integers(*sizes, 5000)
    options = {"tokens_per_batch": 8192, "max_buckets": 3, "packing": packing}
    found = fit_buckets(lengths, **options, length_multiple=None)
    assert found == fit_buckets(lengths, **options, length_multiple=multiple)
    tight = {"tokens_per_batch": 100, "max_buckets": 1, "length_multiple": None}
    assert fit_buckets([40], **tight) == (Bucket(2, 48),)


def test_short_pairs_lose_little_to_padding(translations):
    pairs = translations(4000) // 2 + 1
    options = {"tokens_per_batch": 4096, "max_buckets": 2, "max_length": (128, 128)}
    fine, coarse = (
        Plan(pairs, fit_buckets(pairs, **options, length_multiple=multiple), overflow="drop")
        for multiple in (None, 128)
    )
    assert fine.padding <= coarse.padding


@pytest.mark.parametrize(
    ("lengths", "max_length", "last"),
    [
        ([5, 9, 4000], 200, Bucket(20, 200)),
        ([[500, 30], [20, 400], [20, 20]], (64, 48), Bucket(36, (64, 48))),
        ([[20, 30], [60, 0]], (64, 48), Bucket(73, (24, 32))),  # one has nothing to train on
        ([[3, 5], [5000, 0]], None, Bucket(256, (8, 8))),
    ],
)
def test_max_length_bounds_the_longest_bucket(lengths, max_length, last):
    options = {"tokens_per_batch": 4096, "max_buckets": 3, "length_multiple": 8}
    assert fit_buckets(lengths, **options, max_length=max_length, packing="none")[-1] == last


def test_rows_of_short_examples_are_longer_than_the_longest_of_them():
    lengths = np.random.default_rng(0).integers(44, 60, 40_000)
    options, short = {"tokens_per_batch": 8192, "max_buckets": 3}, (Bucket(64, 128),)
    (bucket,) = fit_buckets(lengths, **options)
    assert 128 < bucket.length <= 1024
    assert Plan(lengths, short).padding > 0.15
    assert Plan(lengths, [bucket]).padding < 0.07
    assert fit_buckets(lengths, **options, max_length=128) == short
    assert fit_buckets(lengths, **options, packing="none") == short
    few = fit_buckets(lengths, tokens_per_batch=1024, max_buckets=3, row_multiple=4)
    assert few[0].length <= 256
    # Where rows are full as it is, they stay.
    assert fit_buckets(LENGTHS, **options)[-1].length == 512


PAIR = {"lengths": [[300, 200]]}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"tokens_per_batch": 100}, "more than tokens_per_batch=100"),
        ({"max_buckets": 0}, "max_buckets is 0"),
        ({"row_multiple": 1.5}, "row_multiple is 1.5"),
        ({"length_multiple": 0}, "length_multiple is 0"),
        ({"align": 0}, "align is 0"),
        ({"width": 0}, "width is 0"),
        ({"packing": "tight"}, "packing is 'tight'"),
        ({"attention": "flash"}, "it must be one of dense, segment"),
        ({"lengths": [0]}, "nothing to fit buckets to"),
        ({"lengths": []}, "nothing to fit buckets to"),
        ({"max_length": (3, 4)}, "and (inputs, targets) for pairs"),
        ({"max_length": []}, "max_length is []; it must be one number"),
        (PAIR | {"max_length": 64}, "and (inputs, targets) for pairs"),
        (PAIR | {"max_length": (64, 0)}, "max_length is 0"),
        (PAIR | {"lengths": [[3, 0]]}, "nothing to fit buckets to"),
        (
            PAIR | {"tokens_per_batch": 100, "length_multiple": 16},
            "1 rows (row_multiple) of 304 + 208 positions are 512, more",
        ),
    ],
)
def test_bad_arguments_get_a_sentence(arguments, sentence):
    good = {"lengths": [3, 300], "tokens_per_batch": 4096, "max_buckets": 2}
    with pytest.raises(ValueError) as error:
        fit_buckets(**(good | arguments))
    assert sentence in str(error.value)


@pytest.mark.parametrize(("by", "due"), [("tokens", 100), ("examples", 1), ("loss", 200)])
def test_several_corpora_have_the_shares_of_examples_that_batches_of_them_have(by, due):
    sizes = {"short": ([2] * 60, 60), "long": ([200] * 40, 8000), "never": ([999], 999)}
    given = {n: SimpleNamespace(lengths=a, num_learnt=m) for n, (a, m) in sizes.items()}
    phases = [(0, {"short": 3, "long": 1, "never": 0}), (9, {"short": 1, "long": 3, "never": 0})]
    counts = np.bincount(typical_lengths(given, phases, by))
    assert counts[2] / counts[200] == pytest.approx(due, rel=0.01)
    assert len(counts) == 201  # none of the corpus that no batch has


def test_one_huge_example_costs_no_memory():
    lengths = np.append(np.arange(100, 300).repeat(9), 1 << 31).astype(np.uint32)
    options = {"tokens_per_batch": 8192, "max_buckets": 2, "max_length": 512}
    tracemalloc.start()
    try:
        buckets = fit_buckets(lengths, **options)
        assert tracemalloc.get_traced_memory()[1] < 1 << 26
    finally:
        tracemalloc.stop()
    # 2**31 positions are 2**22 pieces of 512.
    assert buckets == fit_buckets(np.append(lengths[:-1], [512] * (1 << 22)), **options)


@given(st.lists(st.integers(0, 20) | st.integers(1 << 20, (1 << 32) - 1), max_size=30))
def test_a_histogram_counts_each_length(lengths):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lengths_lib, "CHUNK", 4)
        sizes, counts = lengths_lib.histogram(np.array(lengths, np.uint32))
    assert dict(zip(sizes.tolist(), counts.tolist(), strict=True)) == collections.Counter(lengths)
    assert sizes.tolist() == sorted(set(lengths))
