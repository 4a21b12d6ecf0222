"""DynamicContext: a mesh for each bucket, which divides long rows over devices, and short rows not.

One degree of context parallelism for all buckets has short rows pay for the long ones: their keys
are gathered, too, and kernels for whole rows cannot be used. A bucket is a static shape with a
program of its own, so it may have a mesh of its own. Batches and activations have it; parameters,
the optimizer and checkpoints stay on the base mesh, which has the same devices in the same order.
"""

import dataclasses
import functools
import logging
import math
from typing import TYPE_CHECKING

import numpy as np

from pipeline.errors import InvalidValue, require_type, require_whole

if TYPE_CHECKING:
    from jax.sharding import Mesh, NamedSharding

logger = logging.getLogger(__name__)

# The axes of a base mesh that divide batches; `context` takes devices of the last one first.
ROWS = ("data", "fsdp")
CONTEXT = "context"


@dataclasses.dataclass(frozen=True)
class DynamicContext:
    """A mesh for each bucket, from one base mesh: a value of `sharding=` wherever that is taken.

    Rows are divided over as few devices as their number allows: on 8 devices, a bucket of 16 rows
    has 2 whole rows on each device, one of 4 rows has each row on 2 devices, one of 1 row has it on
    all. So the degree of a bucket is the number of devices ÷ gcd(rows, devices). Its mesh is the
    base mesh with an axis `context` of that size, made of neighbours along `fsdp`, then `data`.
    With degree 1, it is the base mesh.

    Programs take parameters on the base mesh and batches on that of their bucket.
    `pipeline.steps.Compiled` compiles each for the mesh of its bucket; wrap a step of your own with
    `pipeline.steps.on_batch_mesh`.

    Args:
        mesh: the base mesh, with an axis `data` or `fsdp`, whose axes are all `AxisType.Auto`.
        least: the smallest degree, for rows that would not fit fewer devices.
        most: the largest degree, such as the number of devices in a node; a bucket that needs more
            is refused. None: all devices.

    Raises:
        TypeError: `mesh` is not a `jax.sharding.Mesh`.
        ValueError: the mesh or a number is not as above.
    """

    mesh: "Mesh"
    least: int = dataclasses.field(default=1, kw_only=True)
    most: int | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        import jax

        require_type("mesh", self.mesh, "devices", "a jax.sharding.Mesh")
        names = ", ".join(self.mesh.axis_names)
        if self.mesh.explicit_axes:
            raise InvalidValue(
                "the mesh has explicit axes, under which a program takes arrays of one mesh alone; "
                "give jax.sharding.Mesh(mesh.devices, mesh.axis_names), whose axes are "
                f"{jax.sharding.AxisType.Auto}"
            )
        if self.mesh.shape.get(CONTEXT, 1) > 1 or not {*ROWS} & {*self.mesh.axis_names}:
            raise InvalidValue(
                f"the mesh has the axes {names}; the base of DynamicContext needs 'data' or "
                "'fsdp', and no 'context', which it makes of these: give its devices to them"
            )
        least = require_whole("least", self.least, 1)
        most = self.devices if self.most is None else require_whole("most", self.most, 1)
        if not least <= most <= self.devices:
            raise InvalidValue(
                f"least is {least} and most is {most}; they are numbers of devices that share a "
                f"row, from 1 to the {self.devices} of 'data' and 'fsdp', most not below least"
            )
        if not self.degrees:
            raise InvalidValue(
                f"no number of devices from least={least} to most={most} divides the "
                f"{self.devices} of 'data' and 'fsdp'; raise most, or lower least"
            )

    @property
    def devices(self) -> int:
        """The number of devices that share a batch, along `data` and `fsdp`."""
        return math.prod(self.mesh.shape.get(axis, 1) for axis in ROWS)

    @property
    def degrees(self) -> tuple[int, ...]:
        """The numbers of devices that may share a row, ascending: from `least` to `most`."""
        most = self.devices if self.most is None else self.most
        return tuple(n for n in range(self.least, most + 1) if self.devices % n == 0)

    def degree(self, rows: int) -> int:
        """The number of devices that share a row, of a bucket with so many rows.

        Raises:
            ValueError: it would be above `most`.
        """
        for degree in self.degrees:
            if rows % (self.devices // degree) == 0:
                return degree
        raise InvalidValue(
            f"a bucket of {rows} rows needs more than most={self.most} of {self.devices} devices "
            f"for each row; make its rows a multiple of {self.devices // self.degrees[-1]}"
        )

    def of(self, rows: int) -> "NamedSharding":
        """The sharding of `[rows, length]` of a bucket with so many rows."""
        return _shard(self, rows)


@functools.lru_cache(maxsize=256)
def _shard(context: DynamicContext, rows: int) -> "NamedSharding":
    import jax

    if context.devices % rows and rows % context.devices:
        logger.warning(
            f"a bucket of {rows} rows divides each over {context.degree(rows)} of "
            f"{context.devices} devices; numbers of rows that divide {context.devices}, or are "
            "multiples of it, divide them less"
        )
    degree = context.degree(rows)
    mesh = context.mesh if degree == 1 else _divide(context.mesh, degree)
    axes = tuple(axis for axis in ROWS if axis in mesh.axis_names)
    spec = jax.sharding.PartitionSpec(axes, *[CONTEXT] * (degree > 1))
    return jax.sharding.NamedSharding(mesh, spec)


def _divide(mesh: "Mesh", degree: int) -> "Mesh":
    """The mesh with an axis `context` of this size, made of neighbours, in the order of devices."""
    import jax

    sizes, names = dict(mesh.shape), [name for name in mesh.axis_names if name != CONTEXT]
    data, fsdp = (sizes.get(axis, 1) for axis in ROWS)
    from_fsdp = math.gcd(degree, fsdp)
    from_data = degree // from_fsdp
    possible = data % from_data == 0
    if possible and from_fsdp > 1 and from_data > 1:  # all of `fsdp`, with nothing before it
        begin, end = map(names.index, ROWS)
        between = [sizes[name] for name in names[begin + 1 : end]]
        possible = from_fsdp == fsdp and begin < end and math.prod(between) == 1
    if not possible:
        raise InvalidValue(
            f"{degree} devices that share a row would not be neighbours in the mesh "
            f"{dict(mesh.shape)}; give buckets rows with another degree, or a mesh whose axis "
            "'fsdp' follows 'data', and is a multiple or a divisor of each degree"
        )
    sizes |= {"data": data // from_data, "fsdp": fsdp // from_fsdp, CONTEXT: degree}
    names.insert(names.index("fsdp" if from_fsdp > 1 else "data") + 1, CONTEXT)
    grid = mesh.devices.reshape([sizes[name] for name in names])
    _require_nested(grid, names)
    auto = (jax.sharding.AxisType.Auto,) * len(names)
    return jax.sharding.Mesh(grid, names, axis_types=auto)


def _require_nested(grid: np.ndarray, names: list[str]) -> None:
    """Refuses a mesh where some devices of a process share a row with another process, not all."""
    processes = np.vectorize(lambda device: device.process_index, otypes=[int])(grid)
    rows = [names.index(axis) for axis in ROWS if axis in names]
    parts = math.prod(grid.shape[axis] for axis in rows)
    # [parts of the rows, devices that hold a part]
    groups = np.moveaxis(processes, rows, range(len(rows))).reshape(parts, -1)
    for process in np.unique(processes):
        holders = groups[(groups == process).any(axis=1)]
        if len(holders) > 1 and (holders != process).any():
            raise InvalidValue(
                f"some devices of process {process} would share a row with other processes, and "
                "others would not; give buckets rows whose degree divides the devices of a "
                "process, or is a multiple of them"
            )
