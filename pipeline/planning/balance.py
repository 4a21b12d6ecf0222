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


@functools.cache
def count_units(rows: int, most: int) -> int:
    """The number of units of a batch: the largest divisor of its rows up to `most`.

    >>> count_units(96, 64), count_units(96, 1)
    (48, 1)
    """
    return max(number for number in range(1, min(rows, most) + 1) if rows % number == 0)


def balance(costs: np.ndarray, total: int, units: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """An order of rows that gives devices about the same work, and the place of each row.

    `costs` has the cost of each row, [n], where n is at most `total`, the rows of the batch. The
    numbers of the rows in order, and their places, ascending, are int64 [n] each. The other places
    are empty rows, spread like the cheapest rows.

    A unit is so many adjacent places that `units` of them are a batch. Rows are divided evenly
    among the units, in order, and stay in theirs.

    >>> [numbers.tolist() for numbers in balance(np.array([5, 8, 1, 2, 9, 3]), 8, units=2)]
    [[1, 0, 2, 4, 5, 3], [0, 2, 3, 4, 6, 7]]
    """
    rank, number = even_order(total // units), np.arange(len(costs))
    if len(costs) < total:
        slots, number, of_rows = number * total // len(costs), np.full(total, -1), costs
        number[slots], costs = np.arange(len(of_rows)), np.full(total, -1, of_rows.dtype)
        costs[slots] = of_rows
    ranked = (-costs.reshape(units, -1)).argsort(axis=1, kind="stable")
    if units > 1:
        ranked += np.arange(0, total, total // units)[:, None]
    order = number[ranked[:, rank].ravel()]
    places = (order >= 0).nonzero()[0]
    return order[places], places
