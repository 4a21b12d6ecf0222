"""Sides of pairs: the fill of rows of inputs and of targets, and its upper bound."""

import itertools
from collections.abc import Sequence

import numpy as np

from pipeline.planning.bucket import Bucket
from pipeline.planning.figures import count_epoch
from pipeline.planning.plan import Plan


def compare_sides(plan: Plan) -> list[dict[str, float]]:
    """For pairs, the share of positions in use in an epoch, and its bound, for each side.

    A dict for each side: `used`, and `bound`, the most that the ratio of the sides allows. Empty if
    the examples are not pairs.
    """
    if not plan.options.pairs:
        return []
    counts, totals, positions = count_epoch(plan), np.zeros(2), np.zeros(2)
    for stream in plan.stages[-1].streams:
        sides = stream.whole.layout.pieces.positions_per_example().sum(axis=0)
        totals += sides * counts.passes[stream.name]
    for bucket, (batches, *_) in counts.buckets.items():
        positions += batches * bucket.rows * np.array(bucket.lengths)
    _, bounds = volume_bound(totals, list(counts.buckets))
    every = zip((totals / positions).tolist(), bounds, strict=True)
    return [{"used": used, "bound": bound} for used, bound in every]


def volume_bound(totals: np.ndarray, buckets: Sequence[Bucket]) -> tuple[float, tuple[float, ...]]:
    """An upper bound on the share of positions in use: of both sides together, and of each side.

    The rows need room for all inputs and for all targets. With one bucket, the side that needs more
    rows can be full, and the other as full as the ratio of the totals allows. With several buckets,
    the least room is a linear program with two constraints, whose dual has its optimum where two
    constraint lines meet. The bound ignores that sizes may not add up to full rows. `totals` [2]
    are the positions of all inputs and of all targets.

    >>> volume_bound(np.array([1000, 600]), [Bucket(1, (100, 100))])
    (0.8, (1.0, 0.6))
    """
    lengths = np.array([bucket.lengths for bucket in buckets], np.float64)

    def least(room: np.ndarray) -> float:
        """The least sum of rows · room that holds both totals."""
        lines = np.concatenate([np.column_stack([lengths, room]), [[1, 0, 0], [0, 1, 0]]])
        best = 0.0
        for (a, b, e), (c, d, f) in itertools.combinations(lines.tolist(), 2):
            if a * d != b * c:
                price = np.array([e * d - b * f, a * f - e * c]) / (a * d - b * c)
                if (price >= 0).all() and (lengths @ price <= room * (1 + 1e-12)).all():
                    best = max(best, float(totals @ price))
        return best

    sides = tuple(float(totals[side]) / least(lengths[:, side]) for side in (0, 1))
    return float(totals.sum()) / least(lengths.sum(axis=1)), sides
