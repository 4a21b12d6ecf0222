"""Figures: all numbers of the report."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from pipeline.history.plans import find_corpora
from pipeline.loading.batches import require_whole_sides
from pipeline.planning.bucket import PAIR, Bucket
from pipeline.planning.figures import Counts, count_losses
from pipeline.planning.lengths import histogram, weigh
from pipeline.planning.plan import Plan
from pipeline.planning.planned import PlannedBatch
from pipeline.report.dataset import Dataset, Options
from pipeline.report.strategies import (
    PLAIN,
    Strategy,
    compare_other_pairs,
    compare_others,
    compare_plans,
    count_plan,
)
from pipeline.report.tiers import compare_tiers, row_costs

PERCENTILES = (5, 50, 90, 99)
COLUMNS = 48  # of the histogram, at most

# Some figures need every batch; they are computed from at most this many first ones of an epoch.
MOST_BATCHES = 10_000

# The shares of a mixture are compared with its weights over any run of this many steps.
RUN = 200


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """The lengths of a dataset, on one of several sides."""

    name: str  # "corpus"; of several sides its name
    examples: int
    tokens: int  # positions to train on
    learnt: int | None  # those of them that carry loss; None if unknown
    empty: int  # examples without positions to train on; mean, percentiles, columns omit them
    mean: float
    percentiles: dict[str, int]  # lengths, by percentage
    longest: int
    row: int  # positions in the longest row of the plan
    overlong: int  # examples that are longer than `row`
    edges: list[int]  # of the histogram: a column has the lengths from an edge to below the next
    columns: dict[str, list[int]]  # "examples" and "tokens" in each column of the histogram
    sources: list[dict[str, Any]]  # name, examples and tokens of each


@dataclasses.dataclass(frozen=True, kw_only=True)
class Epoch:
    """An epoch of a plan."""

    fingerprint: str  # of the plan
    printed: str  # the text of `print(plan)`
    batches: int
    tokens: int  # real positions
    padding: float  # the share of positions that hold no token
    losses: dict[str, int]  # see `planning.figures.count_losses`
    buckets: list[dict[str, Any]]  # the "bucket" as JSON, "batches", and "fill", None without any
    used: dict[str, float]  # the share of the positions of each of several sides that is used
    walked: int  # the number of first batches from which the following fields are computed
    over_ideal: list[dict[str, Any]]  # see `compare_tiers`
    # For each corpus of a mixture, the largest difference between its weight and its share of any
    # `RUN` consecutive steps of a phase, in the unit of the weights. Empty if phases are shorter.
    off: dict[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """All figures of a report.

    `sides` are the lengths on each side, `ran` is whether the plan is that of a run, `plan` is an
    epoch of it, and `strategies` are ways to make batches, from the most work to the least.
    """

    name: str
    options: dict[str, Any]
    sides: list[Side]
    ran: bool
    plan: Epoch
    strategies: list[Strategy]


def measure(
    dataset: Dataset, options: Options, progress: Callable[[str], None] = lambda text: None
) -> Figures:
    """The figures of a dataset; `progress` is called with the name of each step."""
    options = options.for_lengths(dataset.lengths)
    progress("planning")
    plan = dataset.plan or options.plan(dataset.examples)
    if (corpus := dataset.corpus) is not None:
        require_whole_sides(corpus, plan, corpus.features)
    longest, width = plan.options.buckets[-1].lengths, options["width"]
    if dataset.plan or options.get("buckets"):  # rows are as long as those of the plan
        options = options.replace(max_length=longest if dataset.side_names else longest[0])
    ours = compare_plans(dataset.by_side, options, plan, progress)
    stays = np.ones(len(dataset.lengths), bool)
    stays[np.asarray(options.get("exclude", ()), np.int64)] = False
    if dataset.side_names == PAIR:
        others = compare_other_pairs(dataset.lengths[stays], options, longest)
    elif dataset.side_names:
        size = weigh(longest, plan.options.costs)
        rows = max(int(options["tokens_per_batch"] // size), 1)
        bucket = Bucket(rows, longest, plan.options.names)
        padded = options.replace(packing="none", **PLAIN).plan(dataset.by_side, (bucket,))
        name, about = "padded to the longest of all", f"one example in a row of {bucket}"
        others = [count_plan(padded, width, name=name, about=about)]
    else:
        others = compare_others(*histogram(dataset.lengths[stays]), options, *longest)
    sides = zip(dataset.side_names or ("corpus",), longest, strict=True)
    attention = options["attention"]
    return Figures(
        name=dataset.name,
        options={n: value for n, value in options.items() if n not in ("buckets", "exclude")},
        sides=[measure_side(dataset, *each) for each in sides],
        ran=dataset.plan is not None,
        plan=measure_epoch(plan, width),
        strategies=sorted(others + ours, key=lambda each: -each.work[attention]),
    )


def measure_side(dataset: Dataset, name: str, row: int) -> Side:
    """The lengths of a dataset, on the side `name`, for rows of `row` positions."""
    lengths, number = dataset.lengths, 0
    if dataset.side_names:
        number = dataset.side_names.index(name)
        lengths = lengths[:, number]
    learns = dataset.corpus is not None and dataset.corpus.loss_side == number
    sizes, counts = histogram(lengths)
    overlong, empty = int(counts[sizes > row].sum()), int(counts[sizes == 0].sum())
    if sizes.any():  # if all are empty, 0 is their mean and their longest
        sizes, counts = sizes[sizes > 0], counts[sizes > 0]
    below, tokens = np.cumsum(counts), int(counts @ sizes)
    # Edges grow by a fixed factor; short columns hold a single length.
    exact = np.geomspace(1, max(int(sizes[-1]), 1) + 1, COLUMNS + 1)
    edges = np.unique(np.ceil(exact - 1e-9).astype(np.int64))
    columns = {
        name: np.histogram(sizes, edges, weights=each)[0].tolist()
        for name, each in (("examples", counts), ("tokens", counts * sizes))
    }
    ends = np.cumsum([number for _, number in dataset.sources])
    sources = [
        {"name": source, "examples": number, "tokens": int(part.sum(dtype=np.int64))}
        for (source, number), part in zip(
            dataset.sources, np.split(lengths, ends[:-1]), strict=True
        )
    ]
    return Side(
        name=name,
        examples=len(lengths),
        tokens=tokens,
        learnt=dataset.corpus.num_learnt if learns and dataset.corpus else None,
        empty=empty,
        mean=tokens / int(below[-1]),
        percentiles={
            f"{share}": int(sizes[np.searchsorted(below, share / 100 * below[-1])])
            for share in PERCENTILES
        },
        longest=int(sizes[-1]),
        row=row,
        overlong=overlong,
        edges=edges.tolist(),
        columns=columns,
        sources=sources,
    )


def measure_epoch(plan: Plan, width: int = 1024) -> Epoch:
    """The figures of an epoch of a plan, for a model of this width."""
    first, last = plan.epoch_steps
    counts, buckets = plan.count(first, last), []
    for bucket in plan.options.buckets:
        number, _, *tokens = counts.buckets[bucket]
        size = bucket.rows * weigh(bucket.lengths, plan.options.costs)
        fill = float(weigh(tokens, plan.options.costs) / (number * size)) if number else None
        buckets.append({"bucket": bucket.as_json, "batches": int(number), "fill": fill})
    steps = range(first, min(last, first + MOST_BATCHES))
    costs, shares = [], []
    for batch in map(plan.batch, steps):
        of_rows = row_costs(
            batch.bucket, batch.segments, width, plan.trees, costs=plan.options.costs
        )
        costs.append((batch.bucket, of_rows))
        shares.append(_count_shares(plan, batch))
    return Epoch(
        fingerprint=plan.fingerprint,
        printed=str(plan),
        batches=last - first,
        tokens=counts.num_tokens,
        padding=counts.padding,
        losses=count_losses(plan.stages[-1]),
        buckets=buckets,
        used=_count_used(plan, counts) if plan.options.vectors else {},
        walked=len(steps),
        over_ideal=compare_tiers(costs, plan.options.tiers),
        off=_compare_with_weights(plan, first, shares),
    )


def _count_used(plan: Plan, counts: Counts) -> dict[str, float]:
    """The share of the positions of each side that is used."""
    tokens, positions = np.zeros((2, len(plan.options.names)))
    for bucket, (batches, _, *real) in counts.buckets.items():
        tokens += real
        positions += batches * bucket.rows * np.array(bucket.lengths)
    return dict(zip(plan.options.names, (tokens / positions).tolist(), strict=True))


def _count_shares(plan: Plan, batch: PlannedBatch) -> list[int]:
    """The amount of each corpus in a batch, in the unit of the weights."""
    streams = plan.stages[-1].streams
    if plan.options.by != "examples":
        return [batch.sources.get(stream.name, 0) for stream in streams]
    begun = batch.segments[batch.segments[:, 2] == 0, 1]
    return np.bincount(find_corpora(plan, begun), minlength=len(streams)).tolist()


def _compare_with_weights(plan: Plan, first: int, shares: list[list[int]]) -> dict[str, float]:
    """The field `off` of `Epoch`, from the `shares` of the steps from `first` on."""
    sums = np.cumsum([[0] * len(plan.names), *shares], axis=0)
    starts, found = [stage.start for stage in plan.stages], []
    for stage, end in zip(plan.stages, [*starts[1:], first + len(shares)], strict=True):
        weights = [float((stage.weights or {}).get(name, 0)) for name in plan.names]
        here = sums[max(stage.start - first, 0) : max(end - first + 1, 0)]
        if len(here) > RUN and len(plan.names) > 1:
            runs = here[RUN:] - here[:-RUN]
            of_runs = runs / runs.sum(axis=1, keepdims=True)
            found.append(np.abs(of_runs - weights).max(axis=0))
    return dict(zip(plan.names, np.max(found, axis=0).tolist(), strict=True)) if found else {}
