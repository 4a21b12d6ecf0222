"""Several processes on one machine, joined over loopback, each with a time limit."""

import json
import os
import re
import signal
import time

import numpy as np
import pytest

import pipeline
from tests.processes import TIME_LIMIT, Group, environment, free_port
from tests.runs import host_worker


def start_workers(count, folder, request):
    """Starts host_worker.py in `count` processes with a JSON request."""
    request = request | {"count": count, "port": free_port()}
    asked = [request | {"index": index} for index in range(count)]
    commands = [[host_worker.__file__, json.dumps(each)] for each in asked]
    return Group(commands, folder, environment())


def answers_of(group):
    """What each of some processes answers."""
    outputs = group.end_with(0)
    return [json.loads(re.findall(r"^ANSWER (.*)$", out, re.M)[-1]) for out in outputs]


LAYOUTS = {
    1: [{"mesh": {"data": 1}, "order": [0]}],
    2: [{"mesh": {"data": 2}}, {"mesh": {"sequence": 2}, "spec": [None, "sequence"]}],
    4: [
        {"mesh": {"data": 4}},
        {"mesh": {"data": 4}, "order": [2, 0, 3, 1]},
        {"mesh": {"data": 2, "tensor": 2}, "order": [3, 1, 0, 2]},  # replicas of rows
        {"mesh": {"data": 2, "sequence": 2}, "spec": ["data", "sequence"]},  # length sharded
    ],
}


@pytest.fixture(scope="module")
def answers(once):
    """What each process answers to each job, by the number of processes: one start for all jobs.

    The answers of one process are those of this one.
    """
    found = json.loads((once("hosts", ask) / "answers.json").read_text())
    return {int(count): jobs for count, jobs in found.items()}


def ask(folder):
    rng = np.random.default_rng(0)
    sizes = np.clip(rng.lognormal(2.7, 0.8, 80), 2, 60).astype(int)
    sides = [[rng.integers(1, 99, n + more).astype(np.int32) for n in sizes] for more in (0, 3)]
    pipeline.Corpus.from_arrays(sides[0], folder / "corpus", vocab_size=99)
    pipeline.Pairs.from_arrays(*sides, folder / "pairs", vocab_size=99)
    text = {"do": "batches", "corpus": str(folder / "corpus")}
    both = {"do": "batches", "corpus": str(folder / "pairs"), "overflow": "truncate"}
    both["buckets"] = [[8, [16, 16]], [8, [32, 48]], [4, [32, 64]]]
    jobs = {
        count: {f"text{n}": text | layout for n, layout in enumerate(layouts)}
        for count, layouts in LAYOUTS.items()
    }
    # On two processes, a row of the second bucket spans both; on four, one of the third all.
    mesh = {1: {"data": 1}, 2: {"data": 2}, 4: {"data": 2, "fsdp": 2}}
    dynamic = {"dynamic": True, "buckets": [[4, 16], [2, 32], [1, 64]]}
    for count in LAYOUTS:
        shared = dynamic | {"mesh": mesh[count]}
        jobs[count]["dynamic text0"] = text | shared
        for order in ("contiguous", "zigzag"):
            again = {"do": "train", "context_order": order}
            jobs[count][f"train {order}"] = text | shared | again
    jobs[1]["pairs0"] = both | LAYOUTS[1][0]
    jobs[4]["pairs3"] = both | LAYOUTS[4][3]
    alone = {str(n): {"directory": str(folder / f"disk{n}")} for n in (0, 1)}
    for n in (0, 1):
        (folder / f"disk{n}").mkdir()
    jobs[2] |= {
        "agree": {"do": "agree", "plan": {"seed": 0}},
        "differ": {"do": "agree", "plan": {"seed": 0}, "differ": {1: {"plan": {"seed": 7_000}}}},
        "prepare": {"do": "prepare", "directory": str(folder / "shared")},
        "prepare on own disks": {"do": "prepare", "differ": alone},
        "prepare and fail": {"do": "fail"},
        "share": {"do": "share", "directory": str(folder)},
        "share nothing": {"do": "share", "differ": alone},
        "late": {"do": "exchange", "seconds": 0.5, "differ": {1: {"pause": 2.0}}},
    }
    for count in jobs:
        jobs[count]["exchange"] = {"do": "exchange"}
    found = {1: {name: [host_worker.DO[job["do"]](job)] for name, job in jobs.pop(1).items()}}
    for count, asked in jobs.items():
        request = {"do": "several", "jobs": list(asked.values())}
        of_each = answers_of(start_workers(count, folder / f"logs{count}", request))
        of_jobs = zip(*of_each, strict=True)
        found[count] = {name: list(each) for name, each in zip(asked, of_jobs, strict=True)}
    (folder / "answers.json").write_text(json.dumps(found))


GLOBAL = [(count, f"text{n}") for count in (2, 4) for n in range(len(LAYOUTS[count]))]


@pytest.mark.parametrize(
    ("count", "job"), [*GLOBAL, (4, "pairs3"), (2, "dynamic text0"), (4, "dynamic text0")]
)
def test_global_batches_are_those_of_one_process(answers, count, job):
    (alone,) = answers[1][job[:-1] + "0"]
    assert all(answer == alone for answer in answers[count][job])
    assert len(alone["hashes"]) == 2 * alone["steps_per_epoch"] > 6


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("count", [2, 4])
def test_processes_that_share_a_row_have_the_losses_of_one(answers, count, order):
    (alone,) = answers[1]["train contiguous"]
    for answer in answers[count][f"train {order}"]:
        assert answer["losses"] == pytest.approx(alone["losses"], abs=1e-5)
        assert answer["sum"] == pytest.approx(alone["sum"], rel=1e-5)
        rows = {tuple(each) for each in answer["rows"]}
        assert rows >= {(4, 4 // count), (1, 1)}  # the one row of a batch is on every process


def test_a_process_that_differs_is_named_on_all_of_them(answers):
    assert answers[2]["agree"] == [None, None]
    for said in answers[2]["differ"]:
        assert "1 of 2 processes disagree with process 0" in said
        assert "process 1: plan: seed was 0 and is now 7000" in said


def test_directories_that_are_not_shared_are_named(answers):
    assert answers[2]["share"] == [None, None]
    for said in answers[2]["share nothing"]:
        assert "processes 1 do not see the files of process 0 in" in said


def test_slurm_says_how_many_there_are(tmp_path):
    port = free_port()
    environments = [
        {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": "2"}
        | {"SLURM_PROCID": str(index), "SLURM_LOCALID": "0", "JAX_COORDINATOR_PORT": str(port)}
        for index in range(2)
    ]
    # What a batch script sees that starts no task: nobody else is there to wait for.
    environments.append({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2"})
    asked = json.dumps({"do": "count", "platform": True})
    groups = [
        Group([[host_worker.__file__, asked]], tmp_path / str(n), environment(**e))
        for n, e in enumerate(environments)
    ]
    assert [answers_of(group) for group in groups] == [
        [{"count": 2, "index": 0, "largest": (1 << 40) + 1}],
        [{"count": 2, "index": 1, "largest": (1 << 40) + 1}],
        [{"count": 1, "index": 0, "largest": 0.25}],
    ]


def test_process_0_prepares_and_the_others_open_what_it_left(answers):
    assert [answer["tokenised"] for answer in answers[2]["prepare"]] == [True, False]
    own = answers[2]["prepare on own disks"]
    assert [answer["tokenised"] for answer in own] == [True, True]
    assert len({answer["fingerprint"] for answer in own}) == 1


def test_when_process_0_fails_to_prepare_the_others_say_so(answers):
    first, second = answers[2]["prepare and fail"]
    assert first == "the disk is gone"
    assert "preparing failed on process 0" in second


@pytest.mark.parametrize("count", [1, 2, 4])
def test_each_process_gets_the_values_of_all_whatever_others_exchange_beside_it(answers, count):
    for index, found in enumerate(answers[count]["exchange"]):
        assert not found["late"]
        assert found["all"] == [[[n, number] for n in range(count)] for number in range(3)]
        alike = range(index % 2, count, 2)
        assert found["alike"] == [[["alike", n, number] for n in alike] for number in range(3)]


def test_a_process_without_an_answer_is_named_and_the_round_is_made_again(answers):
    first, second = answers[2]["late"]
    assert set(first["late"]) == {
        "process 1 gave no value within 0.5 s; see its output, and call again, or start all "
        "processes again"
    }
    assert not second["late"]
    assert first["all"] == second["all"] == [[[0, n], [1, n]] for n in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("dies", [0, 1])
def test_who_waits_for_a_process_that_dies_ends(tmp_path, dies):
    job = {"do": "exchange", "differ": {dies: {"pause": 200.0}}}
    group = start_workers(2, tmp_path / "logs", {"do": "several", "jobs": [job]})
    deadline = time.monotonic() + TIME_LIMIT
    while "BEGUN" not in group.outputs()[dies] and time.monotonic() < deadline:
        time.sleep(0.1)
    group.processes[dies].kill()
    codes = group.wait(limit=60)
    assert codes[dies] == -signal.SIGKILL
    assert codes[1 - dies] != 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_process_is_received_by_all_at_the_same_call(tmp_path, number):
    group = start_workers(2, tmp_path / "logs", {"do": "stop"})
    deadline = time.monotonic() + TIME_LIMIT
    while not all("BEGUN" in out for out in group.outputs()) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(group.processes[1].pid, number)
    first, second = answers_of(group)
    assert first["call"] == second["call"] > 0
    assert first["again"]
    assert second["again"]
    assert second["reason"] == number.name
