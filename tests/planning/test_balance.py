import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import Bucket, Plan
from pipeline.planning.balance import balance, even_order
from tests.planning.corpora import costs_of, lognormal


@given(st.integers(1, 300))
def test_an_order_holds_every_rank_once(rows):
    assert sorted(even_order(rows)) == list(range(rows))


@pytest.mark.parametrize("rows", [8, 12, 64, 96, 128, 480])
def test_contiguous_slices_are_even_for_every_number_of_hosts(rows):
    costs = np.linspace(1, 3, rows)  # the costliest row costs three times the cheapest
    order = costs[::-1][even_order(rows)]
    for hosts in (h for h in range(2, rows // 2 + 1) if rows % h == 0):
        share = order.reshape(hosts, -1).sum(axis=1)
        assert share.max() / share.mean() < 1 + 2.5 * hosts / rows


def test_empty_rows_are_spread_over_the_batch():
    rows, places = balance(np.array([9, 9, 9, 9]), total=8)
    assert sorted(rows) == [0, 1, 2, 3]
    assert np.bincount(places // 4).tolist() == [2, 2]


@pytest.mark.parametrize("kind", ["one", "pairs"])
def test_hosts_get_even_attention_work_in_real_batches(kind, translations):
    if kind == "pairs":
        plan = Plan(translations(20_000), [Bucket(64, (128, 128))], overflow="drop")
    else:
        plan = Plan(lognormal(20_000, 4, 1, most=512), [Bucket(64, 512)])
    for cost in (costs_of(plan.batch(step)) for step in range(5)):
        for hosts in (2, 4, 8):
            share = cost.reshape(hosts, -1).sum(axis=1)
            random = np.sort(cost)[::-1].reshape(hosts, -1).sum(axis=1)
            assert share.max() / share.mean() < 1.15
            assert share.max() < random.max()
