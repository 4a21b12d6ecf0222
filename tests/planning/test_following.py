"""Plans of corpora that grow, alone or mixed: their batches are those of the whole ones.

However they grow, each position comes once an epoch, shares are met, and every step resumes.
"""

import concurrent.futures
import functools
import json
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import Bucket, Plan
from pipeline.errors import DoesNotFit
from pipeline.loading.state import StateKey
from pipeline.planning import growing
from pipeline.planning.growing import APART
from pipeline.planning.identity import fingerprint_of
from pipeline.planning.resuming import entries_at, may_wait, resumed
from pipeline.planning.stream import Pass
from tests.planning.corpora import SealedInMemory, change, digests, draw_parts
from tests.properties.accounts import Account

BUCKETS = [Bucket(8, 16), Bucket(4, 32)]
TAILED = [Bucket(8, 16), Bucket(2, 16), Bucket(4, 32), Bucket(1, 32)]
SPLIT = {"buckets": BUCKETS, "overflow": "split"}


@pytest.fixture(autouse=True)
def _short_chapters(monkeypatch):
    monkeypatch.setattr(growing, "CHAPTER", 4)


def follow(parts, buckets=BUCKETS, **options):
    sealed = parts if isinstance(parts, SealedInMemory) else SealedInMemory(parts)
    return Plan(sealed, buckets, **{"window": 50, **options})


def mix(corpora, weights=(6, 3, 1), sealed=None, buckets=BUCKETS, **options):
    """A mixture of corpora; those that are lists of parts grow."""
    given = {
        name: SealedInMemory(each, sealed) if isinstance(each, list) else each
        for name, each in corpora.items()
    }
    shares = dict(zip(corpora, weights, strict=True)) if isinstance(weights, tuple) else weights
    return Plan(given, buckets, weights=shares, **{"window": 50, **options})


def draw(seed):
    rng = np.random.default_rng(seed)
    return {"a": draw_parts(rng, 30), "b": draw_parts(rng, 20), "c": rng.integers(1, 40, 200)}


def first_epoch(plan):
    """The batches of the first epoch."""
    found = []
    while not (batch := plan.batch(len(found))).epoch:
        found.append(batch)
    return found


def last_part(entry):
    """The number of the part after the last window of the entry of a state."""
    return entry["places"][""]["last"][0]


KINDS = [{}, {"tiers": 3}, {"shuffle": False}, {"packing": "none"}, {"packing": "fill"}]
OPTIONS = st.builds(
    lambda kind, **options: kind | options,
    kind=st.sampled_from([*KINDS, {"align": 4}]),
    window=st.sampled_from([1, 30, 50, 200, 10**6]),
    buckets=st.sampled_from([BUCKETS, [Bucket(4, 32)], TAILED]),
)
OF_MIXTURES = st.sampled_from([{}, {"tiers": 3}, {"shuffle": False}, {"window": 20}])
CHANGES = [
    {"seed": 4},
    {"buckets": [Bucket(2, 64)]},
    {"window": 20},
    {"packing": "none"},
    {"align": 4, "packing": "best_fit"},
    {"tiers": 2},
]
CHANGED_WEIGHTS = [
    {"weights": {"a": 1, "b": 1, "c": 1}},
    {"weights": {"a": 0, "b": 2, "c": 5}},
    {"weights": {"a": 9, "b": 0, "c": 1}},
    {"buckets": [Bucket(4, 40)], "weights": {"a": 3, "b": 2, "c": 2}},
]
WEIGHTS = [(6, 3, 1), (1, 1, 1), (0.49, 0.49, 0.02), (1, 5, 0)]


@st.composite
def cases(draw_from):
    """A seed; a function of the number of sealed parts that makes a plan; and its changes."""
    seed, weights = draw_from(st.integers(0, 10**6)), draw_from(st.sampled_from([None, *WEIGHTS]))
    options = draw_from(OF_MIXTURES if weights else OPTIONS)
    corpora = draw(seed) if weights else {"": draw_parts(seed, 30)}

    def make(sealed=None):
        if weights:
            return mix(corpora, weights, sealed, **options)
        return follow(SealedInMemory(corpora[""], sealed), **options)

    every = CHANGES + (CHANGED_WEIGHTS if weights else [{"buckets": TAILED}])
    changes = st.lists(st.tuples(st.integers(0, 30), st.sampled_from(every)), max_size=3)
    return seed, corpora, make, draw_from(changes)


@settings(max_examples=8)
@given(cases())
def test_each_position_comes_once_an_epoch_and_any_step_resumes_whatever_changes(case):
    seed, corpora, begin, changes = case
    plan, mixed, rng = begin(), "" not in corpora, np.random.default_rng(seed)
    if changes:
        first, begun = change(plan, changes[:1])
        assert digests(first, range(begun)) == digests(plan, range(begun))
        assert first.batch(begun).bucket in first.stages[1].options.buckets

    def make():
        return change(begin(), changes)

    changed, last = make()
    accounts = [
        Account(np.concatenate([*map(np.atleast_1d, each)]), number * APART, SPLIT)
        for number, each in enumerate(corpora.values())
    ]
    asked = step = 0
    while True:
        batch = changed.batch(step)
        before, asked = asked, sum(sealed.asked for sealed in changed.parts.values())
        assert changes or asked == before or may_wait(changed, step)
        of = batch.segments[:, 1] // APART
        for number, epoch in np.unique(np.stack([of, batch.epoch_of_segments]), axis=1).T.tolist():
            mine = (of == number) & (batch.epoch_of_segments == epoch)
            accounts[number].take(epoch, batch.segments[mine, 1:])
        if (batch.epoch == 2 - mixed and step > last) or step == last + 500:
            break
        step += 1
    assert all(all(account.over[: -1 - mixed]) for account in accounts)
    assert mixed or len(accounts[0].over) > 2
    order, copy = rng.permutation(last + 40).tolist(), pickle.loads(pickle.dumps(changed))
    assert digests(make()[0], order) == digests(copy, order) == digests(changed, order)
    assert copy.fingerprint == changed.fingerprint
    for at in sorted({0, 1, last, last + 1, step, *rng.integers(0, last + 12, 6).tolist()}):
        state = json.loads(json.dumps(entries_at(changed, at)))
        assert changes or len(json.dumps(state)) < 700 * len(corpora)
        again = resumed(make()[0], state)
        assert digests(again, range(at, at + 7)) == digests(changed, range(at, at + 7))
        later = [json.dumps(entries_at(each, at + 3)) for each in (again, changed)]
        assert later[0] == later[1]
        if (first := entries_at(again, at)[-1]["from"]) and at == step:
            for fails in (
                again.batch,
                functools.partial(again.after, seed=4),
                StateKey(again).state,
            ):
                with pytest.raises(IndexError, match="this plan has only steps from"):
                    fails(first - 1)
    assert digests(again, [last + 400]) == digests(changed, [last + 400])
    assert again.batch(last + 400).epoch == changed.batch(last + 400).epoch


@settings(max_examples=10)
@given(cases())
def test_batches_are_the_same_whatever_is_sealed_first(case):
    seed, corpora, begin, changes = case
    plan, rng, steps = change(begin(0), changes)[0], np.random.default_rng(seed), range(0, 120, 5)
    sealed = {name: 0 for name, each in corpora.items() if isinstance(each, list)}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(plan.batch, step) for step in steps]
        while any(sealed[name] <= len(corpora[name]) for name in sealed):
            name = rng.choice([*sealed])
            sealed[name] += int(rng.integers(1, 12))
            plan.parts[name].seal(sealed[name])
        found = [each.result().digest for each in asked]
    assert found == digests(change(begin(), changes)[0], steps)


@settings(max_examples=6)
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
    # Each of the two chapters has four windows, and ends with short batches.
    expected = [0, 20, 41, 62, 83, *[84, 104, 125, 146, 167], 168]
    assert [step for step in range(500) if may_wait(plan, step)] == expected


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


def test_windows_grow_with_the_corpus(monkeypatch):
    monkeypatch.setattr(growing, "LEAST_WINDOW", 10)
    plan = follow([[8]] * 400, [Bucket(1, 8)], window=60)
    ends = dict.fromkeys(last_part(entries_at(plan, step)[0]) for step in range(1, 401))
    assert np.diff([0, *ends]).tolist()[:12] == [10, 10, 10, 10, 10, 12, 15, 19, 24, 30, 37, 46]
    assert max(np.diff([*ends])) == 60


def test_a_change_waits_for_nothing_before_one_of_its_steps_is_needed():
    live = SealedInMemory(draw_parts(1), sealed=0)
    plan = follow(live).after(30, seed=1).after(60, buckets=[Bucket(2, 64)])
    assert plan.fingerprint != follow(live).fingerprint
    assert (plan.names, plan.max_position) == (("",), (1 << 31) - 1)
    assert "grows" in str(plan)
    assert "Plan(" in repr(plan)
    assert live.asked == 0


def test_pairs_are_followed():
    rng = np.random.default_rng(2)
    parts = [rng.integers(0, (20, 9), (6, 2)) for _ in range(40)]
    buckets = [Bucket(4, (16, 8)), Bucket(2, (32, 16))]
    account = Account(np.concatenate(parts), 0, {"buckets": buckets, "overflow": "drop"})
    for batch in first_epoch(follow(parts, buckets, overflow="drop")):
        account.take(0, batch.segments[:, 1:])
    assert account.over == [True]


def test_rows_have_room_for_all_segments_and_positions_that_may_come():
    plan, few = (follow([[1]], align=4, overflow="drop", max_segments=n) for n in (None, 3))
    for each in (plan.after(3, max_segments=3), few.after(3, max_segments=None)):
        assert each.most_segments() == {BUCKETS[0]: 4, BUCKETS[1]: 8}
    assert few.most_segments()[BUCKETS[1]] == 3
    assert plan.max_position == 31


def test_where_the_rest_of_a_growing_corpus_does_not_fit_a_sentence_says_so(monkeypatch):
    plan = follow([[5, 9, 20]] * 40)
    plan.batch(0)

    def fail(*_, **options):
        raise MemoryError

    monkeypatch.setattr(Pass, "__init__", fail)
    with pytest.raises(DoesNotFit, match="planning the rest of a corpus that grows takes more"):
        plan.after(1, seed=1).batch(1)


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


# ---- mixtures


def test_followed_mixtures_stay_what_they_are(monkeypatch):
    monkeypatch.setattr(growing, "CHAPTER", 3)
    parts = [[5, 3], [4, 2], [1, 6], [7], [9]] * 9
    corpora = {"a": parts, "b": parts[1:], "c": np.array([3, 8])}
    plan = mix(corpora, buckets=[Bucket(2, 5), Bucket(3, 9)], window=4)
    assert fingerprint_of(digests(plan, range(60))) == "1bc5783b427f887c"


def test_shares_are_met_from_a_change_of_weights_on():
    given = [(0, {"a": 6, "b": 3, "c": 1}), (150, {"a": 1, "b": 1, "c": 2})]
    corpora = {name: each * 8 if name != "c" else each for name, each in draw(3).items()}
    plan = mix(corpora, given)
    for begin, end, weights in ((0, 150, (0.6, 0.3, 0.1)), (150, 300, (0.25, 0.25, 0.5))):
        tokens = np.zeros(3)
        for step in range(begin, end):
            sources = plan.batch(step).sources
            tokens += [sources.get(name, 0) for name in "abc"]
        assert np.abs(tokens / tokens.sum() - weights).max() < 0.01


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


def test_rare_rows_of_a_small_finished_corpus_are_trained():
    corpora = {"a": [[9, 10, 30]] * 600, "c": np.array([5] * 400 + [32])}
    plan = mix(corpora, (0.98, 0.02))
    assert any(APART + 400 in plan.batch(step).segments[:, 1] for step in range(700))


def test_files_of_finished_corpora_are_known_ahead():
    filed = SimpleNamespace(lengths=np.full(60, 9), files=np.array([20, 40]))
    plan = mix({"a": draw(0)["a"], "c": filed}, (1, 1), window=20)
    plan.batch(30)
    ahead = plan.files_ahead(30)
    assert [*ahead] == ["c"]
    assert {*np.concatenate(ahead["c"]).tolist()} == {0, 1}


@pytest.mark.parametrize("step", [30, 80, 140])  # it grows; has just ended; ended chapters ago
def test_a_corpus_that_was_replaced_or_cut_short_is_refused_also_if_it_ended(step):
    parts = draw_parts(0, 80)
    corpora = {"a": parts[:20], "b": parts[20:]}
    state = entries_at(mix(corpora, (6, 3)), step)
    for name, place in state[0]["places"].items():
        last, mine = place["last"][0], corpora[name]
        wrong = [(mine[: last - 1], r"parts or more, and this one has fewer")]
        for number in (0, last - 1):
            other = [*mine[:number], [*mine[number], 7], *mine[number + 1 :]]
            wrong.append((other, "no longer what the state was trained on"))
        for other, said in wrong:
            with pytest.raises(ValueError, match=said):
                resumed(mix({**corpora, name: other}, (6, 3)), state)
    if step == 30:  # the future may differ
        resumed(mix({**corpora, name: [*mine[:last], [3, 3, 3]]}, (6, 3)), state)
