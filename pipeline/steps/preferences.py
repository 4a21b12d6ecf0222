"""Losses of pairs of continuations, from the log-probabilities in a loss of tokens."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pipeline.steps.segments import position_losses, sum_continuations

# The feature of continuations with the log-probabilities of the reference.
REFERENCE = "reference_logprob"


@dataclasses.dataclass(frozen=True)
class PairLoss:
    """A loss of segments that are pairs, the preferred continuation first; for `make_train_step`.

    Each pair weighs 1. The log also has the mean reward margin, and the share of pairs whose margin
    is above 0. A batch has the log-probabilities of the reference as the feature
    `reference_logprob`.

    Attributes:
        of_tokens: the loss of tokens, as for `make_train_step`, linear in `loss_weights`.
        objective: from log-probabilities of continuations, and those of the reference, both
            `[…, 2]`, to the losses and the reward margins of pairs, `[…]`.
    """

    of_tokens: Callable
    objective: Callable

    def __call__(self, params: Any, batch: Mapping[str, jax.Array]) -> tuple[Any, ...]:
        """The loss of each segment, its weight, and other values to log: `[rows, segments]`."""
        reference = batch[REFERENCE]
        rows, most = reference.shape
        logprobs = self.score_continuations(params, batch, most)
        pairs = rows, most // 2, 2
        losses, margins = self.objective(logprobs.reshape(pairs), reference.reshape(pairs))
        count = batch["inputs_segment_ids"].max(axis=1, keepdims=True)
        weights = (jnp.arange(most // 2) < count).astype(jnp.float32)
        others = {"reward_margin": margins * weights, "reward_accuracy": (margins > 0) * weights}
        return losses * weights, weights, others

    def score_continuations(
        self, params: Any, batch: Mapping[str, jax.Array], most: int
    ) -> jax.Array:
        """Σ weight · log-probability of each continuation, `[rows, most]`."""
        _, _, nll = position_losses(self.of_tokens, params, batch)
        return sum_continuations(-nll, batch, most)

    def score_reference(self, params: Any, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """`reference_logprob`, a step for `score(…, per="continuation")`."""
        most = batch["inputs"].shape[1]  # each has a position
        return {REFERENCE: self.score_continuations(params, batch, most)}
