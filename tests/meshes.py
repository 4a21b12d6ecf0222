"""Meshes of the devices of conftest, and what one of several processes sees of them."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding


def mesh_of(*, order=None, **axes):
    """A mesh of axes of these sizes, of the first devices or of those with the numbers `order`."""
    devices = np.array(jax.devices())[: np.prod([*axes.values()])]
    devices = devices if order is None else devices[list(order)]
    shape, auto = tuple(axes.values()), (AxisType.Auto,) * len(axes)
    return Mesh(devices.reshape(shape), tuple(axes), axis_types=auto)


class OneProcess(NamedSharding):
    """A sharding as one of several processes sees it, which holds some of the devices."""

    __eq__, __hash__ = object.__eq__, object.__hash__

    def __init__(self, sharding, numbers):
        super().__init__(sharding.mesh, sharding.spec)
        self.devices = [jax.devices()[number] for number in numbers]

    def addressable_devices_indices_map(self, shape):
        everywhere = self.devices_indices_map(shape)
        return {device: everywhere[device] for device in self.devices}
