"""Checksums of arrays on devices."""

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.steps.checksum import checksums
from tests.meshes import mesh_of


def test_a_checksum_does_not_depend_on_the_sharding_and_sees_every_bit():
    rng = np.random.default_rng(0)
    for dtype in ("float32", "bfloat16", "int4", "bool", "complex64"):
        array = jnp.asarray(rng.integers(0, 2 if dtype == "bool" else 99, (8, 3, 5)), dtype)
        seen = checksums({"a": array})
        parts = jax.sharding.NamedSharding(mesh_of(data=4), jax.sharding.PartitionSpec("data"))
        assert checksums({"a": jax.device_put(array, parts)}) == seen
        for at in ((0, 0, 0), (7, 2, 4), (3, 1, 2)):
            other = np.array(array)
            other[at] = not other[at] if dtype == "bool" else other[at] + other.dtype.type(1)
            assert checksums({"a": jnp.asarray(other)}) != seen
    assert checksums({"a": array.ravel()}) == seen  # places count in row order
    assert checksums({"k": jax.random.key(1)}) != checksums({"k": jax.random.key(2)})


def test_arrays_of_any_type_and_size_have_a_checksum():
    for dtype in ("uint4", "float4_e2m1fn", "float8_e4m3fn", "bool"):
        for shape in ((0,), (5, 3)):
            assert checksums({"a": jnp.ones(shape, dtype)})["['a']"].startswith(f"{dtype}:")
