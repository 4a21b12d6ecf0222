"""Streams: a Grain data set packed as it comes, beside Grain's own packers, in one run."""

import dataclasses
import functools
import json
import time
import tracemalloc
from collections.abc import Callable

import grain
import numpy as np

import pipeline
from benchmarks import packers
from benchmarks.lengths import examples_of
from benchmarks.results import Section
from benchmarks.turns import best_seconds

EXAMPLES, TOKENS, LONGEST = 30_000, 16_384, 4096
WINDOWS, BINS = (2048, 8192, 32_768), (64, 512)
STEP = 0.02  # seconds of a training step, for the waits
ROUNDS = 2
SOME = 200  # batches, for memory and waits: some windows


@dataclasses.dataclass
class Contender:
    """A way to make batches: `make` makes the data set; and what a pass through it has."""

    make: Callable[[], grain.IterDataset]
    batches: int = 0
    padding: float = 0.0
    middle: dict | None = None  # a state

    def run(self) -> None:
        """A whole pass."""
        self.batches = empty = positions = 0
        for batch in self.make():
            self.batches += 1
            empty += int((batch["inputs_segment_ids"] == 0).sum())
            positions += batch["inputs_segment_ids"].size
        self.padding = empty / positions

    def memory(self) -> float:
        """The most MiB of memory of arrays and Python objects in the first batches."""
        tracemalloc.start()
        for _ in zip(range(SOME), self.make(), strict=False):
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak / 2**20

    def restore(self) -> tuple[float, int]:
        """Seconds from a state in the middle to its next batch, and the bytes of the state."""
        iterator = iter(self.make())
        for _ in range(self.batches // 2):
            next(iterator)
        text = json.dumps(iterator.get_state())
        iterator.close()
        begin = time.process_time()
        again = iter(self.make())
        again.set_state(json.loads(text))
        next(again)
        return time.process_time() - begin, len(text)

    def slowest(self) -> float:
        """The longest wait for a batch after the first, while each step takes `STEP` seconds."""
        iterator, waits = iter(self.make()), list[float]()
        for _ in range(SOME):
            begin = time.perf_counter()
            if next(iterator, None) is None:
                break
            waits.append(time.perf_counter() - begin)
            time.sleep(STEP)
        return max(waits[1:])


def measure() -> Section:
    """Packs lognormal documents into batches of 16,384 positions."""
    drawn = np.random.default_rng(0).lognormal(6, 1, EXAMPLES)
    examples = examples_of(np.clip(drawn, 8, LONGEST).astype(np.int64))
    source = grain.MapDataset.source(examples).shuffle(seed=0).to_iter_dataset(packers.READ)
    one = [pipeline.Bucket(TOKENS // LONGEST, LONGEST)]
    four = [pipeline.Bucket(TOKENS // n, n) for n in (512, 1024, 2048, LONGEST)]
    ours = functools.partial(pipeline.PackedStream, source)
    contenders = {
        f"PackedStream, window {window:,}": Contender(functools.partial(ours, one, window=window))
        for window in WINDOWS
    }
    contenders["PackedStream, window 8,192, four buckets"] = Contender(
        functools.partial(ours, four, window=8192)
    )
    for bins in BINS:
        make = functools.partial(packers.grain_packed, examples, LONGEST, bins=bins)
        contenders[f"Grain best fit, {bins} bins"] = Contender(
            lambda make=make: make().batch(TOKENS // LONGEST).map(_weighted)
        )
    runs = {name: each.run for name, each in contenders.items()}
    seconds = best_seconds(runs, ROUNDS, time.process_time)
    rates = {name: each.batches / seconds[name] for name, each in contenders.items()}
    lines, least = [], rates[f"Grain best fit, {BINS[-1]} bins"]
    for name, each in contenders.items():
        restore, size = each.restore()
        lines.append(
            (
                name,
                f"{each.padding:.2%}",
                f"{rates[name]:,.0f}",
                f"{rates[name] / least:.2f}×",
                f"{each.memory():,.0f} MiB",
                f"{restore * 1e3:,.0f} ms",
                f"{size:,} bytes",
                f"{each.slowest() * 1e3:,.0f} ms",
            )
        )
    return Section(
        "stream",
        f"{EXAMPLES:,} lognormal documents of up to {LONGEST:,} tokens in memory, batches of "
        f"{TOKENS:,} positions with all five fields. Rates and restores count the processor time "
        "of all threads together. Padding is that of a whole pass; memory that of the first "
        f"{SOME} batches, without the documents; restore the time from a state in the middle to "
        f"its batch; slowest the longest wait for one of {SOME} batches after the first, beside "
        f"steps of {STEP * 1e3:.0f} ms.",
        lines,
        ("packed by", "padding", "batches/s", "compared", "memory", "restore", "state", "slowest"),
    )


def _weighted(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return batch | {"loss_weights": (batch["inputs_segment_ids"] > 0).astype(np.float32)}
