"""The order of rows in a batch, so that every host gets an even share of the work.

Attention that stays inside segments costs the sum of the squares of their lengths. The global
batch must not depend on the number of hosts, so rows are ordered once such that contiguous slices
are even for every number of hosts that divides them: sorted by cost, dealt back and forth over
as many groups as the smallest prime factor of their number, and so on inside each group.
"""

import functools

import numpy as np


@functools.cache
def even_order(rows: int) -> np.ndarray:
    """Which rank, counted from the costliest row, stands in which row: int64 [rows].

    For four rows the halves hold ranks {0, 3} and {1, 2}.

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


def balanced(rows: np.ndarray, costs: np.ndarray, total: int) -> tuple[np.ndarray, np.ndarray]:
    """`rows` in an even order, and the place of each in a batch of `total` rows.

    Places that no row has are empty rows; they cost nothing and are spread like cheap ones.

    Args:
        rows: any numbers, at most `total` of them.
        costs: what each costs.
        total: rows in the batch.
    """
    ranked = rows[np.argsort(-costs, kind="stable")]
    rank = even_order(total)
    places = np.flatnonzero(rank < len(rows))
    return ranked[rank[places]], places


def imbalance(segments: np.ndarray, rows: int, hosts: int) -> float:
    """The work of the busiest host in a batch, as a multiple of the mean: at least 1.

    >>> imbalance(np.array([[0, 0, 0, 3], [1, 1, 0, 1]]), rows=2, hosts=2)  # 9 against 1
    1.8

    Args:
        segments: int64 [n, 4] or [n, 5], as in `PlannedBatch`.
        rows: rows of the batch.
        hosts: how many share them, in contiguous slices; divides `rows`.
    """
    squares = (segments[:, 3:] ** 2.0).sum(axis=1)
    costs = np.bincount(segments[:, 0], weights=squares, minlength=rows)
    shares = costs.reshape(hosts, -1).sum(axis=1)
    return float(shares.max() / shares.mean())
