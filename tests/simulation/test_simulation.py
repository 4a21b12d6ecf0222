"""Histories of the simulator, which run in processes that have not imported the project."""

import re
import sys

import pytest

from tests.processes import call


def simulate(*words: str) -> tuple[bool, list[str]]:
    """Whether all that was said to hold does, and the lines that a run prints."""
    done = call(sys.executable, "-m", "tests.simulation", *words, limit=None, PYTHONHASHSEED="0")
    assert done.returncode in (0, 1), done.stderr
    return not done.returncode, done.stdout.splitlines()


def test_histories_keep_what_is_promised_and_a_seed_has_one_trace():
    holds, said = simulate("--seeds", "0:10", "--digests")
    assert holds, "\n".join(said)
    again, twice = simulate("--seeds", "0:2", "--digests", "--repeat", "2")
    assert again
    assert twice[:4] == [said[0], said[0], said[1], said[1]]


@pytest.mark.slow
def test_many_histories_keep_what_is_promised():
    holds, said = simulate("--seeds", "1000:1120")
    assert holds, "\n".join(said)


@pytest.mark.slow
def test_a_seed_has_one_trace_a_hundred_times():
    _, said = simulate("--seed", "7", "--digests", "--repeat", "100")
    assert len({*said[:100]}) == 1


# Without these, the simulator might have gone blind.
@pytest.mark.parametrize(
    ("fault", "tells"),
    [
        pytest.param("names", "missing|gone|acknowledged", marks=pytest.mark.slow),
        pytest.param("rename", "half-written|not whole", marks=pytest.mark.slow),
        pytest.param("data", "bytes instead of", marks=pytest.mark.slow),
        ("cursor", "were acknowledged; the cursor is"),
        pytest.param("guard", "two hold a lock", marks=pytest.mark.slow),
    ],
)
def test_a_planted_fault_is_found(fault, tells):
    only = ["--only", "locks"] if fault == "guard" else []
    holds, said = simulate("--seeds", "0:200", "--break", fault, "--first", *only)
    assert not holds
    assert re.search(tells, said[0])
