import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import Bucket, Plan
from pipeline.planning.fit import make_search
from pipeline.planning.sets import SetSearch, make_candidates


def lognormal(count=4000, longest=512, mean=4.2):
    rng = np.random.default_rng(0)
    return np.clip(rng.lognormal(mean, 0.9, count), 3, longest).astype(int)


def seconds_of_plan(lengths, buckets, seconds, **options):
    batches = Plan(lengths, buckets, **options).batches_per_bucket
    return sum(count * seconds[bucket] for bucket, count in batches.items())


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 96), min_size=1, max_size=80),
    st.lists(st.floats(0.5, 4), min_size=6, max_size=6),
    st.sampled_from(["best_fit", "none"]),
    st.lists(st.floats(0, 300), min_size=6, max_size=6),
    st.sampled_from([0.01, 1]),
)
def test_the_best_set_is_the_best_of_all_sets_planned_for_real(
    lengths, rates, packing, compiling, epochs
):
    lengths = np.array(lengths)
    candidates = [Bucket(192 // length, length) for length in range(16, 97, 16)]
    seconds = {b: rate * b.positions for b, rate in zip(candidates, rates, strict=True)}
    arguments = {"tokens_per_batch": 192, "length_multiple": 16, "packing": packing}
    search = SetSearch(make_search(lengths, **arguments), candidates)
    took, options = [*seconds.values()], {"max_buckets": 2, "epochs": epochs}
    found = search.best(took, compiling=compiling, **options)
    best = min(each.seconds * epochs + each.compiling for each in found.values())
    totals = [
        seconds_of_plan(lengths, chosen, seconds, packing=packing) * epochs
        + sum(compiling[candidates.index(bucket)] for bucket in chosen)
        for count in (1, 2)
        for chosen in itertools.combinations(candidates, count)
        if chosen[-1].length >= lengths.max()
    ]
    assert best == pytest.approx(min(totals))
    assert search.bound(took) * epochs <= best + 1e-9


@pytest.mark.parametrize("kind", ["one", "pairs"])
def test_batches_and_padding_of_a_set_are_those_of_its_plan(kind, translations):
    lengths, most = (lognormal(), 4) if kind == "one" else (translations(3000), 2)
    multiple = 128 if kind == "one" else 16
    search = SetSearch(make_search(lengths, tokens_per_batch=4096, length_multiple=multiple))
    seconds = [each.positions * (1 + sum(each.lengths) / 400) for each in search.candidates]
    found = search.best(seconds, compiling=[0.0] * len(seconds), max_buckets=most)
    assert [*found] == [*range(1, most + 1)]
    for each in found.values():
        plan = Plan(lengths, each.buckets)
        assert tuple(plan.batches_per_bucket.values()) == each.batches
        assert plan.padding == pytest.approx(each.padding)


def test_shapes_that_cannot_be_used_are_in_no_set():
    search = SetSearch(make_search(lognormal(), tokens_per_batch=4096))
    seconds = np.array([bucket.positions * 1.0 for bucket in search.candidates])
    seconds[0] = np.inf
    found = search.best(seconds, compiling=np.zeros(len(seconds)), max_buckets=3)
    assert all(search.candidates[0] not in each.buckets for each in found.values())
    nothing = np.full(len(seconds), np.inf)
    assert search.best(nothing, compiling=np.zeros(len(nothing)), max_buckets=3) == {}


@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_candidates_keep_the_budget_within_a_tenth_where_rows_allow_it(packing):
    lengths = lognormal(longest=900)
    search = make_search(lengths, tokens_per_batch=8192, row_multiple=2, packing=packing)
    candidates = make_candidates(search)
    for bucket in candidates:
        assert bucket.positions <= 8192
        assert bucket.positions > min(0.9 * 8192, 8192 - 2 * bucket.length)
        assert bucket.rows % 2 == 0
    assert max(bucket.length for bucket in candidates) >= 900
