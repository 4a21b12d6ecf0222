"""Losses: two sums that divide once."""

import jax.numpy as jnp
import numpy as np
import pytest

from models.loss import cross_entropy


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    return {
        "logits": jnp.asarray(4 * rng.normal(size=(3, 5, 37)), jnp.float32),
        "targets": jnp.asarray(rng.integers(0, 37, (3, 5))),
        "weights": jnp.asarray([[1, 1, 1, 1, 1], [1, 0.5, 0, 0, 0], [0] * 5], jnp.float32),
    }


def test_sums_are_of_all_positions_and_not_means_of_rows(case):
    logits = np.asarray(case["logits"], np.float64)
    normaliser = np.log(np.exp(logits).sum(axis=-1))
    losses = (
        normaliser - np.take_along_axis(logits, np.asarray(case["targets"])[..., None], -1)[..., 0]
    )
    found = cross_entropy(**case)
    np.testing.assert_allclose(found.weight, 6.5)
    np.testing.assert_allclose(found.total, np.sum(losses * case["weights"]), rtol=1e-6)


def test_sums_are_float32_for_bfloat16_logits(case):
    logits = case["logits"].astype(jnp.bfloat16)
    total, weight = cross_entropy(logits, case["targets"], case["weights"].astype(jnp.bfloat16))
    assert total.dtype == weight.dtype == jnp.float32
    exact = cross_entropy(logits.astype(jnp.float32), case["targets"], case["weights"])
    assert total == exact.total
