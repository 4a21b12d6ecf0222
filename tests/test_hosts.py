"""Several processes on one machine, joined over loopback, each with a time limit."""

import json
import re
import sys

import numpy as np
import pytest

import pipeline
from pipeline.planning.options import VERSION
from tests.processes import Group, environment, free_port


def worker_group(count, folder, request, per_process=lambda index: {}):
    """Runs tests/host_worker.py in `count` processes with a JSON request; returns their answers."""
    request = request | {"count": count, "port": free_port()}
    asked = [request | {"index": index} | per_process(index) for index in range(count)]
    commands = [[sys.executable, "tests/host_worker.py", json.dumps(each)] for each in asked]
    group = Group(commands, folder, environment())
    codes = group.wait()
    outputs = group.outputs()
    answers = [
        json.loads(found[-1]) if (found := re.findall(r"^ANSWER (.*)$", out, re.M)) else None
        for out in outputs
    ]
    return codes, outputs, answers


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A corpus of 150 examples on a disk that all processes see."""
    rng = np.random.default_rng(0)
    sizes = np.clip(rng.lognormal(2.7, 0.8, 150), 2, 60).astype(int)
    directory = tmp_path_factory.mktemp("shared")
    examples = [rng.integers(1, 99, size).astype(np.int32) for size in sizes]
    pipeline.Corpus.from_arrays(examples, directory / "corpus", vocab_size=99)
    return directory


@pytest.fixture(scope="module")
def one_process(shared, tmp_path_factory):
    request = {"do": "batches", "corpus": str(shared / "corpus"), "mesh": {"data": 1}}
    codes, outputs, answers = worker_group(1, tmp_path_factory.mktemp("one"), request)
    assert codes == [0], outputs
    return answers[0]


MESHES = [
    (2, {"mesh": {"data": 2}}),
    (4, {"mesh": {"data": 4}}),
    (4, {"mesh": {"data": 4}, "order": [2, 0, 3, 1]}),
    (4, {"mesh": {"data": 2, "tensor": 2}, "order": [3, 1, 0, 2]}),  # replicas of rows
    (4, {"mesh": {"data": 2, "sequence": 2}, "spec": ["data", "sequence"]}),  # length sharded
    (2, {"mesh": {"sequence": 2}, "spec": [None, "sequence"]}),
]


@pytest.mark.parametrize(("count", "layout"), MESHES, ids=lambda value: str(value)[:60])
def test_global_batches_are_those_of_one_process(shared, one_process, tmp_path, count, layout):
    request = {"do": "batches", "corpus": str(shared / "corpus")} | layout
    codes, outputs, answers = worker_group(count, tmp_path, request)
    assert codes == [0] * count, outputs
    for answer in answers:
        assert answer["hashes"] == one_process["hashes"]
        assert answer["states"] == one_process["states"]
    assert len(one_process["hashes"]) >= 2 * one_process["steps_per_epoch"]


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"seed": 7}, "plan: seed was 0 and is now 7"),
        ({"buckets": [[4, 64]]}, "plan: buckets was 8x16+4x64 and is now 4x64"),
        ({"version": 99}, f"plan: plan was {VERSION} and is now 99"),
        ({"drop_last_example": True}, "plan: lengths was"),
    ],
)
def test_a_process_that_differs_stops_all_of_them_and_is_named(shared, tmp_path, changed, sentence):
    request = {"do": "agree", "corpus": str(shared / "corpus"), "mesh": {"data": 2}}
    codes, outputs, _ = worker_group(
        2, tmp_path, request, lambda index: changed if index == 1 else {}
    )
    assert all(code != 0 for code in codes), outputs
    for output in outputs:
        assert "1 of 2 processes disagree with process 0" in output
        assert f"process 1: {sentence}" in output


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
        Group(
            [[sys.executable, "tests/host_worker.py", asked]], tmp_path / str(n), environment(**e)
        )
        for n, e in enumerate(environments)
    ]
    assert [group.wait() for group in groups] == [[0]] * 3, [group.outputs() for group in groups]
    found = [re.findall(r"^ANSWER (.*)$", group.outputs()[0], re.M)[-1] for group in groups]
    assert [json.loads(each) for each in found] == [
        {"count": 2, "index": 0, "smallest": 1024},
        {"count": 2, "index": 1, "smallest": 1024},
        {"count": 1, "index": 0, "smallest": None},
    ]


def test_fewer_examples_than_hosts_still_make_equal_steps(tmp_path):
    for count in (1, 3):
        examples = [np.arange(5, dtype=np.int32)] * count
        directory = tmp_path / str(count)
        pipeline.Corpus.from_arrays(examples, directory / "corpus")
        request = {"do": "batches", "corpus": str(directory / "corpus"), "mesh": {"data": 4}}
        request |= {"buckets": [[4, 16]], "epochs": 2}
        codes, outputs, answers = worker_group(4, directory, request)
        assert codes == [0] * 4, outputs
        assert len(answers[0]["hashes"]) == 2
        assert all(answer == answers[0] for answer in answers)
        assert answers[0]["weights"] == [4.0 * count] * 2


def test_microbatches_on_two_processes_give_the_gradients_of_the_whole_batch_on_one(tmp_path):
    gradients = []
    for count in (1, 2):
        request = {"do": "gradients", "mesh": {"data": count}}
        codes, outputs, answers = worker_group(count, tmp_path / str(count), request)
        assert codes == [0] * count, outputs
        gradients += [np.array(answer[number]) for answer in answers for number in "1248"]
    for other in gradients[1:]:
        np.testing.assert_allclose(other, gradients[0], rtol=1e-6, atol=1e-6)


def test_process_0_prepares_and_the_others_open_what_it_left(tmp_path):
    request = {"do": "prepare", "directory": str(tmp_path / "shared"), "mesh": {"data": 2}}
    codes, outputs, answers = worker_group(2, tmp_path / "a", request)
    assert codes == [0, 0], outputs
    assert [answer["tokenised"] for answer in answers] == [True, False]
    own = lambda index: {"directory": str(tmp_path / f"disk{index}")}  # noqa: E731
    codes, outputs, answers = worker_group(2, tmp_path / "b", request, own)
    assert codes == [0, 0], outputs
    assert [answer["tokenised"] for answer in answers] == [True, True]
    assert len({answer["fingerprint"] for answer in answers}) == 1


def test_when_process_0_fails_to_prepare_the_others_say_so_and_stop(tmp_path):
    request = {"do": "prepare", "directory": str(tmp_path / "shared"), "mesh": {"data": 2}}
    broken = lambda index: {"broken": True} if index == 0 else {}  # noqa: E731
    codes, outputs, _ = worker_group(2, tmp_path / "a", request, broken)
    assert all(code != 0 for code in codes), outputs
    assert "preparing failed on process 0" in outputs[1]


@pytest.mark.parametrize(
    "layout",
    [{"mesh": {"data": 4}}, {"mesh": {"data": 2, "sequence": 2}, "spec": ["data", "sequence"]}],
)
def test_global_batches_of_pairs_are_those_of_one_process(tmp_path, layout):
    rng = np.random.default_rng(0)
    sizes = np.clip(rng.lognormal(2.7, 0.8, 150), 2, 60).astype(int)
    sides = ([rng.integers(1, 99, size + more) for size in sizes] for more in (0, 3))
    pipeline.Pairs.from_arrays(*sides, tmp_path / "pairs", vocab_size=99)
    request = {"do": "batches", "corpus": str(tmp_path / "pairs"), "overflow": "truncate"}
    request["buckets"] = [[8, [16, 16]], [8, [32, 48]], [4, [32, 64]]]
    found = []
    for count, asked in ((1, {"mesh": {"data": 1}}), (4, layout)):
        codes, outputs, answers = worker_group(count, tmp_path / str(count), request | asked)
        assert codes == [0] * count, outputs
        found += answers
    assert found[0]["steps_per_epoch"] > 3
    assert all(answer == found[0] for answer in found)
