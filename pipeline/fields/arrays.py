"""Arrays of the host or of devices: one function for both, in the planned order of columns.

Arrays on explicit axes must be told the sharding of some results.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from pipeline.errors import InvalidValue

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

T = TypeVar("T")


def with_auto_axes(function: Callable[..., T], *arrays: Any, spec: "PartitionSpec") -> T:
    """`function(*arrays)`, a `jax.Array` or a tree of these, that has the sharding `spec`.

    Under a mesh with explicit axes, the default of `jax.make_mesh`, JAX must be told the sharding
    of some results, such as sums by index. Inside `function` it decides, as for axes of
    `jax.sharding.AxisType.Auto`.
    """
    import jax

    meshes = [jax.typeof(array).sharding.mesh for array in arrays]
    mesh = next((mesh for mesh in meshes if mesh.explicit_axes), None)
    if mesh is None:
        return function(*arrays)
    placed = jax.sharding.NamedSharding(mesh, spec)
    axes = mesh.explicit_axes
    automatic: Any = jax.sharding.auto_axes(function, axes=axes, out_sharding=placed)
    return automatic(*arrays)


def spec_of(array: Any, dimensions: int) -> "PartitionSpec":
    """The sharding of the first dimensions of an array, if its type has one."""
    import jax

    return jax.sharding.PartitionSpec(*jax.typeof(array).sharding.spec[:dimensions])


def on_host_or_device(function: Callable[..., T], *arrays: Any, dimensions: int) -> T:
    """`function(numpy, *arrays)`, or of `jax.numpy` if some of the arrays are of JAX.

    The first `dimensions` of the result are sharded like those of the first array.
    """
    if all(isinstance(array, np.ndarray) for array in arrays):
        return function(np, *arrays)
    import jax

    function = functools.partial(function, jax.numpy)
    return with_auto_axes(function, *arrays, spec=spec_of(arrays[0], dimensions))


def in_planned_order(function: Callable[..., T], columns: Any) -> Callable[..., T]:
    """`function(numpy, *arrays)`, which looks at neighbours, for rows with their columns moved.

    It gets arrays `[rows, length, …]` with columns in their planned order, and its results, such
    arrays, go back to the order of the batch. `columns` is the field `inputs_columns`, or that of
    another side, given as the last of the arrays; None: columns are in order.
    """
    if columns is None:
        return function
    on_host = isinstance(columns, np.ndarray) and len(columns)
    if on_host and not np.array_equal(np.sort(columns[0]), np.arange(columns.shape[1])):
        raise InvalidValue(
            "the batch has only some columns of each row, and neighbours are in others; compute it "
            "from the global batch on the devices, or load with context_order='contiguous'"
        )

    def run(xp: Any, *arrays: Any) -> Any:
        *fields, columns = arrays
        moved = columns[0] if len(columns) else xp.arange(columns.shape[1])
        planned = xp.argsort(moved)
        results: Any = function(xp, *(field[:, planned] for field in fields))
        if isinstance(results, tuple):
            return tuple(result[:, moved] for result in results)
        return results[:, moved]

    return run


def require_planned_order(batch: Any, side: str, purpose: str) -> None:
    """Refuses a batch whose columns on a side are not in their planned order."""
    if f"{side}_columns" in batch:
        raise InvalidValue(
            f"the columns of {side} are in another order than planned, as {side}_columns tells; "
            f"{purpose} columns in order; load with context_order='contiguous'"
        )
