"""Buffers: the memory of large arrays, used again as soon as nobody holds them.

Memory that was given back to the system comes page by page when it is asked for again. For a batch
of some hundred thousand positions that takes longer than all else that is done to build it.
"""

import itertools
import sys
import threading

import numpy as np

# Smaller arrays than this many bytes come from the allocator, which has memory for them at hand;
# larger ones, and those beyond so many bytes in all, from the system.
SMALL, LARGE, ALL = 1 << 19, 1 << 27, 1 << 30

# Bytes that are worked on at a time.
PART = 1 << 17

# Where XLA wants arrays to begin that it takes over without a copy.
ALIGNED = 64

_lock = threading.Lock()
_held: dict[int, list[np.ndarray]] = {}


def empty(size: int, dtype) -> np.ndarray:
    """An array `[size]` of `dtype`, its values left open, in memory that nobody else holds.

    Whoever holds an array, a view of it, or a jax.Array that shares its memory, holds a reference
    to the buffer beneath; when the last is gone, the buffer is given out again.
    """
    dtype = np.dtype(dtype)
    wanted = size * dtype.itemsize
    if not SMALL <= wanted <= LARGE:
        return np.empty(size, dtype)
    # Eight sizes between a power of two and the next: batches of one bucket share buffers.
    step = 1 << max(wanted.bit_length() - 4, 0)
    room = -(-wanted // step) * step
    with _lock:
        held = _held.setdefault(room, [])
        unused = _unused(held)
        buffer = np.empty(room + ALIGNED, np.uint8) if unused is None else held[unused]
        if unused is None:
            if _total() + room > ALL:  # sizes that were wanted before may be wanted no more
                for others in _held.values():
                    while (number := _unused(others)) is not None:
                        del others[number]
            if _total() + room <= ALL:
                held.append(buffer)
        begin = -buffer.ctypes.data % ALIGNED
        return buffer[begin : begin + wanted].view(dtype)


def ramps(first: np.ndarray, times: np.ndarray, step: int, dtype) -> np.ndarray:
    """For each entry of `first`, `times` numbers from it on, each larger by `step`.

    >>> ramps(np.array([7, 0]), np.array([3, 2]), 1, np.int32).tolist()
    [7, 8, 9, 0, 1]
    >>> ramps(np.array([7, 0]), np.array([3, 2]), 0, np.int32).tolist()
    [7, 7, 7, 0, 0]

    Args:
        first: integers [n].
        times: at least 1 each, [n].
        step: 0 or 1.
        dtype: of the result.
    """
    ends = np.cumsum(times)
    size = int(ends[-1]) if len(times) else 0
    found = empty(size, dtype)
    base = (first - step * (ends - times)).astype(dtype)
    # Part by part, each small enough for the processor's own memory.
    part = PART // found.itemsize
    cuts = {0, *np.searchsorted(ends, np.arange(part, size, part)).tolist(), len(times)}
    at = 0
    for begin, end in itertools.pairwise(sorted(cuts)):
        to = int(ends[end - 1])
        repeated = np.repeat(base[begin:end], times[begin:end])
        if step:
            np.add(repeated, np.arange(at, to, dtype=dtype), out=found[at:to])
        else:
            found[at:to] = repeated
        at = to
    return found


def _total() -> int:
    return sum(size * len(buffers) for size, buffers in _held.items())


def _unused(held: list[np.ndarray]) -> int | None:
    alone = (number for number in range(len(held)) if _references(held, number) == _ALONE)
    return next(alone, None)


def _references(held: list[np.ndarray], number: int) -> int:
    return sys.getrefcount(held[number])


# What that is for an array that nobody but its list holds: this differs between Pythons.
_ALONE = _references([np.empty(1)], 0)
