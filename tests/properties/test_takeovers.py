"""A few takeovers; `python -m tests.properties takeovers` makes hundreds."""

import sys

import pytest

from tests.processes import call

# In a process of its own, which has not used object storage and can fork.
PROGRAM = """
from tests.properties.takeovers import take_over

seen = take_over(8, seed=0)
print(seen.takeovers >= 8, seen.together, seen.ended)
"""


@pytest.mark.slow
def test_a_lock_in_a_bucket_has_one_holder_at_each_moment():
    seen = call(sys.executable, "-c", PROGRAM, limit=None)
    assert seen.stdout == "True [] []\n", seen.stderr
