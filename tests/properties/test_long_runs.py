"""A short run of each trial; `python -m tests.properties` makes the long ones."""

import re
import sys

import pytest

from tests.processes import call
from tests.properties.soak import soak

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
    kills = [(name, sum(some), unequal) for name, (*some, unequal) in figures("kills", *counts)]
    assert kills == [("train.py", 2, 0), ("train.py in a bucket", 1, 0)]


def test_many_batches_leave_memory_threads_and_files_as_they_were(tmp_path):
    first, last, _ = soak(tmp_path, 10_000)
    assert last.threads <= first.threads
    assert last.files <= first.files
    assert last.memory < first.memory + (8 << 20)
