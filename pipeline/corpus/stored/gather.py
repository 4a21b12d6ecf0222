"""Gathering: pieces of memory, copied one after another."""

import ctypes
import functools
import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

logger = logging.getLogger(__name__)

# From addresses, sizes and reaches of pieces of memory to their bytes; see `copy_memory`.
Copy: TypeAlias = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]

# For each field of a task one flat array, pieces of examples one after another.
Fields: TypeAlias = dict[str, np.ndarray]


class Pieces(NamedTuple):
    """Pieces of examples, each of at least one position: int64 [pieces]; see `Side.read`."""

    examples: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    reach: np.ndarray
    epoch: Any = 0

    def take(self, which: np.ndarray) -> "Pieces":
        """Some of the pieces, by a mask or by their places."""
        epoch = self.epoch[which] if np.ndim(self.epoch) else self.epoch
        return Pieces._make([*(column[which] for column in self[:4]), epoch])


# All memory of the process, from this address on. Only what an array holds may be read of it.
BASE = 64
MEMORY = pa.foreign_buffer(BASE, 1 << 62)

# The first odd numbers.
KEPT = 1 << 14
ODD = pa.array(np.arange(1, 2 * KEPT, 2))


def address_of(array: np.ndarray) -> int:
    """The address of the first number of an array."""
    return array.__array_interface__["data"][0]


@functools.lru_cache
def _memory_as(dtype: np.dtype) -> np.ndarray:
    """All memory from `BASE` on, as numbers of a dtype."""

    class Memory:
        __array_interface__ = {  # noqa: RUF012  # as NumPy wants it
            "version": 3,
            "data": (BASE, True),
            "typestr": dtype.str,
            "shape": ((1 << 62) // dtype.itemsize,),
        }

    return np.asarray(Memory())


def take_numbers(addresses: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The number at each address."""
    if np.bitwise_or.reduce(addresses, initial=0) % dtype.itemsize:  # some are not aligned
        sizes = np.full(len(addresses), dtype.itemsize)
        return copy_memory(addresses, sizes, sizes).view(dtype)
    return _memory_as(dtype).take((addresses - BASE) // dtype.itemsize)


def _copy_at_once(addresses: np.ndarray, sizes: np.ndarray, reach: np.ndarray) -> np.ndarray:
    """Copies each piece as a string of bytes of Arrow: 3 to 5 times as fast as by value.

    The strings to take alternate with what lies between them, which may have a negative size; so
    the array of strings must be used for nothing but this `take`.
    """
    total, pieces = int(reach.sum()), len(addresses)
    edges = np.zeros(4 * pieces + 2, np.int64)
    begins, ends, gaps, gap_ends = (edges[at:-1:4] for at in (1, 2, 3, 4))
    np.subtract(addresses, BASE, out=begins)
    np.add(begins, sizes, out=ends)
    gaps.fill(address_of(_zeros(total.bit_length())) - BASE)
    np.add(gaps, reach - sizes, out=gap_ends)
    # Arrow reserves memory by the mean length of all strings, computed from the last edge: here a
    # little more than all that is copied, so that it is never moved. Nothing is read up to there.
    edges[-1] = 2 * total + total // max(2 * pieces, 1) + 2
    buffers = [None, pa.py_buffer(edges), MEMORY]
    strings = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(edges) - 1, buffers)
    odd = ODD.slice(0, 2 * pieces) if 2 * pieces <= KEPT else pa.array(np.arange(1, 4 * pieces, 2))
    return np.frombuffer(strings.take(odd).buffers()[2], np.uint8, total)


def _copy_one_by_one(addresses: np.ndarray, sizes: np.ndarray, reach: np.ndarray) -> np.ndarray:
    """Copies one piece after another, for an Arrow that checks strings: some 20 times as slow."""
    copied = np.zeros(int(reach.sum()), np.uint8)
    targets = address_of(copied) + np.cumsum(reach) - reach
    for target, address, size in zip(
        targets.tolist(), addresses.tolist(), sizes.tolist(), strict=True
    ):
        ctypes.memmove(target, address, size)
    return copied


@functools.lru_cache
def _zeros(log_size: int) -> np.ndarray:
    """2 to the power of `log_size` zeros; they take memory once they are read."""
    return np.zeros(1 << log_size, np.uint8)


def _is_sound(copy: Copy) -> bool:
    """Whether a way to copy memory gives the right bytes, for pieces in any order."""
    source = np.arange(64, dtype=np.uint8)
    firsts, sizes = np.array([40, 0, 7, 7, 63]), np.array([8, 16, 0, 5, 1])
    reach = sizes + np.array([0, 3, 2, 0, 0])
    due = np.zeros(int(reach.sum()), np.uint8)
    for begin, first, size in zip(np.cumsum(reach) - reach, firsts, sizes, strict=True):
        due[begin : begin + size] = source[first : first + size]
    try:
        return np.array_equal(copy(address_of(source) + firsts, sizes, reach), due)
    except (pa.ArrowException, ValueError, MemoryError, IndexError, OSError):
        return False


def choose_copy(fast: Copy) -> Copy:
    """The fast way to copy memory, unless it gives other bytes than it must."""
    if _is_sound(fast):
        return fast
    logger.warning(
        "pyarrow %s does not copy pieces of memory as others do, so batches are read one piece at "
        "a time, which is slower; install another version of pyarrow",
        pa.__version__,
    )
    return _copy_one_by_one


# The bytes of pieces of memory, one after another, each followed by zeros: uint8 [total]. Its
# arguments are where each piece begins, its bytes, and the bytes of the result that it takes, with
# the zeros after it: int64 [pieces] each.
copy_memory = choose_copy(_copy_at_once)


def gather(
    values: np.ndarray, first: np.ndarray, sizes: np.ndarray, reach: np.ndarray | None = None
) -> np.ndarray:
    """`sizes` values from each of `first`, one piece after another.

    Args:
        values: `[n, …]`, of any dtype; the numbers of one value are contiguous.
        first: the place of the first value of each piece.
        sizes: the number of values of each piece.
        reach: the number of values that each piece takes in the result, with zeros after its own;
            None: `sizes`.
    """
    item = values.itemsize * math.prod(values.shape[1:])
    room = sizes if reach is None else reach
    copied = copy_memory(address_of(values) + item * first, item * sizes, item * room)
    return copied.view(values.dtype).reshape(-1, *values.shape[1:])


def new_array(size: int, dtype: Any) -> np.ndarray:
    """An uninitialised flat array, for the fields of batches.

    Arrow allocates it, with huge pages if the system has them: to fill it for the first time then
    takes a half to a third of the time.
    """
    dtype = np.dtype(dtype)
    return np.frombuffer(pa.allocate_buffer(size * dtype.itemsize), dtype)
