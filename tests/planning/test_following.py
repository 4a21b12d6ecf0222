"""Followed plans: the batches of a corpus that grows are those of the whole, however it grows."""

import concurrent.futures
import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import Bucket, Plan
from pipeline.errors import DoesNotFit
from pipeline.loading.state import StateKey
from pipeline.planning import growing
from pipeline.planning.resuming import entries_at, may_wait, resumed
from pipeline.planning.stream import Pass
from tests.planning.corpora import (
    SealedInMemory,
    change,
    digests,
    draw_parts,
)
from tests.properties.accounts import Account

BUCKETS = [Bucket(8, 16), Bucket(4, 32)]


@pytest.fixture(autouse=True)
def _short_chapters(monkeypatch):
    monkeypatch.setattr(growing, "CHAPTER", 4)


def follow(parts, buckets=BUCKETS, **options):
    sealed = parts if isinstance(parts, SealedInMemory) else SealedInMemory(parts)
    return Plan(sealed, buckets, **{"window": 50, **options})


def first_epoch(plan):
    """The batches of the first epoch."""
    found = []
    while not (batch := plan.batch(len(found))).epoch:
        found.append(batch)
    return found


def assert_all_is_trained_once(batches, lengths, buckets, overflow="split"):
    account = Account(lengths, 0, {"buckets": buckets, "overflow": overflow})
    for batch in batches:
        account.take(0, batch.segments[:, 1:])
    assert account.over == [True]


def last_part(entry):
    """The number of the part after the last window of the entry of a state."""
    return entry["places"][""]["last"][0]


few = settings(max_examples=6)
KINDS = [{}, {"tiers": 3}, {"shuffle": False}, {"packing": "none"}, {"packing": "fill"}]
TAILED = [Bucket(8, 16), Bucket(2, 16), Bucket(4, 32), Bucket(1, 32)]
OPTIONS = st.builds(
    lambda kind, **options: kind | options,
    kind=st.sampled_from([*KINDS, {"align": 4}]),
    window=st.sampled_from([1, 30, 50, 200, 10**6]),
    buckets=st.sampled_from([BUCKETS, [Bucket(4, 32)], TAILED]),
)
CHANGES = st.lists(
    st.tuples(
        st.integers(0, 30),
        st.sampled_from(
            [
                {"seed": 4},
                {"buckets": [Bucket(2, 64)]},
                {"buckets": TAILED},
                {"window": 20},
                {"packing": "none"},
                {"align": 4, "packing": "best_fit"},
                {"tiers": 2},
            ]
        ),
    ),
    max_size=3,
)


@few
@given(st.integers(0, 10**6), OPTIONS, CHANGES)
def test_every_position_comes_once_an_epoch_and_every_step_resumes_whatever_changes(
    seed, options, changes
):
    parts = draw_parts(seed, number=30)
    plan = follow(parts, **options)
    if changes:
        first, begun = change(plan, changes[:1])
        assert digests(first, range(begun)) == digests(plan, range(begun))
        assert first.batch(begun).bucket in first.stages[1].options.buckets
    changed, last = change(plan, changes)
    account, steps = Account(np.concatenate(parts), 0, {"buckets": BUCKETS, "overflow": "split"}), 0
    while (batch := changed.batch(steps)).epoch < 2:
        account.take(batch.epoch, batch.segments[:, 1:])
        steps += 1
    assert account.over == [True, True]

    def make():
        return change(follow(parts, **options), changes)[0]

    order = np.random.default_rng(seed).permutation(last + 40).tolist()
    assert digests(make(), order) == digests(changed, order)
    for at in [*range(last + 12), steps]:
        state = json.loads(json.dumps(entries_at(changed, at)))
        assert changes or len(json.dumps(state)) < 700
        again = resumed(make(), state)
        assert digests(again, range(at, at + 9)) == digests(changed, range(at, at + 9))
        assert json.loads(json.dumps(entries_at(again, at + 3))) == json.loads(
            json.dumps(entries_at(changed, at + 3))
        )
        if entries_at(again, at)[-1]["from"]:
            with pytest.raises(IndexError, match="this plan has only steps from"):
                again.batch(entries_at(again, at)[-1]["from"] - 1)


@few
@given(st.integers(0, 10**6), st.sampled_from([1, 3, 17]), CHANGES)
def test_batches_are_the_same_while_the_corpus_grows(seed, pace, changes):
    parts = draw_parts(seed, number=30)
    live = SealedInMemory(parts, sealed=0)
    plan, _ = change(follow(live), changes)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(plan.batch, step) for step in range(70)]
        for sealed in range(pace, len(parts) + 1 + pace, pace):
            live.seal(sealed)
        found = [each.result().digest for each in asked]
    assert found == digests(change(follow(parts), changes)[0], range(70))


@few
@given(st.integers(0, 10**6), OPTIONS)
def test_a_step_needs_no_part_of_a_later_window(seed, options):
    parts = draw_parts(seed)
    sealed = SealedInMemory(parts)
    plan = follow(sealed, **options)
    for step, batch in enumerate(first_epoch(follow(parts, **options))):
        before = sealed.asked
        assert plan.batch(step).digest == batch.digest
        assert sealed.asked == before or may_wait(plan, step)
        (entry,) = entries_at(plan, step + 1)
        # Of a window that ends with the corpus, the next part was waited for.
        assert sealed.asked <= min(last_part(entry), len(parts)) + (sealed.asked > len(parts))


def test_the_first_steps_of_windows_and_of_short_batches_may_wait():
    plan = follow([[5, 9, 20, 16]] * 400, window=200)
    assert len(first_epoch(plan)) == 168
    # Each chapter has four windows, and ends with short batches.
    chapters = [0, 20, 41, 62, 83], [84, 104, 125, 146, 167]
    assert [step for step in range(500) if may_wait(plan, step)] == [
        *chapters[0],
        *chapters[1],
        168,
    ]


def test_steps_that_are_sealed_do_not_wait_for_those_that_are_not():
    parts = draw_parts(1)
    live = SealedInMemory(parts, sealed=10)
    plan = follow(live)
    known = plan.batch(0).digest
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        later = pool.submit(plan.batch, 200)
        assert plan.batch(0).digest == known
        assert not later.done()
        live.seal(len(parts) + 1)
        assert later.result().digest == follow(parts).batch(200).digest


@pytest.mark.parametrize("end", [0, 3])  # the last window is full, or not
def test_later_epochs_are_those_of_an_ordinary_plan_also_where_it_changes(end):
    parts = [[5, 9, 20]] * (40 + end)
    plan, whole = follow(parts, window=15), Plan(np.concatenate(parts), BUCKETS, window=15)
    first, steps = len(first_epoch(plan)), whole.num_batches()
    changed = plan.after(first + 9, seed=4), whole.after(steps + 9, seed=4)
    for followed, ordinary in ((plan, whole), changed):
        for step in range(2 * steps):
            batch, expected = followed.batch(first + step), ordinary.batch(steps + step)
            assert (batch.digest, batch.epoch) == (expected.digest, expected.epoch)


def test_resuming_plans_the_windows_of_one_chapter():
    parts = [[5, 9, 20]] * 400  # 80 windows of five parts, 20 chapters
    plan = follow(parts, window=15)
    at = len(first_epoch(plan)) - 1
    sealed = SealedInMemory(parts)
    asked, lengths = set(), sealed.lengths
    sealed.lengths = lambda number: asked.add(number) or lengths(number)
    again = resumed(follow(sealed, window=15), entries_at(plan, at))
    assert again.batch(at).digest == plan.batch(at).digest
    assert min(asked) >= 400 - 4 * 5


@pytest.mark.parametrize(("rows", "expected"), [(4, [4] * 75), (5, [5, 5, 2] * 25)])
def test_chapters_end_with_short_batches_and_windows_do_not(rows, expected):
    batches = first_epoch(follow([[16] * 3] * 100, [Bucket(rows, 16)], window=3))
    # Each chapter has four windows of three rows.
    assert [int(batch.segments[:, 0].max()) + 1 for batch in batches] == expected


def test_a_length_that_dies_out_holds_nothing_back_beyond_its_chapter():
    sealed = SealedInMemory([[32, 32] + [5] * 18] + [[5] * 20] * 40)  # a window to each part
    batches = first_epoch(follow(sealed, window=20))
    (at,) = [n for n, batch in enumerate(batches) if {0, 1} & {*batch.segments[:, 1].tolist()}]
    examples = {*batches[at].segments[:, 1].tolist()}
    assert {0, 1} <= examples <= {*range(80)}  # beside others of the first chapter
    sealed.asked = 0
    follow(sealed, window=20).batch(at)
    assert sealed.asked == 4  # the parts of the first chapter


def test_windows_grow_with_the_corpus(monkeypatch):
    monkeypatch.setattr(growing, "LEAST_WINDOW", 10)
    plan = follow([[8]] * 400, [Bucket(1, 8)], window=60)
    ends = dict.fromkeys(last_part(entries_at(plan, step)[0]) for step in range(1, 401))
    assert np.diff([0, *ends]).tolist()[:12] == [10, 10, 10, 10, 10, 12, 15, 19, 24, 30, 37, 46]
    assert max(np.diff([*ends])) == 60


def test_a_corpus_that_is_shorter_or_another_is_refused():
    parts = draw_parts(5)
    state = entries_at(follow(parts), 40)
    assert state[0]["places"][""]["part"] < last_part(state[0]) - 1  # its chapter is not over
    with pytest.raises(ValueError, match=r"parts or more, and this one has fewer"):
        resumed(follow(parts[: last_part(state[0]) - 1]), state)
    for number in (0, last_part(state[0]) - 1):
        other = [*parts]
        other[number] = [*parts[number], 7]
        with pytest.raises(ValueError, match="no longer what the state was trained on"):
            resumed(follow(other), state)
    resumed(follow([*parts[: last_part(state[0])], [3, 3, 3]]), state)  # the future may differ


def test_a_change_waits_for_nothing_before_one_of_its_steps_is_needed():
    live = SealedInMemory(draw_parts(1), sealed=0)
    plan = follow(live).after(30, seed=1).after(60, buckets=[Bucket(2, 64)])
    assert plan.fingerprint != follow(live).fingerprint
    assert (plan.names, plan.max_position) == (("",), (1 << 31) - 1)
    assert "grows" in str(plan)
    assert "Plan(" in repr(plan)
    assert live.asked == 0


def test_a_change_does_not_begin_in_a_block_of_tiers():
    plan = follow([[5, 9, 20]] * 40, window=15, tiers=3)  # an epoch has 12 steps
    assert [plan.next_block(step) for step in (12, 13, 15)] == [12, 15, 15]
    with pytest.raises(ValueError, match="step is 13, in the middle of the steps 12 to 14"):
        plan.after(13, seed=4)
    with pytest.raises(IndexError, match=r"step is -1; steps count from 0 over all epochs$"):
        plan.batch(-1)


def test_pairs_are_followed():
    rng = np.random.default_rng(2)
    parts = [rng.integers(0, (20, 9), (6, 2)) for _ in range(40)]
    buckets = [Bucket(4, (16, 8)), Bucket(2, (32, 16))]
    batches = first_epoch(follow(parts, buckets, overflow="drop"))
    assert_all_is_trained_once(batches, np.concatenate(parts), buckets, "drop")


def test_examples_with_nothing_to_train_on_are_in_no_batch():
    plan = follow([[0, 0]] * 30 + [[5]] + [[0]] * 60, window=10)
    assert [batch.segments[:, 1].tolist() for batch in first_epoch(plan)] == [[60]]


def test_plans_are_pickled_without_what_is_made():
    plan = follow(draw_parts(9)).after(30, seed=2)
    plan.batch(20)
    again = pickle.loads(pickle.dumps(plan))
    assert digests(again, range(60)) == digests(plan, range(60))
    assert again.fingerprint == plan.fingerprint


def test_rows_have_room_for_all_segments_and_positions_that_may_come():
    plan, few = (follow([[1]], align=4, overflow="drop", max_segments=n) for n in (None, 3))
    for each in (plan.after(3, max_segments=3), few.after(3, max_segments=None)):
        assert each.most_segments() == {BUCKETS[0]: 4, BUCKETS[1]: 8}
    assert few.most_segments()[BUCKETS[1]] == 3
    assert plan.max_position == 31


def test_followed_batches_stay_what_they_are():
    parts = [[5, 3], [4, 2], [1, 6], [7], [9]]
    plan = follow(parts, [Bucket(2, 9)], window=4, shuffle=False)
    # Of the window 5 3 4 2, then of 1 6 7 9: row, example, start, length.
    assert [batch.segments.tolist() for batch in first_epoch(plan)] == [
        [[0, 0, 0, 5], [0, 2, 0, 4], [1, 1, 0, 3], [1, 3, 0, 2]],
        [[0, 6, 0, 7], [0, 4, 0, 1], [1, 5, 0, 6]],
        [[0, 7, 0, 9]],
    ]
    plan = follow(parts, [Bucket(2, 9)], window=4)
    expected = ["914593292ef3ca04", "7e5e90c7e033bb1e", "8b4c854fd0040b5a"]
    assert digests(plan, range(3)) == expected


def test_a_state_of_other_options_is_refused():
    state = StateKey(follow(draw_parts(2)).after(30, seed=2)).state(40)
    for other in (follow(draw_parts(2)).after(30, seed=3), follow(draw_parts(2), align=4)):
        with pytest.raises(ValueError, match=r"seed was 2 and is now 3|has changed more often"):
            StateKey(other).resume(state)


def test_where_the_rest_of_a_growing_corpus_does_not_fit_a_sentence_says_so(monkeypatch):
    plan = follow([[5, 9, 20]] * 40)
    plan.batch(0)

    def fail(*_, **options):
        raise MemoryError

    monkeypatch.setattr(Pass, "__init__", fail)
    with pytest.raises(DoesNotFit, match="planning the rest of a corpus that grows takes more"):
        plan.after(1, seed=1).batch(1)
