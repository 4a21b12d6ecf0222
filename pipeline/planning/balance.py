"""Balance: orders of rows that give devices about the same work."""

import functools

import numpy as np


@functools.cache
def even_order(rows: int) -> np.ndarray:
    """The rank of the row at each place, where rank 0 is the costliest row: int64 [rows].

    Contiguous slices of the order cost about the same. For four rows, the halves have ranks {0, 3}
    and {1, 2}.

    >>> even_order(4).tolist()
    [0, 3, 1, 2]
    """
    groups = np.arange(rows)[None]
    left = rows
    while left > 1:
        factor = next(p for p in range(2, left + 1) if left % p == 0)
        left //= factor
        groups = groups.reshape(-1, left, factor)
        groups[:, 1::2] = groups[:, 1::2, ::-1]
        groups = groups.transpose(0, 2, 1).reshape(-1, left)
    return groups.ravel()


def balance(costs: np.ndarray, total: int) -> tuple[np.ndarray, np.ndarray]:
    """An order of rows that gives devices about the same work, and the place of each row.

    `costs` has the cost of each row, [n], where n is at most `total`, the rows of the batch. The
    numbers of the rows in order, and their places, ascending, are int64 [n] each. The other places
    are empty rows, spread like the cheapest rows.
    """
    ranked = (-costs).argsort(kind="stable")
    rank = even_order(total)
    if len(costs) == total:
        return ranked[rank], np.arange(total)
    places = (rank < len(costs)).nonzero()[0]
    return ranked[rank[places]], places
