"""Figures: all numbers of the report, computed here and nowhere else."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pipeline.history.plans import find_corpora
from pipeline.planning import figures as planned
from pipeline.planning.bucket import Bucket
from pipeline.planning.lengths import histogram
from pipeline.planning.plan import Plan
from pipeline.planning.planned import PlannedBatch
from pipeline.report.dataset import Dataset, Options
from pipeline.report.sides import compare_sides
from pipeline.report.strategies import PLAIN, Strategy, compare_others, compare_plans, count_plan
from pipeline.report.tiers import compare_tiers, row_costs

PERCENTILES = (5, 50, 90, 99)
COLUMNS = 48  # of the histogram, at most

# Some figures need every batch; for a longer epoch they are those of its first batches.
MOST_BATCHES = 10_000

# The shares of a mixture are compared with its weights over any run of this many steps.
RUN = 200


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """The lengths of a dataset; for pairs, those of the inputs or of the targets.

    Attributes:
        name: "corpus"; for pairs "inputs" or "targets".
        examples: the number of examples.
        tokens: the number of positions to train on.
        learnt: the number of those that carry loss; None if unknown.
        empty: examples without positions to train on, which the following fields leave out.
        mean: the mean length.
        percentiles: lengths, by percentage.
        longest: the largest length.
        row: positions in the longest row of the plan.
        overlong: examples that are longer than `row`.
        edges: the edges of the columns of the histogram; a column has the lengths from an edge up
            to the next, exclusive.
        columns: examples and tokens in each column.
        sources: name, examples and tokens of each source.
    """

    name: str
    examples: int
    tokens: int
    learnt: int | None
    empty: int
    mean: float
    percentiles: dict[str, int]
    longest: int
    row: int
    overlong: int
    edges: list[int]
    columns: dict[str, list[int]]
    sources: list[dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Epoch:
    """An epoch of a plan.

    Attributes:
        fingerprint: of the plan.
        printed: the text of `print(plan)`.
        batches: the number of batches.
        tokens: the number of real positions.
        padding: the share of positions that hold no token.
        losses: examples that are `excluded`, `empty` or `overlong`, and the positions `lost`.
        buckets: the `bucket` as JSON, `batches`, and the `fill`, None without batches.
        walked: the number of first batches that the following fields are computed from.
        mean_length: see `spread_of_means`.
        over_ideal: see `compare_tiers`.
        sides: see `compare_sides`.
        off: for each corpus of a mixture, the largest difference between its weight and its share
            of any `RUN` consecutive steps of a phase, in the unit of the weights; empty if phases
            are shorter.
    """

    fingerprint: str
    printed: str
    batches: int
    tokens: int
    padding: float
    losses: dict[str, int]
    buckets: list[dict[str, Any]]
    walked: int
    mean_length: dict[str, float | None]
    over_ideal: list[dict[str, Any]]
    sides: list[dict[str, float]]
    off: dict[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """All figures of a report.

    Attributes:
        name: of the dataset.
        options: of the plan.
        sides: one; for pairs, the inputs and the targets.
        plan: an epoch of the plan.
        strategies: ways to make batches of this data, from the most work to the least.
        tuning: that of the `Dataset`.
    """

    name: str
    options: dict[str, Any]
    sides: list[Side]
    plan: Epoch
    strategies: list[Strategy]
    tuning: Mapping[str, Any] | None = None


def measure(
    dataset: Dataset, options: Options, progress: Callable[[str], None] = lambda text: None
) -> Figures:
    """The figures of a dataset; `progress` is called with the name of each step."""
    options = options.for_lengths(dataset.lengths)
    progress("planning")
    plan = dataset.plan or options.plan(dataset.examples)
    longest, width = plan.options.buckets[-1].lengths, options["width"]
    if dataset.plan or options.get("buckets"):  # rows are as long as those of the plan
        options = options.replace(max_length=longest if dataset.pairs else longest[0])
    ours = compare_plans(dataset.lengths, options, plan, progress)
    if dataset.pairs:
        bucket = Bucket(max(options["tokens_per_batch"] // sum(longest), 1), longest)
        padded = options.replace(packing="none", **PLAIN).plan(dataset.lengths, (bucket,))
        name, about = "padded to the longest of all", f"one pair in a row of {bucket}"
        others = [count_plan(padded, width, name=name, about=about)]
    else:
        others = compare_others(*histogram(dataset.lengths), options, *longest)
    names = ("inputs", "targets") if dataset.pairs else ("corpus",)
    attention = options["attention"]
    return Figures(
        name=dataset.name,
        options={name: value for name, value in options.items() if name != "buckets"},
        sides=[measure_side(dataset, *each) for each in zip(names, longest, strict=True)],
        plan=measure_epoch(plan, width=width),
        strategies=sorted(others + ours, key=lambda each: -each.work[attention]),
        tuning=dataset.tuning,
    )


def measure_side(dataset: Dataset, name: str, row: int) -> Side:
    """The lengths of a dataset, or of the `name` side of pairs, for rows of `row` positions."""
    lengths = dataset.lengths.reshape(len(dataset.lengths), -1)[:, int(name == "targets")]
    sizes, counts = histogram(lengths)
    overlong, empty = int(counts[sizes > row].sum()), int(counts[sizes == 0].sum())
    if sizes.any():
        sizes, counts = sizes[sizes > 0], counts[sizes > 0]
    below, tokens = np.cumsum(counts), int(counts @ sizes)
    at = {f"{p}": int(sizes[np.searchsorted(below, p / 100 * below[-1])]) for p in PERCENTILES}
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
        learnt=None if dataset.corpus is None or name == "inputs" else dataset.corpus.num_learnt,
        empty=empty,
        mean=tokens / int(below[-1]),
        percentiles=at,
        longest=int(sizes[-1]),
        row=row,
        overlong=overlong,
        edges=edges.tolist(),
        columns=columns,
        sources=sources,
    )


def measure_epoch(plan: Plan, most_batches: int = MOST_BATCHES, *, width: int = 1024) -> Epoch:
    """The figures of an epoch of a plan; some only of its first `most_batches`."""
    first, last = planned.epoch_steps(plan)
    steps = range(first, min(last, first + most_batches))
    counts, buckets = planned.count_steps(plan, first, last), []
    for bucket in plan.options.buckets:
        number, _, tokens = counts.buckets[bucket]
        fill = float(tokens / (number * bucket.positions)) if number else None
        buckets.append({"bucket": bucket.as_json, "batches": int(number), "fill": fill})
    costs, moments, shares = [], [], []
    for batch in map(plan.batch, steps):
        costs.append((batch.bucket, row_costs(batch.bucket, batch.segments, width, plan.trees)))
        sizes = batch.segments[:, 3:].sum(axis=1, dtype=float)
        is_full = len(np.unique(batch.segments[:, 0])) == batch.bucket.rows
        moments.append([len(sizes), sizes.sum(), sizes @ sizes] if is_full else [math.nan] * 3)
        shares.append(_count_shares(plan, batch))
    return Epoch(
        fingerprint=plan.fingerprint,
        printed=str(plan),
        batches=last - first,
        tokens=counts.num_tokens,
        padding=counts.padding,
        losses=planned.losses(plan),
        buckets=buckets,
        walked=len(steps),
        mean_length=spread_of_means([bucket for bucket, _ in costs], np.array(moments)),
        over_ideal=compare_tiers(costs, plan.options.tiers),
        sides=compare_sides(plan),
        off=_compare_with_weights(plan, first, shares),
    )


def _count_shares(plan: Plan, batch: PlannedBatch) -> list[int]:
    """The amount of each corpus in a batch, in the unit of the weights."""
    streams = plan.stages[-1].streams
    if plan.options.by != "examples":
        return [batch.sources.get(stream.name, 0) for stream in streams]
    begun = batch.segments[batch.segments[:, 2] == 0, 1]
    return np.bincount(find_corpora(plan, begun), minlength=len(streams)).tolist()


def _compare_with_weights(plan: Plan, first: int, shares: list[list[int]]) -> dict[str, float]:
    """The largest distance of each corpus from its weight over `RUN` steps of a phase."""
    sums = np.cumsum([[0] * len(plan.names), *shares], axis=0)
    phases, found = planned.weights_by_phase(plan), []
    ends = [*(start for start, _ in phases[1:]), first + len(shares)]
    for (start, weights), end in zip(phases, ends, strict=True):
        here = sums[max(start - first, 0) : max(end - first + 1, 0)]
        if len(here) > RUN and len(plan.names) > 1:
            runs = here[RUN:] - here[:-RUN]
            of_runs = runs / runs.sum(axis=1, keepdims=True)
            found.append(np.abs(of_runs - list(weights.values())).max(axis=0))
    return dict(zip(plan.names, np.max(found, axis=0).tolist(), strict=True)) if found else {}


def spread_of_means(buckets: list[Bucket], moments: np.ndarray) -> dict[str, float | None]:
    """How much the mean length of a batch's segments varies, compared with random batches.

    Random batches have as many segments, drawn from all of their bucket. `buckets` has the bucket
    of each batch; `moments` the number of its segments, the sum of their lengths and that of their
    squares, NaN for batches to leave out: float64 [batches, 3]. `ratio` is the standard deviation
    of the means over that of random batches, and `correlation` that of neighbouring batches; both
    are None if there are too few batches.
    """
    scores = np.full(len(buckets), np.nan)  # deviations of the means; by chance, of variance 1
    full = ~np.isnan(moments[:, 0])
    for bucket in {each for each, is_full in zip(buckets, full, strict=True) if is_full}:
        here = full & np.array([each == bucket for each in buckets])
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
