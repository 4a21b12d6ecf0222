"""What a mesh changes: rows and heads are split over devices, and the compiler is told so.

The mesh is the one of the surrounding `jax.set_mesh`; without one, nothing here does anything.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.sharding import AxisType, PartitionSpec

ROW_AXES = ("data", "fsdp")
HEAD_AXIS = "tensor"


def split_rows(x: Array) -> Array:
    """Return x with its rows (dimension 0) split over `data` and `fsdp`, and nothing else.

    Said of the residual stream, it makes the compiler gather a layer's weights along `fsdp`,
    which is what that axis is for; left alone, it may rather move activations about.
    """
    rows = _row_axes(x.shape[0], _axis_sizes())
    return jax.lax.with_sharding_constraint(x, PartitionSpec(rows)) if rows else x


def per_device(f: Callable[..., Any], *arrays: Array) -> Any:
    """Return f(*arrays), computed by every device on its own rows and heads.

    Every array that goes in or comes out has rows in dimension 0 (split over `data` and `fsdp`)
    and, if it has three dimensions or more, heads in dimension 2 (split over `tensor`); f must
    treat rows and heads independently. Under plain `jit` the partitioner cannot know that of a
    loop with dynamic slices, and gathers its operands on every device.

    With axes that are already manual (inside a `shard_map`), or where an axis does not divide its
    dimension, f sees the whole of it.
    """
    sizes = _axis_sizes()
    rows = _row_axes(arrays[0].shape[0], sizes)
    num_heads = math.gcd(*(array.shape[2] for array in arrays if array.ndim > 2))
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


def _axis_sizes() -> dict[str, int]:
    """Return the axes of the current mesh that split something and are the compiler's to use."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return {name: size for name, size, kind in axes if size > 1 and kind == AxisType.Auto}


def _row_axes(num_rows: int, sizes: dict[str, int]) -> tuple[str, ...]:
    """Return the axes that rows can be split over: as many as divide their number."""
    axes: tuple[str, ...] = ()
    for axis in ROW_AXES:
        if axis in sizes and num_rows % math.prod(sizes[name] for name in (*axes, axis)) == 0:
            axes += (axis,)
    return axes
