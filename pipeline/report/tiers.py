"""Tiers: how long groups of devices take for the rows of a plan, over the least time."""

from collections.abc import Iterable, Sequence

import numpy as np

from pipeline.planning.bucket import Bucket
from pipeline.planning.lengths import weigh

GROUPS = (8, 32, 128, 1024)  # numbers of groups of rows, such as devices, to compare


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
