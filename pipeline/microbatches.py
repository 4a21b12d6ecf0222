"""A batch in several parts: gradients summed over all tokens, divided once.

Averaging the gradients of microbatches, as `optax.MultiSteps` does, is wrong when they hold
different numbers of tokens. Here the sums are those of the whole batch.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pipeline.sharding import parts


def allowed(rows: int, sharding) -> list[int]:
    """Into how many microbatches a batch can be split, ascending: each device splits its rows.

    >>> from jax.sharding import Mesh, NamedSharding, PartitionSpec
    >>> allowed(12, NamedSharding(jax.make_mesh((1,), ("data",)), PartitionSpec("data")))
    [1, 2, 3, 4, 6, 12]
    """
    share = rows // parts(sharding)[0]
    return [number for number in range(1, share + 1) if share % number == 0]


def split(batch: Mapping[str, jax.Array], number: int, sharding) -> dict[str, jax.Array]:
    """The fields `[rows, length]` as `[number, rows / number, length]`, without a transfer.

    Each device cuts the rows that it holds, so microbatch `k` is the `k`-th part of every device.

    Args:
        batch: fields of the global batch.
        number: one of `allowed(rows, sharding)`.
        sharding: the `NamedSharding` of the fields; None on one device.
    """
    devices, placed = parts(sharding)[0], None
    if sharding is not None:
        stacked = jax.sharding.PartitionSpec(None, *sharding.spec)
        placed = jax.sharding.NamedSharding(sharding.mesh, stacked)

    def cut(field):
        rows, length = field.shape
        field = field.reshape(devices, number, rows // (devices * number), length)
        field = field.swapaxes(0, 1).reshape(number, rows // number, length)
        return field if placed is None else jax.lax.with_sharding_constraint(field, placed)

    return {name: cut(field) for name, field in batch.items()}


def summed_gradients(
    loss: Callable[[Any, Mapping[str, jax.Array]], tuple[jax.Array, jax.Array]],
    params: Any,
    batch: Mapping[str, jax.Array],
    *,
    microbatches: int,
    sharding,
) -> tuple[jax.Array, jax.Array, Any]:
    """Σ weight·nll, Σ weight, and the gradients of the first, of a whole batch.

    Args:
        loss: from parameters and a batch to the two sums, float32 scalars.
        params: what to differentiate by.
        batch: fields `[rows, length]` of the global batch.
        microbatches: how many parts to compute one after another; only one is in memory.
        sharding: the `NamedSharding` of the fields.
    """
    differentiate = jax.value_and_grad(loss, has_aux=True)
    if microbatches == 1:
        (total, weight), gradients = differentiate(params, batch)
        return total, weight, gradients

    def add(sums, microbatch):
        (total, weight), gradients = differentiate(params, microbatch)
        return jax.tree.map(jnp.add, sums, (total, weight, gradients)), None

    zero = jnp.zeros((), jnp.float32)
    start = zero, zero, jax.tree.map(jnp.zeros_like, params)
    return jax.lax.scan(add, start, split(batch, microbatches, sharding))[0]
