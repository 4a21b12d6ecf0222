"""Measure: everything that the report says, as plain JSON."""

from collections.abc import Callable
from typing import Any

import numpy as np

from pipeline.planning import lengths as lengths_lib
from pipeline.planning.lengths import Lengths
from pipeline.report.lockstep import Fitter
from pipeline.report.options import Options
from pipeline.report.planned import planned
from pipeline.report.statistics import by_bucket, statistics
from pipeline.report.strategies import BUCKETS, compare, lockstep, padded_pairs, ways
from pipeline.report.stream import Stream, shuffled
from pipeline.report.subject import Subject

VERSION = 1

# Examples that strategies which go one by one are simulated on.
SAMPLE = 1_000_000

# Of more examples than this, buckets for the comparison are fitted to a sample.
FITTED = 4_000_000


def measure(
    subject: Subject,
    options: Options,
    *,
    sample: int = SAMPLE,
    optimal: bool = False,
    tell: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """The report as JSON: `corpus`, `strategies`, `plan`, `cost` and the `options` behind them.

    Of pairs, `corpus` is about the inputs, and `targets` about the targets.

    Args:
        subject: what it is about.
        options: how to fit buckets and plan.
        sample: examples for the strategies that go one by one.
        optimal: simulate optimal packing also where that may take minutes.
        tell: is told what is going on.
    """
    options = options.for_lengths(subject.lengths)
    tell("planning")
    plan = subject.plan or options.plan(subject.examples)
    longest = plan.options.buckets[-1].lengths
    figures: dict[str, Any] = {
        "version": VERSION,
        "name": subject.name,
        "options": {name: value for name, value in options.chosen.items() if name != "buckets"},
        "plan": planned(plan),
    }
    tell("counting")
    columns = [subject.lengths] if not subject.pairs else list(subject.lengths.T)
    counts = [lengths_lib.histogram(column) for column in columns]
    for side, name in enumerate(("corpus", "targets")[: len(columns)]):
        figures[name] = statistics(subject, side, counts[side], longest[side])
    width = options["width"]
    left_out: list[str] = []
    if subject.pairs:
        lengths, most = Lengths(subject.lengths), (longest[0], longest[1])
        fitter = Fitter(lengths, 0, subject.lengths[:FITTED], options.unmixed, most)
        found = [padded_pairs(fitter, width=width)]
    else:
        figures["plan"]["histogram"] = by_bucket(
            counts[0], [bucket.lengths[0] for bucket in plan.options.buckets]
        )
        tell("shuffling")
        stream = shuffled(subject.lengths, longest[0], options["overflow"], options["seed"])
        others = ways(options["tokens_per_batch"], longest[0], int(stream.pieces.max()))
        found = list(compare(stream, others, width=width, sample=sample, tell=tell))
        fitter = Fitter(
            Lengths(stream.pieces), stream.cut, _fitted(stream), options.unmixed, longest[0]
        )
    optimal = optimal or options["packing"] == "optimal"
    found += lockstep(fitter, width=width, left_out=left_out, optimal=optimal, tell=tell)
    figures["strategies"], figures["left_out"] = found, left_out
    figures["cost"] = _cost(found, width)
    return figures


def _fitted(stream: Stream) -> np.ndarray:
    """The lengths that buckets are fitted to: all, or a sample and the longest."""
    some = stream.pieces[:FITTED]
    return np.append(some, stream.pieces.max()) if len(some) < len(stream.pieces) else some


def _cost(strategies: list[dict[str, Any]], width: int) -> dict[str, Any]:
    """How the work per token falls with the number of buckets, and how many are enough.

    A bucket more is worth it if it saves more than 1%.
    """
    curve = [
        {"buckets": len(each["buckets"]), "dense": each["cost"], "segment": each["segment_cost"]}
        for each in strategies
        if each.get("packing") == "best_fit"
    ]
    enough = {}
    for kind in ("dense", "segment"):
        least = min(point[kind] for point in curve)
        enough[kind] = next(p["buckets"] for p in curve if p[kind] <= least * 1.01)
    return {"width": width, "most": BUCKETS[-1], "curve": curve, "enough": enough}
