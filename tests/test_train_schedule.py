"""Runs whose batches change on the way, planned and not, and their audit."""

import json
import shutil
import signal
import subprocess
import sys

import pytest

from tests.test_train import (
    ROOT,
    lines,
    run,
    start,
    summary,
    text,  # noqa: F401
    wait_for_step,
)

SMALL = ("--config.model.num_layers=1", "--config.model.width=32", "--config.model.attention=dense")
RAMP = (
    *SMALL,
    "--config.steps=16",
    '--config.schedule=((4, {"tokens_per_batch": 2048}), (9, {"max_length": 256}))',
)


def audit(workdir):
    command = [sys.executable, "-m", "pipeline", "audit", str(workdir)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def ramped(text, tmp_path_factory):  # noqa: F811
    """A run with a ramp of the batch size and a stage of longer context, killed on the way."""
    workdir = tmp_path_factory.mktemp("ramped")
    process = start(text, workdir, *RAMP)
    wait_for_step(process, workdir, 6)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    code, output = run(text, workdir, *RAMP)
    assert code == 0, output
    return workdir, output


def test_all_shapes_of_a_schedule_are_compiled_before_step_0_and_the_loss_falls(ramped):
    workdir, output = ramped
    steps = [line for line in lines(workdir) if "loss" in line]
    assert [line["step"] for line in steps] == list(range(16))
    shapes = [tuple(map(int, line["bucket"].split("x"))) for line in steps]
    assert {rows * length for rows, length in shapes[:4]} == {1024}
    assert {length for _, length in shapes[:9]} == {128}
    assert max(length for _, length in shapes[9:]) == 256
    assert summary(workdir)["compiles_after_start"] == 0, output
    assert steps[-1]["loss"] < steps[0]["loss"] - 1


def test_the_audit_of_a_run_that_changed_and_was_killed_passes(ramped):
    code, said = audit(ramped[0])
    assert code == 0, said
    assert "plan from step 9 on: buckets=" in said
    assert "all 16 batches are those that were planned" in said


# One test, so that the run is made once.
SPOILT = (
    (lambda log: log[10].update(batch="0" * 16), "step 10 did not run the batch"),
    (lambda log: log.pop(10), "step 10 is missing"),
    (lambda log: log.insert(10, log[10]), "step 10 was run twice"),
    (lambda log: log[10].update(batch=log[9]["batch"]), "but that of step 9, again"),
)


def test_the_audit_names_the_step_that_is_not_as_planned(ramped, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(ramped[0], workdir, ignore=shutil.ignore_patterns("programs", "tensorboard"))
    whole = (workdir / "metrics.jsonl").read_text().splitlines()
    for spoil, sentence in SPOILT:
        log = [line for line in map(json.loads, whole) if "batch" in line]
        spoil(log)
        (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
        code, said = audit(workdir)
        assert code == 1, said
        assert sentence in said


def test_a_change_needs_a_word_and_is_told_before_it_is_made(
    text,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    code, output = run(text, tmp_path, *SMALL, "--config.steps=5")
    assert code == 0, output
    more = (*SMALL, "--config.steps=8", "--config.batches.tokens_per_batch=512")
    code, output = run(text, tmp_path, *more)
    assert code != 0
    assert "config.batches.tokens_per_batch was 1024 and is now 512" in output
    assert "or change it from step 5 on:" in output
    allowed = """'--change={"tokens_per_batch": 512}'"""
    assert f"{' '.join(more)} {allowed}" in output
    code, output = run(text, tmp_path, *more, allowed.strip("'"))
    assert code == 0, output
    told = output.index("tokens_per_batch was 1024 and is now 512")
    assert told < output.index("resumed: step 5 of 8") < output.index("step 8/8")
    assert "none is lost or trained on again" in output
    buckets = [line["bucket"] for line in lines(tmp_path) if "loss" in line]
    assert buckets[4:6] == ["8x128", "4x128"]
    code, said = audit(tmp_path)
    assert code == 0, said
    # From then on the run goes on under its first config as well, and as it was changed.
    code, output = run(text, tmp_path, *SMALL, "--config.steps=9")
    assert code == 0, output
    assert [line["bucket"] for line in lines(tmp_path) if "loss" in line][-1] == "4x128"
    # New data joins the epoch that is half done.
    code, output = run(text, tmp_path, *SMALL, "--config.steps=11", '--change={"add": ["more"]}')
    assert code != 0
    assert "config.added has nothing; each of more must be there" in output
    monkeypatch.setenv("TINY_MORE", "1")
    code, output = run(text, tmp_path, *SMALL, "--config.steps=11", '--change={"add": ["more"]}')
    assert code == 0, output
    assert "changed from step 9 on, with 32 new examples, " in output
    assert "more: 32 examples more, from this epoch on" in output
    # It stays, without a word.
    code, output = run(text, tmp_path, *SMALL, "--config.steps=13")
    assert code == 0, output
    code, said = audit(tmp_path)
    assert code == 0, said
    assert "plan from step 9 on: examples=" in said
    assert "all 13 batches are those that were planned" in said
