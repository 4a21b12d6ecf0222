"""A few histories; `python -m tests.properties histories` makes hundreds."""

import sys

import pytest

from tests.processes import call

# In a process of its own, which has no backend of JAX, has not used object storage, and can fork.
PROGRAM = """
from tests.properties.histories import tell

for place, seen in tell(4, seed=1, stored=2).items():
    had = seen.writer_kills, seen.reader_kills, seen.resumes, seen.chapters > 4
    print(place, seen.histories, all(had), *seen.found)
"""


@pytest.mark.slow
def test_batches_do_not_depend_on_when_writers_and_readers_were_killed():
    seen = call(sys.executable, "-c", PROGRAM, limit=None)
    due = "on disk 2 True\nin a bucket 2 True\n"
    assert seen.stdout == due, seen.stdout + seen.stderr
