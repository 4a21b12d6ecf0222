"""The report's figures of one epoch of a plan."""

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.planning import figures
from pipeline.planning.balance import compare_tiers, row_costs
from pipeline.planning.bucket import Bucket
from pipeline.planning.plan import Plan

# Some figures need every batch; in a longer epoch they are those of its first batches.
MOST_BATCHES = 10_000

HOSTS = 8


def measure_epoch(
    plan: Plan, most_batches: int | None = None, *, width: int = 1024
) -> dict[str, Any]:
    """What the report's JSON has for a plan.

    Args:
        plan: the plan.
        most_batches: batches to build, at most; None: `MOST_BATCHES`.
        width: width of the model, which weighs attention against the rest.

    Returns:
        `fingerprint`, `batches`, `padding` and `tokens` of an epoch; `overlong` examples, their
        `overflow` and the number of positions `lost`; `sides`, the fill of each side of pairs;
        `segments_per_row`, pairs of a number of segments and a number of rows; `walked`, the number
        of batches built for the following figures; `order`, their buckets as indices; `balance`
        over hosts, with `over_ideal`; `mean_length`, with the `ratio` and the `correlation` of
        `spread_of_means`; `sources` of a mixture; and `buckets`, each with its `rows`,
        `length` (for pairs both), `batches`, `fill`, `tokens`, `segments`, and the means
        `tokens_per_step` and `documents_per_step`.
    """
    buckets, histogram = _buckets(plan)
    lost = figures.losses(plan)
    first, last = figures.epoch_steps(plan)
    batches = _FirstBatches(plan, first, min(last - first, most_batches or MOST_BATCHES), width)
    for index, bucket in enumerate(buckets):
        bucket["documents_per_step"] = batches.documents_per_step(index)
    return {
        "fingerprint": plan.fingerprint,
        "batches": last - first,
        "padding": plan.padding,
        "tokens": plan.num_tokens,
        "overflow": plan.options.overflow,
        "overlong": lost.overlong,
        "lost": lost.lost,
        "sides": list(figures.side_fills(plan)),
        "buckets": buckets,
        "segments_per_row": histogram,
        "walked": len(batches.order),
        "order": batches.order.tolist(),
        "balance": batches.balance(),
        "mean_length": spread_of_means(batches.order, batches.moments),
        "sources": batches.sources(plan) if len(plan.names) > 1 else [],
    }


def _buckets(plan: Plan) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Each bucket's figures, and `[segments, rows]` pairs, both from the packed histograms."""
    per_row: Counter[int] = Counter()
    segments: Counter[Bucket] = Counter()
    for _, of_histogram, packed in figures.packed(plan):
        for index, (bucket, times) in enumerate(of_histogram):
            segments[bucket] += round(times * packed.segments(index))
            for pattern in packed.patterns[index]:
                per_row[pattern.segments] += round(times * pattern.rows)
    contents = figures.rows_and_tokens(plan)
    buckets = []
    for bucket, batches in figures.epoch_batches(plan).items():
        rows, tokens = contents.get(bucket, np.zeros(2)).round().astype(int).tolist()
        if empty := batches * bucket.rows - rows:
            per_row[0] += empty
        buckets.append(
            {
                "rows": bucket.rows,
                "length": bucket.length,
                "batches": batches,
                "fill": tokens / (batches * bucket.positions) if batches else None,
                "tokens": tokens,
                "segments": segments[bucket],
                "tokens_per_step": tokens / batches if batches else None,
            }
        )
    return buckets, [[count, rows] for count, rows in sorted(per_row.items())]


class _FirstBatches:
    """The first batches of an epoch, one by one."""

    def __init__(self, plan: Plan, first: int, count: int, width: int):
        stages = [stage for stage, _, _ in plan.stages_between(first, first + count)]
        number_of = {b: index for stage in stages for index, b in enumerate(stage.options.buckets)}
        self.first, self.count, self.tiers = first, count, plan.options.tiers
        self.hosts = next(h for h in (HOSTS, 4, 2, 1) if all(b.rows % h == 0 for b in number_of))
        self.order = np.zeros(count, np.int64)
        self.documents = np.zeros(count, np.int64)
        # Real positions and squared segment lengths of each host in each batch.
        self.tokens = np.zeros((count, self.hosts))
        self.squares = np.zeros((count, self.hosts))
        self.moments = np.zeros((count, 3))  # for `spread_of_means`; NaN unless all rows are used
        self.source_tokens: list[Mapping[str, int]] = []
        self.row_costs: list[tuple[Bucket, np.ndarray]] = []
        self.contents: list[list[int]] = []  # as `figures.content`
        for step in range(count):
            planned = plan.batch(first + step)
            row, example = planned.segments[:, :2].T
            sides = planned.segments[:, 3:].astype(float)
            host = row * self.hosts // planned.bucket.rows
            self.order[step] = number_of[planned.bucket]
            self.documents[step] = len(np.unique(example))
            self.tokens[step] = np.bincount(host, sides.sum(axis=1), self.hosts)
            self.squares[step] = np.bincount(host, (sides**2).sum(axis=1), self.hosts)
            self.source_tokens.append(planned.sources)
            costs = row_costs(planned.bucket, planned.segments, width)
            self.row_costs.append((planned.bucket, costs))
            lengths = sides.sum(axis=1)
            moments = len(lengths), lengths.sum(), (lengths**2).sum()
            full = np.count_nonzero(np.diff(row)) + 1 == planned.bucket.rows
            self.moments[step] = moments if full else math.nan
            self.contents.append(figures.content(plan, planned) if planned.sources else [])

    def documents_per_step(self, index: int) -> float | None:
        """Different documents in a batch of a bucket, on average; None without such a batch."""
        here = self.order == index
        return float(self.documents[here].mean()) if here.any() else None

    def sources(self, plan: Plan) -> list[dict[str, Any]]:
        """What each corpus of a mixture gets of the real positions.

        `weights` by phase; its `share`; `epochs`, how often an epoch of the plan goes through it;
        and `off`, the largest difference between its weight and its share of `figures.RUN` steps in
        a row of one phase, in the unit of the weights: None for shorter phases.
        """
        before, after = (figures.passes(plan, step) for step in figures.epoch_steps(plan))
        phases = [
            (max(start - self.first, 0), weights)
            for start, weights in figures.weights_by_phase(plan)
        ]
        tokens = {
            name: sum(real.get(name, 0) for real in self.source_tokens) for name in plan.names
        }
        off = figures.deviations(plan, self.first, self.contents)
        return [
            {
                "name": name,
                "weights": [[start, weights[name]] for start, weights in phases],
                "share": tokens[name] / sum(tokens.values()),
                "epochs": after[name] - before[name],
                "off": None if off is None else off[index],
            }
            for index, name in enumerate(plan.names)
        ]

    def balance(self) -> dict[str, Any]:
        """The work of the busiest host ÷ that of the mean host, over all steps.

        The last, under-filled batch of an epoch counts like any other. `over_ideal` is that of
        `compare_tiers`.
        """
        balance: dict[str, Any] = {"hosts": self.hosts}
        for name, values in (("tokens", self.tokens), ("attention", self.squares)):
            ratio = values.max(axis=1) / values.mean(axis=1)
            balance[name] = {"mean": float(ratio.mean()), "worst": float(ratio.max())}
        return balance | {"over_ideal": compare_tiers(self.row_costs, self.tiers)}


def spread_of_means(buckets: np.ndarray, moments: np.ndarray) -> dict[str, float | None]:
    """How much the mean length of a batch's segments varies, compared with random batches.

    Random batches have as many segments, drawn at random from all of their bucket.

    Args:
        buckets: the bucket of each batch, as an index: int64 [batches].
        moments: the number of segments of each batch, the sum of their lengths, and that of their
            squared lengths: float64 [batches, 3]; NaN for batches to leave out.

    Returns:
        `ratio`: the standard deviation of the means over that of random batches; `correlation`,
        between neighbouring batches. None if too few batches tell.
    """
    scores = np.full(len(buckets), np.nan)  # deviations of the means, with the variance 1 by chance
    full = ~np.isnan(moments[:, 0])
    for bucket in np.unique(buckets[full]):
        here = full & (buckets == bucket)
        number, total, squares = moments[here].T
        every = number.sum()
        mean = total.sum() / every
        variance = squares.sum() / every - mean**2
        if len(number) > 1 and variance > 1e-9 * mean**2:
            chance = variance * (1 / number - 1 / every)
            scores[here] = (total / number - mean) / np.sqrt(chance)
    pairs = np.stack([scores[:-1], scores[1:]])
    pairs = pairs[:, ~np.isnan(pairs).any(axis=0)]
    if pairs.shape[1] < 2 or not pairs.std(axis=1).all():
        return {"ratio": None, "correlation": None}
    ratio = float(np.sqrt(np.nanmean(scores**2)))
    return {"ratio": ratio, "correlation": float(np.corrcoef(pairs)[0, 1])}


def runs(order: list[int]) -> list[tuple[int, int]]:
    """The order of buckets as runs: (bucket, batches of it in a row).

    >>> runs([1, 1, 0, 1])
    [(1, 2), (0, 1), (1, 1)]
    """
    return [(bucket, len(list(group))) for bucket, group in itertools.groupby(order)]
