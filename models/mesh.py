"""Hints to the compiler: rows, positions and heads are split over the devices of a mesh.

The mesh is that of the surrounding `jax.set_mesh`; without one, these functions do nothing.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, PartitionSpec

ROW_AXES = ("data", "fsdp")
LENGTH_AXIS = "context"
HEAD_AXIS = "tensor"


def splits_length() -> bool:
    """Return whether the mesh splits rows along their length, over `context`.

    If so, the columns of a row may be in any order: only segment ids and positions tell which comes
    first.
    """
    return LENGTH_AXIS in _axis_sizes()


def count_length_parts() -> int:
    """Return the number of devices that rows are divided over along their length."""
    return _axis_sizes().get(LENGTH_AXIS, 1)


def split_batch(x: Array) -> Array:
    """Return x [B, L, …], with rows split over `data` and `fsdp`, and positions over `context`.

    On the residual stream, this makes the compiler gather a layer's weights along `fsdp`, which is
    the purpose of that axis; otherwise it may move activations instead.
    """
    sizes = _axis_sizes()
    rows, length = _row_axes(x.shape[0], sizes), _axis(LENGTH_AXIS, x.shape[1], sizes)
    if not rows and not length:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(rows or None, length))


def gather_table(table: Array) -> Array:
    """Return a table of vectors [V, D] that is whole along D, if the mesh splits rows' length.

    Its vectors are split over `fsdp`, and looked up by tokens that are split over `context` as
    well. Between the two, the compiler would make the vectors of all tokens whole on each device.
    """
    sizes = _axis_sizes()
    if LENGTH_AXIS not in sizes:
        return table
    vocabulary = _axis(HEAD_AXIS, table.shape[0], sizes)
    return jax.lax.with_sharding_constraint(table, PartitionSpec(vocabulary, None))


def count_parts(shape: Sequence[int]) -> tuple[int, int, int]:
    """Return the parts on a mesh of rows, length and vocabulary of logits [B, L, V]."""
    sizes = _axis_sizes()
    axes = _row_axes(shape[0], sizes), _axis(LENGTH_AXIS, shape[1], sizes)
    rows = math.prod(sizes[name] for name in axes[0])
    length, vocabulary = (
        sizes.get(name or "", 1) for name in (axes[1], _axis(HEAD_AXIS, shape[2], sizes))
    )
    return rows, length, vocabulary


def repeat_heads(x_BSGK: Array, num_heads: int) -> Array:
    """Return key heads, repeated as often as it takes for `tensor` to divide them, if it can.

    It can if it divides the query heads, whose number is `num_heads`. With 8 query heads and 2 key
    heads over 4 devices, each key head comes twice; otherwise each device would compute all heads.
    """
    parts, heads = _axis_sizes().get(HEAD_AXIS, 1), x_BSGK.shape[2]
    if num_heads % parts:
        return x_BSGK
    return jnp.repeat(x_BSGK, parts // math.gcd(heads, parts), axis=2)


def per_device(f: Callable[..., Any], queries: Sequence[Array], keys: Sequence[Array]) -> Any:
    """Return f(*queries, *keys), computed by every device for its own rows, queries and heads.

    Every array has rows in dimension 0 (split over `data` and `fsdp`) and, if it has three
    dimensions or more, heads in dimension 2 (split over `tensor`). Queries have positions, or
    blocks of them, in dimension 1 (split over `context`); each device has the keys of whole rows,
    gathered along that axis. Every result has the dimensions of the first of the queries. f must
    treat rows, queries and heads independently. Under plain `jit`, the partitioner cannot know that
    a loop with dynamic slices does so, and gathers its operands on every device; and it takes no
    kernel of Pallas, unless all axes of the mesh are manual, also those of size 1.

    If an axis is already manual (inside a `shard_map`), or does not divide its dimension, f sees
    the whole dimension.
    """
    sizes, arrays = _axis_sizes(), (*queries, *keys)
    if not sizes:
        return f(*arrays)
    rows = _row_axes(arrays[0].shape[0], sizes)
    length = _axis(LENGTH_AXIS, arrays[0].shape[1], sizes)
    num_heads = math.gcd(*(array.shape[2] for array in arrays if array.ndim > 2))
    heads = _axis(HEAD_AXIS, num_heads, sizes)

    def spec(array, length=length):
        return PartitionSpec(*(rows or None, length, heads)[: array.ndim])

    return jax.shard_map(
        f,
        in_specs=(*map(spec, queries), *(spec(array, None) for array in keys)),
        out_specs=spec(arrays[0]),
        axis_names=_auto_axes(),
        check_vma=False,
    )(*arrays)


def _auto_axes() -> set[str]:
    """Return the axes of the current mesh that are `AxisType.Auto`."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name for name, kind in kinds if kind == AxisType.Auto}


def _axis_sizes() -> dict[str, int]:
    """Return the sizes of the axes of the current mesh that are above 1 and `AxisType.Auto`."""
    shape, automatic = jax.sharding.get_abstract_mesh().shape, _auto_axes()
    return {name: size for name, size in shape.items() if size > 1 and name in automatic}


def _axis(name: str, size: int, sizes: dict[str, int]) -> str | None:
    """Return the axis if the mesh has it and it divides a dimension of that size."""
    return name if name in sizes and size % sizes[name] == 0 else None


def _row_axes(num_rows: int, sizes: dict[str, int]) -> tuple[str, ...]:
    """Return the axes that rows can be split over: as many as divide their number."""
    axes: tuple[str, ...] = ()
    for axis in ROW_AXES:
        if axis in sizes and num_rows % math.prod(sizes[name] for name in (*axes, axis)) == 0:
            axes += (axis,)
    return axes
