"""Several processes on one machine, joined over loopback, each with a time limit."""

import json
import re
import signal
import time

import numpy as np
import pytest

import pipeline
from pipeline import Writer
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
# For each wait for a corpus that grows: the examples that one process sees, and the other; options.
WAITS = {
    "a window": (180, 120, {}),
    "the end": (250, 250, {"restores": True}),
    "the first window": (
        240,
        120,
        {"fitting": {"tokens_per_batch": 512, "max_length": 64, "window": 200}},
    ),
    "the first part": (240, 0, {}),
}
LATE = ["a window", "the end", "the first part"]  # those that process 1 also sees later


@pytest.fixture(scope="module")
def answers(once):
    """What each process answers to each job, by the number of processes: one start for all jobs.

    The answers of one process are those of this one.
    """
    found = json.loads((once("hosts", ask) / "answers.json").read_text())
    return {int(count): jobs for count, jobs in found.items()}


def ask(folder):
    rng = np.random.default_rng(0)
    sizes = np.clip(rng.lognormal(2.7, 0.8, 150), 2, 60).astype(int)
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
    }
    add_waits(folder, jobs)
    found = {1: {name: [host_worker.DO[job["do"]](job)] for name, job in jobs.pop(1).items()}}
    for count, asked in jobs.items():
        request = {"do": "several", "jobs": list(asked.values())}
        of_each = answers_of(start_workers(count, folder / f"logs{count}", request))
        of_jobs = zip(*of_each, strict=True)
        found[count] = {name: list(each) for name, each in zip(asked, of_jobs, strict=True)}
    (folder / "answers.json").write_text(json.dumps(found))


def write(directory, number, *, finish=False):
    """Writes the first of 250 examples, in parts of 20, as a corpus that grows."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 99, size) for size in rng.integers(2, 60, 250)]
    with Writer(directory) as writer:
        for at, tokens in enumerate(documents[:number], 1):
            writer.append(tokens)
            if at % 20 == 0 or at == number:
                writer.seal()
        if finish:
            writer.finish()


def add_waits(folder, jobs):
    """Adds those of a corpus that grows, of which one process sees less than the other."""
    write(folder / "followed", 250, finish=True)
    whole = {"do": "follow", "corpus": str(folder / "followed")}
    jobs[1]["follow"] = whole | LAYOUTS[1][0]
    for name, (more, less, options) in WAITS.items():
        for late in (0, 1) if name in LATE else (0,):
            own = {str(n): {"corpus": str(folder / f"{name} {late} {n}")} for n in (0, 1)}
            # Process 0 decides. If it sees all, process 1 sees the same after a second.
            numbers = (less, more) if late == 0 else (250, less)
            own["1"]["grows_after"] = 1 if late == 1 else None
            for n, number in enumerate(numbers):
                if number:
                    write(own[str(n)]["corpus"], number, finish=number == 250 and n != late)
            job = {"do": "follow", "mesh": {"data": 2}, "differ": own, "more": whole["corpus"]}
            jobs[2][f"{name}, late {late}"] = job | options


GLOBAL = [(count, f"text{n}") for count in (2, 4) for n in range(len(LAYOUTS[count]))]


@pytest.mark.parametrize(("count", "job"), [*GLOBAL, (4, "pairs3")])
def test_global_batches_are_those_of_one_process(answers, count, job):
    (alone,) = answers[1][job[:-1] + "0"]
    assert all(answer == alone for answer in answers[count][job])
    assert len(alone["hashes"]) == 2 * alone["steps_per_epoch"] > 6


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


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_that_is_over_on_process_0_ends_all_at_the_same_step(answers, wait):
    ((whole,), (first, second)) = answers[1]["follow"], answers[2][f"{wait}, late 0"]
    assert first == second
    (said,) = first["said"]
    assert re.match(
        "process 0: (no part was added to .* and is not finished|nothing is sealed)", said
    )
    if first["states"]:
        assert 0 < first["states"][0]["step"] < len(whole["hashes"])
        assert first["hashes"] == whole["hashes"]


@pytest.mark.parametrize("wait", LATE)
def test_a_process_that_sees_parts_later_than_process_0_waits_for_them(answers, wait):
    ((whole,), (first, second)) = answers[1]["follow"], answers[2][f"{wait}, late 1"]
    assert first == second
    assert not first["said"]
    assert first["hashes"] == whole["hashes"]


@pytest.mark.slow
def test_a_process_that_never_sees_the_parts_of_process_0_says_so_and_ends_the_run(tmp_path):
    own = {str(n): {"corpus": str(tmp_path / f"{n}")} for n in (0, 1)}
    for n in (0, 1):
        write(own[str(n)]["corpus"], 180 - 60 * n)
    job = {"do": "follow", "mesh": {"data": 2}, "lag": 2, "differ": own}
    group = start_workers(2, tmp_path / "logs", {"do": "several", "jobs": [job]})
    codes = group.wait(limit=60)
    assert 0 not in codes
    assert (
        "process 0 sees parts of the corpus that this one has not seen for 2" in group.outputs()[1]
    )


@pytest.mark.slow
@pytest.mark.parametrize("dies", [0, 1])
def test_who_waits_for_a_process_that_dies_ends(tmp_path, dies):
    own = {str(n): {"corpus": str(tmp_path / f"{n}")} for n in (0, 1)}
    for n in (0, 1):
        write(own[str(n)]["corpus"], 120 if n == dies else 180)
    job = {"do": "follow", "mesh": {"data": 2}, "wait_seconds": 200.0, "differ": own}
    group = start_workers(2, tmp_path / "logs", {"do": "several", "jobs": [job]})
    deadline = time.monotonic() + TIME_LIMIT
    while "waiting for part 6" not in group.outputs()[dies] and time.monotonic() < deadline:
        time.sleep(0.1)
    group.processes[dies].kill()
    codes = group.wait(limit=60)
    assert codes[dies] == -signal.SIGKILL
    assert codes[1 - dies] != 0
