"""The options of a run's batches over its stages, planned and not."""

import numpy as np
import pytest

from pipeline import Bucket, Plan
from pipeline.training.change import allowing, applied, changed, parsed, resumed
from pipeline.training.schedule import resolve, stages, told

LENGTHS = np.random.default_rng(0).integers(1, 60, 300)
BEGIN = {"seed": 0, "tokens_per_batch": 256, "max_length": 32, "length_multiple": 16}


def plan_and_stages(schedule, *changes):
    """The plan of a schedule and of changes (step, asked), resolved as runs do it: one by one."""
    found = stages(schedule, {**BEGIN, "packing": None})
    resolve(found, LENGTHS, 2)
    for step, asked in changes:
        found = changed(found, step, asked)
        resolve(found, LENGTHS, 2)
    return Plan.replay(LENGTHS, [(stage.step, stage.changes) for stage in found]), found


def test_a_ramp_and_a_longer_context_are_other_buckets():
    plan, _ = plan_and_stages([(3, {"tokens_per_batch": 512}), (9, {"max_length": 64})])
    assert [stage.start for stage in plan.stages] == [0, 3, 9]
    first, second, third = (stage.options.buckets for stage in plan.stages)
    assert first[-1] == Bucket(8, 32)
    assert second[-1] == Bucket(16, 32)
    assert third[-1] == Bucket(8, 64)
    assert {*first, *second, *third} <= {*plan.buckets}


def test_what_stands_at_step_0_is_there_from_the_beginning():
    plan, found = plan_and_stages([(0, {"seed": 7, "leave_out": [2]})])
    assert len(found) == 1
    assert plan.options.seed == 7
    assert plan.stages[-1].sources[0].lengths.left_out.tolist() == [2]
    assert plan.stages[-1].start == 0


def test_a_change_keeps_what_was_and_works_out_later_stages_again():
    schedule = [(3, {"tokens_per_batch": 512}), (9, {"max_length": 64})]
    before, _ = plan_and_stages(schedule)
    plan, found = plan_and_stages(schedule, (5, {"row_multiple": 3, "leave_out": [4, 1]}))
    assert [(stage.start, stage.options.buckets[-1]) for stage in plan.stages] == [
        (0, Bucket(8, 32)),
        (3, Bucket(16, 32)),
        (5, Bucket(15, 32)),
        (9, Bucket(6, 64)),
    ]
    assert [plan.batch(step).digest for step in range(5)] == [
        before.batch(step).digest for step in range(5)
    ]
    text = told(found, found[2], plan)
    assert "from step 5 on, without 2 examples that are left out" in text
    assert "row_multiple was not given and is now 3" in text
    assert "2 examples are left out: 1, 4" in text
    assert "16x32" in text
    assert "15x32" in text
    assert "batches for the 7,605 positions that epoch 0 still had" in text


def test_a_change_that_is_asked_for_again_is_made_once():
    found = plan_and_stages([(9, {"seed": 3})], (5, {"seed": 2, "leave_out": [1]}))[1]
    assert len(found) == 3
    again = changed(found, 7, {"seed": 2, "leave_out": [1]})
    assert again == found
    # Nor after a planned stage has changed it back.
    assert changed(found, 12, {"seed": 2, "leave_out": [1]}) == found
    assert changed(found, 12, {"seed": 5})[:3] == found
    assert [stage.asked for stage in changed(found, 7, {"seed": 2, "leave_out": [1, 6]})] == [
        *[stage.asked for stage in found[:2]],
        {"leave_out": [6]},
        found[2].asked,
    ]


def test_the_config_may_show_the_change_or_not():
    found = plan_and_stages([], (5, {"seed": 2, "max_length": 64, "leave_out": [1]}))[1]
    config = {"seed": 0, "batches": {"max_length": 32, "packing": None}, "schedule": []}
    assert applied(config, found) == {
        "seed": 2,
        "batches": {"max_length": 64, "packing": None},
        "schedule": [],
    }
    assert config["batches"]["max_length"] == 32


def test_what_is_planned_for_later_may_change_and_what_was_may_not():
    schedule = [[3, {"tokens_per_batch": 512}], [9, {"max_length": 64}]]
    found = plan_and_stages(schedule)[1]
    other = [schedule[0], [8, {"seed": 1}], [12, {"max_length": 48}]]
    plan, now = plan_and_stages(schedule, (5, {"schedule": other}))
    assert now[:2] == found[:2]
    assert [(stage.start, stage.options.buckets[-1]) for stage in plan.stages[1:]] == [
        (3, Bucket(16, 32)),
        (8, Bucket(16, 32)),
        (12, Bucket(10, 48)),
    ]
    config = {"seed": 0, "batches": {}, "schedule": schedule}
    assert applied(config, now)["schedule"] == other
    assert changed(now, 6, {"schedule": other}) == now
    assert changed(now, 6, {"schedule": schedule[:1]}) == now[:2]
    # What has passed may be left out, as of the config, but not be another.
    assert changed(now, 6, {"schedule": other[1:]}) == now
    assert changed(now, 6, {"schedule": []}) == now[:2]
    for given in (other[1:], [[0, {"seed": 3}], *other[1:]]):
        zero = [entry for entry in given if entry[0] == 0]
        assert resumed({"schedule": given}, now, 6)["schedule"] == zero + other
    for wrong in (lambda config: resumed(config, now, 6), lambda config: changed(now, 6, config)):
        with pytest.raises(ValueError, match=r"has \[3, .*up to step 6, .*it was \[\[3, .*512"):
            wrong({"schedule": [[3, {"seed": 1}]]})


def test_the_command_that_allows_a_change_is_shown_where_there_is_one():
    config = {"seed": 2, "batches": {"max_length": 64, "packing": None}, "model": {"width": 8}}
    given = ["train.py", "--workdir=w", "--change={}"]
    assert allowing(given, config, ["batches.max_length", "seed"]) == (
        """python train.py --workdir=w '--change={"max_length": 64, "seed": 2}'"""
    )
    assert allowing(given, config, ["batches.max_length", "model.width"]) == ""
    assert allowing(given, config, ["batches.packing"]) == ""


@pytest.mark.parametrize(
    ("schedule", "sentence"),
    [
        ([(3, {"token_per_batch": 1})], "did you mean 'tokens_per_batch'?"),
        ([(3, {"seed": 1}), (2, {"seed": 2})], "by ascending steps"),
        ([3], "schedule holds 3; each entry is a step and what changes there"),
        ([(3, {"leave_out": 17})], "must be a list of numbers of examples"),
        ([(-1, {"seed": 1})], "by ascending steps"),
    ],
)
def test_a_schedule_that_cannot_be_gets_a_sentence(schedule, sentence):
    with pytest.raises(ValueError) as error:
        stages(schedule, BEGIN)
    assert sentence in str(error.value)


@pytest.mark.parametrize("text", ["{", "3", '"seed"'])
def test_a_change_that_is_no_object_gets_a_sentence(text):
    with pytest.raises(ValueError, match="must be a JSON object of options"):
        parsed(text)
