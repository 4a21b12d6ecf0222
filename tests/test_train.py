"""The training program in processes of its own: as a user runs it, killed and stopped."""

import json
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.processes import environment
from tests.runs import lines, loss_files, segment_losses, summary

ROOT = pathlib.Path(__file__).parent.parent
TIME_LIMIT = 240  # seconds for one start


@pytest.fixture(scope="module")
def text(once):
    """160 documents of 5 to 300 characters as JSON lines."""
    return once("text", write_documents) / "documents.jsonl"


def write_documents(folder):
    rng = np.random.default_rng(0)
    words = ["pack", "the", "rows", "a", "bucket", "of", "lengths", "and", "step"]
    documents = [
        " ".join(rng.choice(words, size=int(n))) + "."
        for n in np.clip(rng.lognormal(2.5, 0.8, 160), 1, 60)
    ]
    lines = [json.dumps({"text": document}) + "\n" for document in documents]
    (folder / "documents.jsonl").write_text("".join(lines))


def start(text, workdir, *flags, program="train.py"):
    """Starts the program; one device, as on a user's machine."""
    programs = str(text.parent / "programs")  # of all starts
    command = [sys.executable, program, "--config=tests/tiny_config.py", f"--workdir={workdir}"]
    return subprocess.Popen(
        [*command, *flags],
        cwd=ROOT,
        env=environment(TINY_TEXT=str(text), JAX_COMPILATION_CACHE_DIR=programs),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def run(text, workdir, *flags):
    """Runs the program to its end: exit code and output."""
    process = start(text, workdir, *flags)
    try:
        output, _ = process.communicate(timeout=TIME_LIMIT)
    finally:
        process.kill()
    return process.returncode, output


def wait_for_step(process, workdir, step):
    deadline = time.monotonic() + TIME_LIMIT
    while process.poll() is None and time.monotonic() < deadline:
        if any(line["step"] >= step and "loss" in line for line in lines(workdir)):
            return
        time.sleep(0.02)
    process.kill()
    raise AssertionError(f"step {step} was not reached:\n{process.communicate()[0]}")


@pytest.fixture(scope="module")
def uninterrupted(text, once):
    def make(workdir):
        code, output = run(text, workdir)
        assert code == 0, output
        (workdir / "output").write_text(output)

    workdir = once("uninterrupted", make)
    return workdir, (workdir / "output").read_text()


def test_a_run_compiles_each_bucket_once_and_nothing_after_the_start(uninterrupted):
    workdir, output = uninterrupted
    values = summary(workdir)
    assert 1 <= len(values["compiles"]) <= 3
    assert set(values["compiles"].values()) == {1}
    assert values["compiles_after_start"] == values["other_compiles"] == 0, output
    for bucket in values["compiles"]:
        assert f"train_step {bucket}: compiled in" in output


def test_a_run_learns_and_says_how_much(uninterrupted):
    workdir, output = uninterrupted
    values = summary(workdir)
    assert values["eval_loss_last"] < values["eval_loss_first"]
    assert values["steps"] == 30
    steps = [line for line in lines(workdir) if "loss" in line]
    assert [line["step"] for line in steps] == list(range(30))
    assert {line["epoch"] for line in steps} >= {0, 1}
    assert sum(line["tokens"] for line in steps) == values["tokens"]
    evaluations = [line for line in lines(workdir) if "eval_loss" in line]
    assert [line["step"] for line in evaluations] == [0, 10, 20, 30]
    assert evaluations[-1]["bits_per_byte"] == values["bits_per_byte"]
    assert "padding" in output
    segment_losses(workdir)
    assert list((workdir / "tensorboard").iterdir())


def test_killed_at_a_random_step_it_continues_bit_for_bit(uninterrupted, text, tmp_path):
    workdir, _ = uninterrupted
    process = start(text, tmp_path, program="tests/slow_train.py")
    wait_for_step(process, tmp_path, random.Random(0).randint(6, 20))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    kept = set((text.parent / "programs").glob("*_step-*"))
    code, output = run(text, tmp_path)
    assert code == 0, output
    assert kept
    assert kept == set((text.parent / "programs").glob("*_step-*"))  # nothing is compiled anew
    assert "resumed: step" in output
    assert lines(tmp_path) == lines(workdir)
    assert summary(tmp_path) == summary(workdir)
    assert loss_files(tmp_path) == loss_files(workdir)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_saves_leaves_with_its_status_and_the_next_start_continues(
    uninterrupted, text, tmp_path, number
):
    workdir, _ = uninterrupted
    process = start(text, tmp_path, program="tests/slow_train.py")
    wait_for_step(process, tmp_path, 7)
    process.send_signal(number)
    output, _ = process.communicate(timeout=TIME_LIMIT)
    assert process.returncode == 128 + number, output  # so that `train.py && next` ends here
    assert f"{number.name}: saved step" in output
    code, output = run(text, tmp_path)
    assert code == 0, output
    assert lines(tmp_path) == lines(workdir)


def test_the_work_directory_alone_goes_on(uninterrupted, text):
    workdir, _ = uninterrupted
    done = subprocess.run(
        [sys.executable, "train.py", f"--workdir={workdir}"],
        cwd=ROOT,
        env=environment(TINY_TEXT=str(text)),
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
    )
    assert done.returncode == 0, done.stderr
    assert "finished: all 30 steps are done" in done.stdout
