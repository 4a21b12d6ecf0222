"""Balance: how long steps take over the least possible time, when every device has its own rows."""

import time
from collections.abc import Callable

import numpy as np

import pipeline
from benchmarks.results import Line, Section
from pipeline.planning.balance import time_over_ideal

EXAMPLES = 1_000_000
WIDTH = 4096  # of the model: a row costs L + Σ l² / (6 · WIDTH), the FLOPs of a whole layer
TIERS = 16
MORE = 64
BUFFER = 64  # rows among which other libraries balance

# Devices, and rows of each.
LAYOUTS = ((32, 1), (128, 1), (32, 4), (32, 8))


def measure(lengths: np.ndarray) -> Section:
    """Compares plans with and without tiers, random rows and rows balanced in a buffer."""
    rng = np.random.default_rng(0)
    short, long = rng.lognormal(6, 1, EXAMPLES), rng.lognormal(10.5, 0.8, EXAMPLES)
    data = {
        "lognormal up to 32,768": np.clip(rng.lognormal(6.5, 1.3, EXAMPLES), 1, 32_768),
        "3% long, up to 131,072": np.clip(
            np.where(rng.random(EXAMPLES) < 0.03, long, short), 1, 131_072
        ),
        "the lengths given": lengths[:EXAMPLES],
    }
    lines = []
    for name, each in data.items():
        longest = int(each.max())
        for devices, rows in LAYOUTS:
            bucket = pipeline.Bucket(devices * rows, -(-longest // 128) * 128)
            lines.append(_compare(f"{name}, {devices} × {rows}", each.astype(int), bucket, devices))
    return Section(
        "balance",
        f"Time of the steps of an epoch with tiers={TIERS} over that of evenly shared work (1 is "
        f"perfect), for devices × rows of each, attention that skips other segments, width "
        f"{WIDTH:,}; planning and batches with tiers over those without.",
        lines,
    )


def _compare(what: str, lengths: np.ndarray, bucket: pipeline.Bucket, devices: int) -> Line:
    plain, seconds = _costs(lengths, bucket, 1)
    tiers, with_tiers = _costs(lengths, bucket, TIERS)
    rows = np.concatenate(plain)
    rows = np.random.default_rng(1).permutation(rows)[: len(rows) // bucket.rows * bucket.rows]
    contenders: dict[str, list[np.ndarray]] = {
        "random": list(rows.reshape(-1, bucket.rows)),
        f"greedy over {max(BUFFER, bucket.rows)} rows": _greedy(rows, bucket.rows, devices),
        "without tiers": plain,
        f"tiers={MORE}": _costs(lengths, bucket, MORE)[0],
    }
    others = [f"{name} {time_over_ideal(b, devices):.3f}" for name, b in contenders.items()]
    ratios = [after / before for before, after in zip(seconds, with_tiers, strict=True)]
    return Line(
        what,
        f"{time_over_ideal(tiers, devices):.3f}",
        f"{', '.join(others)}; plan {ratios[0]:.2f}×, batches {ratios[1]:.2f}×",
    )


def _costs(
    lengths: np.ndarray, bucket: pipeline.Bucket, tiers: int
) -> tuple[list[np.ndarray], tuple[float, float]]:
    """The cost of each row of each batch of an epoch; the seconds for the plan and its batches."""
    plan, planning = _timed(lambda: pipeline.Plan(lengths, [bucket], tiers=tiers))
    batches, building = _timed(lambda: [plan.batch(step) for step in range(plan.num_batches())])
    costs = []
    for batch in batches:
        squares = np.bincount(batch.segments[:, 0], batch.segments[:, 3] ** 2.0, bucket.rows)
        costs.append(bucket.length + squares / (6 * WIDTH))
    return costs, (planning, building)


def _timed(function: Callable) -> tuple:
    start = time.perf_counter()
    return function(), time.perf_counter() - start


def _greedy(rows: np.ndarray, batch: int, devices: int) -> list[np.ndarray]:
    """Batches of rows that are balanced in a buffer: the costliest goes to the least busy device.

    The buffer has at least `BUFFER` rows and whole batches. Shares of like cost meet in a batch.
    """
    size = max(BUFFER, batch) // batch * batch
    found = []
    for first in range(0, len(rows) - size + 1, size):
        shares: list[list[float]] = [[] for _ in range(size // batch * devices)]
        for cost in -np.sort(-rows[first : first + size]):
            open_ = [share for share in shares if len(share) < batch // devices]
            min(open_, key=sum).append(float(cost))
        ranked = np.array(sorted(shares, key=sum))
        found += [each.ravel() for each in np.split(ranked, size // batch)]
    return found
