"""Pointers: the values of a side at the columns that another side points to."""

from typing import Any

from pipeline.fields.arrays import on_host_or_device


def follow(values: Any, pointer: Any) -> Any:
    """The values that a pointer points to; zeros where it points to nothing.

    >>> import numpy as np
    >>> follow(np.array([[[1, 2], [3, 4]]]), np.array([[1, 1, -1]])).tolist()
    [[[3, 4], [3, 4], [0, 0]]]

    A pointer to a side of parts, plus 1, is the segment ids of attention within a part.

    Args:
        values: `[rows, length, …]`, fields of a side or what a model made of them, of NumPy or JAX,
            also in a compiled step; whole rows.
        pointer: columns of `values`, or -1: `[rows, …]`, such as a field of a batch with
            `Feature(…, to=side)`.

    Returns:
        `[*pointer.shape, …]`, of NumPy or JAX like `values`.
    """
    return on_host_or_device(_take, values, pointer, dimensions=1)


def _take(xp: Any, values: Any, pointer: Any) -> Any:
    rows = xp.arange(len(pointer)).reshape(-1, *[1] * (pointer.ndim - 1))
    taken = values[rows, xp.maximum(pointer, 0)]
    points = (pointer >= 0).reshape(*pointer.shape, *[1] * (taken.ndim - pointer.ndim))
    return xp.where(points, taken, xp.zeros_like(taken))
