"""Checksums of arrays on devices, the same for every sharding; orbax has none."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def checksums(tree: Any) -> dict[str, str]:
    """A checksum of each array of a pytree, by its path: its dtype, and 32 bits.

    It is the sum, modulo 2**32, of the elements' bits, each times an odd number that depends on its
    place. So one changed bit always changes it.

    >>> checksums({"w": jnp.arange(3.0), "n": jnp.int32(7)})
    {"['n']": 'int32:00000007', "['w']": 'float32:fe800000'}
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    sums = jax.device_get(_sums([_data(leaf) for _, leaf in leaves]))
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype}:{int(each):08x}"
        for (path, leaf), each in zip(leaves, sums, strict=True)
    }


def _data(leaf: Any) -> jax.Array:
    """The numbers of an array, or of random keys."""
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


@jax.jit
def _sums(arrays: list[jax.Array]) -> list[jax.Array]:
    return [_sum(array) for array in arrays]


def _bits(dtype: Any) -> int:
    return (jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype).bits


def _sum(array: jax.Array) -> jax.Array:
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag], axis=-1)
    if array.dtype != bool:
        bits = _bits(array.dtype)
        if bits < 8:  # which do not fill bytes; float32 holds them all
            array, bits = array.astype(jnp.float32), 32
        bits = min(bits, 32)  # 64 bits become twice 32, in another dimension
        array = lax.bitcast_convert_type(array, f"uint{bits}")
    # Places by dimension: to flatten an array, devices would have to exchange its elements.
    place = jnp.uint32(0)
    for axis, size in enumerate(array.shape):
        stride = math.prod(array.shape[axis + 1 :]) % (1 << 32)
        shape = [size if axis == each else 1 for each in range(array.ndim)]
        place = place + lax.iota(jnp.uint32, size).reshape(shape) * jnp.uint32(stride)
    return (array.astype(jnp.uint32) * (2 * place + 1)).sum(dtype=jnp.uint32)
