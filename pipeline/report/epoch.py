"""The report's figures of one epoch of a plan."""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.planning import figures
from pipeline.planning.balance import sort_rows, time_over_ideal
from pipeline.planning.plan import Plan

# Some figures need every batch; in a longer epoch they are those of its first batches.
MOST_BATCHES = 10_000

HOSTS = 8

# Numbers of groups of rows, such as devices, and of steps in a block of tiers, that are compared.
GROUPS = (8, 32, 128, 1024)
TIERS = (1, 4, 16)


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
        over hosts, with `over_ideal`; `sources` of a mixture; and `buckets`, each with its `rows`,
        `length` (for pairs both), `batches`, `fill`, `tokens`, `segments`, and the means
        `tokens_per_step` and `documents_per_step`.
    """
    buckets, histogram = _buckets(plan)
    lost = figures.losses(plan)
    first, last = figures.epoch_steps(plan)
    batches = _FirstBatches(plan, first, min(last - first, most_batches or MOST_BATCHES))
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
        "balance": batches.balance() | {"over_ideal": batches.over_ideal(width)},
        "sources": batches.sources(plan) if len(plan.names) > 1 else [],
    }


def _buckets(plan: Plan) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Each bucket's figures, and `[segments, rows]` pairs, both from the packed histograms."""
    buckets = []
    per_row: dict[int, int] = {}
    histograms = figures.packed(plan)
    for bucket, batches in figures.epoch_batches(plan).items():
        tokens = segments = rows = 0
        for number, index, packed in histograms.get(bucket, ()):
            tokens += round(number * packed.real(index))
            segments += round(number * packed.segments(index))
            rows += round(number * packed.rows(index))
            for pattern in packed.patterns[index]:
                count = pattern.segments
                per_row[count] = per_row.get(count, 0) + round(number * pattern.rows)
        empty = batches * bucket.rows - rows
        if empty:
            per_row[0] = per_row.get(0, 0) + empty
        buckets.append(
            {
                "rows": bucket.rows,
                "length": bucket.length,
                "batches": batches,
                "fill": tokens / (batches * bucket.positions) if batches else None,
                "tokens": tokens,
                "segments": segments,
                "tokens_per_step": tokens / batches if batches else None,
            }
        )
    return buckets, [[count, rows] for count, rows in sorted(per_row.items())]


class _FirstBatches:
    """The first batches of an epoch, one by one."""

    def __init__(self, plan: Plan, first: int, count: int):
        stages = [stage for stage, _, _ in plan.stages_between(first, first + count)]
        number_of = {b: index for stage in stages for index, b in enumerate(stage.options.buckets)}
        self.first, self.count, self.tiers = first, count, plan.options.tiers
        self.hosts = next(h for h in (HOSTS, 4, 2, 1) if all(b.rows % h == 0 for b in number_of))
        self.order = np.zeros(count, np.int64)
        self.documents = np.zeros(count, np.int64)
        # Real positions and squared segment lengths of each host in each batch.
        self.tokens = np.zeros((count, self.hosts))
        self.squares = np.zeros((count, self.hosts))
        self.source_tokens: list[Mapping[str, int]] = []
        # The positions of a row of each batch, and the squared segment lengths of each row.
        self.row_costs: list[tuple[int, np.ndarray]] = []
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
            squares = np.bincount(row, (sides**2).sum(axis=1), planned.bucket.rows)
            self.row_costs.append((sum(planned.bucket.lengths), squares))
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

        The last, under-filled batch of an epoch counts like any other.
        """
        balance: dict[str, Any] = {"hosts": self.hosts}
        for name, values in (("tokens", self.tokens), ("attention", self.squares)):
            ratio = values.max(axis=1) / values.mean(axis=1)
            balance[name] = {"mean": float(ratio.mean()), "worst": float(ratio.max())}
        return balance

    def over_ideal(self, width: int) -> list[dict[str, Any]]:
        """The time of the steps over that of evenly shared work, with some numbers of `tiers`.

        The cost of a row is `L + Σ l² / (6 · width)`, for a row of `L` positions with segments of
        `l` positions, between which attention is skipped. A list of `groups` of rows, `tiers` and
        `ratio`, for numbers of groups that divide the rows of all batches. For a plan with tiers,
        only its own number.
        """
        costs = [length + squares / (6 * width) for length, squares in self.row_costs]
        found = []
        for tiers in TIERS if self.tiers == 1 else (1,):
            batches: list[np.ndarray] = []
            for first in range(0, self.count, tiers):
                of_bucket: dict[int, list[np.ndarray]] = {}
                for step in range(first, min(first + tiers, self.count)):
                    of_bucket.setdefault(int(self.order[step]), []).append(costs[step])
                batches += [each for same in of_bucket.values() for each in sort_rows(same)]
            for groups in GROUPS:
                if all(len(each) % groups == 0 for each in batches):
                    ratio = time_over_ideal(batches, groups)
                    found.append({"groups": groups, "tiers": tiers * self.tiers, "ratio": ratio})
        return found


def runs(order: list[int]) -> list[tuple[int, int]]:
    """The order of buckets as runs: (bucket, batches of it in a row).

    >>> runs([1, 1, 0, 1])
    [(1, 2), (0, 1), (1, 1)]
    """
    return [(bucket, len(list(group))) for bucket, group in itertools.groupby(order)]
