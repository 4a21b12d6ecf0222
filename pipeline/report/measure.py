"""Measure: every figure of the report, as plain JSON."""

from collections.abc import Callable
from typing import Any

import numpy as np

from pipeline.planning.lengths import Lengths
from pipeline.report.dataset import Dataset
from pipeline.report.epoch import measure_epoch
from pipeline.report.lockstep import BUCKETS, compare, padded_pairs
from pipeline.report.options import Options
from pipeline.report.statistics import statistics
from pipeline.report.strategies import simulate, strategies
from pipeline.report.stream import draw, stream_of

VERSION = 2

# Examples that other strategies are simulated on, and that buckets are fitted to, at most.
SAMPLE = 1_000_000


def measure(
    dataset: Dataset,
    options: Options,
    *,
    sample: int = SAMPLE,
    optimal: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """The report as JSON: `corpus`, `strategies`, `plan`, `cost` and the `options` behind them.

    For pairs, `corpus` describes the inputs and `targets` the targets. Other strategies are
    simulated on at most `sample` examples. `optimal` includes optimal packing also where it may
    take minutes. `progress` is called with the name of each step.
    """
    options = options.for_lengths(dataset.lengths)
    progress("planning")
    plan = dataset.plan or options.plan(dataset.examples)
    longest, width = plan.options.buckets[-1].lengths, options["width"]
    figures: dict[str, Any] = {
        "version": VERSION,
        "name": dataset.name,
        "options": {name: value for name, value in options.values.items() if name != "buckets"},
        "plan": measure_epoch(plan, width=width),
    }
    progress("counting")
    for side, name in enumerate(("corpus", "targets")[: len(longest)]):
        figures[name] = statistics(dataset, side, longest[side])
    sampled, fitted = draw(dataset.lengths, sample, options["seed"]), dataset.lengths
    scale = len(dataset.lengths) / len(sampled)
    if scale > 1:  # without the longest example, the longest bucket would be shorter
        fitted = np.concatenate([sampled, dataset.lengths.max(axis=0, keepdims=True)])
    alternatives = options
    if dataset.plan or options.values.get("buckets"):  # rows are as long as those of the plan
        most = longest if dataset.pairs else longest[0]
        alternatives = options.replace(max_length=most)
    lengths = Lengths(dataset.lengths)
    if dataset.pairs:
        found = [padded_pairs(lengths, alternatives, longest)]
    else:
        (row,) = longest
        stream = stream_of(sampled, row, options.values.get("overflow"), scale)
        found = []
        longest_example = min(row, figures["corpus"]["longest"])
        for each in strategies(options["tokens_per_batch"], row, longest_example):
            progress(each.name)
            found.append(simulate(each, stream, width=width))
    optimal = optimal or options["packing"] == "optimal"
    ours, figures["excluded"] = compare(
        lengths, fitted, alternatives, longest, optimal=optimal, progress=progress
    )
    figures["strategies"] = found + ours
    figures["cost"] = _cost(ours, width)
    return figures


def _cost(strategies: list[dict[str, Any]], width: int) -> dict[str, Any]:
    """How the work per token falls with the number of buckets, and how many are enough.

    One more bucket is worth its compilation if it saves more than 1%.
    """
    curve = [
        {"buckets": len(each["buckets"]), "dense": each["cost"], "segment": each["segment_cost"]}
        for each in strategies
        if each["packing"] == "best_fit"
    ]
    enough = {}
    for kind in ("dense", "segment"):
        least = min(point[kind] for point in curve)
        enough[kind] = next(p["buckets"] for p in curve if p[kind] <= least * 1.01)
    return {"width": width, "most": BUCKETS[-1], "curve": curve, "enough": enough}
