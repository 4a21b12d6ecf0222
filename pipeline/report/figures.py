"""Figures: all numbers of the report."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from pipeline.loading.batches import require_whole_sides
from pipeline.planning.bucket import PAIR, Bucket
from pipeline.planning.figures import Counts, count_losses
from pipeline.planning.lengths import histogram, weigh
from pipeline.planning.plan import Plan
from pipeline.planning.planned import PlannedBatch
from pipeline.report.dataset import Dataset, Options
from pipeline.report.run import Run
from pipeline.report.strategies import (
    PLAIN,
    Strategy,
    compare_other_pairs,
    compare_others,
    compare_plans,
    count_plan,
)
from pipeline.report.tiers import GROUPS, TIERS, row_costs, time_over_ideal, time_with_tiers

PERCENTILES = (5, 50, 90, 99)
COLUMNS = 48  # of the histogram, at most

# The balance of devices needs every batch; it is computed from the first ones of an epoch.
MOST_BATCHES = 10_000


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
    # `time_over_ideal` by the number of groups, for those that divide the rows of every batch; and
    # the time with `tiers=TIERS` over that of this plan, if it has fewer.
    over_ideal: dict[str, float]
    with_tiers: dict[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """All figures of a report.

    `sides` are the lengths on each side, `ran` is whether the plan is that of a run, `run` is what
    the log of that run says, `plan` is an epoch of the plan, and `strategies` are ways to make
    batches, from the most work to the least.
    """

    name: str
    options: dict[str, Any]
    sides: list[Side]
    ran: bool
    run: Run | None
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
        size = weigh(longest, plan.options.cost)
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
        sides=[measure_side(dataset, *side) for side in sides],
        ran=dataset.plan is not None,
        run=dataset.run,
        plan=measure_epoch(plan, width, getattr(dataset.corpus, "trees", None)),
        strategies=sorted(others + ours, key=lambda way: -way.work[attention]),
    )


def measure_side(dataset: Dataset, name: str, row: int) -> Side:
    """The lengths of a dataset, on the side `name`, for rows of `row` positions."""
    lengths, number = dataset.lengths, 0
    if dataset.side_names:
        number = dataset.side_names.index(name)
        lengths = lengths[:, number]
    corpus = dataset.corpus
    learns = corpus is not None and corpus.loss == corpus.side_names[number]
    sizes, counts = histogram(lengths)
    overlong, empty = int(counts[sizes > row].sum()), int(counts[sizes == 0].sum())
    if sizes.any():  # if all are empty, 0 is their mean and their longest
        sizes, counts = sizes[sizes > 0], counts[sizes > 0]
    below, tokens = np.cumsum(counts), int(counts @ sizes)
    # Edges grow by a fixed factor; short columns hold a single length.
    exact = np.geomspace(1, max(int(sizes[-1]), 1) + 1, COLUMNS + 1)
    edges = np.unique(np.ceil(exact - 1e-9).astype(np.int64))
    columns = {
        name: np.histogram(sizes, edges, weights=weights)[0].tolist()
        for name, weights in (("examples", counts), ("tokens", counts * sizes))
    }
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
    )


def measure_epoch(plan: Plan, width: int = 1024, trees: np.ndarray | None = None) -> Epoch:
    """The figures of an epoch of a plan, for a model of this width; `trees` are of the corpus."""
    first, last = plan.epoch_steps
    counts, buckets = plan.count(first, last), []
    for bucket in plan.options.buckets:
        number, _, *tokens = counts.buckets[bucket]
        size = bucket.rows * weigh(bucket.lengths, plan.options.cost)
        fill = float(weigh(tokens, plan.options.cost) / (number * size)) if number else None
        buckets.append({"bucket": bucket.as_json, "batches": int(number), "fill": fill})

    def costs_of(batch: PlannedBatch) -> np.ndarray:
        return row_costs(batch.bucket, batch.segments, width, trees, costs=plan.options.cost)

    costs = [costs_of(plan.batch(step)) for step in range(first, min(last, first + MOST_BATCHES))]
    groups = [n for n in GROUPS if all(len(of_batch) % n == 0 for of_batch in costs)]

    def time_of(batch: PlannedBatch) -> np.ndarray:
        costs = costs_of(batch)
        return np.array([costs.reshape(n, -1).sum(axis=1).max() for n in groups])

    with_tiers: dict[str, float] = {}
    if groups and plan.options.tiers < TIERS:
        times = time_with_tiers(plan, TIERS, time_of)
        with_tiers = {f"{n}": float(time) for n, time in zip(groups, times, strict=True)}
    return Epoch(
        fingerprint=plan.fingerprint,
        printed=str(plan),
        batches=last - first,
        tokens=counts.num_tokens,
        padding=counts.padding,
        losses=count_losses(plan.stages[-1]),
        buckets=buckets,
        used=_count_used(plan, counts) if plan.options.vectors else {},
        over_ideal={f"{number}": time_over_ideal(costs, number) for number in groups},
        with_tiers=with_tiers,
    )


def _count_used(plan: Plan, counts: Counts) -> dict[str, float]:
    """The share of the positions of each side that is used."""
    tokens, positions = np.zeros((2, len(plan.options.names)))
    for bucket, (batches, _, *real) in counts.buckets.items():
        tokens += real
        positions += batches * bucket.rows * np.array(bucket.lengths)
    return dict(zip(plan.options.names, (tokens / positions).tolist(), strict=True))
