"""Lengths, the one thing a plan is made from: checked, counted and digested."""

import hashlib

import numpy as np

# Big arrays are walked in pieces of this many examples, so that a memory-mapped array of a
# billion lengths is never copied whole.
PIECE = 1 << 22


def as_lengths(lengths) -> np.ndarray:
    """`lengths` as an array of non-negative integers, without a copy where none is needed.

    Accepts an integer array `[n]`, of pairs `[n, 2]`, or anything with a `lengths` attribute (a
    corpus).

    Raises:
        ValueError: it is of another shape, not of integers, or holds a negative number.
    """
    array = np.asarray(getattr(lengths, "lengths", lengths))
    if array.ndim != 1 and array.shape[1:] != (2,):
        raise ValueError(
            f"lengths has shape {array.shape}; a plan takes one integer per example, shape [n], "
            "or inputs and targets of pairs, shape [n, 2]"
        )
    if array.size == 0:
        array = array.astype(np.uint32)
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"lengths has dtype {array.dtype}; lengths are whole numbers of positions, so pass "
            "an integer array"
        )
    # What the dtype promises needs no look at each of what may be a billion numbers.
    safe = array.dtype.kind == "u" and array.dtype.itemsize <= 4
    for piece in () if safe else pieces(array):
        low, high = int(piece.min()), int(piece.max())
        if low < 0 or high >= 1 << 32:
            seen = low if low < 0 else high
            raise ValueError(f"lengths holds {seen:,}; a length is at least 0 and below 2**32")
    return array


def pieces(lengths: np.ndarray):
    """Consecutive slices of `lengths`, none longer than `PIECE`."""
    for start in range(0, len(lengths), PIECE):
        yield lengths[start : start + PIECE]


def digest(lengths) -> str:
    """A short hash of the lengths, the same for every integer dtype that holds them.

    An object that stores its digest (a corpus) is asked for it instead.

    >>> digest(np.array([3, 1, 2])) == digest(np.array([3, 1, 2], np.uint16))
    True
    """
    if stored := getattr(lengths, "lengths_digest", None):
        return stored
    sha = hashlib.sha256()
    for piece in pieces(as_lengths(lengths)):
        sha.update(piece.astype("<u4").tobytes())
    return sha.hexdigest()[:16]


def histogram(lengths: np.ndarray) -> np.ndarray:
    """How many examples have each length: int64, shape [longest + 1].

    >>> histogram(np.array([3, 1, 3])).tolist()
    [0, 1, 0, 2]
    """
    counts = np.zeros(1, np.int64)
    for piece in pieces(lengths):
        more = np.bincount(piece.astype(np.int64, copy=False), minlength=len(counts))
        more[: len(counts)] += counts
        counts = more
    return counts
