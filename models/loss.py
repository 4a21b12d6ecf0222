"""Losses: weighted cross-entropy as two sums, to divide once, and losses of preferences."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, nn
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


# The loss of a pair, from the reward margin m and beta.
PREFERENCE_LOSSES = {
    "sigmoid": lambda m, beta: -nn.log_sigmoid(m),  # DPO, arXiv:2305.18290: −ln σ(m)
    "ipo": lambda m, beta: ((m - 0.5) / beta) ** 2,  # arXiv:2310.12036: (m/β − 1/(2β))²
    "hinge": lambda m, beta: nn.relu(1 - m),  # SLiC, arXiv:2305.10425: max(0, 1 − m)
}


def preference_losses(
    logprobs: Array, reference: Array, *, beta: float, kind: str = "sigmoid"
) -> tuple[Array, Array]:
    """Return the loss of each pair of continuations of one prompt, and its reward margin.

    The reward of a continuation is β · (ln p − ln p of the reference); the margin is the reward of
    the preferred continuation minus that of the other. Terms that both have in common cancel.

    >>> losses, margins = preference_losses(
    ...     jnp.array([[-10.0, -14.0]]), jnp.array([[-11.0, -12.0]]), beta=0.5, kind="hinge"
    ... )
    >>> margins.tolist(), losses.tolist()  # 0.5 · ((−10 + 11) − (−14 + 12)) = 1.5
    ([1.5], [0.0])

    Args:
        logprobs: float [..., 2]; the sum of the log-probabilities of the tokens of each
            continuation, in nats, the preferred one first. For "ipo", TRL uses means, not sums.
        reference: float [..., 2]; the same by the model that training begins with.
        beta: above 0; how much a nat counts. The smaller, the farther the model may go from the
            reference.
        kind: one of `PREFERENCE_LOSSES`.

    Returns:
        float32 [...] each.
    """
    rewards = beta * (logprobs.astype(jnp.float32) - reference.astype(jnp.float32))
    margins = rewards[..., 0] - rewards[..., 1]
    return PREFERENCE_LOSSES[kind](margins, beta), margins
