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
    counts = "--prepare=10", "--train=2", "--write=24", "--train-in-storage=1"
    kills = [(name, sum(some), unequal) for name, (*some, unequal) in figures("kills", *counts)]
    name, killed, unequal = kills.pop(5)  # before each change of a file
    assert (name, unequal) == ("Writer", 0)
    assert killed > 20
    assert kills == [
        ("prepare", 2, 0),
        ("prepare_sides", 2, 0),
        ("from_arrays", 2, 0),
        ("prepare 2 workers", 1, 0),
        ("train.py", 2, 0),
        ("Writer", 16, 0),
        ("Writer in a bucket", 8, 0),
        ("train.py in a bucket", 1, 0),
    ]


def test_a_lock_in_a_bucket_has_one_holder_at_each_moment():
    ((_, (takeovers, _, _, _, together, *_)),) = figures("takeovers", "--number=8")
    assert takeovers >= 8
    assert together == 0


def test_batches_do_not_depend_on_when_writers_and_readers_were_killed():
    found = figures("histories", "--number=4", "--seed=1")
    assert [place for place, _ in found] == ["on disk", "in a bucket"]
    for _, (histories, _, chapters, *seen, wrong) in found:
        assert (histories, wrong) == (2, 0)
        assert chapters > 4
        assert all(seen)


def test_many_batches_leave_memory_threads_and_files_as_they_were(tmp_path):
    first, last, _ = soak(tmp_path, 10_000)
    assert last.threads <= first.threads
    assert last.files <= first.files
    assert last.memory < first.memory + (8 << 20)
