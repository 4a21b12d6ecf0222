"""Mixtures in which some corpora grow: shares, each position once, the same whenever they grow."""

import concurrent.futures
import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import Bucket, Plan
from pipeline.loading.state import StateKey
from pipeline.planning import growing
from pipeline.planning.growing import APART
from pipeline.planning.identity import fingerprint_of
from pipeline.planning.resuming import entries_at, may_wait, resumed
from tests.planning.corpora import SealedInMemory, change, digests, draw_parts
from tests.properties.accounts import Account

BUCKETS = [Bucket(8, 16), Bucket(4, 32)]


@pytest.fixture(autouse=True)
def _short_chapters(monkeypatch):
    monkeypatch.setattr(growing, "CHAPTER", 3)


def draw(seed):
    rng = np.random.default_rng(seed)
    return {"a": draw_parts(rng, 50), "b": draw_parts(rng, 30), "c": rng.integers(1, 40, 200)}


def mix(corpora, weights=(6, 3, 1), sealed=None, buckets=BUCKETS, **options):
    given = {
        name: SealedInMemory(each, sealed) if isinstance(each, list) else each
        for name, each in corpora.items()
    }
    shares = dict(zip(corpora, weights, strict=True))
    return Plan(given, buckets, weights=shares, **{"window": 50, **options})


few = settings(max_examples=4)
WEIGHTS = st.sampled_from([(6, 3, 1), (1, 1, 1), (0.49, 0.49, 0.02), (1, 5, 0)])
OPTIONS = st.sampled_from([{}, {"tiers": 3}, {"shuffle": False}, {"window": 20}])
SPLIT = {"buckets": BUCKETS, "overflow": "split"}


@few
@given(st.integers(0, 10**6), WEIGHTS, OPTIONS)
def test_steps_that_ask_for_more_than_those_before_may_wait(seed, weights, options):
    plan = mix(draw(seed), weights, **options)
    asked, waits = [], []
    for step in range(450):
        plan.batch(step)
        asked.append([sealed.asked for sealed in plan.parts.values()])
        waits.append(may_wait(plan, step))
    assert asked[-1] == [51, 31]  # to the end of both
    assert all(waits[step] for step in range(1, 450) if asked[step] != asked[step - 1])
    assert sum(waits) < 100


@pytest.mark.parametrize("weights", [(6, 3, 1), (0.49, 0.49, 0.02)])
def test_shares_are_met(weights):
    plan, tokens = mix(draw(3), weights), np.zeros(3)
    for step in range(400):
        sources = plan.batch(step).sources
        tokens += [sources.get(name, 0) for name in "abc"]
        if step > 60:
            shares = tokens / tokens.sum() - np.array(weights) / sum(weights)
            assert np.abs(shares).max() < 0.03
    assert np.abs(shares).max() < 0.006


CHANGES = st.lists(
    st.tuples(
        st.integers(0, 40),
        st.sampled_from(
            [
                {"weights": {"a": 1, "b": 1, "c": 1}},
                {"weights": {"a": 0, "b": 2, "c": 5}},
                {"weights": {"a": 9, "b": 0, "c": 1}},
                {"seed": 4},
                {"buckets": [Bucket(3, 16), Bucket(2, 64)]},
                {"buckets": [Bucket(4, 40)], "weights": {"a": 3, "b": 2, "c": 2}},
                {"window": 20},
                {"tiers": 2},
            ]
        ),
    ),
    max_size=4,
)


@few
@given(st.integers(0, 10**6), WEIGHTS, OPTIONS, CHANGES)
def test_each_position_comes_once_an_epoch_and_every_step_resumes_whatever_changes(
    seed, weights, options, changes
):
    corpora = draw(seed)

    def make():
        return change(mix(corpora, weights, **options), changes)

    changed, last = make()
    accounts = [
        Account(np.concatenate([*map(np.atleast_1d, each)]), number * APART, SPLIT)
        for number, each in enumerate(corpora.values())
    ]
    for step in range(last + 500):
        batch = changed.batch(step)
        of = batch.segments[:, 1] // APART
        for number, epoch in np.unique(np.stack([of, batch.epochs]), axis=1).T.tolist():
            mine = (of == number) & (batch.epochs == epoch)
            accounts[number].take(epoch, batch.segments[mine, 1:])
        if batch.epoch and step > last:
            break
    assert all(all(account.over[:-2]) for account in accounts)
    order = np.random.default_rng(seed).permutation(last + 40).tolist()
    assert digests(make()[0], order) == digests(changed, order)
    for at in range(last + 12):
        state = json.loads(json.dumps(entries_at(changed, at)))
        again = resumed(make()[0], state)
        assert digests(again, range(at, at + 6)) == digests(changed, range(at, at + 6))
        later = [json.dumps(entries_at(each, at + 3)) for each in (again, changed)]
        assert later[0] == later[1]
    assert digests(again, [last + 400]) == digests(changed, [last + 400])
    assert [again.batch(last + 400).epoch] == [changed.batch(last + 400).epoch]


@few
@given(st.integers(0, 10**6), CHANGES)
def test_batches_are_the_same_whatever_is_sealed_first(seed, changes):
    corpora, rng, steps = draw(seed), np.random.default_rng(seed), range(0, 160, 7)
    plan, sealed = change(mix(corpora, sealed=0), changes)[0], {"a": 0, "b": 0}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(plan.batch, step) for step in steps]
        while any(sealed[name] <= len(corpora[name]) for name in sealed):
            name = rng.choice(["a", "b"])
            sealed[name] += int(rng.integers(1, 12))
            plan.parts[name].seal(sealed[name])
        found = [each.result().digest for each in asked]
    assert found == digests(change(mix(corpora), changes)[0], steps)


def test_a_corpus_that_grew_and_lost_its_weight_is_owed_the_same_after_resuming():
    corpora = {"a": [[9, 5, 20]] * 6, "b": [[7, 12, 30]] * 400, "c": np.full(50, 9)}

    def make():
        plan = mix(corpora, (3, 6, 1)).after(40, seed=4)
        return plan.after(75, weights={"a": 0, "b": 6, "c": 3}).after(
            90, weights={"a": 1, "b": 1, "c": 1}
        )

    plan = make()
    for at in range(70, 112, 3):
        again = resumed(make(), entries_at(plan, at))
        assert digests(again, range(at, at + 20)) == digests(plan, range(at, at + 20))


def test_a_plan_that_is_resumed_knows_its_first_step(monkeypatch):
    plan = mix(draw(0))
    again, changed = mix(draw(0)), mix(draw(0)).after(60, seed=3)
    state = StateKey(changed).state(90)
    with pytest.raises(ValueError, match=r"has changed more often|belongs to another plan"):
        StateKey(again).resume(state)
    assert again.batch(0).digest == plan.batch(0).digest  # as it was
    again = resumed(again, entries_at(plan, 90))
    first = entries_at(again, 90)[0]["from"]
    assert first
    for fails in (lambda: again.after(first - 1, seed=4), lambda: StateKey(again).state(first - 1)):
        with pytest.raises(IndexError, match="this plan has only steps from"):
            fails()


def test_shares_are_met_from_a_change_of_weights_on():
    given = [(0, {"a": 6, "b": 3, "c": 1}), (150, {"a": 1, "b": 1, "c": 2})]
    corpora = {name: each * 4 if name != "c" else each for name, each in draw(3).items()}
    plan = Plan(
        {name: SealedInMemory(each) if name != "c" else each for name, each in corpora.items()},
        BUCKETS,
        weights=given,
        window=50,
    )
    for begin, end, weights in ((0, 150, (0.6, 0.3, 0.1)), (150, 300, (0.25, 0.25, 0.5))):
        tokens = np.zeros(3)
        for step in range(begin, end):
            sources = plan.batch(step).sources
            tokens += [sources.get(name, 0) for name in "abc"]
        assert np.abs(tokens / tokens.sum() - weights).max() < 0.01


def test_rare_rows_of_a_small_finished_corpus_are_trained():
    corpora = {"a": [[9, 10, 30]] * 600, "c": np.array([5] * 400 + [32])}
    plan = mix(corpora, (0.98, 0.02))
    assert any(APART + 400 in plan.batch(step).segments[:, 1] for step in range(700))


def test_a_length_that_dies_out_holds_nothing_back_beyond_its_chapter():
    parts = [[32, 32, 5, 5, 5, 5]] + [[5] * 10] * 200  # two long rows, of a batch of four
    plan = mix({"a": parts, "c": np.full(100, 8)}, (1, 1), window=20)
    begun = next(n for n in range(60) if {0, 1} & {*plan.batch(n).segments[:, 1].tolist()})
    assert plan.parts["a"].asked <= 9  # windows of two parts, three a chapter
    short = plan.batch(begun)
    assert sorted(short.segments[:, 1].tolist()) == [0, 1]  # no other has rows of this length
    assert short.bucket == Bucket(4, 32)


def test_a_state_of_other_buckets_or_windows_is_refused_before_it_is_resumed():
    state = StateKey(mix(draw(0))).state(40)
    other = mix(draw(0), buckets=[*BUCKETS, Bucket(2, 64)])
    with pytest.raises(ValueError, match=r"buckets was 8x16\+4x32 and is now 8x16\+4x32\+2x64"):
        StateKey(other).resume(state)
    with pytest.raises(ValueError, match="window of a was 50 and is now 20"):
        StateKey(mix(draw(0), window=20)).resume(state)


def test_files_of_finished_corpora_are_known_ahead():
    filed = SimpleNamespace(lengths=np.full(60, 9), files=np.array([20, 40]))
    plan = mix({"a": draw(0)["a"], "c": filed}, (1, 1), window=20)
    plan.batch(30)
    ahead = plan.files_ahead(30)
    assert [*ahead] == ["c"]
    assert {*np.concatenate(ahead["c"]).tolist()} == {0, 1}


def test_followed_mixtures_stay_what_they_are():
    parts = [[5, 3], [4, 2], [1, 6], [7], [9]] * 9
    corpora = {"a": parts, "b": parts[1:], "c": np.array([3, 8])}
    plan = mix(corpora, buckets=[Bucket(2, 5), Bucket(3, 9)], window=4)
    assert fingerprint_of(digests(plan, range(60))) == "1bc5783b427f887c"


@pytest.mark.parametrize("step", [30, 80, 140])  # it grows; has just ended; ended chapters ago
def test_a_corpus_that_was_replaced_is_refused_also_if_it_ended(step):
    rng = np.random.default_rng(0)
    parts = [rng.integers(0, 40, 8) for _ in range(80)]
    corpora = {"a": parts[:20], "b": parts[20:], "c": np.full(50, 9)}
    plan = mix(corpora)
    state = entries_at(plan, step)
    assert (step == 30) == (plan.parts["a"].asked <= 20)
    resumed(mix(corpora), state)
    for name in "ab":
        with pytest.raises(ValueError, match="no longer what the state was trained on"):
            resumed(mix({**corpora, name: [*corpora[name][:5], *[[3] * 9] * 60]}), state)
