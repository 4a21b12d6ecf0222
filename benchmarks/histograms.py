"""Histograms: the share of positions used by best fit, beside a proven bound."""

import json
import pathlib
import time

import numpy as np

import pipeline
from benchmarks.bound import fewest_rows
from benchmarks.results import Line, Section


def measure(paths: list[str]) -> Section:
    """Packs each histogram into rows of its longest length, and checks the plan as a partition."""
    lines = []
    for path in paths:
        name, lengths = lengths_of(path)
        longest = int(lengths.max())
        begin = time.perf_counter()
        plan = pipeline.Plan(lengths, [pipeline.Bucket(1, longest)])
        seconds = time.perf_counter() - begin
        least = fewest_rows(np.bincount(lengths), longest)
        bound = min(int(lengths.sum()) / (least * longest), 1)
        _check(lengths, longest)
        lines.append(
            Line(
                f"{name}, {len(lengths):,} examples up to {longest:,}",
                f"{1 - plan.padding:.4%}",
                f"proven bound {bound:.4%}; {seconds:.2f} s, a partition",
            )
        )
    return Section(
        "histograms",
        "The share of positions that hold tokens when published histograms of lengths are packed "
        "into rows of the longest length, beside the greatest share that any packing can have; and "
        "the seconds of the whole plan.",
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


def _check(lengths: np.ndarray, longest: int) -> None:
    """Goes through an epoch in large batches: every example once, whole, and no row too long."""
    plan = pipeline.Plan(lengths, [pipeline.Bucket(4096, longest)])
    seen = np.zeros(len(lengths), np.uint8)
    for step in range(plan.num_batches()):
        row, example, start, size = plan.batch(step).segments.T
        assert np.bincount(row, size).max() <= longest
        assert not start.any()
        assert np.array_equal(size, lengths[example])
        np.add.at(seen, example, 1)
    assert (seen == 1).all()
