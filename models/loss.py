"""Losses: weighted cross-entropy as two sums, to divide once; in parts where logits are large."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from optax import softmax_cross_entropy_with_integer_labels

from models.mesh import count_parts, split_batch

# Float32 logits of a device, in bytes: from the first number on they are made in chunks, which have
# at most the second. Each chunk is computed again in the backward pass, which takes a third more
# time for the last matrix product; a smaller limit saves no memory worth that.
LARGE = 2**29
CHUNK = 2**27


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
    return _weigh(_losses(logits, targets), weights)


def chunked_cross_entropy(
    hidden: Array,
    logits: Callable[[Array], Array],
    targets: Array,
    weights: Array,
    chunks: int | None = None,
) -> LossSum:
    """Return `cross_entropy(logits(hidden), targets, weights)`, without all logits in memory.

    Logits and their gradients are computed for one chunk of the columns after another, and again in
    the backward pass. For 4 rows of 2,048 tokens and 50,000 ids, all logits take 1.6 GB, and a step
    twice that.

    Args:
        hidden: [B, L, D], the last hidden states.
        logits: from some columns of `hidden`, [B, l, D], to [B, l, V].
        targets: int [B, L].
        weights: float [B, L].
        chunks: the number of chunks, which divides L, or each device's part of it; None: 1, or so
            many that a chunk of large logits takes at most 128 MiB on a device.
    """
    B, L, _ = hidden.shape
    shape_BLV = jax.eval_shape(logits, hidden).shape
    rows, length, vocabulary = count_parts(shape_BLV)
    if chunks is None:
        chunks = _count_chunks(
            4 * math.prod(shape_BLV) // (rows * length * vocabulary), L // length
        )
    if chunks == 1:
        return cross_entropy(logits(hidden), targets, weights)

    def cut(x: Array) -> Array:
        # Each device cuts the columns that it holds.
        x = x.reshape(B, length, chunks, L // (length * chunks), *x.shape[2:])
        return jnp.moveaxis(x, 2, 0).reshape(chunks, B, L // chunks, *x.shape[4:])

    def losses(_: None, chunk: tuple[Array, Array]) -> tuple[None, Array]:
        hidden, targets = map(split_batch, chunk)
        return None, _losses(logits(hidden), targets)

    _, losses_CBl = jax.lax.scan(jax.checkpoint(losses), None, (cut(hidden), cut(targets)))
    losses_BL = jnp.moveaxis(losses_CBl.reshape(chunks, B, length, -1), 0, 2).reshape(B, L)
    return _weigh(losses_BL, weights)


def _count_chunks(size: int, length: int) -> int:
    """The least divisor of a length with which a chunk of logits of this size is small enough."""
    if size < LARGE:
        return 1
    return next(
        n for n in range(1, length + 1) if length % n == 0 and (size <= n * CHUNK or n == length)
    )


def _losses(logits: Array, targets: Array) -> Array:
    return softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)


def _weigh(losses: Array, weights: Array) -> LossSum:
    weights = weights.astype(jnp.float32)
    return LossSum(jnp.sum(losses * weights), jnp.sum(weights))
