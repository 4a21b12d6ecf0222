"""A soak: what a process holds after many batches."""

import dataclasses
import gc
import os
import time
from pathlib import Path

import numpy as np


@dataclasses.dataclass(frozen=True)
class Held:
    """What this process holds: bytes of resident memory, threads, open files."""

    memory: int
    threads: int
    files: int

    @classmethod
    def now(cls) -> "Held":
        gc.collect()
        status = Path("/proc/self/status").read_text()
        numbers = dict(line.split()[:2] for line in status.splitlines() if line.split()[1:])
        return cls(
            memory=int(numbers["VmRSS:"]) * 1024,
            threads=int(numbers["Threads:"]),
            files=len(os.listdir("/proc/self/fd")),
        )


def soak(directory: str | Path, batches: int) -> tuple[Held, Held, float]:
    """What is held after a tenth of the batches and after all of them, and the seconds.

    Each hundredth of them a new loader goes on from the state of the last one.
    """
    import pipeline

    rng = np.random.default_rng(0)
    examples = [rng.integers(0, 99, size) for size in rng.integers(2, 60, 2000)]
    corpus = pipeline.Corpus.from_arrays(examples, directory)
    state, first, begin = None, None, time.monotonic()
    share = max(batches // 100, 1)
    for number in range(0, batches, share):
        with pipeline.load(
            corpus, tokens_per_batch=256, max_buckets=3, length_multiple=16
        ) as loader:
            if state:
                loader.set_state(state)
            for _ in range(min(share, batches - number)):
                next(loader)
            state = loader.get_state()
        if first is None and 10 * (number + share) >= batches:
            first = Held.now()
    assert state["step"] == batches
    return first, Held.now(), time.monotonic() - begin
