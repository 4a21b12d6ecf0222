"""The loss: two sums that divide once, and the chunked form against the plain one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models.loss import chunked_cross_entropy, cross_entropy, token_losses


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    return {
        "hidden": jnp.asarray(rng.normal(size=(3, 5, 8)), jnp.float32),
        "embedding": jnp.asarray(rng.normal(size=(37, 8)), jnp.float32),
        "targets": jnp.asarray(rng.integers(0, 37, (3, 5))),
        "weights": jnp.asarray([[1, 1, 1, 1, 1], [1, 0.5, 0, 0, 0], [0] * 5], jnp.float32),
    }


def plain(case, **options):
    logits = jnp.einsum("BLD,VD->BLV", case["hidden"], case["embedding"])
    return cross_entropy(logits, case["targets"], case["weights"], **options)


def test_token_losses_agree_with_optax(case):
    logits = case["hidden"] @ case["embedding"].T
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, case["targets"])
    np.testing.assert_allclose(token_losses(logits, case["targets"]), expected, rtol=1e-5)


def test_label_smoothing_is_cross_entropy_against_the_smoothed_distribution(case):
    logits = case["hidden"] @ case["embedding"].T
    smoothed = optax.smooth_labels(jax.nn.one_hot(case["targets"], 37), 0.1)
    expected = optax.softmax_cross_entropy(logits, smoothed)
    found = token_losses(logits, case["targets"], label_smoothing=0.1)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_z_loss_adds_the_squared_log_normaliser(case):
    logits = case["hidden"] @ case["embedding"].T
    extra = token_losses(logits, case["targets"], z_loss=0.5) - token_losses(
        logits, case["targets"]
    )
    expected = 0.5 * jax.nn.logsumexp(logits, axis=-1) ** 2
    np.testing.assert_allclose(extra, expected, rtol=1e-4)


def test_sums_are_not_means_of_rows(case):
    losses = token_losses(case["hidden"] @ case["embedding"].T, case["targets"])
    found = plain(case)
    np.testing.assert_allclose(found.weight, 6.5)
    np.testing.assert_allclose(found.total, np.sum(losses * case["weights"]), rtol=1e-6)


def test_sums_of_microbatches_are_the_sums_of_the_batch(case):
    whole = plain(case)
    halves = [
        plain({k: v if k == "embedding" else v[rows] for k, v in case.items()})
        for rows in (slice(0, 1), slice(1, 3))
    ]
    np.testing.assert_allclose(whole, np.sum(halves, axis=0), rtol=1e-6)


def test_sums_are_float32_for_bfloat16_logits(case):
    logits = (case["hidden"] @ case["embedding"].T).astype(jnp.bfloat16)
    total, weight = cross_entropy(logits, case["targets"], case["weights"].astype(jnp.bfloat16))
    assert total.dtype == weight.dtype == jnp.float32


@pytest.mark.parametrize("options", [{}, {"z_loss": 1e-2, "label_smoothing": 0.1}])
@pytest.mark.parametrize("chunk", [8, 37, 64])
def test_chunked_loss_and_gradients_equal_the_plain_ones(case, chunk, options):
    def chunked(hidden, embedding):
        return chunked_cross_entropy(
            hidden, embedding, case["targets"], case["weights"], chunk=chunk, **options
        ).total

    def unchunked(hidden, embedding):
        return plain(case | {"hidden": hidden, "embedding": embedding}, **options).total

    arguments = case["hidden"], case["embedding"]
    found, found_gradients = jax.value_and_grad(chunked, (0, 1))(*arguments)
    expected, expected_gradients = jax.value_and_grad(unchunked, (0, 1))(*arguments)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for a, b in zip(found_gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_chunked_loss_never_holds_all_logits():
    shapes = [(4, 256, 16), (8192, 16), (4, 256), (4, 256)]
    arguments = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in zip(shapes, ["float32", "float32", "int32", "float32"], strict=True)
    ]

    def temporary_bytes(loss):
        gradient = jax.jit(jax.grad(lambda *a: loss(*a).total, (0, 1)))
        return gradient.lower(*arguments).compile().memory_analysis().temp_size_in_bytes

    def whole(hidden, embedding, targets, weights):
        return cross_entropy(hidden @ embedding.T, targets, weights)

    def chunked(*a):
        return chunked_cross_entropy(*a, chunk=512)

    assert temporary_bytes(chunked) * 4 < temporary_bytes(whole)
