"""The training program on several hosts: equal results, elastic resume, hosts that go."""

import re
import signal

import pytest

from pipeline.fs import as_path, objects
from tests.fs import object_servers
from tests.runs.programs import SLOW, run_hosts, start_hosts, wait_for_step
from tests.runs.runs import assert_same_losses, audited, lines, steps, summary


def wait_for_steps(group, workdir, more):
    """Waits until `more` steps have been made since the call."""
    last = max([line["step"] for line in steps(workdir)], default=-1)
    wait_for_step(group, workdir, last + more)


@pytest.fixture(scope="module")
def alone(text, once):
    return once("alone", lambda workdir: run_hosts(text, workdir, 1))


def assert_same_run(workdir, alone):
    """Every step once, with the batch of the run of one process, and its loss."""
    assert [line["step"] for line in steps(workdir)] == list(range(40))
    assert_same_losses(workdir, alone)
    assert summary(workdir)["compiles_after_start"] == 0


def go_on(text, workdir, counts, logs=None):
    """Starts the run on each of these numbers of hosts, and stops it midway but for the last."""
    for count in counts[:-1]:
        # The schedule must be that of the whole run, so every start but the last is stopped.
        group = start_hosts(text, workdir, count, program=SLOW, logs=logs)
        wait_for_steps(group, workdir, 3)
        group.processes[-1].terminate()  # all of them save
        assert "SIGTERM: saved step" in group.end_with(143)[0]
    group = start_hosts(text, workdir, counts[-1], program=SLOW, logs=logs)
    assert "resumed: step" in group.end_with(0)[0]


@pytest.mark.slow
def test_sigkill_to_one_of_four_ends_the_others_and_three_one_and_two_go_on(alone, text, tmp_path):
    group = start_hosts(text, tmp_path, 4, program=SLOW)
    wait_for_steps(group, tmp_path, 7)
    group.processes[3].kill()
    *codes, killed = group.wait(limit=60)
    assert killed == -signal.SIGKILL
    assert all(codes)
    said = "\n".join(group.outputs()[:3])
    assert "most likely because another is gone" in said, said
    go_on(text, tmp_path, (3, 1, 2))
    assert_same_run(tmp_path, alone)
    assert re.search(r"epoch 1: [\d,]+ positions, each once$", audited(tmp_path), re.M)


@pytest.mark.slow
def test_a_signal_to_one_of_two_ends_an_evaluation_which_the_next_start_makes(
    alone, text, tmp_path
):
    group = start_hosts(text, tmp_path, 2, program="tests/runs/stopped_evaluation.py")
    outputs = group.end_with(143)
    assert "SIGTERM: saved step 10;" in outputs[0]
    cut = [re.findall(r"evaluated (\d+) of (\d+) batches: None", output) for output in outputs]
    assert cut[0] == cut[1]
    ((done, every),) = cut[0]
    assert int(done) < int(every)
    assert [line["step"] for line in lines(tmp_path) if "eval_loss" in line] == [0]
    assert "resumed: step 10 of 40" in run_hosts(text, tmp_path, 2)[0]
    assert_same_run(tmp_path, alone)
    ours, theirs = (
        {line["step"]: line["eval_loss"] for line in lines(place) if "eval_loss" in line}
        for place in (tmp_path, alone)
    )
    assert [*ours] == [0, 10, 20, 30, 40]
    assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.slow
def test_saved_by_two_in_a_bucket_resumed_on_one_and_two(alone, text, tmp_path, monkeypatch):
    objects._open_store.cache_clear()
    with (
        object_servers.gcs(tmp_path) as port,
        object_servers.Proxy(port, translate=True) as proxy,
    ):
        for name, value in object_servers.gcs_environment(proxy.server_port).items():
            monkeypatch.setenv(name, value)
        workdir = as_path(f"gs://{object_servers.BUCKET}/run")
        go_on(text, workdir, (2, 1, 2), logs=tmp_path)
        assert_same_run(workdir, alone)
        audited(workdir)
    objects._open_store.cache_clear()


@pytest.mark.slow
def test_weights_of_a_file_change_on_two_hosts_and_are_those_of_the_run_on_one(text, tmp_path):
    (tmp_path / "weights.json").write_text('{"first": 1, "second": 9}')
    mixture = "--config=tests/runs/tiny_config.py:mixture", "--config.batches.row_multiple=2"
    flags = *mixture, "--config.weights_every=3", "--config.optimizer.decay_steps=14"
    said = run_hosts(text, tmp_path, 2, *flags, "--config.steps=8")
    assert "changed from step 3 on, as" in said[0]
    assert "changed from step" not in said[1]
    assert "plan from step 3 on: weights={'first': '1/10', 'second': '9/10'}" in audited(tmp_path)
    (tmp_path / "weights.json").write_text('{"first": 1, "second": 0}')
    (said,) = run_hosts(text, tmp_path, 1, *flags, "--config.steps=11")
    assert "changed from step 11 on, as" in said  # it has not begun when the run ends
    said = run_hosts(text, tmp_path, 2, *flags, "--config.steps=14")
    assert "changed from step" not in said[0]
    every = audited(tmp_path)
    assert "plan from step 11 on: weights={'first': '1', 'second': '0'}" in every
    assert "all 14 batches are those that were planned" in every


def test_a_process_that_waits_in_vain_for_others_says_so(text, tmp_path):
    for group in [start_hosts(text, tmp_path, 2, own={index: ["--wait=1"]}) for index in (0, 1)]:
        (output,) = group.end_with(2, limit=60)
        assert "not all processes of the run joined within 1 s" in output
        assert "Check failure" not in output


@pytest.mark.slow
def test_if_one_host_cannot_read_a_batch_all_end_with_its_sentence(text, tmp_path):
    group = start_hosts(text, tmp_path, 2, program="tests/runs/failing_train.py")
    for output in group.end_with(2, limit=90):
        assert "train.py: process 1 of 2: the disk is gone; mount it again" in output
    assert len(steps(tmp_path)) >= 4  # it failed in the middle
    own = run_hosts(text, tmp_path, 2)
    assert "resumed: step" in own[0]


def test_a_configuration_that_differs_on_one_host_is_named(text, tmp_path):
    own = {index: [f"--config.optimizer.clip={1.0 + index}"] for index in range(2)}
    group = start_hosts(text, tmp_path, 2, own=own)
    assert all(group.wait())
    for output in group.outputs():
        assert "optimizer.clip was 1.0 and is now 2.0" in output
