"""The planner: examples per second, its cost in sorts, and padding, against others."""

import numpy as np

import pipeline
from benchmarks import packers, simulations
from benchmarks.results import Line, Section
from benchmarks.simulations import Simulation
from benchmarks.turns import best_seconds

TOKENS = 16_384  # positions in a batch, as in the published figures of read-ahead batches

# Grain moves tokens to find out where they go, so it gets a sample of the examples.
GRAIN_EXAMPLES = 100_000


def measure(lengths: np.ndarray) -> Section:
    """Plans an epoch of `lengths`; fits buckets once, which is not timed."""
    buckets = pipeline.fit_buckets(lengths, tokens_per_batch=TOKENS, max_buckets=4)
    longest = buckets[-1].length  # of the rows of every packer
    batches: list[tuple[Simulation, str]] = []
    rows: list[int] = []

    def lockstep():
        pipeline.Plan(lengths, buckets).batch(0)

    def infinibatch():
        batches[:] = [packers.read_ahead(lengths, TOKENS)]

    def next_fit():
        order = np.random.default_rng(0).permutation(lengths)
        rows[:] = [int(simulations.next_fit(order, longest)[-1]) + 1]

    def argsort():
        np.argsort(np.random.default_rng(0).random(len(lengths)))

    seconds = best_seconds(
        {"plan": lockstep, "sort": argsort, "read-ahead": infinibatch, "next fit": next_fit}
    )
    total = int(lengths.sum())
    plan = pipeline.Plan(lengths, buckets)

    def rate(name: str) -> str:
        return f"{len(lengths) / seconds[name] / 1e6:.1f} M examples/s"

    ahead, made_by = batches[0]
    padding = ahead.padding
    lines = [
        Line(
            "Lockstep: plan of an epoch and its first batch",
            rate("plan"),
            f"{seconds['plan'] / seconds['sort']:.1f}× a random argsort of as many numbers, "
            f"{seconds['next fit'] / seconds['plan']:.0f}× as fast as next fit, "
            f"{seconds['read-ahead'] / seconds['plan']:.0f}× as fast as read-ahead batches",
        ),
        Line(
            f"Lockstep: padding, {len(buckets)} shapes, {plan.num_batches():,} batches",
            f"{plan.padding:.3%}",
        ),
        Line(
            f"read-ahead batches ({made_by}): padding, {ahead.shapes} shapes, "
            f"{len(ahead.rows):,} batches",
            f"{padding:.2%}",
            f"{padding / plan.padding:.0f}× Lockstep's",
        ),
        Line(
            "contiguous next fit: padding, one shape",
            f"{1 - total / (rows[0] * longest):.2%}",
            f"{(1 - total / (rows[0] * longest)) / plan.padding:.0f}× Lockstep's",
        ),
    ]
    for packer in packers.PACKERS:
        fill = packers.grain_fill(lengths[:GRAIN_EXAMPLES], longest, packer=packer, bins=32)
        lines.append(
            Line(
                f"Grain {packer}, 32 bins: padding, one shape",
                f"{1 - fill:.2%}",
                f"{(1 - fill) / plan.padding:.0f}× Lockstep's",
            )
        )
    about = (
        f"{len(lengths):,} examples, mean length {lengths.mean():.1f}, longest {lengths.max()}, "
        f"{TOKENS:,} positions in a batch; Grain's padding is of the first {GRAIN_EXAMPLES:,}."
    )
    return Section("planner", about, lines)
