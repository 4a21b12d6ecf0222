"""Histograms: the share of positions used, best fit and optimal, beside the proven bound."""

import json
import pathlib
import time

import numpy as np

import pipeline
from benchmarks.results import Line, Section


def measure(paths: list[str]) -> Section:
    """Packs each histogram into rows of its longest length, and checks the plan as a partition."""
    lines = []
    for path in paths:
        name, lengths = lengths_of(path)
        longest = int(lengths.max())
        for packing in ("best_fit", "optimal"):
            begin = time.perf_counter()
            plan = pipeline.Plan(lengths, [pipeline.Bucket(1, longest)], packing=packing)
            seconds = time.perf_counter() - begin
            solution = plan.stages[0].streams[0].solution
            bound = "" if solution is None else f"proven bound {solution.bound:.4%}, "
            lines.append(
                Line(
                    f"{name}, {len(lengths):,} examples up to {longest:,}: {packing}",
                    f"{1 - plan.padding:.4%}",
                    f"{bound}{seconds:.2f} s, {_checked(lengths, longest, packing)}",
                )
            )
    return Section(
        "histograms",
        "The share of positions that hold tokens when published histograms of lengths are packed "
        "into rows of the longest length, and the seconds of the whole plan.",
        lines,
    )


def lengths_of(path: str) -> tuple[str, np.ndarray]:
    """The name of a histogram, and its lengths in a random order.

    The file is JSON: a list whose entry `i` counts the examples of length `i + 1`, or an object
    with such a list as `counts` and, if it likes, a `name`.
    """
    stored = json.loads(pathlib.Path(path).read_text())
    name = pathlib.Path(path).stem
    if isinstance(stored, dict):
        name, stored = stored.get("name", name), stored["counts"]
    lengths = np.repeat(np.arange(1, len(stored) + 1, dtype=np.uint32), stored)
    np.random.default_rng(0).shuffle(lengths)
    return name, lengths


def _checked(lengths: np.ndarray, longest: int, packing: str) -> str:
    """Goes through an epoch in large batches: every example once, whole, and no row too long."""
    plan = pipeline.Plan(lengths, [pipeline.Bucket(4096, longest)], packing=packing)
    seen = np.zeros(len(lengths), np.uint8)
    for step in range(plan.num_batches()):
        row, example, start, size = plan.batch(step).segments.T
        assert np.bincount(row, size).max() <= longest
        assert not start.any()
        assert np.array_equal(size, lengths[example])
        np.add.at(seen, example, 1)
    assert (seen == 1).all()
    return "a partition"
