"""Growth: what a plan and a batch cost as the corpus, the epoch and the step grow."""

import functools
import tempfile
import time

import numpy as np

import pipeline
from benchmarks.lengths import examples_of
from benchmarks.results import Line, Section
from benchmarks.turns import best_seconds
from pipeline.planning.lengths import Lengths

PLANNED = (10_000, 100_000, 1_000_000, 10_000_000, 100_000_000)
LOADED = (10_000, 100_000, 1_000_000)
STEPS = (0, 1_000_000, 1_000_000_000)
TOKENS = 32_768


def measure(lengths: np.ndarray) -> Section:
    """Plans growing samples of `lengths`, and loads batches from larger and larger corpora."""
    buckets = pipeline.fit_buckets(lengths, tokens_per_batch=TOKENS, max_buckets=4)
    rng = np.random.default_rng(2)
    lines = []
    for count in PLANNED:
        drawn = rng.choice(lengths.astype(np.uint32), count)
        known = Lengths(drawn)
        assert known.digest  # found once, and kept
        first = best_seconds({"plan": functools.partial(_plan, known, buckets)})["plan"]
        deep = _median(_plan(known, buckets), 10**9)
        lines.append(
            Line(
                f"plan of {count:,} examples",
                f"{first * 1e3:,.0f} ms to the first batch",
                f"{first / count * 1e9:.0f} ns an example, {deep * 1e6:.0f} µs a further batch",
            )
        )
    for count in LOADED:
        with tempfile.TemporaryDirectory() as directory:
            drawn = rng.choice(lengths, count)
            corpus = pipeline.Corpus.from_arrays(examples_of(drawn), directory)
            batches = pipeline.Batches(corpus, pipeline.Plan(corpus, buckets)).repeat()
            for step in STEPS:
                lines.append(
                    Line(
                        f"batch of {TOKENS:,} positions, {count:,} examples, from step {step:,} "
                        f"(epoch {step // batches.plan.num_batches():,})",
                        f"{_median(batches, step) * 1e3:.3f} ms",
                    )
                )
    return Section(
        "growth",
        "Samples of the lengths of the section planner, whose digest is computed before; medians "
        "of 200 batches after the first.",
        lines,
    )


def _plan(lengths: Lengths, buckets) -> pipeline.Plan:
    """A new plan, its first batch made."""
    plan = pipeline.Plan(lengths, buckets)
    plan.batch(0)
    return plan


def _median(source, step: int) -> float:
    """The median seconds of 200 batches from `step` on, after the first of them."""
    get = source.batch if isinstance(source, pipeline.Plan) else source.__getitem__
    get(step)
    seconds = []
    for each in range(step + 1, step + 201):
        begin = time.perf_counter()
        get(each)
        seconds.append(time.perf_counter() - begin)
    return float(np.median(seconds))
