"""Weights that change on several real processes, joined over loopback."""

import functools
import json
import re
import time

import pytest

from tests.loading import live_worker
from tests.processes import Group, environment, free_port

COUNTS = 1, 2, pytest.param(4, marks=pytest.mark.slow)
JOBS = {
    "blocks": {"do": "walk", "every": 8, "restore": [0, 5, 22, 50]},
    "steps": {"do": "walk", "every": 1, "restore": [21]},
    "tiers": {"do": "walk", "every": 6, "plan": {"tiers": 4}, "restore": [4]},
    "end": {"do": "walk", "every": 6, "epochs": 1},
    "refuse": {"do": "refuse"},
}
TRAIN = {"do": "train", "steps": 120, "reference": [2.3, 4.7]}


def start(count, folder, request):
    request = request | {"count": count, "port": free_port()}
    commands = [
        [live_worker.__file__, json.dumps(request | {"index": index})] for index in range(count)
    ]
    return Group(commands, folder, environment())


def answers_of(group):
    outputs = group.end_with(0)
    return [json.loads(re.findall(r"^ANSWER (.*)$", out, re.M)[-1]) for out in outputs]


@pytest.fixture
def answers(once):
    """What each process answers to each job, by their number."""

    def get(count):
        folder = once(f"live weights{count}", functools.partial(ask, count))
        return json.loads((folder / "answers.json").read_text())

    return get


def ask(count, folder):
    request = {"do": "several", "jobs": [*JOBS.values()]}
    of_each = answers_of(start(count, folder / "logs", request))
    found = dict(zip(JOBS, map(list, zip(*of_each, strict=True)), strict=True))
    (folder / "answers.json").write_text(json.dumps(found))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("job", ["blocks", "steps", "tiers", "end"])
def test_all_processes_have_the_batches_of_one_although_threads_are_ahead(answers, count, job):
    of_each, (alone,) = answers(count)[job], answers(1)[job]
    assert [each["digests"] for each in of_each] == [alone["digests"]] * count
    assert of_each[0]["changed"] == alone["changed"]
    assert [each["wrong"] for each in of_each] == [[]] * count
    if job == "blocks":
        assert alone["changed"] == [8, 24, 56]
    elif job == "end":
        assert len(alone["digests"]) < 60
    else:
        assert len(alone["changed"]) >= 3


@pytest.mark.parametrize("count", COUNTS[1:])
def test_only_process_0_of_a_loader_that_asked_for_it_changes_weights(answers, count):
    for index, said in enumerate(answers(count)["refuse"]):
        if index:
            assert f"process {index} changes weights, which process 0 decides" in said["no word"]
            assert "if jax.process_index() == 0" in said["other process"]
        else:
            assert f"{count} processes share the batches" in said["no word"]
            assert "make the loader with changes_every=16" in said["no word"]
            assert "give each a weight" in said["weights"]
            assert "the epoch is over at step" in said["end"]
        assert (said["stages"], said["rest"]) == (1, 0)


@pytest.fixture
def trained(once):
    """The end of a run of the page's loop on one process."""
    folder = once("live training", train_alone)
    return json.loads((folder / "answer.json").read_text())


def train_alone(folder):
    (folder / "run").mkdir()
    (answer,) = answers_of(start(1, folder / "logs", TRAIN | {"folder": str(folder / "run")}))
    (folder / "answer.json").write_text(json.dumps(answer))


MORE = [pytest.param(counts, marks=pytest.mark.slow) for counts in ((4, 4), (2, 4), (4, 1))]


@pytest.mark.parametrize("counts", [(1, 1), (2, 2), *MORE])
def test_the_loop_of_the_page_is_the_same_if_it_is_killed_on_any_number_of_hosts(
    trained, tmp_path, counts
):
    request = TRAIN | {"folder": str(tmp_path)}
    assert trained["changes"] == [0, 24, 48, 64, 88, 104]  # multiples of 8 after each 20th
    killed = start(counts[0], tmp_path / "killed", request)
    end = time.monotonic() + 120
    while min(out.count("STEP") for out in killed.outputs()) < 5:
        assert time.monotonic() < end, "\n\n".join(killed.outputs())
        time.sleep(0.01)
    killed.kill()
    saved = [path.stem for path in tmp_path.glob("*.json")]
    assert 40 <= max(map(int, saved)) < 120
    group = start(counts[1], tmp_path / "resumed", request)
    for answer in answers_of(group):
        assert answer == trained
    assert all("BEGUN 0" not in out for out in group.outputs())
