"""Sums, means and last values of segments, computed on the device; their losses."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from pipeline.fields.arrays import in_planned_order, spec_of, with_auto_axes


def position_losses(
    loss: Callable, params: Any, batch: Mapping[str, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Σ weight · nll and Σ weight of a batch, and the weight · nll of each position.

    `loss` returns the first two. It is linear in `loss_weights`, so its gradient by them is the
    nll of each position. This needs no second pass: only the last product is differentiated.
    """

    def total(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        return loss(params, {**batch, "loss_weights": weights})

    value, pull, weight = jax.vjp(total, batch["loss_weights"], has_aux=True)
    return value, weight, batch["loss_weights"] * pull(jnp.ones_like(value))[0]


def sum_segments(
    losses: jax.Array, batch: Mapping[str, jax.Array], shape: tuple[int, int]
) -> jax.Array:
    """Σ weight · nll and Σ weight of each segment: float32 `[2, rows, segments]`.

    >>> batch = {"inputs_segment_ids": jnp.array([[1, 1, 2, 0]]), "loss_weights": jnp.ones((1, 4))}
    >>> sum_segments(jnp.array([[1.0, 2, 4, 8]]), batch, (1, 3)).tolist()
    [[[3.0, 4.0, 0.0]], [[2.0, 1.0, 0.0]]]

    `losses` has the weight · nll of each position, `[rows, length]`. `shape` has the rows of the
    whole batch, and the most segments in a row, from `plan.most_segments()`. The field `rows` of a
    microbatch, int32 [rows], has the numbers of its rows in the whole batch.
    """
    ids = batch["targets_segment_ids" if "targets_segment_ids" in batch else "inputs_segment_ids"]
    sums = jnp.stack([_sum_by(ids, each, shape[1]) for each in (losses, batch["loss_weights"])])
    if "rows" not in batch:
        return sums

    def spread(sums: jax.Array, rows: jax.Array) -> jax.Array:
        return jnp.zeros((2, *shape), jnp.float32).at[:, rows].set(sums)

    return with_auto_axes(spread, sums, batch["rows"], spec=PartitionSpec())


def sum_continuations(values: jax.Array, batch: Mapping[str, jax.Array], most: int) -> jax.Array:
    """The sum over each continuation of the groups of a batch: float32 `[rows, most]`.

    The sum for branch id `b` is in column `b - 1`; prefixes, documents and padding do not count. So
    log-probabilities of tokens become those of continuations.

    >>> batch = {"inputs_branch_ids": jnp.array([[0, 1, 1, 2, 0]])}
    >>> sum_continuations(jnp.array([[1.0, 2, 4, 8, 16]]), batch, 3).tolist()
    [[6.0, 8.0, 0.0]]

    `values` are those of each position, `[rows, length]`, such as weight · log-probability. `most`
    is the most continuations in a row: `plan.most_continuations()[bucket]`, or the columns of a
    feature of continuations.
    """
    return _sum_by(batch["inputs_branch_ids"], values, most)


def segment_mean(values: jax.Array, batch: Mapping[str, jax.Array], most: int) -> jax.Array:
    """The mean over each segment: float32 `[rows, most, …]`, 0 where a row has no such segment.

    The mean for segment id `s` is in column `s - 1`, as in features of examples. A piece of a split
    example is a segment of its own.

    >>> batch = {"inputs_segment_ids": jnp.array([[1, 1, 2, 0]])}
    >>> segment_mean(jnp.array([[1.0, 2, 4, 8]]), batch, 3).tolist()
    [[1.5, 4.0, 0.0]]

    `values` are those of each position, `[rows, length, …]`, such as the last hidden states of a
    model. For the decoder of pairs, give `{"inputs_segment_ids": batch["targets_segment_ids"]}` as
    `batch`. `most` is the most segments in a row: the columns of a feature of examples, or
    `plan.most_segments()[bucket]`.
    """
    ids = batch["inputs_segment_ids"]
    counts = _sum_by(ids, jnp.ones_like(ids), most)
    shape = (*counts.shape, *[1] * (values.ndim - 2))
    return _sum_by(ids, values, most) / jnp.maximum(counts, 1).reshape(shape)


def segment_last(values: jax.Array, batch: Mapping[str, jax.Array], most: int) -> jax.Array:
    """The value at the last position of each segment: float32 `[rows, most, …]`.

    Arguments and places are those of `segment_mean`. For the decoder of pairs, give
    `targets_columns` as `inputs_columns`, too, if the batch has them.

    >>> batch = {"inputs_segment_ids": jnp.array([[1, 1, 2, 0]])}
    >>> segment_last(jnp.array([[1.0, 2, 4, 8]]), batch, 3).tolist()
    [[2.0, 4.0, 0.0]]
    """
    ids = batch["inputs_segment_ids"]

    def keep_last(xp: Any, ids: jax.Array) -> jax.Array:
        return xp.where(ids != xp.pad(ids, ((0, 0), (0, 1)))[:, 1:], ids, 0)

    columns = batch.get("inputs_columns")
    keep = functools.partial(in_planned_order(keep_last, columns), jnp)
    more = [] if columns is None else [columns]
    ids = with_auto_axes(keep, ids, *more, spec=spec_of(ids, 2))
    return _sum_by(ids, values, most)


def _sum_by(ids: jax.Array, values: jax.Array, most: int) -> jax.Array:
    """The sum of the values with each id, from 1, in each row: float32 `[rows, most, …]`."""
    rows, inner = len(ids), values.shape[2:]

    def add(ids: jax.Array, values: jax.Array) -> jax.Array:
        # One more place in each row, for values without an id.
        place = jnp.arange(rows)[:, None] * (most + 1) + jnp.where(ids > 0, ids - 1, most)
        flat = values.astype(jnp.float32).reshape(-1, *inner)
        sums = jax.ops.segment_sum(flat, place.ravel(), rows * (most + 1))
        return sums.reshape(rows, most + 1, *inner)[:, :most]

    return with_auto_axes(add, ids, values, spec=spec_of(ids, 1))


def by_segment(
    loss: Callable, batch: Mapping[str, jax.Array], most: int
) -> tuple[Callable, dict[str, jax.Array]]:
    """`loss` with the sums of segments, and the batch for it, for a sum over microbatches.

    The function returns Σ weight · nll, and a pair of Σ weight and `sum_segments`; the batch has
    the numbers of its rows; `most` is the most segments in a row.
    """
    rows = len(batch["loss_weights"])

    def sums(
        params: Any, part: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        value, weight, losses = position_losses(loss, params, part)
        return value, (weight, sum_segments(losses, part, (rows, most)))

    return sums, {**batch, "rows": jnp.arange(rows)}
