"""Tiers: how long groups of devices take for the rows of a plan, over the least time."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pipeline.planning.balance import even_order
from pipeline.planning.bucket import Bucket
from pipeline.planning.lengths import weigh

GROUPS = (8, 32, 128, 1024)  # numbers of groups of rows, such as devices, to compare
TIERS = (1, 4, 16)  # numbers of steps in a block of tiers to compare


def row_costs(
    bucket: Bucket,
    segments: np.ndarray,
    width: int = 1024,
    trees: np.ndarray | None = None,
    costs: Sequence[float] | None = None,
) -> np.ndarray:
    """The cost of each row of a batch with attention that skips other segments: float64 [rows].

    A row of `L` positions with segments of `l` positions costs `L + Σ l² / (6 · width)`. `segments`
    are those of a `PlannedBatch`. For groups, the cost in the corpus's `trees` replaces `l²`. The
    positions of each side count with its entry of `costs`.

    >>> row_costs(Bucket(2, 12), np.array([[0, 0, 0, 12], [1, 1, 0, 6]]), width=1).tolist()
    [36.0, 18.0]
    """
    costs = (1,) * len(bucket.lengths) if costs is None else costs
    squares = weigh(segments[:, 3:] ** 2.0, costs)
    if trees is not None:
        _, branches, of_groups = trees[segments[:, 1]].T
        squares = np.where(branches > 0, of_groups, squares)
    of_rows = np.bincount(segments[:, 0], squares, bucket.rows)
    return weigh(bucket.lengths, costs) + of_rows / (6 * width)


def time_over_ideal(batches: Iterable[np.ndarray], groups: int) -> float:
    """The time of some batches, as a multiple of the least time: at least 1.

    `batches` has the cost of each row of each batch. Each of `groups` takes a contiguous slice of
    the rows, and a step takes as long as the group with the most work. The least time is that of
    groups that share the work of all steps evenly.

    >>> time_over_ideal([np.array([3, 1]), np.array([2, 2])], groups=2)  # 3 + 2 against 2 + 2
    1.25
    """
    shares = [costs.reshape(groups, -1).sum(axis=1) for costs in batches]
    return float(sum(each.max() for each in shares) / sum(each.mean() for each in shares))


def sort_rows(batches: list[np.ndarray]) -> list[np.ndarray]:
    """The costs of the rows of batches of one bucket, grouped into batches again as tiers.

    >>> [each.tolist() for each in sort_rows([np.array([5, 1]), np.array([1, 4])])]
    [[5, 4], [1, 1]]
    """
    ranked = -np.sort(-np.concatenate(batches))
    return [each[even_order(len(each))] for each in np.split(ranked, len(batches))]


def compare_tiers(batches: Sequence[tuple[Bucket, np.ndarray]], tiers: int) -> list[dict[str, Any]]:
    """`time_over_ideal` of consecutive batches, by numbers of "groups" and of "tiers".

    `batches` has the bucket of each batch and the cost of each of its rows. Numbers of tiers are
    compared for a plan without them; numbers of groups must divide the rows of every batch.
    """
    ratios = []
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
                ratios.append({"groups": groups, "tiers": steps * tiers, "ratio": ratio})
    return ratios
