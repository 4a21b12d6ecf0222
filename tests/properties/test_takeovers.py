"""A few takeovers; `python -m tests.properties takeovers` makes hundreds."""

import pytest

from tests.properties.takeovers import take_over


@pytest.mark.slow
def test_a_lock_in_a_bucket_has_one_holder_at_each_moment():
    seen = take_over(12, seed=0)
    assert seen.takeovers >= 12, seen
    assert (seen.together, seen.ended) == ([], []), seen
