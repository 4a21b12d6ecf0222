"""Short runs of kills, whose long ones `python -m tests.properties` makes, and a soak."""

import gc
import os
import pathlib
import re
import sys

import numpy as np
import pytest

import pipeline
from tests.processes import call

pytestmark = pytest.mark.slow


def figures(*words):
    """The name and the numbers of each line that a run prints.

    It is a process of its own, which has no backend of JAX, has not used storage, and can fork.
    """
    done = call(sys.executable, "-m", "tests.properties", *words, limit=None)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    lines = [line.rpartition(": ") for line in done.stdout.replace(",", "").splitlines()]
    return [(name, [*map(int, re.findall(r"\d+", said))]) for name, _, said in lines]


def test_what_is_killed_at_any_instant_ends_as_if_it_had_not_been():
    counts = "--train=2", "--in-storage=1"
    kills = [(name, sum(some), unequal) for name, (*some, unequal) in figures(*counts)]
    assert kills == [("train.py", 2, 0), ("train.py in a bucket", 1, 0)]


def held():
    """What this process holds: bytes of resident memory, threads, open files."""
    gc.collect()
    status = pathlib.Path("/proc/self/status").read_text()
    numbers = dict(re.findall(r"^(VmRSS|Threads):\s+(\d+)", status, re.M))
    return int(numbers["VmRSS"]) << 10, int(numbers["Threads"]), len(os.listdir("/proc/self/fd"))


def test_many_batches_leave_memory_threads_and_files_as_they_were(tmp_path):
    rng = np.random.default_rng(0)
    examples = [rng.integers(0, 99, size) for size in rng.integers(2, 60, 2000)]
    corpus, state, before = pipeline.Corpus.from_arrays(examples, tmp_path), None, (0, 0, 0)
    options = {"tokens_per_batch": 256, "max_buckets": 3, "length_multiple": 16}
    for number in range(100):  # of loaders, each of which goes on from the state of the last one
        with pipeline.load(corpus, **options) as loader:
            if state:
                loader.set_state(state)
            for _ in range(100):
                next(loader)
            state = loader.get_state()
        if number == 9:
            before = held()
    assert state["step"] == 10_000
    memory, *others = held()
    assert memory < before[0] + (8 << 20)
    assert all(now <= then for now, then in zip(others, before[1:], strict=True))
