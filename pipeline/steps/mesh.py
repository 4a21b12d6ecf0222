"""The mesh of all devices."""

import math
from collections.abc import Mapping

import jax

from pipeline.errors import InvalidValue


def make_mesh(axes: Mapping[str, int]) -> jax.sharding.Mesh:
    """A mesh of all devices of all hosts.

    Args:
        axes: the size of each axis by its name; one size may be -1, for the devices that are left.

    Raises:
        ValueError: the product of the sizes is not the number of devices.
    """
    devices = jax.device_count()
    given = math.prod(size for size in axes.values() if size != -1)
    sizes = {axis: devices // given if size == -1 else size for axis, size in axes.items()}
    if math.prod(sizes.values()) != devices:
        raise InvalidValue(
            f"mesh {dict(axes)} does not fit {devices} devices; the product of its axes must be "
            "the number of devices, and one axis may be -1"
        )
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=auto)
