"""Scale: a plan of up to a billion lengths, mapped from a file: time, memory, padding.

    python -m benchmarks scale --examples 1_000_000_000     # four gigabytes of disk, some minutes

Each size is measured in a process of its own, so that its memory is its own.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import numpy as np

import pipeline
from benchmarks.results import Line, Section

SMALL = 1_000_000
TOKENS = 4_000_000  # positions in a batch
LONGEST = 8192
PER_FILE = 25_000  # examples, some 2²⁴ tokens


def measure(examples: int) -> Section:
    """Plans a million lengths, then `examples` of them, also in files; each a whole epoch."""
    lines: list[Line] = []
    with tempfile.TemporaryDirectory() as directory:
        few, many = (os.path.join(directory, name) for name in ("few", "many"))
        _write(few, SMALL)
        first = _run(few)
        lines += _lines(f"{SMALL:,} lengths", first, SMALL, first)
        _write(many, examples)
        for name, options in (("lengths", []), ("lengths in files", [str(PER_FILE)])):
            lines += _lines(f"{examples:,} {name}", _run(many, *options), examples, first)
    return Section(
        "scale",
        f"Lognormal lengths up to {LONGEST:,}, memory-mapped, in up to four buckets with "
        f"{TOKENS:,} positions in a batch. In files: each file has {PER_FILE:,} examples, and a "
        "window has whole files.",
        lines,
    )


def _run(path: str, *options: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.scale", path, *options]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


def _lines(what: str, seen: dict, count: int, first: dict) -> list[Line]:
    rate, compared = count / seen["epoch"], SMALL / first["epoch"]
    return [
        Line(
            f"{what}: first batch",
            f"{seen['first']:.2f} s",
            f"{seen['windows']} windows, padding {seen['padding']:.4%}, "
            f"{seen['batches']:,} batches",
        ),
        Line(
            f"{what}: plan and all batches of an epoch",
            f"{rate / 1e6:.1f} M examples/s",
            f"{rate / compared:.2f}× the rate at {SMALL:,}; every position once",
        ),
        Line(
            f"{what}: anonymous memory at most",
            f"{seen['memory'] / 2**20:,.0f} MiB",
            f"{seen['memory'] / count:.2f} bytes an example",
        ),
        Line(
            f"{what}: any step",
            f"{seen['any']:.2f} s",
            "the median of three far apart, each in a window of its own",
        ),
    ]


def _write(path: str, count: int) -> None:
    lengths = np.memmap(path, np.uint32, "w+", shape=(count,))
    rng = np.random.default_rng(0)
    for begin in range(0, count, 1 << 22):
        part = lengths[begin : begin + (1 << 22)]
        part[:] = np.clip(rng.lognormal(6, 1.2, len(part)), 1, LONGEST)


class Filed(NamedTuple):
    """Lengths whose examples lie in files."""

    lengths: np.ndarray
    files: np.ndarray


def _plan_once(path: str, per_file: int) -> dict:
    lengths = np.memmap(path, np.uint32, "r")
    files = np.diff([*range(0, len(lengths), per_file), len(lengths)]) if per_file else None
    buckets = pipeline.fit_buckets(
        np.array(lengths[:SMALL]),
        tokens_per_batch=TOKENS,
        max_buckets=4,
        max_length=LONGEST,
    )
    begin = time.perf_counter()
    plan = pipeline.Plan(lengths if files is None else Filed(lengths, files), buckets)
    plan.batch(0)
    first = time.perf_counter() - begin
    memory, total, steps = _anonymous(), np.uint64(0), plan.num_batches()
    for step in range(steps):
        segments = plan.batch(step).segments
        total += _mixed(segments[:, 1], segments[:, 3])
        if step % 64 == 0:
            memory = max(memory, _anonymous())
    epoch = time.perf_counter() - begin
    _check(lengths, total)
    jumps = []
    for step in (5 * steps + 1, 9 * steps // 2, 100 * steps - 1):
        begin = time.perf_counter()
        plan.batch(step)
        jumps.append(time.perf_counter() - begin)
    return {
        "first": first,
        "epoch": epoch,
        "memory": memory,
        "any": float(np.median(jumps)),
        "padding": plan.padding,
        "batches": steps,
        "windows": len(plan.stages[0].streams[0].whole.windows),
    }


def _check(lengths: np.ndarray, total: np.uint64) -> None:
    """That a sum over all positions, each example's weighed by a number of its own, is `total`."""
    for begin in range(0, len(lengths), 1 << 22):
        part = lengths[begin : begin + (1 << 22)]
        total -= _mixed(np.arange(begin, begin + len(part)), part)
    assert total == 0, "the epoch is not a partition"


def _mixed(examples: np.ndarray, sizes: np.ndarray) -> np.uint64:
    weights = examples.astype(np.uint64) + np.uint64(1)
    weights *= np.uint64(0x9E3779B97F4A7C15)
    weights ^= weights >> np.uint64(29)
    weights *= np.uint64(0xBF58476D1CE4E5B9)
    return (weights * sizes.astype(np.uint64)).sum(dtype=np.uint64)


def _anonymous() -> int:
    """Bytes of this process's memory that no file backs."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    np.seterr(over="ignore")
    print(json.dumps(_plan_once(sys.argv[1], int((sys.argv[2:] or ["0"])[0]))))
