"""The options of a run's batches over its schedule: the past stands, the future may change."""

import ast
import json
import re

import numpy as np
import pytest

import pipeline
from tests.planning.corpora import digests
from tests.runs.runs import messages
from trainer.schedule import Schedule

LENGTHS = np.random.default_rng(0).integers(1, 60, 300)
BEGIN = {"seed": 0, "tokens_per_batch": 256, "max_length": 32, "length_multiple": 16}
RAMP = [(3, {"tokens_per_batch": 512}), (9, {"max_length": 64})]


def planned(changes, begin=None):
    """A schedule and its plan."""
    made = Schedule.make(BEGIN | {"row_multiple": 2} | (begin or {}), changes)
    schedule = made.fit(LENGTHS)
    return schedule, schedule.plan(LENGTHS)


def resumed(state, step, changes, begin=None):
    """A schedule that goes on from another at a step, and its plan."""
    made = Schedule.make(BEGIN | (begin or {}), json.loads(json.dumps(changes)))
    schedule = made.resume(json.loads(json.dumps(state.as_json())), step).fit(LENGTHS)
    return schedule, schedule.plan(LENGTHS)


def shapes(plan):
    """The shape of the longest bucket, by the step from which it holds."""
    return {stage.start: stage.options.buckets[-1].shape for stage in plan.stages}


def options(schedule):
    return [(entry.step, entry.options) for entry in schedule.entries[1:]]


def test_a_run_keeps_its_plan_on_other_devices_and_a_change_keeps_the_past():
    first, before = planned(RAMP[::-1])  # in any order
    assert shapes(before) == {0: (8, 32), 3: (16, 32), 9: (8, 64)}
    assert {*shapes(before).values()} <= {bucket.shape for bucket in before.buckets}
    assert [first.options(step)["tokens_per_batch"] for step in (2, 3)] == [256, 512]
    for step in (3, 5):
        again, plan = resumed(first, step, RAMP)
        assert again.as_json() == first.as_json()
        assert plan.fingerprint == before.fingerprint
    with messages() as said:
        change = 5, {"row_multiple": 3, "exclude": [1, 4]}
        _, plan = resumed(first, 5, [RAMP[0], change, RAMP[1]])
    assert shapes(plan) == {0: (8, 32), 3: (16, 32), 5: (15, 32), 9: (6, 64)}  # fitted again
    assert digests(plan, range(5)) == digests(before, range(5))
    assert "changed from step 5 on: row_multiple=3, exclude=1, 4" in str(said)


def test_a_curriculum_may_begin_and_end_during_a_run():
    begin = {"buckets": [[8, 16], [4, 32], [2, 64]], "curriculum": "short_first"}
    first, plan = planned([(9, {"curriculum": None})], begin | {"cycles": 3})
    lengths = [plan.batch(step).bucket.length for step in range(9)]
    assert lengths == sorted(lengths)
    assert len({*lengths}) > 1
    again, same = resumed(first, 5, [(9, {"curriculum": None})], begin)  # cycles as it began
    assert same.fingerprint == plan.fingerprint
    _, later = resumed(again, 9, [(9, {"curriculum": None}), (20, {"curriculum": "short_first"})])
    assert later.batch(8).digest == plan.batch(8).digest
    rest = [later.batch(step).bucket.length for step in range(20, later.first_step(1))]
    assert rest == sorted(rest)
    with pytest.raises(ValueError, match="curriculum was 'short_first' and is now 'long_first'"):
        resumed(first, 5, [], begin | {"curriculum": "long_first"})


def test_leaving_examples_out_keeps_the_buckets():
    change = 5, {"exclude": np.flatnonzero(LENGTHS > 12).tolist(), "max_segments": 2}
    _, plan = planned([change])
    assert plan.stages[1].options.buckets == plan.stages[0].options.buckets


def test_the_config_may_show_the_beginning_or_what_it_has_become_and_nothing_else():
    first, _ = planned([])
    change = 5, {"seed": 2, "max_length": 64, "exclude": [1]}
    second, plan = resumed(first, 5, [change])
    for begin in ({}, {"seed": 2, "max_length": 64}, {"max_length": 64}, {"packing": None}):
        again, same = resumed(second, 8, [], begin=begin)
        assert again.as_json() == second.as_json()
        assert same.fingerprint == plan.fingerprint
    later = 9, {"seed": 3}
    for begin in ({"max_length": 48}, {"packing": "none"}):
        with pytest.raises(ValueError, match=r"The past of a run stands") as refused:
            resumed(second, 8, [later], begin=begin)
        schedule = re.search(r'from step 8 on with --config.schedule="(.*)"', str(refused.value))[1]
        assert ast.literal_eval(schedule) == ((8, begin), later)
        again, _ = resumed(second, 8, ast.literal_eval(schedule), begin=begin)
        assert options(again) == [change, (8, begin), later]


def test_the_future_of_a_schedule_may_change_and_its_past_may_not():
    first, before = planned(RAMP)
    other = [RAMP[0], (8, {"seed": 1}), (12, {"max_length": 48})]
    second, plan = resumed(first, 5, other)
    assert shapes(plan) == {0: (8, 32), 3: (16, 32), 8: (16, 32), 12: (10, 48)}
    assert digests(plan, range(8)) == digests(before, range(8))
    # The past may be left out.
    assert resumed(second, 6, other[1:])[0].as_json() == second.as_json()
    assert options(resumed(second, 6, [])[0]) == [RAMP[0]]
    # An entry at the step where the run goes on is still to come.
    assert options(resumed(second, 8, [RAMP[0]])[0]) == [RAMP[0]]
    for wrong in ([(3, {"seed": 1})], [other[0], (4, {"seed": 1})]):
        with pytest.raises(ValueError, match=r"up to step 6, .*it was \[\[3, .*512"):
            resumed(second, 6, wrong)


def test_a_change_within_a_block_of_tiers_is_refused_with_the_steps_where_it_can_be_made():
    first, before = planned([], {"tiers": 4})
    with pytest.raises(ValueError, match=r"step is 5, .*\b8\b"):
        resumed(first, 5, [(5, {"seed": 2})], begin={"tiers": 4})
    second, plan = resumed(first, 5, [(8, {"seed": 2})], begin={"tiers": 4})
    assert second.entries[1].plan == {"seed": 2}  # its buckets stay
    assert digests(plan, range(8)) == digests(before, range(8))


def test_corpora_join_in_the_order_in_which_entries_add_them():
    sizes = {"train": 2, "news": 3, "code": 4}
    every = pipeline.Corpora({name: pipeline.Examples([[1] * 9] * n) for name, n in sizes.items()})
    schedule = Schedule.make(BEGIN, [(3, {"add": ["code"]}), (5, {"add": ["news"]})])
    plan = schedule.plan(schedule.select(every))
    assert [changes["examples"] for _, changes in plan.changes] == [2, 6, 9]
    schedule = Schedule.make(BEGIN, [(0, {"add": ["code"]}), (5, {"add": ["news"]})])
    plan = schedule.plan(schedule.select(every))
    assert [changes["examples"] for _, changes in plan.changes] == [6, 9]
    begin = Schedule.make(
        {"exclude": [1]}, [(0, {"exclude": [2], "seed": 3}), (0, {"exclude": [5]})]
    )
    assert begin.options() == {"exclude": [1, 2, 5], "seed": 3}
    with pytest.raises(ValueError, match=r"each of news must be there, .* and be added once"):
        Schedule.make(BEGIN, [(3, {"add": ["news", "news"]})]).select(every)


def test_a_run_says_which_planned_entries_its_schedule_no_longer_has():
    first, _ = planned(RAMP)
    with messages() as said:
        resumed(first, 5, [(6, {"exclude": [1]})])
    assert "no longer in the schedule: from step 9 on, max_length=64" in str(said)
    with messages() as said:
        resumed(first, 5, RAMP)
    assert "no longer" not in str(said)


def test_the_config_may_show_what_a_later_entry_makes_of_an_option_and_lists_in_any_order():
    first, _ = planned([], {"tiers": 4, "exclude": [1, 7]})
    change = 8, {"max_length": 64, "exclude": [3]}
    own = {"tiers": 4, "exclude": [3, 1, 7], "max_length": 64}
    second, _ = resumed(first, 5, [change], own)
    assert options(second) == [change]
    with pytest.raises(ValueError, match=r"exclude was \[1, 7\] and is now") as refused:
        resumed(first, 4, [], {"tiers": 4, "exclude": [1, 7, 3]})
    schedule = re.search(r'--config.schedule="(.*)"', str(refused.value))[1]
    assert ast.literal_eval(schedule) == ((4, {"exclude": [3]}),)
    resumed(first, 4, ast.literal_eval(schedule), {"tiers": 4, "exclude": [1, 7, 3]})
