"""Updates: `pack` of what was sampled a moment ago, beside the packers of other trainers.

    python -m benchmarks updates

Where Tunix is installed, its own packer makes its rows.
"""

import ctypes
import gc
import time
from typing import Any

import jax
import numpy as np
import pyarrow as pa

import pipeline
from benchmarks import packers, simulations
from benchmarks.results import Line, Section
from benchmarks.turns import best_seconds
from pipeline.loading.batches import Batches
from pipeline.planning.bucket import Bucket
from pipeline.report.tiers import row_costs, time_over_ideal
from pipeline.scoring.update_plan import plan_update
from pipeline.steps.compile_log import CompileLog
from pipeline.steps.compiled import Compiled

ROLLOUTS, LENGTH = 2048, 8192
ROWS = (8, 32, 128)  # of a batch
TAILS = (2, 4, 8)  # the rows of a batch, divided by these
WIDTH = 4096  # of the model: a row costs L + Σ l² / (6 · WIDTH), as 24576 · L + L² does
MOST_SEGMENTS = 64
UPDATES, MORE_UPDATES = 10, 50  # that are packed; that follow on the first
ROUNDS = 9

FEATURES = {
    "old_logprobs": pipeline.Feature("targets", dtype="float32"),
    "reference_logprobs": pipeline.Feature("targets", dtype="float32"),
    "values": pipeline.Feature("inputs", dtype="float32"),
    "advantage": pipeline.Feature("example", dtype="float32"),
}


def measure() -> Section:
    """Compares rows, padding and balance, times planning and collating, counts compilations."""
    updates = [draw_lengths(seed) for seed in range(UPDATES)]
    made_by = packers.tunix(updates[0][:1], LENGTH)[1]
    others = [
        {
            "first-fit decreasing": simulations.first_fit_decreasing(lengths, LENGTH),
            f"Tunix ({made_by})": packers.tunix(lengths, LENGTH)[0],
        }
        for lengths in updates
    ]
    lines = [_compare_rows(updates, others)]
    for rows in ROWS:
        lines += _compare_batches(updates, others, rows)
    lines += [_compare_speed(updates[0], rows) for rows in ROWS]
    return Section(
        "updates",
        f"{UPDATES} updates of {ROLLOUTS:,} rollouts of lognormal length, {np.mean(updates):,.0f} "
        f"tokens in the mean and at most {LENGTH:,}, in rows of {LENGTH:,}. Time over ideal: that "
        "of an update's steps, with a row on each device, over that of evenly shared work in as "
        "many steps (1 is perfect), by the cost model of attention that skips other segments at "
        f"width {WIDTH:,}. Karmarkar–Karp makes parts of equal cost but unequal length, and its "
        "padding is up to the longest part. Planning and collating: the CPU time, in turns, of an "
        "update with four features; all memory is new in each turn.",
        [*lines, *_count_compilations()],
    )


def draw_lengths(seed: int) -> np.ndarray:
    """Lengths of the rollouts of an update: int64 [rollouts]."""
    drawn = np.random.default_rng(seed).lognormal(6.5, 0.9, ROLLOUTS)
    return np.clip(drawn, 1, LENGTH).astype(np.int64)


def bound_rows(lengths: np.ndarray, length: int) -> int:
    """Rows below which no packing is possible: the bound L₂ of Martello and Toth (1990).

    >>> bound_rows(np.array([6, 6, 6, 2]), length=8), bound_rows(np.array([3, 3, 3]), length=8)
    (3, 2)

    For each size `k` up to half a row: examples above half a row need a row each, those above
    `length - k` share it with none from `k` up, and the rest of these fill what the others leave.
    """
    best = 0
    large = lengths[2 * lengths > length]
    for size in np.unique(lengths[2 * lengths <= length]).tolist() or [0]:
        room = (length - large[large <= length - size]).sum()
        small = lengths[(2 * lengths <= length) & (lengths >= size)].sum()
        best = max(best, len(large) + max(-(-int(small - room) // length), 0))
    return best


def _plan(lengths: np.ndarray | pipeline.Examples, buckets: list[Bucket]) -> pipeline.Plan:
    """The plan of `pack`."""
    return plan_update(lengths, buckets, max_segments=MOST_SEGMENTS)


def _with_tails(rows: int) -> list[Bucket]:
    return [Bucket(each, LENGTH) for each in (rows, *(rows // divisor for divisor in TAILS))]


def _compare_rows(updates: list[np.ndarray], others: list[dict[str, np.ndarray]]) -> Line:
    """Rows over the least possible; of `others`, the row of each rollout by name."""
    least = np.array([bound_rows(lengths, LENGTH) for lengths in updates])
    ours = [_rows_of_plan(_plan(lengths, [Bucket(8, LENGTH)])) for lengths in updates]
    over = np.array(ours) - least
    theirs = {
        name: f"{sum(each[name].max() + 1 for each in others) / least.sum():.4f}"
        for name in others[0]
    }
    return Line(
        "rows over the least possible",
        f"{sum(ours) / least.sum():.4f}×",
        f"{least.min()} to {least.max()} rows are needed, and pack takes {over.min()} to "
        f"{over.max()} more; {_join(theirs)}",
    )


def _rows_of_plan(plan: pipeline.Plan) -> int:
    batches = map(plan.batch, range(plan.num_batches()))
    return sum(len(np.unique(each.segments[:, 0])) for each in batches)


def _compare_batches(
    updates: list[np.ndarray], others: list[dict[str, np.ndarray]], rows: int
) -> list[Line]:
    """The padding of batches of some rows, and the time of their steps, in the mean of updates."""
    padding: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {}
    longest = 0
    for lengths, theirs in zip(updates, others, strict=True):
        tokens = int(lengths.sum())
        plan = _plan(lengths, [Bucket(rows, LENGTH)])
        batches = [plan.batch(step) for step in range(plan.num_batches())]
        costs = [row_costs(each.bucket, each.segments, WIDTH) for each in batches]
        steps = len(batches)
        ours = {"pack": plan, "with tails": _plan(lengths, _with_tails(rows))}
        found = {name: each.padding for name, each in ours.items()}
        times = {"pack": time_over_ideal(costs, rows)}
        times["its rows, sorted and cut"] = _time(-np.sort(-np.concatenate(costs)), rows)
        for name, row in theirs.items():
            found[name] = 1 - tokens / (-(-(row.max() + 1) // rows) * rows * LENGTH)
            squares = np.bincount(row, lengths.astype(float) ** 2)
            times[name] = _time(LENGTH + squares / (6 * WIDTH), rows)
        work = 6 * WIDTH * lengths + lengths**2
        part = simulations.karmarkar_karp(work, steps * rows)
        most = int(np.bincount(part, lengths).max())
        found["Karmarkar–Karp"] = 1 - tokens / (steps * rows * most)
        times["Karmarkar–Karp"] = _time(np.bincount(part, work, steps * rows), rows)
        longest = max(longest, most)
        for name, value in found.items():
            padding.setdefault(name, []).append(value)
        for name, value in times.items():
            seconds.setdefault(name, []).append(value)
    worst = max(
        one - other
        for one, other in zip(seconds["pack"], seconds["its rows, sorted and cut"], strict=True)
    )
    tails = " and ".join(f"{rows // divisor}" for divisor in TAILS)
    of_padding = {name: f"{np.mean(each):.1%}" for name, each in padding.items()}
    of_time = {name: f"{np.mean(each):.4f}" for name, each in seconds.items()}
    return [
        Line(
            f"padding in batches of {rows} rows",
            of_padding.pop("pack"),
            f"with tails of {tails} rows {of_padding.pop('with tails')}; {_join(of_padding)}, in "
            f"parts of up to {longest:,}",
        ),
        Line(
            f"time over ideal, {rows} devices",
            of_time.pop("pack"),
            f"{_join(of_time)}; pack is at most {worst:.5f} above its rows, sorted and cut",
        ),
    ]


def _join(figures: dict[str, str]) -> str:
    return ", ".join(f"{name} {figure}" for name, figure in figures.items())


def _time(costs: np.ndarray, rows: int) -> float:
    """`time_over_ideal` of rows in this order, in whole steps; empty rows cost their length."""
    whole = np.append(costs, np.full(-len(costs) % rows, float(LENGTH)))
    return time_over_ideal(whole.reshape(-1, rows), rows)


def _columns(lengths: np.ndarray) -> dict[str, Any]:
    """Random rollouts of these lengths, with their weights and features."""
    rng, sizes = np.random.default_rng(1), (lengths + 1).tolist()
    per_token = ("weights", *(name for name, each in FEATURES.items() if not each.per_example))
    columns = {name: [rng.random(n, dtype=np.float32) for n in sizes] for name in per_token}
    tokens = [rng.integers(1, 30_000, n, dtype=np.int32) for n in sizes]
    return {"tokens": tokens, "advantage": rng.random(len(sizes), dtype=np.float32), **columns}


def _examples(columns: dict[str, Any]) -> pipeline.Examples:
    return pipeline.Examples(columns, features=FEATURES)


def _compare_speed(lengths: np.ndarray, rows: int) -> Line:
    """The time to plan and collate an update, over that of writing as many new arrays."""
    columns, buckets = _columns(lengths), [Bucket(rows, LENGTH)]
    examples = _examples(columns)
    held: list[Any] = []

    def plan() -> None:
        found = _plan(examples, buckets)
        held.extend(found.batch(step) for step in range(found.num_batches()))

    def plan_and_collate() -> None:
        batches = Batches(examples, _plan(examples, buckets))
        held.extend(batches[step] for step in range(len(batches)))

    def pack() -> None:
        held.extend(pipeline.pack(examples, buckets, max_segments=MOST_SEGMENTS))
        jax.block_until_ready([batch for _, batch in held])

    def construct() -> None:
        held.append(_examples(columns))

    def forget() -> None:
        """Gives all memory back to the system, so that arrays are new and not used again."""
        held.clear()
        gc.collect()
        pa.default_memory_pool().release_unused()
        ctypes.CDLL(None).malloc_trim(0)

    plan_and_collate()
    shapes = [(array.shape, array.dtype) for batch in held for array in batch.values()]

    def write() -> None:
        held.extend(np.full(shape, 1, dtype) for shape, dtype in shapes)

    contenders = {"write": write, "plan and collate": plan_and_collate, "plan": plan, "pack": pack}
    seconds = best_seconds(contenders, ROUNDS, time.process_time, forget)
    seconds |= best_seconds({"construct": construct}, ROUNDS, time.process_time, forget)
    ratio = {name: f"{each / seconds['write']:.2f}×" for name, each in seconds.items()}
    size = sum(np.prod(shape) * dtype.itemsize for shape, dtype in shapes)
    return Line(
        f"planning and collating, {rows} rows a batch, over writing new arrays of the same sizes",
        ratio["plan and collate"],
        f"{size / 1e6:,.0f} MB in {seconds['write'] * 1e3:,.0f} ms; planning {ratio['plan']}, "
        f"pack with its transfers {ratio['pack']}, Examples themselves {ratio['construct']}",
    )


def _count_compilations() -> list[Line]:
    """The compilations of a step, in the first update and in those after it."""
    lines = []
    for what, buckets in {"": [Bucket(8, LENGTH)], ", with tails": _with_tails(8)}.items():

        def step(_: float, batch: dict[str, jax.Array]) -> jax.Array:
            return sum(field.sum() for field in batch.values())

        counts, compiled = [], None
        with CompileLog() as log:
            for seed in range(1 + MORE_UPDATES):
                columns = _columns(draw_lengths(100 + seed))
                packed = pipeline.pack(_examples(columns), buckets, max_segments=MOST_SEGMENTS)
                compiled = compiled or Compiled(step, 0.0, packed.specs)
                jax.block_until_ready([compiled(0.0, batch) for _, batch in packed])
                counts.append(len(log.names))
        lines.append(
            Line(
                f"compilations in {MORE_UPDATES} updates after the first{what}",
                f"{counts[-1] - counts[0]}",
                f"{counts[0]} in the first, of {len(buckets)} shapes",
            )
        )
    return lines
