"""Tiers: the time of groups of devices for the rows of a plan, over the least time."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pipeline.planning.balance import even_order
from pipeline.planning.bucket import Bucket

# Numbers of groups of rows, such as devices, and of steps in a block of tiers, to compare.
GROUPS = (8, 32, 128, 1024)
TIERS = (1, 4, 16)


def row_costs(
    bucket: Bucket, segments: np.ndarray, width: int = 1024, trees: np.ndarray | None = None
) -> np.ndarray:
    """The cost of each row of a batch with attention that skips other segments: float64 [rows].

    A row of `L` positions with segments of `l` positions costs `L + Σ l² / (6 · width)`, as
    `fit_buckets` counts it. `segments` are those of a `PlannedBatch`; the `trees` of a corpus with
    groups replace `l²` for these.

    >>> row_costs(Bucket(2, 12), np.array([[0, 0, 0, 12], [1, 1, 0, 6]]), width=1).tolist()
    [36.0, 18.0]
    """
    squares = (segments[:, 3:] ** 2.0).sum(axis=1)
    if trees is not None:
        _, branches, costs = trees[segments[:, 1]].T
        squares = np.where(branches > 0, costs, squares)
    return sum(bucket.lengths) + np.bincount(segments[:, 0], squares, bucket.rows) / (6 * width)


def time_over_ideal(batches: Iterable[np.ndarray], groups: int) -> float:
    """The time of devices for some batches, as a multiple of the least time: at least 1.

    `batches` has the cost of each row of each batch; each of `groups` has a contiguous slice of the
    rows. A step takes as long as the group with the most work. The least time is that of devices
    that share all work evenly.

    >>> time_over_ideal([np.array([3, 1]), np.array([2, 2])], groups=2)  # 3 + 2 against 2 + 2
    1.25
    """
    shares = [costs.reshape(groups, -1).sum(axis=1) for costs in batches]
    return float(sum(each.max() for each in shares) / sum(each.mean() for each in shares))


def sort_rows(batches: list[np.ndarray]) -> list[np.ndarray]:
    """The costs of the rows of batches of one bucket, dealt again as tiers of one block.

    >>> [each.tolist() for each in sort_rows([np.array([5, 1]), np.array([1, 4])])]
    [[5, 4], [1, 1]]
    """
    ranked = -np.sort(-np.concatenate(batches))
    return [each[even_order(len(each))] for each in np.split(ranked, len(batches))]


def compare_tiers(
    batches: Sequence[tuple[Bucket, np.ndarray]], tiers: int = 1
) -> list[dict[str, Any]]:
    """`time_over_ideal` of consecutive batches, as they are and if they were dealt as tiers.

    `batches` has the bucket of each batch and the cost of each of its rows. If the plan itself has
    `tiers` above 1, they are not dealt again. Groups that do not divide all rows are left out.
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
