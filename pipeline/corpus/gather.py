"""Gathering: pieces of examples, copied from a flat array of tokens one after another."""

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import pyarrow as pa

# For each field of a task one flat array, pieces of examples one after another.
Fields: TypeAlias = dict[str, np.ndarray]


def gather(
    tokens: np.ndarray,
    first: np.ndarray,
    lengths: np.ndarray,
    reach: np.ndarray,
    shifts: Mapping[str, int],
    ends: np.ndarray | None = None,
) -> Fields:
    """The tokens of each piece, one piece after another, for each field.

    A field with shift 1 is the field before it, moved by one place, except for the last token of
    each piece.

    Args:
        tokens: flat, of any dtype.
        first: the place of the first token of each piece.
        lengths: tokens of each piece, at least 1 each.
        reach: places that each piece takes in the result, at least its length. The places after
            its tokens hold whatever follows them in `tokens`, or zeros.
        shifts: the fields, and how much later than `first` each of them reads.
        ends: where the readable memory of each piece ends; None: at the end of `tokens`.
    """
    last = np.cumsum(reach) - reach + lengths - 1
    if ends is None:
        ends = np.full(len(first), len(tokens))
    plain = _slices(tokens, first, reach, ends)
    fields = {}
    for field, shift in shifts.items():
        if shift == 1 and len(plain):
            fields[field] = np.empty_like(plain)
            fields[field][:-1] = plain[1:]
            fields[field][last] = tokens.take(first + lengths, mode="wrap")
        else:
            fields[field] = _slices(tokens, first + shift, reach, ends) if shift else plain
    return fields


def gather_feature(
    values: np.ndarray,
    first: np.ndarray,
    lengths: np.ndarray,
    reach: np.ndarray,
    shape: tuple[int, ...] = (),
    ends: np.ndarray | None = None,
) -> np.ndarray:
    """The values of each piece, one piece after another: `[sum(reach), *shape]`.

    Of `values`, flat, `prod(shape)` are the value of one token; `first` and `ends` are places among
    them. Otherwise as `gather`.
    """
    size = math.prod(shape)
    flat = gather(values, first, lengths * size, reach * size, {"values": 0}, ends)["values"]
    return flat.reshape(-1, *shape)


def _slices(
    tokens: np.ndarray, first: np.ndarray, sizes: np.ndarray, ends: np.ndarray
) -> np.ndarray:
    """`sizes` tokens from each of `first`, one after another; zeros in place of those past `ends`.

    Arrow copies them as strings of bytes, each whole: 3 to 5 times as fast as a gather by token.
    Strings to take alternate with the gaps between them. A gap before an earlier piece has a
    negative size, so the array must be used for nothing but this `take`.
    """
    within = np.minimum(sizes, ends - first)
    edges = np.zeros(2 * len(first) + 2, np.int64)
    edges[1:-1:2], edges[2:-1:2] = first, first + within
    # Arrow reserves memory by the mean length of all strings, from the first and the last edge.
    edges[-1] = min(2 * int(within.sum()), len(tokens))
    memory = pa.foreign_buffer(tokens.ctypes.data, tokens.nbytes, tokens)
    offsets = pa.py_buffer(edges * tokens.itemsize)
    strings = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(edges) - 1, [None, offsets, memory]
    )
    taken = strings.take(pa.array(np.arange(1, len(edges) - 1, 2)))
    flat = np.frombuffer(taken.buffers()[2], tokens.dtype)
    if len(flat) < sizes.sum():
        flat = np.insert(flat, np.repeat(np.cumsum(within), sizes - within), 0)
    return flat


def join_memory(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """One array over the memory of several of one dtype, and the place in it of each: int64 [n].

    All memory has one address space, so an array from the lowest to the highest covers all of them.
    Nothing between them may be read, and they must live as long as it does.
    """
    some = [each for each in arrays if len(each)] or [np.zeros(1, arrays[0].dtype)]
    lowest = min(some, key=lambda array: array.ctypes.data)
    item, base = lowest.itemsize, lowest.ctypes.data
    places = [(each.ctypes.data - base) // item if len(each) else 0 for each in arrays]
    size = max(place + len(each) for place, each in zip(places, arrays, strict=True))
    whole = np.lib.stride_tricks.as_strided(lowest, (size,), (item,), writeable=False)
    return whole, np.array(places, np.int64)
