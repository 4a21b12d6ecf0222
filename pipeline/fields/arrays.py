"""Arrays of the host or of devices: one function for both, and what explicit axes must be told."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

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
