"""Run a function on each device's own rows and heads, when a mesh is there."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.sharding import AxisType, PartitionSpec

ROW_AXES = ("data", "fsdp")
HEAD_AXIS = "tensor"


def per_device(f: Callable[..., Any], *arrays: Array) -> Any:
    """Return f(*arrays), computed by every device on its part of dimension 0 and dimension 2.

    Every array that goes in or comes out has rows in dimension 0 (split over `data` and `fsdp`)
    and, if it has three dimensions or more, heads in dimension 2 (split over `tensor`); f must
    treat rows and heads independently. Under plain `jit` the partitioner cannot know that of a
    loop with dynamic slices, and gathers its operands on every device.

    The mesh is the one of the surrounding `jax.set_mesh`. With none, with axes that are already
    manual (inside a `shard_map`), or where an axis does not divide its dimension, f sees the
    whole of it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    sizes = {
        name: size
        for name, size, kind in zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
        if size > 1 and kind != AxisType.Manual
    }
    num_rows = arrays[0].shape[0]
    num_heads = math.gcd(*(array.shape[2] for array in arrays if array.ndim > 2))
    rows: tuple[str, ...] = ()
    for axis in ROW_AXES:
        if axis in sizes and num_rows % (sizes[axis] * math.prod(sizes[a] for a in rows)) == 0:
            rows += (axis,)
    heads = HEAD_AXIS if HEAD_AXIS in sizes and num_heads % sizes[HEAD_AXIS] == 0 else None
    if not rows and not heads:
        return f(*arrays)

    def spec(array):
        return PartitionSpec(*(rows or None, None, heads)[: array.ndim])

    return jax.shard_map(
        f,
        in_specs=tuple(map(spec, arrays)),
        out_specs=jax.tree.map(spec, jax.eval_shape(f, *arrays)),
        axis_names=set(rows) | ({heads} if heads else set()),
        check_vma=False,
    )(*arrays)
