"""The losses of segments: sums made on the device, from the losses of the step that there are."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp


def position_losses(
    loss: Callable, params: Any, batch: Mapping[str, jax.Array]
) -> tuple[jax.Array, Any, jax.Array]:
    """Σ weight · nll and Σ weight of a batch, and the weight · nll of each position.

    `loss` gives the first two. It is linear in `loss_weights`, so that its gradient by them is the
    nll of each position. This takes no second pass: only the last product is differentiated.
    """

    def total(weights: jax.Array) -> tuple[jax.Array, Any]:
        return loss(params, {**batch, "loss_weights": weights})

    weights = batch["loss_weights"]
    value, pull, weight = jax.vjp(total, weights, has_aux=True)
    return value, weight, weights * pull(jnp.ones_like(value))[0]


def sum_segments(
    losses: jax.Array, batch: Mapping[str, jax.Array], shape: tuple[int, int]
) -> jax.Array:
    """Σ weight · nll and Σ weight of each segment: float32 `[2, rows, segments]`.

    >>> batch = {"inputs_segment_ids": jnp.array([[1, 1, 2, 0]]), "loss_weights": jnp.ones((1, 4))}
    >>> sum_segments(jnp.array([[1.0, 2, 4, 8]]), batch, (1, 3)).tolist()
    [[[3.0, 4.0, 0.0]], [[2.0, 1.0, 0.0]]]

    Args:
        losses: weight · nll of each position, `[rows, length]`.
        batch: fields of the batch; `rows`, int32 [rows], says which of all rows it has, if it is a
            microbatch.
        shape: of the whole batch the rows, and the most segments in a row, as
            `plan.most_segments()` says them.
    """
    ids = batch["targets_segment_ids" if "targets_segment_ids" in batch else "inputs_segment_ids"]
    rows, most = batch.get("rows", jnp.arange(len(ids))), shape[1]
    # A place more in each row, for padding.
    place = rows[:, None] * (most + 1) + jnp.where(ids > 0, ids - 1, most)
    both = jnp.stack([losses, batch["loss_weights"]]).astype(jnp.float32)
    count = shape[0] * (most + 1)
    sums = [jax.ops.segment_sum(each.ravel(), place.ravel(), count) for each in both]
    return jnp.stack(sums).reshape(2, shape[0], most + 1)[:, :, :most]


def by_segment(
    loss: Callable, batch: Mapping[str, jax.Array], most: int
) -> tuple[Callable, dict[str, jax.Array]]:
    """`loss` with the sums of segments, and the batch for it, for a sum over microbatches.

    The function gives Σ weight · nll, and Σ weight with `sum_segments`; the batch has the numbers
    of its rows; `most` is the most segments in a row.
    """
    rows = len(batch["loss_weights"])

    def sums(params: Any, part: Mapping[str, jax.Array]) -> tuple[jax.Array, Any]:
        total, weight, losses = position_losses(loss, params, part)
        return total, (weight, sum_segments(losses, part, (rows, most)))

    return sums, {**batch, "rows": jnp.arange(rows)}
