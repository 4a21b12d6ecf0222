"""Tiers: how long groups of devices take for the rows of a plan, over the least time."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from pipeline.planning.bucket import Bucket
from pipeline.planning.lengths import weigh
from pipeline.planning.plan import Plan
from pipeline.planning.planned import PlannedBatch
from pipeline.planning.tiers import Tiers

# The most steps by which numbers of tiers are compared, to the end of a block.
COMPARED = 1024

TIERS = 16  # the number of tiers whose time a report gives
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
    return float(sum(share.max() for share in shares) / sum(share.mean() for share in shares))


def time_with_tiers(plan: Plan, tiers: int, time_of: Callable[[PlannedBatch], Any]) -> Any:
    """The time of steps with `tiers`, over their time in a plan: below 1 if devices wait less.

    The steps are the first ones of an epoch. `time_of` returns the time of a step, in any unit, or
    an array of several, such as those on several numbers of devices.

    >>> plan = Plan([6, 1, 6, 1], [Bucket(rows=2, length=6)], packing="none", seed=1)
    >>> def time_of(batch):  # of two devices with a row each
    ...     return row_costs(batch.bucket, batch.segments, width=1).max()
    >>> [time_of(plan.batch(step)).round(1).tolist() for step in (0, 1)]  # each has a long example
    [12.0, 12.0]
    >>> float(time_with_tiers(plan, 2, time_of).round(2))  # (12 + 6.2) ÷ (12 + 12)
    0.76
    """
    stage, (first, last) = plan.stages[-1], plan.epoch_steps
    options = dataclasses.replace(stage.options, tiers=tiers)
    dealt = Tiers(stage.plain, stage.schedule, options)
    steps = range(first, dealt.block(min(last, first + COMPARED) - 1).stop)
    times = [
        [time_of(batches.batch(step)) for step in steps] for batches in (dealt, stage.assembly)
    ]
    return np.divide(*np.sum(times, axis=1))
