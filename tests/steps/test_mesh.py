"""Meshes of the devices of a run, in one slice and in several."""

import dataclasses

import jax
import numpy as np
import pytest

from pipeline.steps import make_mesh


@dataclasses.dataclass(frozen=True)
class Device:
    """A device as `create_hybrid_device_mesh` sees it."""

    id: int
    slice_index: int
    platform: str = "gpu"
    device_kind: str = "one"
    process_index: int = 0


@pytest.fixture
def four_slices(monkeypatch):
    devices = [Device(number, number % 4) for number in range(8)]  # of two devices each
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    monkeypatch.setattr(jax, "device_count", lambda: len(devices))
    monkeypatch.setattr(jax.sharding, "Mesh", lambda grid, names, axis_types: (grid, names))


@pytest.mark.parametrize(
    ("axes", "over"),
    [({"data": -1, "fsdp": 2}, 0), ({"data": 2, "fsdp": 4}, 1), ({"data": 8, "tensor": 1}, 0)],
)
def test_one_axis_goes_over_slices_and_the_others_stay_inside(axes, over, four_slices):
    grid, names = make_mesh(axes)
    assert names == tuple(axes)
    assert grid.size == 8
    slices = np.vectorize(lambda device: device.slice_index)(grid)
    for line in np.moveaxis(slices, over, 0).reshape(slices.shape[over], -1).T:
        assert sorted({*line.tolist()}) == [0, 1, 2, 3]
    others = tuple(axis for axis in range(slices.ndim) if axis != over)
    assert (slices.max(axis=others) == slices.min(axis=others)).all()


def test_slices_that_no_axis_can_go_over_are_refused(four_slices):
    with pytest.raises(ValueError, match="does not fit 4 slices; make the size of one axis a mult"):
        make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
