"""Change: what it costs to go on with another plan, and to audit a run that did."""

import json
import os
import statistics
import tempfile
import time

import numpy as np
from etils import epath

import pipeline
from benchmarks.lengths import examples_of
from benchmarks.results import Line, Section
from pipeline.history import audit, write_history

STEPS = (10_000, 10_000_000)
CHANGES = 4
ROUNDS = 7
# Of the run that is audited.
EXAMPLES, TOKENS = 200_000, 1_000_000_000


def measure(lengths: np.ndarray) -> Section:
    """Times `Plan.after` beside planning an epoch, and the audit of a billion tokens."""
    buckets = pipeline.fit_buckets(lengths, tokens_per_batch=32_768, max_buckets=4)

    def epoch():
        plan = pipeline.Plan(lengths, buckets)
        for step in range(plan.num_batches()):
            plan.batch(step)

    whole = _median(lambda: None, lambda _: epoch())
    lines = [Line("plan an epoch, and all its batches", f"{whole * 1e3:.0f} ms")]
    for step in STEPS:
        seconds = _median(
            lambda: pipeline.Plan(lengths, buckets),
            lambda plan, step=step: plan.after(step, seed=1).batch(step),
        )
        lines.append(_line(f"change at step {step:,}, to its first batch", seconds, whole))

    def often(plan):
        for number in range(CHANGES):
            plan = plan.after(STEPS[-1] + 100 * number, seed=number)
        plan.batch(STEPS[-1] + 100 * CHANGES)

    seconds = _median(lambda: pipeline.Plan(lengths, buckets), often)
    lines.append(_line(f"{CHANGES} changes, 100 steps apart, to the first batch", seconds, whole))
    lines.append(_audited(lengths[:EXAMPLES]))
    return Section(
        "change",
        f"{len(lengths):,} examples, batches of 32,768 positions; medians of {ROUNDS}. The "
        f"audited run has {EXAMPLES:,} examples, and its plan changed once.",
        lines,
    )


def _audited(lengths: np.ndarray) -> Line:
    buckets = pipeline.fit_buckets(lengths, tokens_per_batch=32_768, max_buckets=4)
    with tempfile.TemporaryDirectory() as directory:
        workdir = epath.Path(directory)
        corpus = pipeline.Corpus.from_arrays(examples_of(lengths), workdir / "corpus")
        plan = pipeline.Plan(corpus, buckets)
        steps = TOKENS // (plan.num_tokens // plan.num_batches())
        plan = plan.after(steps // 3, seed=1)
        write_history(workdir, corpus, plan)
        with open(os.fspath(workdir / "metrics.jsonl"), "w") as file:
            for step in range(steps):
                line = {"step": step, "loss": 1.0, "batch": plan.batch(step).digest}
                file.write(json.dumps(line) + "\n")
        begin = time.perf_counter()
        audit(workdir, lambda said: None)
        seconds = time.perf_counter() - begin
    return Line(
        f"audit of {TOKENS:,} tokens in {steps:,} steps",
        f"{seconds:.1f} s",
        f"{TOKENS / seconds / 1e6:.0f} M tokens/s",
    )


def _median(make, work) -> float:
    """The median seconds of `work(make())`, without those of `make`."""
    seconds = []
    for _ in range(ROUNDS):
        made = make()
        begin = time.perf_counter()
        work(made)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def _line(what: str, seconds: float, whole: float) -> Line:
    return Line(what, f"{seconds * 1e3:.0f} ms", f"{seconds / whole:.2f}× planning an epoch")
