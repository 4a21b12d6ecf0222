"""Sharding: the rows and columns that a process builds of each batch.

Everything takes one `sharding`: a `jax.sharding.Mesh`, whose batches have the usual layout, a
`jax.sharding.NamedSharding` of `[rows, length]`, or a `DynamicContext`, which has one of these for
each bucket.

With causal attention, the last columns of a long segment see many keys and the first see few. So
contiguous parts of a row cost different amounts: with one segment in four parts, the last part
costs 1.75 times the mean. In two other orders, each part has columns from the whole row.
"""

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

import numpy as np

from pipeline.errors import InvalidValue, require_type
from pipeline.loading.dynamic_context import DynamicContext

if TYPE_CHECKING:
    from jax.sharding import Mesh, NamedSharding

ContextOrder = Literal["contiguous", "zigzag", "striped"]
CONTEXT_ORDERS: tuple[ContextOrder, ...] = get_args(ContextOrder)


@dataclasses.dataclass(frozen=True)
class Block:
    """The part of a global batch that one process builds."""

    rows: np.ndarray  # in the global batch, ascending, int64 [n]
    columns: tuple[int, int]  # the first and one past the last
    # For each column of a whole row, the column of the planned row that it holds; None: itself.
    order: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and of columns."""
        return len(self.rows), self.columns[1] - self.columns[0]


def slice_of_process(shape: tuple[int, int], process_index: int, process_count: int) -> Block:
    """The contiguous rows `[p·rows/P, (p+1)·rows/P)` of process `p` of `P`."""
    rows, length = shape
    if not 0 <= process_index < process_count:
        raise InvalidValue(
            f"process_index is {process_index} of process_count={process_count}; it must be from "
            f"0 to {process_count - 1}"
        )
    if rows % process_count:
        raise _does_not_divide(shape, 0, process_count, f"{process_count} processes")
    share = rows // process_count
    return Block(np.arange(process_index * share, (process_index + 1) * share), (0, length))


@functools.lru_cache(maxsize=256)
def block_of_sharding(
    sharding: "NamedSharding", shape: tuple[int, int], context_order: ContextOrder = "contiguous"
) -> Block:
    """The rows and columns that this process's devices hold under `sharding`.

    They come from the sharding's own index map, which handles any order of the mesh, replicas and a
    sharded length axis. The columns of a row are in `context_order`.
    """
    for axis, multiple in enumerate(multiples(sharding, context_order)):
        if shape[axis] % multiple:
            over = f"{sharding.spec} of {sharding.mesh}, columns in {context_order} order"
            raise _does_not_divide(shape, axis, multiple, over)
    # JAX's annotation allows None, which no sharding of a mesh has.
    every = sharding.addressable_devices_indices_map(shape).values()
    indices = [index for index in every if index is not None]
    rows = np.unique(np.concatenate([np.arange(*index[0].indices(shape[0])) for index in indices]))
    rows.flags.writeable = False  # all batches of the shape share it
    spans = {index[1].indices(shape[1]) for index in indices}
    columns = min(span[0] for span in spans), max(span[1] for span in spans)
    length_parts = parts(sharding)[1]
    if columns[1] - columns[0] != len(spans) * shape[1] // length_parts:
        columns = 0, shape[1]  # JAX takes parts that do not adjoin from the whole
    order = None
    if context_order != "contiguous" and length_parts > 1:
        order = column_order(context_order, shape[1], length_parts)
    return Block(rows, columns, order)


def column_order(order: ContextOrder, length: int, parts: int) -> np.ndarray:
    """For each column of a batch, the column of the planned row that it holds: int64 [length].

    Part `p` of `P` parts has the columns

    - "contiguous": from `p·length/P` to `(p+1)·length/P`;
    - "zigzag": chunks `p` and `2P-1-p` of `2P` (Megatron-LM; "dual chunk swap" elsewhere);
    - "striped": `p`, `p+P`, `p+2P`, … (Brandon et al., 2023).

    >>> column_order("zigzag", 8, 2).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    >>> column_order("striped", 8, 2).tolist()
    [0, 2, 4, 6, 1, 3, 5, 7]
    """
    columns = np.arange(length)
    if order == "contiguous":
        return columns
    if order == "striped":
        return columns.reshape(-1, parts).T.ravel()
    first, last = np.split(columns.reshape(2 * parts, -1), 2)
    return np.stack([first, last[::-1]], axis=1).ravel()


def parts(sharding: "NamedSharding | None") -> tuple[int, int]:
    """The number of parts of the rows and of the length in a `NamedSharding`; None: 1 and 1."""
    if sharding is None:
        return 1, 1
    spec = (*sharding.spec, None, None)[:2]
    axes = [() if axis is None else axis if isinstance(axis, tuple) else (axis,) for axis in spec]
    rows, length = (math.prod(sharding.mesh.shape[name] for name in names) for names in axes)
    return rows, length


def multiples(
    sharding: "NamedSharding | DynamicContext | None", context_order: ContextOrder
) -> tuple[int, int]:
    """What the rows and the lengths of all buckets must be multiples of."""
    if isinstance(sharding, DynamicContext):
        rows = sharding.devices // sharding.degrees[-1]
        length = math.lcm(*sharding.degrees)
    else:
        rows, length = parts(sharding)
    return rows, 2 * length if context_order == "zigzag" and length > 1 else length


def _does_not_divide(shape: tuple[int, int], axis: int, multiple: int, over: str) -> ValueError:
    what, option = (("rows", "row_multiple"), ("length", "length_multiple"))[axis]
    return InvalidValue(
        f"a bucket of {shape[0]} rows × {shape[1]} does not divide over {over}; make the {what} of "
        f"every bucket a multiple of {multiple} (fit_buckets: {option}={multiple})"
    )


def sharding_of(sharding: Any, rows: int) -> Any:
    """The `NamedSharding` of batches with so many rows; None stays None."""
    return sharding.of(rows) if isinstance(sharding, DynamicContext) else sharding


@overload
def batch_sharding(sharding: DynamicContext) -> DynamicContext: ...


@overload
def batch_sharding(sharding: "Mesh | NamedSharding | None") -> "NamedSharding": ...


@overload
def batch_sharding(
    sharding: "Mesh | NamedSharding | DynamicContext | None",
) -> "NamedSharding | DynamicContext": ...


def batch_sharding(sharding: Any) -> Any:
    """The sharding of `[rows, length]` from an argument `sharding=`.

    The axes `data` and `fsdp` of a mesh divide rows, and `context` divides their length, if it has
    them. A `NamedSharding` or `DynamicContext` is returned as it is. None is the first local
    device.

    Raises:
        TypeError: it is none of these.
        ValueError: the mesh has none of the axes.
    """
    import jax

    if sharding is None:
        auto, devices = (jax.sharding.AxisType.Auto,), jax.local_devices()[:1]
        sharding = jax.make_mesh((1,), ("data",), axis_types=auto, devices=devices)
    if isinstance(sharding, DynamicContext):
        return sharding
    if not isinstance(sharding, jax.sharding.Mesh):
        wanted = "a jax.sharding.Mesh, a jax.sharding.NamedSharding of [rows, length], or a "
        wanted += "pipeline.DynamicContext"
        require_type("sharding", sharding, "spec", wanted)
        return sharding
    axes = tuple(axis for axis in ("data", "fsdp") if axis in sharding.axis_names)
    length = ("context",) if "context" in sharding.axis_names else ()
    if not axes and not length:
        raise InvalidValue(
            f"the mesh has the axes {sharding.axis_names}, none of 'data', 'fsdp' and 'context'; "
            "choose the axes that divide batches, with "
            "sharding=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(…))"
        )
    return jax.sharding.NamedSharding(sharding, jax.sharding.PartitionSpec(axes, *length))
