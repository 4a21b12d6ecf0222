"""Weighted cross-entropy as two sums, so that it can be normalised once, over the global batch.

Shape letters are explained in `models/__init__.py`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class LossSum(NamedTuple):
    """Two float32 scalars: add them over microbatches, devices and hosts; divide at the very end.

    Dividing row by row, or device by device, and averaging after that would count the tokens of
    a poorly filled row more than those of a full one.
    """

    total: Array  # Σ weight · nll
    weight: Array  # Σ weight


def cross_entropy(
    logits: Array,
    targets: Array,
    weights: Array,
    *,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> LossSum:
    """Return Σ weights · loss per token, and Σ weights.

    Args:
        logits: [..., V].
        targets: int [...].
        weights: float [...]; 0 leaves a position out.
        z_loss: see `token_losses`.
        label_smoothing: see `token_losses`.
    """
    losses = token_losses(logits, targets, z_loss=z_loss, label_smoothing=label_smoothing)
    return _weigh(losses, weights)


def token_losses(
    logits: Array, targets: Array, *, z_loss: float = 0.0, label_smoothing: float = 0.0
) -> Array:
    """Return float32 [...]: −ln of the probability given to each target, in nats.

    >>> import jax.numpy as jnp
    >>> print(token_losses(jnp.log(jnp.array([[0.25, 0.75]])), jnp.array([1])))
    [0.287...]

    Args:
        logits: [..., V].
        targets: int [...], from 0 to V − 1.
        z_loss: adds z_loss · (ln Σ exp(logits))², which keeps logits from drifting (PaLM,
            Chowdhery et al., 2022; 1e-4 there).
        label_smoothing: the target distribution keeps 1 − label_smoothing on the target and
            spreads the rest evenly over all V tokens (Szegedy et al., 2016).
    """
    logits = logits.astype(jnp.float32)
    log_normaliser = jax.nn.logsumexp(logits, axis=-1)
    wanted = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    mean = jnp.mean(logits, axis=-1)
    return _combine(log_normaliser, wanted, mean, z_loss, label_smoothing)


def chunked_cross_entropy(
    hidden: Array,
    embedding: Array,
    targets: Array,
    weights: Array,
    *,
    chunk: int = 4096,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> LossSum:
    """Return what `cross_entropy` gives for logits hidden · embeddingᵀ, which never all exist.

    The vocabulary is taken `chunk` tokens at a time, with a running maximum and sum as in an
    online softmax (Milakov and Gimelshein, 2018); the backward pass computes each chunk's logits
    again. So at most [B, L, chunk] logits are in memory, for one more matrix product.

    Args:
        hidden: [B, L, D], as from `Decoder.hidden`.
        embedding: [V, D]; it is cast to the dtype of `hidden`.
        targets: int [B, L].
        weights: float [B, L].
        chunk: tokens of the vocabulary at a time; V need not be a multiple.
        z_loss: see `token_losses`.
        label_smoothing: see `token_losses`.
    """
    V, D = embedding.shape
    num_chunks = -(-V // chunk)
    padded = jnp.pad(embedding.astype(hidden.dtype), ((0, num_chunks * chunk - V), (0, 0)))
    starts = jnp.arange(num_chunks) * chunk

    @jax.checkpoint
    def add_chunk(sums, start_and_part):
        peak, normaliser, wanted, total = sums
        start, part_CD = start_and_part
        logits = jnp.einsum("BLD,CD->BLC", hidden, part_CD, preferred_element_type=jnp.float32)
        tokens_C = start + jnp.arange(chunk)
        total += jnp.sum(logits, axis=-1, where=tokens_C < V)
        wanted += jnp.sum(logits, axis=-1, where=tokens_C == targets[..., None])
        logits = jnp.where(tokens_C < V, logits, -jnp.inf)
        # The peak only keeps exp() in range and cancels out, so no gradient runs through it.
        new_peak = jnp.maximum(peak, jax.lax.stop_gradient(jnp.max(logits, axis=-1)))
        normaliser *= jnp.exp(peak - new_peak)
        normaliser += jnp.sum(jnp.exp(logits - new_peak[..., None]), axis=-1)
        return (new_peak, normaliser, wanted, total), None

    zeros = jnp.zeros(targets.shape, jnp.float32)
    sums, _ = jax.lax.scan(
        add_chunk,
        (zeros - jnp.inf, zeros, zeros, zeros),
        (starts, padded.reshape(num_chunks, chunk, D)),
    )
    peak, normaliser, wanted, total = sums
    losses = _combine(peak + jnp.log(normaliser), wanted, total / V, z_loss, label_smoothing)
    return _weigh(losses, weights)


def _combine(log_normaliser, wanted, mean, z_loss, label_smoothing):
    """Return the loss per token from ln Σ exp(logits), the target's logit and the mean logit."""
    if label_smoothing:
        wanted = (1 - label_smoothing) * wanted + label_smoothing * mean
    losses = log_normaliser - wanted
    return losses + z_loss * jnp.square(log_normaliser) if z_loss else losses


def _weigh(losses, weights):
    weights = weights.astype(jnp.float32)
    return LossSum(jnp.sum(losses * weights), jnp.sum(weights))
