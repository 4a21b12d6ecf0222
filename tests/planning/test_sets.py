import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import Bucket, Plan
from pipeline.planning.fit import make_search
from pipeline.planning.sets import SetSearch, make_candidates
from tests.planning.corpora import lognormal

LENGTHS = lognormal(4000, 4.2, 0.9, least=3, most=512)


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
    candidates = [Bucket(192 // length, length) for length in range(16, 97, 16)]
    took = [rate * each.positions for each, rate in zip(candidates, rates, strict=True)]
    seconds = dict(zip(candidates, zip(took, compiling, strict=True), strict=True))

    def total(chosen):
        batches = Plan(lengths, chosen, packing=packing).batches_per_bucket
        steps = sum(count * seconds[bucket][0] for bucket, count in batches.items())
        return steps * epochs + sum(seconds[bucket][1] for bucket in chosen)

    arguments = {"tokens_per_batch": 192, "length_multiple": 16, "packing": packing}
    search = SetSearch(make_search(np.array(lengths), **arguments), candidates)
    found = search.best(took, compiling=compiling, max_buckets=2, epochs=epochs)
    best = min(each.seconds * epochs + each.compiling for each in found.values())
    sets = itertools.chain(*(itertools.combinations(candidates, n) for n in (1, 2)))
    totals = [total(chosen) for chosen in sets if chosen[-1].length >= max(lengths)]
    assert best == pytest.approx(min(totals))
    assert search.bound(took) * epochs <= best + 1e-9


@pytest.mark.parametrize("kind", ["one", "pairs"])
def test_batches_and_padding_of_a_set_are_those_of_its_plan(kind, translations):
    lengths, most = (LENGTHS, 4) if kind == "one" else (translations(3000), 2)
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
    search = SetSearch(make_search(LENGTHS, tokens_per_batch=4096))
    seconds = np.array([bucket.positions * 1.0 for bucket in search.candidates])
    seconds[0] = np.inf
    found = search.best(seconds, compiling=np.zeros(len(seconds)), max_buckets=3)
    assert all(search.candidates[0] not in each.buckets for each in found.values())
    nothing = np.full(len(seconds), np.inf)
    assert search.best(nothing, compiling=np.zeros(len(nothing)), max_buckets=3) == {}


@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_candidates_keep_the_budget_within_a_tenth_where_rows_allow_it(packing):
    lengths = lognormal(4000, 4.2, 0.9, least=3, most=900)
    search = make_search(lengths, tokens_per_batch=8192, row_multiple=2, packing=packing)
    candidates = make_candidates(search)
    for bucket in candidates:
        assert bucket.positions <= 8192
        assert bucket.positions > min(0.9 * 8192, 8192 - 2 * bucket.length)
        assert bucket.rows % 2 == 0
    assert max(bucket.length for bucket in candidates) >= 900
