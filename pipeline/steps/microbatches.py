"""A batch in several parts, whose sums are those of the whole batch."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from pipeline.errors import InvalidValue, require_whole
from pipeline.fields.arrays import with_auto_axes
from pipeline.loading.dynamic_context import DynamicContext
from pipeline.loading.sharding import parts, sharding_of

T = TypeVar("T")

# The sharding of the fields of a batch; None on one device.
Sharding = NamedSharding | DynamicContext | None


def allowed(rows: int, sharding: NamedSharding | None) -> list[int]:
    """The numbers of microbatches that a batch can be split into, ascending.

    Each device splits its own rows.

    >>> allowed(12, NamedSharding(jax.make_mesh((1,), ("data",)), PartitionSpec("data")))
    [1, 2, 3, 4, 6, 12]
    """
    share = rows // parts(sharding)[0]
    return [number for number in range(1, share + 1) if share % number == 0]


def split(
    batch: Mapping[str, Any], number: int, sharding: NamedSharding | None
) -> dict[str, jax.Array]:
    """The fields `[rows, …]` as `[number, rows / number, …]`, without a transfer.

    Each device cuts the rows that it holds, so microbatch `k` is the `k`-th part of every device.
    `number` is one of `allowed(rows, sharding)`.
    """
    devices = parts(sharding)[0]

    def cut(field: jax.Array) -> jax.Array:
        rows, *rest = field.shape
        field = field.reshape(devices, number, rows // (devices * number), *rest)
        return field.swapaxes(0, 1).reshape(number, rows // number, *rest)

    def place(field: jax.Array) -> jax.Array:
        # Other dimensions keep their sharding: that of positions, and none of segments.
        explicit = jax.typeof(field).sharding
        if explicit.mesh.explicit_axes:
            return with_auto_axes(cut, field, spec=PartitionSpec(None, *explicit.spec))
        if sharding is None:
            return cut(field)
        others = [PartitionSpec.UNCONSTRAINED] * (field.ndim - 1)
        stacked = PartitionSpec(None, (*sharding.spec, None)[0], *others)
        return jax.lax.with_sharding_constraint(cut(field), NamedSharding(sharding.mesh, stacked))

    return {name: place(field) for name, field in batch.items()}


def summed(
    function: Callable[[Any, Mapping[str, Any]], T],
    params: Any,
    batch: Mapping[str, Any],
    *,
    microbatches: int,
    sharding: Sharding,
) -> T:
    """The sum of `function` over the microbatches of a batch.

    For `jax.value_and_grad(loss, has_aux=True)`, it returns the gradients of the whole batch. Sums
    are made in float32 at least, and returned in the dtypes of `function`.

    Args:
        function: from `params` and a batch to a pytree of sums over the batch.
        params: the parameters.
        batch: fields of the global batch, rows first.
        microbatches: the number of parts, computed one after another; only one is in memory.
        sharding: the `NamedSharding` of the fields, or the `DynamicContext`.
    """
    rows = len(next(iter(batch.values())))
    on: NamedSharding | None = sharding_of(sharding, rows)
    if require_whole("microbatches", microbatches, 1) not in (numbers := allowed(rows, on)):
        raise InvalidValue(
            f"microbatches is {microbatches}, and a batch has {rows} rows, of which each device "
            f"splits its own; it must be one of {', '.join(map(str, numbers))}"
        )
    if microbatches == 1:
        return function(params, batch)
    stacked = split(batch, microbatches, on)

    def one(params: Any, stacked: Mapping[str, jax.Array]) -> Any:
        return function(params, {name: field[0] for name, field in stacked.items()})

    sums = jax.eval_shape(one, params, stacked)

    def add(sums: Any, microbatch: Any) -> tuple[Any, None]:
        return jax.tree.map(add_to, sums, function(params, microbatch)), None

    found = jax.lax.scan(add, zeros(sums), stacked)[0]
    return jax.tree.map(lambda leaf, own: leaf.astype(own.dtype), found, sums)


def zeros(arrays: Any) -> Any:
    """Zeros to which arrays of these shapes and shardings are added, in float32 at least.

    In bfloat16, 256 + 1 is 256.
    """
    return jax.tree.map(lambda leaf: jnp.zeros_like(leaf, wide(leaf.dtype)), arrays)


def add_to(sum_: jax.Array, term: Any) -> jax.Array:
    """The sum and one more term, in the dtype of the sum."""
    return sum_ + jnp.asarray(term, sum_.dtype)


def wide(dtype: Any) -> Any:
    """The dtype of sums of a dtype: float32 for shorter floats."""
    short = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.float32 if short else dtype
