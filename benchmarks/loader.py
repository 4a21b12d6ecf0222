"""The loader: real tokens per second and the longest waits, against Grain's packer and memcpy."""

import itertools
import tempfile
import time
from collections.abc import Callable

import numpy as np

import pipeline
from benchmarks import packers
from benchmarks.lengths import examples_of
from benchmarks.results import Line, Section
from benchmarks.turns import best_seconds

TOKENS = 131_072  # positions in a batch
EXAMPLES = 200_000
GRAIN_EXAMPLES = 20_000


def measure(lengths: np.ndarray) -> Section:
    """Loads an epoch of random tokens of these lengths, all five fields, from the page cache."""
    lengths = lengths[:EXAMPLES]
    longest = int(lengths.max())
    examples = examples_of(lengths)
    with tempfile.TemporaryDirectory() as directory:
        corpus = pipeline.Corpus.from_arrays(examples, directory)
        buckets = pipeline.fit_buckets(corpus, tokens_per_batch=TOKENS, max_buckets=4)
        plan = pipeline.Plan(corpus, buckets)
        batches = pipeline.Batches(corpus, plan)
        built = [batches[step] for step in range(24)]  # also brings the plan's window up
        room = [{name: np.zeros_like(field) for name, field in batch.items()} for batch in built]

        def one_by_one():
            for step in range(len(batches)):
                batches[step]

        def load():
            with pipeline.load(corpus, buckets=buckets, num_epochs=1) as loader:
                for batch in loader:
                    batch["inputs"].block_until_ready()

        def iterate():
            for _ in batches.to_iter_dataset():
                pass

        def copy():
            for batch, copied in zip(built, room, strict=True):
                for name, field in batch.items():
                    np.copyto(copied[name], field)

        tokens_by_grain = 0

        def grain():
            nonlocal tokens_by_grain
            rows = packers.grain_packed(examples[:GRAIN_EXAMPLES], longest)
            stacked = rows.batch(TOKENS // longest).map(_weighted)
            tokens_by_grain = sum(int(batch["loss_weights"].sum()) for batch in stacked)

        contenders: dict[str, Callable[[], object]] = {
            "one": one_by_one,
            "iterator": iterate,
            "loaded": load,
            "copy": copy,
            "grain": grain,
        }
        seconds = best_seconds(contenders)
        waits = np.sort(_waits(corpus, plan.buckets, len(lengths) // 8))
    tokens = dict.fromkeys(contenders, plan.num_tokens) | {
        "grain": tokens_by_grain,
        "copy": sum(batch["loss_weights"].size for batch in built),
    }
    rates = {name: tokens[name] / seconds[name] for name in seconds}

    def line(what: str, name: str) -> Line:
        compared = f"{rates[name] / rates['grain']:.0f}× Grain, "
        compared += f"{rates[name] / rates['copy']:.1%} of memcpy"
        return Line(what, f"{rates[name] / 1e6:,.1f} M tokens/s", compared)

    return Section(
        "loader",
        f"{len(lengths):,} examples, batches of {TOKENS:,} positions with all five fields, from "
        "a corpus in the page cache; Grain packs arrays in memory, without threads, which is its "
        "fastest here.",
        [
            line("Lockstep, `batches[step]` in one thread", "one"),
            line("Lockstep, iterator with its thread", "iterator"),
            line("Lockstep, `load`: as jax.Arrays", "loaded"),
            Line("memcpy of the same arrays", f"{rates['copy'] / 1e6:,.1f} M tokens/s"),
            Line("Grain best fit, 32 bins", f"{rates['grain'] / 1e6:,.2f} M tokens/s"),
            Line(
                f"Lockstep, 99th percentile of `next()`, {len(waits):,} batches over windows and "
                "epochs",
                f"{waits[int(len(waits) * 0.99)] * 1e3:.2f} ms",
                f"median {waits[len(waits) // 2] * 1e3:.2f} ms, longest {waits[-1] * 1e3:.1f} ms",
            ),
        ],
    )


def _weighted(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return batch | {"loss_weights": (batch["inputs_segment_ids"] > 0).astype(np.float32)}


def _waits(corpus: pipeline.Corpus, buckets, window: int) -> np.ndarray:
    """Seconds that each `next()` takes over four epochs, after the first."""
    plan = pipeline.Plan(corpus, buckets, window=window)
    steps = iter(pipeline.Batches(corpus, plan).repeat().to_iter_dataset())
    next(steps)
    waits = []
    for _ in itertools.repeat(None, 4 * plan.num_batches()):
        begin = time.perf_counter()
        next(steps)
        waits.append(time.perf_counter() - begin)
    return np.array(waits)
