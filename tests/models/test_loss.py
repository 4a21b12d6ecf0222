"""Losses: two sums that divide once, and those of pairs against their definitions."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.loss import cross_entropy, preference_losses


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


def test_positions_without_weight_have_no_gradient(case):
    def total(logits):
        return cross_entropy(logits, case["targets"], case["weights"]).total

    gradient = np.asarray(jax.grad(total)(case["logits"]))
    expected = jax.nn.softmax(case["logits"]) - jax.nn.one_hot(case["targets"], 37)
    np.testing.assert_allclose(gradient, expected * case["weights"][..., None], atol=1e-6)
    assert not gradient[np.asarray(case["weights"]) == 0].any()


# Of the chosen and the rejected continuation: log-probabilities, then those of the reference.
PAIR = ((-10.0, -14.0), (-11.0, -12.0))  # the log-ratio of one is 1, that of the other −2


@pytest.mark.parametrize(
    ("kind", "beta", "expected"),
    [
        ("sigmoid", 0.1, math.log(1 + math.exp(-0.3))),  # β · (1 − (−2)) = 0.3
        ("ipo", 0.1, (3 - 1 / (2 * 0.1)) ** 2),
        ("hinge", 0.1, 1 - 0.3),
        ("hinge", 0.5, 0.0),  # β · 3 is above 1
    ],
)
def test_the_loss_of_a_pair_is_that_of_its_paper(kind, beta, expected):
    loss, margin = preference_losses(*map(jnp.array, PAIR), beta=beta, kind=kind)
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    assert float(margin) == pytest.approx(3 * beta, rel=1e-6)
    assert loss.dtype == margin.dtype == jnp.float32


@pytest.mark.parametrize("kind", ["sigmoid", "ipo", "hinge"])
def test_what_both_continuations_have_in_common_cancels(kind):
    logprobs, reference = np.random.default_rng(0).normal(0, 9, (2, 3, 5, 2)).astype(np.float32)
    one, other = (
        preference_losses(jnp.array(each), jnp.array(reference), beta=0.2, kind=kind)
        for each in (logprobs, logprobs + np.float32(4))
    )
    assert one[0].shape == (3, 5)
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_a_large_margin_has_a_finite_loss_and_gradient():
    def loss(margin):
        return preference_losses(jnp.array([-1.0, 0.0]) * margin, jnp.zeros(2), beta=1.0)[0]

    value, gradient = jax.value_and_grad(loss)(1e4)
    assert (float(value), float(gradient)) == (1e4, 1.0)
