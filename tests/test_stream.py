"""Streams of passes: independent orders, windows made once, states that say what differs."""

import concurrent.futures
import threading

import numpy as np
import pytest

import pipeline
from pipeline import Batches, Bucket, Plan
from pipeline.loading.state import StateKey
from pipeline.planning import stage
from pipeline.planning.assembly import Assembly
from pipeline.planning.order import Quota
from pipeline.planning.stream import Pass

EQUAL, ANY = np.full(400, 8), np.random.default_rng(5).integers(1, 30, 400)


def overlap(some, others):
    """How many numbers two lists of sets of numbers have in common, step by step, over chance."""
    common = sum(len(a & b) for a, b in zip(some, others, strict=True))
    return common / sum(len(a) * len(b) / 400 for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("lengths", [EQUAL, ANY])
@pytest.mark.parametrize("window", [1 << 22, 100])
def test_corpora_of_a_mixture_are_shuffled_independently(lengths, window):
    corpora = {"a": lengths, "b": lengths}
    mixture = Plan(corpora, [Bucket(16, 32)], weights={"a": 1, "b": 1}, window=window)
    batches = [mixture.batch(step).segments[:, 1] for step in range(60)]
    first, second = ([{*each[(each // 400) == n] % 400} for each in batches] for n in (0, 1))
    assert 0.5 < overlap(first, second) < 1.6


@pytest.mark.parametrize("lengths", [EQUAL, ANY])
def test_epochs_are_shuffled_independently(lengths):
    plan = Plan(lengths, [Bucket(8, 32)])
    steps = plan.num_batches()
    batches = [{*plan.batch(step).segments[:, 1]} for step in range(2 * steps)]
    assert 0.5 < overlap(batches[:steps], batches[steps:]) < 1.6


@pytest.fixture
def fills(monkeypatch):
    """The pass, epoch and place of each window that is filled."""
    found, fill = [], Pass._fill

    def noting(self, cache, epoch, place):
        found.append((self, epoch, place))
        return fill(self, cache, epoch, place)

    monkeypatch.setattr(Pass, "_fill", noting)
    return found


def test_random_steps_over_many_windows_fill_each_once(fills):
    plan = Plan(np.tile(ANY, 10), [Bucket(8, 32)], window=400)
    for step in np.random.default_rng(0).permutation(plan.num_batches()).tolist():
        plan.batch(step)
    first = [each for each in fills if each[1] == 0]
    assert len(first) == len({*first}) == 10


def test_nothing_is_prepared_for_an_epoch_that_nobody_asks_for(fills, tmp_path):
    corpus = pipeline.Corpus.from_arrays([np.arange(n + 1) for n in ANY], tmp_path)
    batches = Batches(corpus, Plan(corpus, [Bucket(8, 32)], window=100))
    for step in range(len(batches)):
        batches[step]
    assert {epoch for _, epoch, _ in fills} == {0}


def test_threads_sort_a_block_of_tiers_once(monkeypatch):
    blocks, lock, assemble = [], threading.Lock(), Assembly._assemble

    def noting(self, steps, last_epoch):
        with lock:
            blocks.append(steps)
        return assemble(self, steps, last_epoch)

    monkeypatch.setattr(Assembly, "_assemble", noting)
    plan = Plan(ANY, [Bucket(2, 32)], tiers=8)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(plan.batch, range(64)))
    assert len(blocks) == len({*blocks}) == 8


def test_windows_of_old_stages_are_forgotten(monkeypatch):
    monkeypatch.setattr(stage, "CACHED", 1)
    plan = Plan(ANY, [Bucket(8, 32)])
    for change in range(1, 9):
        plan = plan.after(2 * change, seed=change)
        plan.batch(2 * change)
    cache = plan.stages[-1].cache
    assert sum(each.pieces for each in cache._entries.values()) <= cache.capacity < 20 * len(ANY)
    assert len(cache._entries) < 20  # of nine stages with two passes each, and their slots


def test_the_entries_of_a_state_are_made_once():
    plan = Plan(ANY, [Bucket(8, 32)]).after(3, exclude=np.arange(100))
    assert plan.stages[1].entry is plan.stages[1].entry
    assert all(
        a["identity"] is b["identity"] for a, b in zip(plan.entries, plan.entries, strict=True)
    )


def test_a_name_cannot_imitate_what_differs():
    even = {"x;lengths of y=1": 1, "y": 1}
    plans = [
        Plan(dict(zip(even, each, strict=True)), [Bucket(4, 32)], weights=even)
        for each in ((ANY, EQUAL), (ANY, EQUAL + 1))
    ]
    with pytest.raises(ValueError, match=r"lengths of y was .* and is now"):
        StateKey(plans[1]).step(StateKey(plans[0]).state(3))


def test_a_quota_knows_no_largest_number():
    quota = Quota([1 << 60, 1])
    assert quota.before((1 << 60) + 1) == [1 << 60, 1]
    assert quota.before(1 << 59) in ([1 << 59, 0], [(1 << 59) - 1, 1])
    assert [quota.of(taker, 1 << 59) for taker in (0, 1)] == quota.before(1 << 59)


def test_small_shares_are_not_starved_by_many_intervals():
    # Forty corpora end what is left of their epochs at forty different steps.
    corpora = {f"c{n}": ANY[: 100 + 7 * n] for n in range(40)} | {"small": EQUAL}
    weights = {name: 0.02 if name == "small" else 1 for name in corpora}
    plan = Plan(corpora, [Bucket(4, 32)], weights=weights).after(50, seed=2)
    rows = plan.stages[1].schedule.before(2000)[1][0]
    due = 2000 * 4 * 0.02 / 40.02
    assert len(plan.stages[1].schedule._intervals) > 20
    assert abs(int(rows[-1]) - due) < 2


def test_windows_of_what_is_left_are_in_the_identity():
    plan = Plan([8] * 60, [Bucket(4, 1)], seed=1)
    changed = [plan.after(60, buckets=[Bucket(4, 8)], window=window) for window in (100, 10_000)]
    assert changed[0].batch(60).digest != changed[1].batch(60).digest
    assert changed[0].fingerprint != changed[1].fingerprint


def test_steps_of_a_plan_that_ends_are_no_more_than_it_has():
    plan = Plan({"a": ANY}, [Bucket(8, 32)], weights={"a": 1}, ending="stop")
    with pytest.raises(IndexError, match="this plan ends after"):
        plan.between(0, 10**6).batch(plan.num_batches())
