"""Balance: rows in an order in which devices have about the same work, and measures of it."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pipeline.planning.bucket import Bucket

# Numbers of groups of rows, such as devices, and of steps in a block of tiers, that are compared.
GROUPS = (8, 32, 128, 1024)
TIERS = (1, 4, 16)


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
    """An order of rows in which hosts have about the same work, and the place of each row.

    The other places of the batch are empty rows, spread like the cheapest rows.

    Args:
        costs: the cost of each row, [n], where n is at most `total`.
        total: rows in the batch.

    Returns:
        The numbers of the rows in order, and their places in the batch, ascending: int64 [n] each.
    """
    ranked = (-costs).argsort(kind="stable")
    rank = even_order(total)
    if len(costs) == total:
        return ranked[rank], np.arange(total)
    places = (rank < len(costs)).nonzero()[0]
    return ranked[rank[places]], places


def row_costs(bucket: Bucket, segments: np.ndarray, width: int = 1024) -> np.ndarray:
    """The cost of each row of a batch with attention that skips other segments: float64 [rows].

    A row of `L` positions with segments of `l` positions costs `L + Σ l² / (6 · width)`, as
    `fit_buckets` counts it.

    >>> row_costs(Bucket(2, 12), np.array([[0, 0, 0, 12], [1, 1, 0, 6]]), width=1).tolist()
    [36.0, 18.0]

    Args:
        bucket: the shape of the batch.
        segments: int64 [n, 4] or [n, 5], as in `PlannedBatch`.
        width: the width of the model.
    """
    squares = (segments[:, 3:] ** 2.0).sum(axis=1)
    return sum(bucket.lengths) + np.bincount(segments[:, 0], squares, bucket.rows) / (6 * width)


def time_over_ideal(batches: Iterable[np.ndarray], groups: int) -> float:
    """The time that devices need for some batches, as a multiple of the least: at least 1.

    A step takes as long as the group of rows with the most work. The least is the time of devices
    that share all work evenly.

    >>> time_over_ideal([np.array([3, 1]), np.array([2, 2])], groups=2)  # 3 + 2 against 2 + 2
    1.25

    Args:
        batches: the cost of each row of each batch, [rows].
        groups: the number of groups, which have contiguous slices of the rows; divides the rows.
    """
    shares = [costs.reshape(groups, -1).sum(axis=1) for costs in batches]
    return float(sum(each.max() for each in shares) / sum(each.mean() for each in shares))


def sort_rows(batches: list[np.ndarray]) -> list[np.ndarray]:
    """The costs of the rows of some batches, as these batches have them as tiers of one block.

    >>> [each.tolist() for each in sort_rows([np.array([5, 1]), np.array([1, 4])])]
    [[5, 4], [1, 1]]

    Args:
        batches: the cost of each row of each batch, [rows], of one bucket.
    """
    ranked = -np.sort(-np.concatenate(batches))
    return [each[even_order(len(each))] for each in np.split(ranked, len(batches))]


def compare_tiers(
    batches: Sequence[tuple[Bucket, np.ndarray]], tiers: int = 1
) -> list[dict[str, Any]]:
    """`time_over_ideal` of consecutive batches, as they are and if they were dealt as tiers.

    Args:
        batches: the bucket of each batch, and the cost of each of its rows.
        tiers: the option of the plan that has the batches; above 1, they are not dealt again.

    Returns:
        Dicts of `groups`, `tiers` and `ratio`, for numbers of groups that divide the rows of all.
    """
    found = []
    for steps in TIERS if tiers == 1 else (1,):
        dealt: list[np.ndarray] = []
        for first in range(0, len(batches), steps):
            of_bucket: dict[Bucket, list[np.ndarray]] = {}
            for bucket, costs in batches[first : first + steps]:
                of_bucket.setdefault(bucket, []).append(costs)
            dealt += [each for same in of_bucket.values() for each in sort_rows(same)]
        for groups in GROUPS:
            if all(len(each) % groups == 0 for each in dealt):
                ratio = time_over_ideal(dealt, groups)
                found.append({"groups": groups, "tiers": steps * tiers, "ratio": ratio})
    return found
