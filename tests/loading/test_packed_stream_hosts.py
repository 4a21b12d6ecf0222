"""Packed streams of several real processes, joined over loopback."""

import collections
import functools
import itertools
import json
import re
import time

import numpy as np
import pytest

from tests.loading import stream_worker
from tests.loading.stream_worker import BUCKETS, OF_ELEMENT, OF_SHARD, shard_of
from tests.processes import Group, environment, free_port

KINDS = "equal", "unequal", "skewed", "empty"
COUNTS = 2, pytest.param(4, marks=pytest.mark.slow)


def start(count, folder, request):
    request = request | {"count": count, "port": free_port()}
    commands = [
        [stream_worker.__file__, json.dumps(request | {"index": index})] for index in range(count)
    ]
    return Group(commands, folder, environment())


def answers_of(group):
    outputs = group.end_with(0)
    return [json.loads(re.findall(r"^ANSWER (.*)$", out, re.M)[-1]) for out in outputs]


@pytest.fixture
def answers(once, count):
    """What each of `count` processes answers to each job: one start for all jobs."""
    folder = once(f"streams{count}", functools.partial(ask, count))
    return json.loads((folder / "answers.json").read_text()) | {"folder": folder}


def ask(count, folder):
    jobs = {
        f"{kind} {ending}": {
            "do": "whole",
            "kind": kind,
            "ending": ending,
            "every": 3 if (count, kind, ending) == (2, "unequal", "pad") else 7,
            "file": str(folder / f"{kind} {ending}"),
        }
        for kind, ending in itertools.product(KINDS, ("pad", "drop"))
    }
    held = {"do": "whole", "kind": "held", "window": 100, "every": 20}
    jobs["held pad"] = held | {"file": str(folder / "held pad")}
    jobs["fail"] = {"do": "fail", "kind": "equal", "file": str(folder / "fail")}
    jobs["refuse"] = {"do": "refuse", "kind": "equal"}
    jobs["load"] = {"do": "load", "kind": "unequal"}
    jobs["interrupt"] = {"do": "interrupt", "kind": "unequal"}
    request = {"do": "several", "jobs": [*jobs.values()]}
    of_each = answers_of(start(count, folder / "logs", request))
    found = dict(zip(jobs, map(list, zip(*of_each, strict=True)), strict=True))
    (folder / "answers.json").write_text(json.dumps(found))


def read(path):
    """The batches of a process, in order."""
    batches = collections.defaultdict(dict)
    with np.load(path) as fields:
        for key in fields:
            step, name = key.split(" ")
            batches[int(step)][name] = fields[key]
    return [batches[step] for step in range(len(batches))]


def positions_of(batches):
    """How often each position of each element is in some batches: (process, element, position).

    Each segment must be a run of consecutive tokens of one element, with the targets one later.
    """
    found = collections.Counter()
    for batch in batches:
        for row, ids in enumerate(batch["inputs_segment_ids"]):
            for segment in range(1, ids.max() + 1):
                at = np.flatnonzero(ids == segment)
                tokens = batch["inputs"][row, at]
                assert (np.diff(tokens) == 1).all()
                assert (np.diff(at) == 1).all()
                assert (batch["targets"][row, at] == tokens + 1).all()
                assert (batch["inputs_positions"][row, at] == tokens % OF_ELEMENT).all()
                process, rest = divmod(int(tokens[0]), OF_SHARD)
                element, first = divmod(rest, OF_ELEMENT)
                found.update((process, element, first + n) for n in range(len(at)))
    return found


def expected_of(kind, count):
    return collections.Counter(
        (process, element, position)
        for process in range(count)
        for element, tokens in enumerate(shard_of(kind, process, count))
        for position in range(len(tokens) - 1)
    )


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_position_comes_once_and_hosts_have_one_shape_at_a_step(answers, count, kind):
    each = [read(answers["folder"] / f"{kind} pad.{process}.npz") for process in range(count)]
    assert len({len(batches) for batches in each}) == 1
    assert len(each[0]) > 3
    shapes = {(bucket.rows // count, bucket.length) for bucket in BUCKETS}
    for of_step in zip(*each, strict=True):
        assert len({batch["inputs"].shape for batch in of_step}) == 1
        assert of_step[0]["inputs"].shape in shapes
    assert sum(map(positions_of, each), collections.Counter()) == expected_of(kind, count)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_drops_the_end_has_no_empty_row_and_nothing_twice(answers, count, kind):
    each = [read(answers["folder"] / f"{kind} drop.{process}.npz") for process in range(count)]
    assert len({len(batches) for batches in each}) == 1
    assert bool(each[0]) == (kind != "empty")
    assert all((b["inputs_segment_ids"][:, 0] > 0).all() for batches in each for b in batches)
    found = sum(map(positions_of, each), collections.Counter())
    assert not found - expected_of(kind, count)


@pytest.mark.parametrize("count", COUNTS)
def test_a_host_that_has_read_all_still_shares_its_steps(answers, count):
    """Even if the last packs alone what others packed before, there would be twice the steps."""
    each = [read(answers["folder"] / f"held pad.{process}.npz") for process in range(count)]
    assert sum(map(positions_of, each), collections.Counter()) == expected_of("held", count)
    rows = BUCKETS[1].rows // count
    most = max(sum((b["inputs_segment_ids"] > 0).sum() for b in batches) for batches in each)
    assert len(each[0]) < 1.35 * most / (rows * BUCKETS[1].length)


@pytest.mark.parametrize("count", COUNTS)
def test_states_are_small(answers):
    for kind, ending in itertools.product(KINDS, ("pad", "drop")):
        assert max(answer["state"] for answer in answers[f"{kind} {ending}"]) < 1500


@pytest.mark.parametrize("count", COUNTS)
def test_an_error_on_one_host_reaches_all_and_nothing_is_lost(answers, count):
    for process, said in enumerate(answers["fail"]):
        (told,) = said
        if process == 1:
            assert told == "OSError: no answer"
        else:
            assert re.match(r"InvalidState: process 1 has no window \d: OSError: no answer;", told)
    each = [read(answers["folder"] / f"fail.{process}.npz") for process in range(count)]
    assert sum(map(positions_of, each), collections.Counter()) == expected_of("equal", count)


@pytest.mark.parametrize("count", COUNTS)
def test_what_differs_between_hosts_is_named_on_all(answers, count):
    for process, said in enumerate(answers["refuse"]):
        assert "hosts have different streams: seed was" in said["seeds"]
        assert "hosts have different streams: step was" in said["steps"]
        assert "seed was 0 and is now 4" in said["seed of a state"]
        assert f"host was {(process + 1) % count} and is now {process}" in said["host"]
        assert f"hosts was {count} and is now 1" in said["hosts"]
        assert "processes hold the same rows" in said["rows"]
        assert "most= of DynamicContext" in said["row"]
    whole = sum(said["window"] for said in answers["refuse"])
    assert whole == expected_of("empty", count).total()


@pytest.mark.parametrize("count", COUNTS)
def test_buckets_are_chosen_for_the_first_window_of_all_hosts(answers, count):
    first, *others = answers["load"]
    assert all(other == first for other in others)
    tokens = sum(n for *_, n in first["batches"])
    assert tokens == expected_of("unequal", count).total()


@pytest.mark.parametrize("count", COUNTS)
def test_a_stream_is_restored_while_a_thread_waits_for_other_hosts(answers):
    assert len({*answers["interrupt"]}) == 1
    assert answers["interrupt"][0] > 3


@pytest.mark.slow
@pytest.mark.parametrize("kills", [(3, 9), (5, 6)])
def test_processes_that_are_killed_go_on_as_if_they_had_not_been(tmp_path, kills):
    job = {"do": "restart", "kind": "unequal"}
    runs = {"whole": (), "killed": kills}
    for name, steps in runs.items():
        folder = tmp_path / name
        for what in ("state0", "state1", "batch0", "batch1"):
            (folder / what).mkdir(parents=True)
        for number, step in enumerate((*steps, None)):
            group = start(2, folder / f"logs{number}", job | {"folder": str(folder)})
            if step is None:
                group.end_with(0)
                continue
            end = time.monotonic() + 120
            while time.monotonic() < end and not (folder / f"state1/{step}.json").exists():
                time.sleep(0.002)
            group.kill()
            assert (folder / f"state1/{step}.json").exists()
    for process in range(2):
        every = [sorted((tmp_path / run / f"batch{process}").iterdir()) for run in runs]
        assert [path.name for path in every[0]] == [path.name for path in every[1]]
        for paths in zip(*every, strict=True):
            alone, killed = (dict(np.load(path)) for path in paths)
            np.testing.assert_equal(killed, alone)
