import numpy as np
import pytest

from pipeline import Bucket, Plan
from pipeline.planning.balance import balance
from tests.planning.corpora import costs_of, lognormal


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
