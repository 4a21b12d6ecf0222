"""The training program on several hosts: equal results, elastic resume, hosts that go."""

import signal
import time

import numpy as np
import pytest

from pipeline import Bucket, Corpus, Plan
from pipeline.loading.checkpoint import Checkpoints
from pipeline.trainer import read_tuned
from tests.processes import TIME_LIMIT
from tests.runs.programs import run_hosts, start_hosts
from tests.runs.runs import assert_same_losses, steps, summary

SLOW = "tests/runs/slow_train.py"  # to be stopped midway


def wait_for_steps(group, workdir, more):
    """Waits until `more` steps have been made since the call."""
    step = max([line["step"] for line in steps(workdir)], default=-1) + more
    deadline = time.monotonic() + TIME_LIMIT
    while time.monotonic() < deadline and all(p.poll() is None for p in group.processes):
        if any(line["step"] >= step for line in steps(workdir)):
            return
        time.sleep(0.02)
    outputs = "\n\n".join(group.outputs())
    group.kill()
    raise AssertionError(f"step {step} was not reached:\n{outputs[-6000:]}")


@pytest.fixture(scope="module")
def alone(text, once):
    return once("alone", lambda workdir: run_hosts(text, workdir, 1))


def assert_every_example_once(workdir):
    """In each whole epoch of the log, the batches that ran hold every position once."""
    corpus = Corpus.open(workdir / "corpus/train")
    state, _ = Checkpoints(workdir / "checkpoints").restore_json(40)
    identity = state["plans"][0]["identity"]
    shapes = identity["buckets"].split("+")
    plan = Plan(corpus, [Bucket(*map(int, shape.split("x"))) for shape in shapes])
    assert plan.identity == identity
    log = steps(workdir)
    per_epoch = plan.num_batches()
    assert len(log) >= 2 * per_epoch
    for first in (0, per_epoch):
        ran = [plan.batch(line["step"]) for line in log[first : first + per_epoch]]
        assert [each.digest for each in ran] == [
            line["batch"] for line in log[first : first + per_epoch]
        ]
        seen = np.concatenate([each.segments for each in ran])
        counts = [np.zeros(length, int) for length in corpus.lengths]
        for _, example, start, size in seen:
            counts[example][start : start + size] += 1
        assert all((each == 1).all() for each in counts)


def assert_same_run(workdir, alone):
    """Every step once, with the batch of the run of one process, and its loss."""
    assert [line["step"] for line in steps(workdir)] == list(range(40))
    assert_same_losses(workdir, alone)


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_losses_are_those_of_one_process(alone, text, tmp_path, count):
    run_hosts(text, tmp_path, count)
    assert_same_run(tmp_path, alone)
    assert summary(tmp_path)["compiles_after_start"] == 0


@pytest.mark.slow
def test_saved_on_four_resumed_on_one_three_and_two(alone, text, tmp_path):
    # The schedule must be that of the whole run, so every start but the last is stopped.
    for count in (4, 1, 3, 2, 4):
        group = start_hosts(text, tmp_path, count, program=SLOW)
        stopped = len(list(tmp_path.glob("logs*"))) < 5
        if stopped:
            wait_for_steps(group, tmp_path, 3)
            group.processes[0].send_signal(signal.SIGTERM)
        codes = group.wait()
        assert codes == [143 if stopped else 0] * count, "\n\n".join(group.outputs())[-6000:]
    assert "resumed: step" in group.outputs()[0]
    assert_same_run(tmp_path, alone)


@pytest.mark.slow
def test_sigterm_to_one_of_four_saves_on_all(alone, text, tmp_path):
    group = start_hosts(text, tmp_path, 4, program=SLOW)
    wait_for_steps(group, tmp_path, 6)
    group.processes[2].send_signal(signal.SIGTERM)
    assert group.wait() == [143] * 4, group.outputs()
    assert "SIGTERM: saved step" in group.outputs()[0]
    run_hosts(text, tmp_path, 4)
    assert_same_run(tmp_path, alone)


@pytest.mark.slow
def test_sigkill_to_one_of_four_ends_the_others_and_three_continue(alone, text, tmp_path):
    group = start_hosts(text, tmp_path, 4, program=SLOW)
    wait_for_steps(group, tmp_path, 7)
    group.processes[3].send_signal(signal.SIGKILL)
    codes = group.wait(limit=60)
    assert codes[3] == -signal.SIGKILL
    assert all(code != 0 for code in codes[:3])
    said = "\n".join(group.outputs()[:3])
    assert "most likely because another has gone" in said, said
    run_hosts(text, tmp_path, 3)
    assert_same_run(tmp_path, alone)
    assert_every_example_once(tmp_path)


@pytest.mark.slow
def test_rows_that_do_not_divide_name_the_multiple_to_use(alone, text, tmp_path):
    group = start_hosts(text, tmp_path, 5)
    codes = group.wait()
    assert all(code != 0 for code in codes)
    assert "row_multiple=5" in "".join(group.outputs())


def test_a_process_that_waits_in_vain_for_others_says_so(text, tmp_path):
    for group in [start_hosts(text, tmp_path, 2, own={index: ["--wait=3"]}) for index in (0, 1)]:
        assert group.wait(limit=60) == [2]
        assert "not all processes of the run have joined within 3 s" in group.outputs()[0]
        assert "Check failure" not in group.outputs()[0]


def test_a_configuration_that_differs_on_one_host_is_named(text, tmp_path):
    own = {
        index: [f"--workdir={tmp_path / str(index)}", f"--config.optimizer.clip={1.0 + index}"]
        for index in range(2)
    }
    group = start_hosts(text, tmp_path, 2, own=own)
    assert all(code != 0 for code in group.wait())
    for output in group.outputs():
        assert "optimizer.clip was 1.0 and is now 2.0" in output


@pytest.mark.slow
def test_hosts_measure_together_and_choose_alike(text, tmp_path):
    outputs = run_hosts(text, tmp_path, 2, "--config.batches.tune=True")
    assert "another set is better by at most" in outputs[0]
    tuned = read_tuned(tmp_path)
    state, _ = Checkpoints(tmp_path / "checkpoints").restore_json(40)
    shapes = state["plans"][0]["identity"]["buckets"].split("+")
    assert shapes == [str(bucket) for bucket in tuned.buckets]
    assert all(bucket.rows % 12 == 0 for bucket in tuned.buckets)
    assert [line["step"] for line in steps(tmp_path)] == list(range(40))
