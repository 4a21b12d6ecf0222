"""Losses: weighted cross-entropy as two sums, to divide once."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from optax import softmax_cross_entropy_with_integer_labels


class LossSum(NamedTuple):
    """Two float32 scalars: add them over microbatches, devices and hosts; divide at the very end.

    A mean over rows, or over devices, would count the tokens of a poorly filled row more than those
    of a full one.
    """

    total: Array  # Σ weight · nll
    weight: Array  # Σ weight


def cross_entropy(logits: Array, targets: Array, weights: Array) -> LossSum:
    """Return Σ weights · −ln(probability of each target), in nats, and Σ weights.

    Args:
        logits: [..., V], of any floating point; the loss is computed in float32.
        targets: int [...], from 0 to V − 1.
        weights: float [...]; 0 leaves a position out.
    """
    losses = softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
    weights = weights.astype(jnp.float32)
    return LossSum(jnp.sum(losses * weights), jnp.sum(weights))
