"""Sharding: the rows and columns that a process builds, and global jax.Arrays made of them."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

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

    def within(self, index: tuple[slice, ...]) -> tuple:
        """`index`, slices of the global batch, as an index into this block."""
        first, last = index[0].start or 0, index[0].stop
        top = int(np.searchsorted(self.rows, first))
        bottom = len(self.rows) if last is None else int(np.searchsorted(self.rows, last))
        left, right, _ = index[1].indices(self.columns[1])
        return slice(top, bottom), slice(left - self.columns[0], right - self.columns[0])


def slice_of_process(shape: tuple[int, int], process_index: int, process_count: int) -> Block:
    """The contiguous rows `[p·rows/P, (p+1)·rows/P)` of process `p` of `P`.

    Raises:
        ValueError: `process_index` is out of range, or the rows do not divide.
    """
    rows, length = shape
    if not 0 <= process_index < process_count:
        raise ValueError(
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
        raise ValueError(
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
    return ValueError(
        f"a bucket of {shape[0]} rows × {shape[1]} does not divide over {over}; make the rows of "
        f"every bucket a multiple of {multiple} (fit_buckets: row_multiple={multiple})"
    )


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
            raise ValueError(
                f"the mesh has the axes {mesh.axis_names}, none of 'data', 'fsdp' and 'context'; "
                "say with spec=jax.sharding.PartitionSpec(…) over which of them batches are divided"
            )
        spec = jax.sharding.PartitionSpec(axes, *length)
    return jax.sharding.NamedSharding(mesh, spec)


# In batches of pairs, these fields have the length of the inputs, others that of the targets.
INPUTS_SIDE = ("inputs", "inputs_segment_ids", "inputs_positions")


def shape_of_field(name: str, shape: tuple[int, Any]) -> tuple[int, int]:
    """Rows and positions of a field, from the shape of a bucket: `(rows, length)`.

    >>> shape_of_field("targets", (8, (512, 128)))
    (8, 128)
    """
    rows, length = shape
    return rows, length[name not in INPUTS_SIDE] if isinstance(length, tuple) else length


def field_layout(
    name: str, local: np.ndarray, shape: tuple[int, Any], sharding: "NamedSharding"
) -> tuple[tuple, Any]:
    """The global shape and the sharding of a field.

    A field `[rows, positions]` has the sharding of batches. A field of more dimensions (`segments`
    of compact batches) belongs to whole rows, and has the sharding of rows alone.
    """
    import jax

    if local.ndim == 2:
        return shape_of_field(name, shape), sharding
    spec = jax.sharding.PartitionSpec(*sharding.spec[:1])
    return (shape[0], *local.shape[1:]), jax.sharding.NamedSharding(sharding.mesh, spec)


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
            raise ValueError(
                "to_global needs shape=(rows, length) of the global batch when there are several "
                "processes: this process's rows do not tell it"
            )
        rows, length = next(iter(batch.values())).shape
        shape = rows, length
        if "decoder_inputs" in batch:
            shape = rows, (length, batch["decoder_inputs"].shape[1])
    arrays: dict[str, jax.Array] = {}
    for name in batch if fields is None else fields:
        local, block = batch[name], block_of_sharding(sharding, shape_of_field(name, shape))
        if len(local) != len(block.rows) or (local.ndim == 2 and local.shape != block.shape):
            raise ValueError(
                f"{name} has shape {local.shape}, but of a global batch of "
                f"{shape_of_field(name, shape)} this process "
                f"holds {block.shape}; build batches with Batches(…, sharding=…) for the same mesh"
            )
        arrays[name] = jax.make_array_from_callback(
            *field_layout(name, local, shape, sharding), functools.partial(_part, local, block)
        )
    return arrays


def _part(local: np.ndarray, block: Block, index: tuple[slice, ...] | None) -> np.ndarray:
    assert index is not None, "JAX names the part of every sharded array"
    rows, columns = block.within(index)
    return local[rows] if local.ndim > 2 else local[rows, columns]
