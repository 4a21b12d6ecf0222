"""Balance: how long steps take over the least possible time, when every device has its own rows."""

import functools
import time

import numpy as np

import pipeline
from benchmarks.histograms import lengths_of
from benchmarks.results import Line, Section
from benchmarks.turns import best_seconds
from pipeline.report.tiers import row_costs, time_over_ideal

EXAMPLES = 1_000_000
WIDTH = 4096  # of the model: a row costs L + Σ l² / (6 · WIDTH), the FLOPs of a whole layer
TIERS = 16
MORE = 64
BUFFER = 64  # rows among which other libraries balance
GREEDY = 20_000  # rows that are balanced in a buffer, which takes time in Python
STEPS, ROUNDS = 128, 9  # that are timed

# Devices, and rows of each.
LAYOUTS = ((32, 1), (128, 1), (32, 4), (32, 8))


def measure(lengths: np.ndarray, histograms: list[str]) -> Section:
    """Compares plans with and without tiers, random rows and rows balanced in a buffer."""
    rng = np.random.default_rng(0)
    short, long = rng.lognormal(6, 1, EXAMPLES), rng.lognormal(10.5, 0.8, EXAMPLES)
    data = {
        "lognormal up to 32,768": np.clip(rng.lognormal(6.5, 1.3, EXAMPLES), 1, 32_768),
        "a narrower one": np.clip(rng.lognormal(6.5, 1, EXAMPLES), 1, 32_768),
        "3% long, up to 131,072": np.clip(
            np.where(rng.random(EXAMPLES) < 0.03, long, short), 1, 131_072
        ),
        "the lengths given": lengths[:EXAMPLES],
    }
    for path in histograms:
        name, counted = lengths_of(path)
        data[name] = rng.choice(counted, EXAMPLES // 4)  # with many rows each
    lines = []
    for name, each in data.items():
        longest = int(each.max())
        for devices, rows in LAYOUTS:
            bucket = pipeline.Bucket(devices * rows, -(-longest // 128) * 128)
            lines.append(_compare(f"{name}, {devices} × {rows}", each.astype(int), bucket, devices))
    return Section(
        "balance",
        f"Figure: the time of an epoch's steps with tiers={TIERS} over that of evenly shared work "
        "(1 is perfect), for devices × rows of each device, by the cost model of attention that "
        f"skips other segments at width {WIDTH:,}. Compared: the same for other orders of rows; "
        f"the CPU time of a plan with its first batch, and of {STEPS} batches, with tiers over "
        "that without, in turns; and how much the mean length of the documents in a batch varies "
        "without tiers, against batches of random documents.",
        lines,
    )


def _compare(what: str, lengths: np.ndarray, bucket: pipeline.Bucket, devices: int) -> Line:
    plans = {k: pipeline.Plan(lengths, [bucket], tiers=k) for k in (1, TIERS, MORE)}
    costs = {k: _costs(plan) for k, plan in plans.items()}
    rows = np.concatenate(costs[1])
    rows = np.random.default_rng(1).permutation(rows)[: len(rows) // bucket.rows * bucket.rows]
    contenders: dict[str, list[np.ndarray]] = {
        "random": list(rows.reshape(-1, bucket.rows)),
        f"greedy over {max(BUFFER, bucket.rows)} rows": _greedy(rows, bucket.rows, devices),
        "without tiers": costs[1],
        f"tiers={MORE}": costs[MORE],
    }
    others = [f"{name} {time_over_ideal(b, devices):.3f}" for name, b in contenders.items()]
    if bucket.rows == devices:  # blocks that are all alike take as long as slices of all rows
        slices = -np.sort(-rows)[: len(rows) // TIERS * TIERS].reshape(TIERS, -1)
        others.append(f"{TIERS} slices of all rows {time_over_ideal(slices, slices.shape[1]):.3f}")
    first = map(plans[1].batch, range(min(2_000, plans[1].num_batches() - 1)))
    varies = spread_of_means([batch.segments[:, 3] for batch in first])
    steps = min(STEPS, plans[1].num_batches())

    def plan(tiers: int) -> None:
        pipeline.Plan(lengths, [bucket], tiers=tiers).batch(0)

    def batches(tiers: int) -> None:
        for step in range(steps):
            plans[tiers].batch(step)

    ratios = []
    for work in (plan, batches):
        turns = {f"{tiers}": functools.partial(work, tiers) for tiers in (1, TIERS)}
        seconds = best_seconds(turns, ROUNDS, time.process_time)
        ratios.append(seconds[f"{TIERS}"] / seconds["1"])
    return Line(
        what,
        f"{time_over_ideal(costs[TIERS], devices):.3f}",
        f"{', '.join(others)}; plan {ratios[0]:.2f}×, batches {ratios[1]:.2f}×; mean length of a "
        f"batch varies {varies:.2f}×",
    )


def spread_of_means(batches: list[np.ndarray]) -> float:
    """The standard deviation of the mean length of batches, over that of random batches.

    `batches` has the lengths of the segments of each; random batches have as many segments.
    """
    every, numbers = np.concatenate(batches), np.array([len(each) for each in batches])
    means = np.array([each.mean() for each in batches])
    chance = every.var() * (1 / numbers - 1 / len(every))
    return float(np.sqrt(np.mean((means - every.mean()) ** 2 / chance)))


def _costs(plan: pipeline.Plan) -> list[np.ndarray]:
    """The cost of each row of each batch of an epoch."""
    batches = map(plan.batch, range(plan.num_batches()))
    return [row_costs(each.bucket, each.segments, WIDTH) for each in batches]


def _greedy(rows: np.ndarray, batch: int, devices: int) -> list[np.ndarray]:
    """Batches of rows that are balanced in a buffer: the costliest goes to the least busy device.

    The buffer has at least `BUFFER` rows and whole batches. Shares of like cost meet in a batch.
    """
    size = max(BUFFER, batch) // batch * batch
    found = []
    for first in range(0, min(len(rows), GREEDY) - size + 1, size):
        shares: list[list[float]] = [[] for _ in range(size // batch * devices)]
        for cost in -np.sort(-rows[first : first + size]):
            open_ = [share for share in shares if len(share) < batch // devices]
            min(open_, key=sum).append(float(cost))
        ranked = np.array(sorted(shares, key=sum))
        found += [each.ravel() for each in np.split(ranked, size // batch)]
    return found
