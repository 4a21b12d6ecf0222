"""The training program in processes of its own: as a user runs it, killed and stopped."""

import random
import signal
import sys
import time

import pytest

from tests.processes import TIME_LIMIT, call
from tests.runs.programs import run, start, wait_for_step
from tests.runs.runs import lines, loss_files, segment_losses, summary


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
    process = start(text, tmp_path, program="tests/runs/slow_train.py")
    wait_for_step(process, tmp_path, random.Random(0).randint(6, 20))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    kept = set((text.parent / "programs").glob("*_step-*"))
    programs = str(text.parent / "programs")
    own = {"TINY_TEXT": str(text), "JAX_COMPILATION_CACHE_DIR": programs}
    done = call(sys.executable, "train.py", f"--workdir={tmp_path}", **own)  # knows its config
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
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
    process = start(text, tmp_path, program="tests/runs/slow_train.py")
    wait_for_step(process, tmp_path, 7)
    process.send_signal(number)
    output, _ = process.communicate(timeout=TIME_LIMIT)
    assert process.returncode == 128 + number, output  # so that `train.py && next` ends here
    assert f"{number.name}: saved step" in output
    saved = lines(tmp_path)
    assert len(saved) > 7
    assert saved == lines(workdir)[: len(saved)]
    if number == signal.SIGINT:  # the test of kills above has the other start
        code, output = run(text, tmp_path)
        assert code == 0, output
        assert lines(tmp_path) == lines(workdir)


def test_an_interrupt_before_the_first_step_ends_the_run_at_once(text, tmp_path):
    process = start(text, tmp_path)
    while process.poll() is None and not (tmp_path / "run_config.json").exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=TIME_LIMIT)
    assert (process.returncode, "Traceback" in output) == (-signal.SIGINT, False), output
    assert not lines(tmp_path)
