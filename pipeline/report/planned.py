"""The plan's own section: what its batches look like, counted over them."""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.planning import figures
from pipeline.planning.plan import Plan

# Batches are walked one by one, up to this many; an epoch that has more is told by its first ones.
WALKED = 10_000

HOSTS = 8

# Over so many steps the shares of a mixture are compared with its weights.
STEPS = 200

# Into how many stretches an epoch is divided to show how even it is.
STRETCHES = 40


def planned(plan: Plan, walked: int | None = None) -> dict[str, Any]:
    """What there is to say of a plan.

    Args:
        plan: what to tell of.
        walked: how many batches to walk, at most; `WALKED` if not given.

    Returns:
        `fingerprint`, `batches` and `padding` of an epoch; `overlong` examples, what `overflow`
        does with them and how many positions are `lost`; `segments_per_row`, rows by their number
        of segments; `walked`, how many batches the rest is counted over; `order`, the bucket of
        each of them as an index; `balance` over hosts; of a mixture, its `sources`; and for each
        of the `buckets` its `rows` and `length` (of pairs, both), `batches`, `fill`, `tokens`,
        `segments`, and the mean of `tokens` and `documents` in an optimizer step.
    """
    buckets, histogram = _buckets(plan)
    lost = figures.losses(plan)
    first, last = figures.epoch_steps(plan)
    walk = _Walk(plan, first, min(last - first, walked or WALKED))
    for index, bucket in enumerate(buckets):
        bucket["documents_per_step"] = walk.documents_per_step(index)
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
        "walked": len(walk.order),
        "order": walk.order.tolist(),
        "balance": walk.balance(),
        "sources": walk.sources(plan) if len(plan.names) > 1 else [],
    }


def _buckets(plan: Plan) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Each bucket's figures, and `[segments, rows]` pairs, both from the packed histograms."""
    buckets = []
    per_row: dict[int, int] = {}
    every = figures.packed(plan)
    for bucket, batches in figures.epoch_batches(plan).items():
        tokens = segments = rows = 0
        for number, index, packed in every.get(bucket, ()):
            tokens += round(number * packed.real(index))
            segments += round(number * packed.segments(index))
            rows += round(number * packed.rows(index))
            for pattern in packed.patterns[index]:
                held = pattern.segments
                per_row[held] = per_row.get(held, 0) + round(number * pattern.rows)
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
    return buckets, [[held, per_row[held]] for held in sorted(per_row)]


class _Walk:
    """The first batches of an epoch, one by one."""

    def __init__(self, plan: Plan, first: int, count: int):
        stages = [stage for stage, _, _ in plan.stages_between(first, first + count)]
        number_of = {b: index for stage in stages for index, b in enumerate(stage.options.buckets)}
        self.first, self.count = first, count
        self.hosts = next(h for h in (HOSTS, 4, 2, 1) if all(b.rows % h == 0 for b in number_of))
        self.order = np.zeros(count, np.int64)
        self.documents = np.zeros(count, np.int64)
        # Real positions and squared segment lengths of each host in each batch.
        self.tokens = np.zeros((count, self.hosts))
        self.squares = np.zeros((count, self.hosts))
        self.of_source: list[Mapping[str, int]] = []
        for step in range(count):
            planned = plan.batch(first + step)
            row, example = planned.segments[:, :2].T
            sides = planned.segments[:, 3:].astype(float)
            host = row * self.hosts // planned.bucket.rows
            self.order[step] = number_of[planned.bucket]
            self.documents[step] = len(np.unique(example))
            self.tokens[step] = np.bincount(host, sides.sum(axis=1), self.hosts)
            self.squares[step] = np.bincount(host, (sides**2).sum(axis=1), self.hosts)
            self.of_source.append(planned.sources)

    def documents_per_step(self, index: int) -> float | None:
        """Different documents in a batch of a bucket, on average; None if none was walked."""
        here = self.order == index
        return float(self.documents[here].mean()) if here.any() else None

    def sources(self, plan: Plan) -> list[dict[str, Any]]:
        """What each of several corpora was to have, and had, of the real positions walked.

        `weights` by phase; its `share`; `epochs`, how often an epoch of the plan goes through it;
        and `off`, how far from its weight the share of any `STEPS` steps of one phase is at most,
        None where there are not so many, or weights count examples.
        """
        before, after = (figures.passes(plan, step) for step in figures.epoch_steps(plan))
        phases = [
            (max(start - self.first, 0), weights)
            for start, weights in figures.weights_by_phase(plan)
        ]
        starts = [start for start, _ in phases]
        tokens = np.array([[of.get(name, 0) for name in plan.names] for of in self.of_source])
        sums = np.cumsum(np.concatenate([np.zeros((1, tokens.shape[1])), tokens]), axis=0)
        off = np.full(tokens.shape[1], -1.0)
        for (start, weights), end in zip(phases, [*starts[1:], self.count], strict=True):
            here = sums[start : min(end, self.count) + 1]
            if len(here) > STEPS and plan.options.by == "tokens":
                run = here[STEPS:] - here[:-STEPS]
                beside = np.abs(run / run.sum(axis=1, keepdims=True) - list(weights.values()))
                off = np.maximum(off, beside.max(axis=0))
        return [
            {
                "name": name,
                "weights": [[start, weights[name]] for start, weights in phases],
                "share": float(sums[-1, index] / sums[-1].sum()),
                "epochs": after[name] - before[name],
                "off": float(off[index]) if off[index] >= 0 else None,
            }
            for index, name in enumerate(plan.names)
        ]

    def balance(self) -> dict[str, Any]:
        """How even the work of the hosts is: the busiest host against the mean, over all steps.

        The last, under-filled batch of an epoch counts like any other.
        """
        figures: dict[str, Any] = {"hosts": self.hosts}
        for name, values in (("tokens", self.tokens), ("attention", self.squares)):
            ratio = values.max(axis=1) / values.mean(axis=1)
            stretches = np.array_split(ratio, min(len(ratio), STRETCHES))
            figures[name] = {
                "mean": float(ratio.mean()),
                "worst": float(ratio.max()),
                "over_epoch": [float(stretch.mean()) for stretch in stretches],
            }
        return figures


def runs(order: list[int]) -> list[tuple[int, int]]:
    """The order of buckets as (bucket, how many batches of it follow one another).

    >>> runs([1, 1, 0, 1])
    [(1, 2), (0, 1), (1, 1)]
    """
    return [(bucket, len(list(group))) for bucket, group in itertools.groupby(order)]
