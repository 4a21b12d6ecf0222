"""Calibration: the width of a model, as the seconds of its steps show it."""

from collections.abc import Iterable

import numpy as np

from pipeline.errors import InvalidValue, require_one_of
from pipeline.planning.cascade import ATTENTIONS, Attention
from pipeline.planning.planned import PlannedBatch


def calibrate(
    batches: Iterable[PlannedBatch], seconds: Iterable[float], *, attention: Attention = "dense"
) -> int:
    """The `width` with which the costs of `fit_buckets` are in ratio to the seconds of steps.

    On another device, or with another kernel, attention weighs more or less against the rest of the
    model than the model's width says. A batch of `P` positions and `S` scores takes `a·P + c·S`
    seconds, and a row costs `L + L²/(6·width)`, so the width is `a/(6·c)`. The slope `c` is the
    median over pairs of a step with little attention and one with much (Theil, 1950), so a few slow
    steps do not count.

    >>> from pipeline import Bucket
    >>> short = PlannedBatch(Bucket(8, 64), np.array([[0, 0, 0, 64]]))
    >>> long = PlannedBatch(Bucket(2, 256), np.array([[0, 1, 0, 256]]))
    >>> calibrate([short, long], [0.7, 1.0])  # 0.6 + 0.1 · (64 / 64) and 0.6 + 0.1 · (256 / 64)
    64

    Args:
        batches: the batches of some steps, as `plan.batch(step)` gives them; for attention over
            whole rows, of at least two buckets.
        seconds: the seconds that each step took, without compilation; `metrics.jsonl` of a run has
            them as `seconds`.
        attention: "dense", over whole rows (default); or "segment", which skips other segments.

    Raises:
        ValueError: the seconds do not grow with the share of attention.
    """
    require_one_of("attention", attention, ATTENTIONS)
    points = []
    for batch, each in zip(batches, seconds, strict=True):
        bucket = batch.bucket
        sides = np.array([bucket.lengths] * bucket.rows, float)
        if attention == "segment":
            sides = batch.segments[:, 3:].astype(float)
        # l² for one length; for pairs a² + b² + a·b: both sides' own scores, and those across
        scores = (sides.sum(axis=1) ** 2 + (sides**2).sum(axis=1)).sum() / 2
        points.append((scores / bucket.positions, each / bucket.positions))
    shares, rates = np.array(sorted(points)).reshape(-1, 2).T
    half = len(shares) // 2
    run, rise = shares[-half:] - shares[:half], rates[-half:] - rates[:half]
    slope = np.median(rise[run > 0] / run[run > 0]) if (run > 0).any() else 0.0
    rest = np.median(rates - slope * shares) if slope > 0 else 0.0
    if rest <= 0:
        raise InvalidValue(
            f"the seconds of {len(points):,} steps do not grow with their share of attention, up "
            f"to {shares.max(initial=0):,.0f} scores a position; give more steps, or batches with "
            "longer rows beside short ones"
        )
    return max(round(rest / (6 * slope)), 1)
