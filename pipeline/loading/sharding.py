"""Sharding: the rows and columns that a process builds, and global jax.Arrays made of them."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.errors import InvalidValue
from pipeline.loading.context import ContextOrder, column_order, num_chunks

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec


@dataclasses.dataclass(frozen=True)
class Block:
    """The part of a global batch that one process builds.

    Attributes:
        rows: the rows in the global batch, ascending, int64 [n].
        columns: the first column and one past the last.
        order: for each of these columns, the column of the planned row that it holds, int64
            [columns]; None: itself.
    """

    rows: np.ndarray
    columns: tuple[int, int]
    order: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and of columns."""
        return len(self.rows), self.columns[1] - self.columns[0]

    def within(self, index: tuple[slice, ...]) -> tuple[slice, ...]:
        """`index`, slices of a global array, as an index into this block; not 2-D: rows alone."""
        first, last = index[0].start or 0, index[0].stop
        top = int(np.searchsorted(self.rows, first))
        bottom = len(self.rows) if last is None else int(np.searchsorted(self.rows, last))
        if len(index) != 2:
            return (slice(top, bottom),)
        left, right, _ = index[1].indices(self.columns[1])
        return slice(top, bottom), slice(left - self.columns[0], right - self.columns[0])


def slice_of_process(shape: tuple[int, int], process_index: int, process_count: int) -> Block:
    """The contiguous rows `[p·rows/P, (p+1)·rows/P)` of process `p` of `P`.

    Raises:
        ValueError: `process_index` is out of range, or the rows do not divide.
    """
    rows, length = shape
    if not 0 <= process_index < process_count:
        raise InvalidValue(
            f"process_index is {process_index} of process_count={process_count}; it must be from "
            f"0 to {process_count - 1}"
        )
    if rows % process_count:
        raise _does_not_divide(shape, process_count, f"{process_count} processes")
    share = rows // process_count
    return Block(np.arange(process_index * share, (process_index + 1) * share), (0, length))


@functools.lru_cache(maxsize=256)
def block_of_sharding(
    sharding: "NamedSharding", shape: tuple[int, int], context_order: ContextOrder = "contiguous"
) -> Block:
    """The rows and columns that this process's devices hold under `sharding`.

    They come from the sharding's own index map, which knows any order of the mesh, replicas and a
    sharded length axis; over that, the columns of a row are in `context_order`.

    Raises:
        ValueError: the rows, or the positions, do not divide over the sharding.
    """
    row_multiple, length_multiple = multiples(sharding, context_order)
    over = f"{sharding.spec} of {sharding.mesh}"
    if shape[0] % row_multiple:
        raise _does_not_divide(shape, row_multiple, over)
    if shape[1] % length_multiple:
        raise InvalidValue(
            f"a bucket of {shape[0]} rows × {shape[1]} does not divide over {over}, columns in "
            f"{context_order} order; make the length of every bucket a multiple of "
            f"{length_multiple} (fit_buckets: length_multiple={length_multiple})"
        )
    # The annotation of JAX allows None, which no sharding of a mesh has.
    every = sharding.addressable_devices_indices_map(shape).values()
    indices = [index for index in every if index is not None]
    rows = np.unique(np.concatenate([np.arange(*index[0].indices(shape[0])) for index in indices]))
    rows.flags.writeable = False  # all batches of the shape share it
    spans = [index[1].indices(shape[1]) for index in indices]
    columns = min(span[0] for span in spans), max(span[1] for span in spans)
    order, (_, length_parts) = None, parts(sharding)
    if context_order != "contiguous" and length_parts > 1:
        order = column_order(context_order, shape[1], length_parts)[slice(*columns)]
    return Block(rows, columns, order)


def parts(sharding: "NamedSharding | None") -> tuple[int, int]:
    """The number of parts of the rows and of the length in a `NamedSharding`; None: 1 and 1."""
    if sharding is None:
        return 1, 1
    spec = (*sharding.spec, None, None)[:2]
    axes = [() if axis is None else axis if isinstance(axis, tuple) else (axis,) for axis in spec]
    rows, length = (math.prod(sharding.mesh.shape[name] for name in names) for names in axes)
    return rows, length


def multiples(sharding: "NamedSharding | None", context_order: ContextOrder) -> tuple[int, int]:
    """What the rows and the lengths of all buckets must be multiples of."""
    rows, length = parts(sharding)
    return rows, num_chunks(context_order, length)


def _does_not_divide(shape: tuple[int, int], multiple: int, over: str) -> ValueError:
    return InvalidValue(
        f"a bucket of {shape[0]} rows × {shape[1]} does not divide over {over}; make the rows of "
        f"every bucket a multiple of {multiple} (fit_buckets: row_multiple={multiple})"
    )


def batch_mesh(mesh: "Mesh | None") -> "Mesh":
    """The mesh that is given; without one, the first local device."""
    if mesh is not None:
        return mesh
    import jax

    auto, devices = (jax.sharding.AxisType.Auto,), jax.local_devices()[:1]
    return jax.make_mesh((1,), ("data",), axis_types=auto, devices=devices)


def batch_sharding(mesh: "Mesh", spec: "PartitionSpec | None" = None) -> "NamedSharding":
    """The sharding of batches over the axes of a mesh, or as `spec` says.

    Rows are divided over `data` and `fsdp`, their length over `context`, as far as the mesh has
    these axes.

    Raises:
        ValueError: the mesh has none of them and no `spec` is given.
    """
    import jax

    if spec is None:
        axes = tuple(axis for axis in ("data", "fsdp") if axis in mesh.axis_names)
        length = ("context",) if "context" in mesh.axis_names else ()
        if not axes and not length:
            raise InvalidValue(
                f"the mesh has the axes {mesh.axis_names}, none of 'data', 'fsdp' and 'context'; "
                "say with spec=jax.sharding.PartitionSpec(…) over which of them batches are divided"
            )
        spec = jax.sharding.PartitionSpec(axes, *length)
    return jax.sharding.NamedSharding(mesh, spec)


def field_layout(
    name: str, local: np.ndarray, shape: tuple[int, Any], sharding: "NamedSharding"
) -> "tuple[Block, tuple[int, ...], NamedSharding]":
    """What this process holds of a field, and the field's global shape and sharding.

    A field `[rows, positions]` has the sharding of batches. In batches of pairs it belongs to the
    side of the bucket that has as many positions here. A field of other dimensions (`segments` of
    compact batches) belongs to whole rows, and has the sharding of rows alone.

    Raises:
        ValueError: this process holds another part of a batch of `shape`.
    """
    import jax

    rows, lengths = shape[0], shape[1] if isinstance(shape[1], tuple) else (shape[1],)
    blocks = {(rows, length): block_of_sharding(sharding, (rows, length)) for length in lengths}
    if local.ndim != 2:
        block = blocks[rows, lengths[0]]
        if len(local) == len(block.rows):
            spec = jax.sharding.PartitionSpec(*sharding.spec[:1])
            by_row = jax.sharding.NamedSharding(sharding.mesh, spec)
            return block, (rows, *local.shape[1:]), by_row
    for side, block in blocks.items():
        if local.shape == block.shape:
            return block, side, sharding
    held = " or ".join(str(block.shape) for block in blocks.values())
    raise InvalidValue(
        f"{name} has shape {local.shape}, but of a global batch of {shape} this process holds "
        f"{held}; build batches with Batches(…, sharding=…) for the same mesh, and transform them "
        "to fields of as many rows and positions"
    )


def to_global(
    batch: Mapping[str, Any],
    mesh: "Mesh",
    *,
    spec: "PartitionSpec | None" = None,
    shape: tuple[int, Any] | None = None,
    fields: Iterable[str] | None = None,
) -> "dict[str, jax.Array]":
    """Global jax.Arrays made of the rows of this process; each device holds its own part.

    Args:
        batch: arrays `[rows, positions]` of this process, as `Batches(…, sharding=…)` builds them.
        mesh: a `jax.sharding.Mesh`.
        spec: a `PartitionSpec`; None: rows over the axes `data` and `fsdp`, length over `context`.
        shape: `(rows, length)` of the global batch, as its bucket has it; not needed with one
            process.
        fields: the fields to transfer; None: all of them.

    Returns:
        A dict of jax.Arrays with the dtypes of `batch` and the global shape `[rows, length]`.

    Raises:
        ValueError: with several processes and no `shape`, or arrays of another shape than this
            process's block of `shape`.
    """
    import jax

    sharding = batch_sharding(mesh, spec)
    if shape is None:
        if jax.process_count() > 1:
            raise InvalidValue(
                "to_global needs shape=(rows, length) of the global batch when there are several "
                "processes: this process's rows do not tell it"
            )
        rows, length = next(iter(batch.values())).shape
        shape = rows, length
        if "decoder_inputs" in batch:
            shape = rows, (length, batch["decoder_inputs"].shape[1])
    arrays: dict[str, jax.Array] = {}
    for name in batch if fields is None else fields:
        local = batch[name]
        block, of_field, placed = field_layout(name, local, shape, sharding)
        part = functools.partial(_part, local, block)
        arrays[name] = jax.make_array_from_callback(of_field, placed, part)
    return arrays


def _part(local: np.ndarray, block: Block, index: tuple[slice, ...] | None) -> np.ndarray:
    assert index is not None, "JAX names the part of every sharded array"
    return local[block.within(index)]
