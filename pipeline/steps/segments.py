"""The losses of segments, summed on the device from the losses of the step.

If a loss is linear in `loss_weights`, the losses of positions are its gradient. If not, such as a
function of the log-probabilities of two continuations, it returns the losses of segments itself.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pipeline.errors import InvalidValue


def differentiate(
    loss: Callable, params: Any, batch: Mapping[str, jax.Array]
) -> tuple[jax.Array, list[Any], Callable]:
    """The value of `loss`, its other results, and the function from cotangents to the weights."""

    def total(weights: jax.Array) -> tuple[jax.Array, list[Any]]:
        value, *others = loss(params, {**batch, "loss_weights": weights})
        return value, others

    value, pull, others = jax.vjp(total, batch["loss_weights"], has_aux=True)
    return value, others, pull


def position_losses(
    loss: Callable, params: Any, batch: Mapping[str, jax.Array]
) -> tuple[jax.Array, Any, jax.Array]:
    """Σ weight · nll and Σ weight of a batch, and the weight · nll of each position.

    `loss` returns the first two. It is linear in `loss_weights`, so its gradient by them is the
    nll of each position. This needs no second pass: only the last product is differentiated.
    """
    value, (weight, *_), pull = differentiate(loss, params, batch)
    if value.ndim:
        raise InvalidValue(
            f"the loss returns an array of shape {value.shape}, by segment, and no values of "
            'positions; score with a step that returns it, and per="segment"'
        )
    return value, weight, batch["loss_weights"] * pull(jnp.ones_like(value))[0]


def sum_segments(
    losses: jax.Array, batch: Mapping[str, jax.Array], shape: tuple[int, int]
) -> jax.Array:
    """Σ weight · nll and Σ weight of each segment: float32 `[2, rows, segments]`.

    >>> batch = {"inputs_segment_ids": jnp.array([[1, 1, 2, 0]]), "loss_weights": jnp.ones((1, 4))}
    >>> sum_segments(jnp.array([[1.0, 2, 4, 8]]), batch, (1, 3)).tolist()
    [[[3.0, 4.0, 0.0]], [[2.0, 1.0, 0.0]]]

    Args:
        losses: weight · nll of each position, `[rows, length]`.
        batch: fields of the batch; for a microbatch, `rows`, int32 [rows], has the numbers of its
            rows in the whole batch.
        shape: the rows of the whole batch, and the most segments in a row, from
            `plan.most_segments()`.
    """
    ids = batch["targets_segment_ids" if "targets_segment_ids" in batch else "inputs_segment_ids"]
    sums = [_sum_by(ids, each, shape[1]) for each in (losses, batch["loss_weights"])]
    return _place(jnp.stack(sums), batch, shape)


def sum_continuations(values: jax.Array, batch: Mapping[str, jax.Array], most: int) -> jax.Array:
    """The sum over each continuation of the groups of a batch: float32 `[rows, most]`.

    The sum for branch id `b` is in column `b - 1`; prefixes, documents and padding do not count. So
    log-probabilities of tokens become those of continuations.

    >>> batch = {"inputs_branch_ids": jnp.array([[0, 1, 1, 2, 0]])}
    >>> sum_continuations(jnp.array([[1.0, 2, 4, 8, 16]]), batch, 3).tolist()
    [[6.0, 8.0, 0.0]]

    Args:
        values: of each position, `[rows, length]`, such as weight · log-probability.
        batch: fields of the batch, with `inputs_branch_ids`.
        most: the most continuations in a row: `plan.most_continuations()[bucket]`, or the columns
            of a feature of continuations.
    """
    return _sum_by(batch["inputs_branch_ids"], values, most)


def _sum_by(ids: jax.Array, values: jax.Array, most: int) -> jax.Array:
    """The sum of the values with each id, from 1, in each row: float32 `[rows, most]`."""
    rows = len(ids)
    # One more place in each row, for values without an id.
    place = jnp.arange(rows)[:, None] * (most + 1) + jnp.where(ids > 0, ids - 1, most)
    flat = values.astype(jnp.float32).ravel()
    sums = jax.ops.segment_sum(flat, place.ravel(), rows * (most + 1))
    return sums.reshape(rows, most + 1)[:, :most]


def _place(sums: jax.Array, batch: Mapping[str, jax.Array], shape: tuple[int, int]) -> jax.Array:
    """Sums `[2, rows, segments]` of some rows of a batch, at their places in all: float32 `shape`.

    Segments beyond `shape` are empty, and dropped.
    """
    sums = sums.astype(jnp.float32)[:, :, : shape[1]]
    if "rows" not in batch and sums.shape[1:] == shape:
        return sums
    rows = batch.get("rows", jnp.arange(sums.shape[1]))
    return jnp.zeros((2, *shape), jnp.float32).at[:, rows, : sums.shape[2]].set(sums)


def sum_loss(loss: Callable) -> Callable:
    """A function of the first sum of `loss` and a list of the others; arrays are summed."""

    def sums(params: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, list[Any]]:
        value, *others = jax.tree.map(jnp.sum, loss(params, batch))
        return value, others

    return sums


def by_segment(
    loss: Callable, batch: Mapping[str, jax.Array], most: int
) -> tuple[Callable, dict[str, jax.Array]]:
    """`loss` with the sums of segments, and the batch for it, for a sum over microbatches.

    The function returns Σ weight · nll, and a list of Σ weight and `sum_segments`; the batch has
    the numbers of its rows; `most` is the most segments in a row. A loss that is not linear in
    `loss_weights` returns two arrays `[rows, segments]` instead of sums, with segment id `s` in
    column `s - 1`, which are used as they are. Sums of its other values come second in the list.
    """
    rows = len(batch["loss_weights"])

    def sums(params: Any, part: Mapping[str, jax.Array]) -> tuple[jax.Array, list[Any]]:
        value, (weight, *others), pull = differentiate(loss, params, part)
        if value.ndim:
            own = _place(jnp.stack([value, weight]), part, (rows, most))
            return value.sum(), [weight.sum(), *jax.tree.map(jnp.sum, others), own]
        losses = part["loss_weights"] * pull(jnp.ones_like(value))[0]
        return value, [weight, sum_segments(losses, part, (rows, most))]

    return sums, {**batch, "rows": jnp.arange(rows)}
