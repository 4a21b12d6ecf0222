"""The benchmark for accelerators, with its smallest setting."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import accelerator


@pytest.fixture
def run(tmp_path):
    """Runs it; returns the status with which it ends, and the results that it has written."""

    def run(*arguments):
        status, path = 0, tmp_path / "RESULTS.md"
        try:
            accelerator.main(["--setting=tiny", f"--results={path}", *arguments])
        except SystemExit as ending:
            status = ending.code
        return status, path.read_text()

    return run


@pytest.mark.slow
def test_all_parts_run_and_are_in_the_results(run):
    status, text = run()
    assert status == 0
    for part in accelerator.PARTS:
        assert f"## accelerator: {part}, {jax.devices()[0].device_kind}" in text
    for what in ("blocked, a window", "512, one document, blocked", "tiny, packed, blocked"):
        assert f"| {what} |" in text
    assert "wrong" not in text


def test_a_run_whose_time_is_over_keeps_what_it_has(run):
    status, text = run("equality", "--seconds=0")
    assert status == 3
    assert text.count("| blocked, ") == 1


def test_an_implementation_that_is_wrong_ends_the_run(run, monkeypatch):
    right = accelerator.make_attention

    def wrong(ids, *, implementation, **options):
        if implementation == "blocked":
            ids = jnp.where(ids == 2, 1, ids)
        return right(ids, implementation=implementation, **options)

    monkeypatch.setattr(accelerator, "make_attention", wrong)
    status, text = run("equality", "training")
    assert status == 1
    assert "blocked is wrong for packed: an error of" in text
    assert "training" not in text
