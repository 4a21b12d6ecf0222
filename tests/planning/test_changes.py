"""Plans that take over from one another: nothing lost, nothing repeated, exact at every step."""

import json

import numpy as np
import pytest

import pipeline
from pipeline import Bucket, Plan
from pipeline.loading.state import StateKey
from pipeline.planning.rows import Rows

FOURS = (Bucket(16, 16), Bucket(8, 32), Bucket(4, 64))


@pytest.mark.parametrize("weights", [{}, {"weights": {"first": 3, "new": 1}}])
def test_a_state_knows_which_corpora_there_were(weights, corpus):
    """A state from before another corpus came goes on with it; a later one, with that one alone."""
    few = pipeline.Corpora({"first": corpus}) if weights else corpus
    before = Plan(few, FOURS, **({"weights": {"first": 1}} if weights else {}))

    def key(new):
        both = pipeline.Corpora({"first": corpus, "new": new})
        return StateKey(before.after(6, lengths=both, seed=2, **weights), both)

    one = key(pipeline.Examples([np.arange(size) for size in (20, 3, 40, 1, 60)], vocab_size=1000))
    early, late = StateKey(before, few).state(6), one.state(9)
    assert [one.resume(state) for state in (early, late)] == [6, 9]
    with pytest.raises(ValueError, match=r"tokens of new was .* from step 6 on"):
        key(corpus).resume(late)


def test_a_plan_that_changes_by_hand():
    plan = Plan([5, 3, 4, 2, 9, 6], [Bucket(1, 8)], shuffle=False)
    later = plan.after(
        2, buckets=[Bucket(1, 16)], exclude=lambda lengths: [n == 2 for n in lengths]
    )
    past = [[[0, 0, 0, 5], [0, 1, 0, 3]], [[0, 2, 0, 4], [0, 4, 8, 1]]]
    assert [plan.batch(step).segments.tolist() for step in range(4)] == [
        *past,
        [[0, 4, 0, 8]],
        [[0, 5, 0, 6], [0, 3, 0, 2]],
    ]
    assert [later.batch(step).segments.tolist() for step in range(5)] == [
        *past,
        [[0, 4, 0, 8], [0, 5, 0, 6]],
        [[0, 0, 0, 5], [0, 2, 0, 4], [0, 1, 0, 3]],
        [[0, 4, 0, 9], [0, 5, 0, 6]],
    ]
    assert later.identity[1]["lengths"] == f"{plan.identity['lengths']} without 1 (45f83d17)"
    assert "from step 2 on: buckets, 1 more example left out" in str(later)
    # The rest of a split example is joined in longer rows.
    plan = Plan([20, 3, 20], [Bucket(1, 8)], shuffle=False).after(1, buckets=[Bucket(1, 32)])
    assert plan.batch(2).segments.tolist() == [[0, 2, 0, 20], [0, 0, 8, 12]]


def test_the_state_is_what_is_past_and_knows_what_another_plan_would_change(corpus):
    plan = Plan(corpus, FOURS)
    seeded = plan.after(10, seed=3)
    changing = seeded.after(20, exclude=range(50)).after(21, exclude=range(50))

    def sides(name):
        lengths = {"inputs": [5, 3], name: [8, 4]}
        return Plan(lengths, [Bucket(2, {"inputs": 8, name: 16})])

    late, state = StateKey(changing).state(25), StateKey(changing).state(15)
    assert [entry["from"] for entry in late["plans"]] == [0, 10, 20, 21]
    assert len(json.dumps(late)) < 1200
    assert StateKey(changing).resume(json.loads(json.dumps(late))) == 25
    # What is past stands, and what is to come may change.
    for other in (changing, seeded, seeded.after(15, packing="none")):
        assert StateKey(other).resume(state) == 15
        assert StateKey(changing).resume(StateKey(other).state(15)) == 15
    assert StateKey(changing).resume(StateKey(plan).state(10)) == 10
    for other, saved, sentence in (
        (plan, state, "seed was 3 and is now 0 from step 10 on"),
        (plan.after(10, seed=4), state, "seed was 3 and is now 4 from step 10 on"),
        (plan.after(11, seed=3), state, "seed was 3 and is now 0 from step 10 on"),
        (seeded.after(12, packing="none"), state, "packing was best_fit and is now none"),
        (seeded.after(14), state, "its plan changes here alone from step 14 on"),
        (seeded.after(20, exclude=[1]), late, "exclude differs: lengths was"),
        (sides("frames"), StateKey(sides("patches")).state(0), "sides was .*'patches'.*'frames'"),
    ):
        with pytest.raises(ValueError, match=f"belongs to another plan.*{sentence}"):
            StateKey(other).resume(saved)


ONE = {"lengths": [5, 3, 4]}
TWO = {"lengths": {"a": [5, 3, 4], "b": [4, 2]}, "weights": {"a": 1, "b": 1}}


@pytest.mark.parametrize("data", [ONE, TWO])
def test_a_change_before_another_is_refused(data):
    with pytest.raises(ValueError, match="last change of options is at step 5"):
        Plan(buckets=[Bucket(1, 8)], **data).after(5, seed=1).after(4)


def test_changes_are_plain_json():
    of_numpy = dict.fromkeys(["seed", "window", "max_segments", "tiers", "align"], np.int64(2))
    plan = Plan(buckets=[Bucket(1, 8)], **TWO)
    plan = plan.after(5, shuffle=np.bool_(False), overflow=None, **of_numpy)
    assert json.loads(json.dumps(plan.changes))[1][1]["seed"] == 2


def test_far_steps_cost_no_walk(monkeypatch):
    lengths = np.random.default_rng(0).integers(1, 60, 2000)
    assigned, assign = [], Rows._fill
    monkeypatch.setattr(Rows, "_fill", lambda self, *at: assigned.append(at) or assign(self, *at))
    plan = Plan(lengths, FOURS, window=300)
    monkeypatch.setattr(plan, "batch", None)  # no batch is asked for one by one
    step = 10**9 + 7
    later = plan.after(step, seed=1)
    assert len(assigned) == 1
    assert later.batch(step).epoch == step // plan.num_batches()


def test_the_later_steps_of_a_plan_have_their_buckets_alone():
    two, three, four = (Bucket(rows, 16) for rows in (2, 3, 4))
    plan = Plan([10] * 30, [two]).after(10, buckets=[three]).after(12, buckets=[four])
    assert plan.onward(2).batches_per_bucket[two] == 8
    later = plan.onward(12)
    assert later.buckets == (four,)
    assert later.fingerprint == plan.fingerprint
    for part in (later, later.onward(3), later.after(15, seed=1)):
        with pytest.raises(IndexError, match="has only steps from 12 on"):
            part.batch(11)


def test_changes_are_keywords_of_after():
    plan = Plan([5, 3, 4, 2], [Bucket(1, 8)]).after(2, exclude=[1, 3], seed=4)
    (_, _), (step, changes) = json.loads(json.dumps(plan.changes))
    again = Plan([5, 3, 4, 2], [Bucket(1, 8)]).after(step, **changes)
    assert again.fingerprint == plan.fingerprint
