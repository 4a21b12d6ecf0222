import pickle
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from pipeline import Bucket, Plan
from pipeline.planning import options
from tests.planning.corpora import digests, lognormal
from tests.properties.accounts import batches_of

BUCKETS = (Bucket(4, 16), Bucket(3, 32), Bucket(2, 64))
PAIRED = (Bucket(4, (16, 8)), Bucket(3, (16, 32)), Bucket(2, (64, 32)))
LENGTHS = lognormal(20_000)
SHUFFLED = lognormal(3000, seed=1)


def test_a_plan_that_does_not_fit_into_memory_is_a_sentence(monkeypatch):
    fails = mock.Mock(side_effect=MemoryError("Unable to allocate 2.67 GiB"))
    monkeypatch.setattr(options, "Pieces", fails)
    with pytest.raises(MemoryError, match="planning 1 example of 2,147,483,648 positions"):
        Plan([1 << 31], [Bucket(2, 6)])


def test_a_plan_is_replayed_with_all_its_examples():
    grown = Plan([5] * 40, [Bucket(2, 8)]).after(3, lengths=[5] * 41)
    for lengths, changes in (([5] * 39, grown.changes), ([5] * 40, [])):
        with pytest.raises(ValueError, match=r"the plan is of 40|changes is empty"):
            Plan.replay(lengths, changes)
    trees = np.array([[5, 2, 20]] * 41)
    few, more = (SimpleNamespace(lengths=[5] * n, trees=trees[:n]) for n in (40, 41))
    grown = Plan(few, [Bucket(2, 8)]).after(3, lengths=more)
    assert Plan.replay(more, grown.changes).fingerprint == grown.fingerprint


def test_a_plan_by_hand():
    plan = Plan([5, 3, 4, 9, 2, 1], [Bucket(2, 8)], shuffle=False)
    assert [batch.segments.tolist() for batch in batches_of(plan)] == [
        # 8 + 0 | 5 + 3
        [[0, 0, 0, 5], [0, 1, 0, 3], [1, 2, 0, 4], [1, 4, 0, 2], [1, 3, 8, 1], [1, 5, 0, 1]],
        [[0, 3, 0, 8]],
    ]
    assert plan.max_position == 8
    assert plan.padding == pytest.approx(1 - 24 / 32)


def test_golden_plan_so_that_a_changed_algorithm_raises_the_version():
    plan = Plan([3, 1, 2, 2, 4, 1, 3], [Bucket(2, 4), Bucket(1, 8)], seed=7)
    assert plan.identity == {
        "plan": 11,
        "attention": "dense",
        "width": 1024,
        "lengths": "5e1ffcddd4216665",
        "buckets": "2x4+1x8",
        "seed": 7,
        "shuffle": True,
        "packing": "best_fit",
        "overflow": "split",
        "window": None,
        "max_segments": None,
        "tiers": 1,
    }
    assert plan.fingerprint == "48cc371ff2b9f935"
    assert [batch.segments.tolist() for batch in batches_of(plan, 0) + batches_of(plan, 1)] == [
        [[0, 4, 0, 4], [1, 6, 0, 3], [1, 5, 0, 1]],
        [[0, 0, 0, 3], [0, 1, 0, 1], [1, 3, 0, 2], [1, 2, 0, 2]],
        [[0, 0, 0, 3], [0, 5, 0, 1], [1, 2, 0, 2], [1, 3, 0, 2]],
        [[0, 4, 0, 4], [1, 6, 0, 3], [1, 1, 0, 1]],
    ]


NUMBERS = np.arange(1, 4000)
LINES = NUMBERS[:199] % 23 + 1, [Bucket(2, 8), Bucket(1, 24)]
FILLED = LINES[0] + 11, [Bucket(2, 24), Bucket(1, 40)]
SEVENS = LINES[0], [Bucket(7, 24)]  # windows end within batches
SENTENCES = (
    np.stack([NUMBERS[:399] % 23 + 1, NUMBERS[:399] % 17 + NUMBERS[:399] % 5], axis=1),
    [Bucket(2, (24, 24)), Bucket(1, (64, 48))],
)
BOOKS = np.stack([NUMBERS % 1987 + 1, NUMBERS * 13 % 1999 + 1], axis=1), [Bucket(2, (4096, 4096))]
FILL, ALONE = {"packing": "fill", "window": 50}, {"packing": "none"}
DEALT = {"tiers": 8, "align": 2, "max_segments": 3}


@pytest.mark.parametrize(
    ("data", "options", "expected"),
    [
        (LINES, {"window": 50}, ["c61cc16083b39e08", "bfaf47cc3de1a8ea", "c6018f26296409e6"]),
        (LINES, {"window": 10}, ["fdc746691c565582", "f2cd34d03e647a17", "1d94eda3b968113d"]),
        (LINES, ALONE, ["78b95cedd0dca0f6", "08116dc93e5839a1", "232ce5dbff484168"]),
        (LINES, DEALT, ["b7dc5cd1341efb79", "2b0a6d764c7f2c2c", "928ad33fc33c52c6"]),
        (SEVENS, {"window": 37}, ["c78b14345fe1402e", "2d0b35a55bc9b0d8", "28070e830738eacd"]),
        (FILLED, FILL, ["5a07404a21ef5602", "657c82bad6cb3406", "0725c6e8e658630f"]),
        (SENTENCES, {}, ["317d5194e0f6a0bc", "08d9ea84822177bf", "1b2c0baf8bd75757"]),
        (SENTENCES, {"window": 100}, ["c5b831048612d65a", "e6a926e8d74a2bc7", "d97d473ded6df990"]),
        (SENTENCES, ALONE, ["16c1722bafcea440", "7c667cb9da06e1ff", "38a975c5dedcd957"]),
        (BOOKS, {}, ["9ca32a178d2a0c40", "216ecfb9e6d98e97", "563cad1b60092e6a"]),
    ],
)
def test_golden_digests_so_that_a_changed_algorithm_raises_the_version(data, options, expected):
    plan = Plan(*data, seed=7, overflow="drop", **options)
    assert digests(plan, (0, 1, 3333)) == expected


@pytest.mark.parametrize(
    ("lengths", "buckets", "options"),
    [
        (LENGTHS[:3000], BUCKETS, {}),
        (np.stack([LENGTHS[:3000], SHUFFLED // 2], axis=1), PAIRED, {}),
        ({"a": LENGTHS[:2000], "b": SHUFFLED}, BUCKETS, {"weights": {"a": 1, "b": 2}}),
    ],
    ids=["one", "pairs", "mixture"],
)
def test_another_process_makes_the_same_plan(lengths, buckets, options):
    code = (
        "import sys, pickle\n"
        "from pipeline import Plan\n"
        "lengths, buckets, options, steps = pickle.load(sys.stdin.buffer)\n"
        "plan = Plan(lengths, buckets, **options)\n"
        "digests = [plan.batch(step).digest for step in steps]\n"
        "heavy = [m for m in ('jax', 'grain', 'tensorflow', 'pyarrow') if m in sys.modules]\n"
        "print(repr((plan.fingerprint, digests, heavy)))\n"
    )
    options = options | {"seed": 3, "window": 900, "overflow": "drop"}
    plan = Plan(lengths, buckets, **options)
    steps = [0, 1, plan.num_batches() - 1, plan.num_batches(), 7 * plan.num_batches() + 5, 10**9]
    given = pickle.dumps((lengths, buckets, options, steps))
    out = subprocess.check_output([sys.executable, "-c", code], input=given)
    assert eval(out) == (plan.fingerprint, digests(plan, steps), [])


def test_windows_cost_little_padding():
    assert Plan(LENGTHS, BUCKETS, window=4000).padding < 0.01


def test_buckets_are_spread_evenly_over_the_epoch():
    order = [batch.bucket for batch in batches_of(Plan(LENGTHS, BUCKETS))]
    for bucket in BUCKETS:
        at = np.flatnonzero([b == bucket for b in order])
        assert np.ptp(np.diff(at)) <= len(BUCKETS) + 1


def test_printing_plans_no_batch(monkeypatch):
    monkeypatch.setattr(Plan, "batch", None)
    str(Plan(LENGTHS, BUCKETS))


def test_pairs_that_fit_need_no_word_on_overflow():
    plan = Plan([[6, 3], [8, 2]], [Bucket(2, (8, 4))])
    assert plan.options.overflow == plan.identity["overflow"] == "error"
    assert Plan([6, 8], [Bucket(2, 4)]).options.overflow == "split"


@pytest.mark.parametrize("number", [0, -3, 2.5, True, "88", 1 << 31])
def test_a_bucket_refuses_what_is_no_number(number):
    for given in ({"rows": number, "length": 8}, {"rows": 8, "length": (3, number)}):
        with pytest.raises(ValueError, match="whole number of at least 1"):
            Bucket(**given)


@pytest.mark.parametrize("plan", [Plan([3], BUCKETS), Plan([3, 4], BUCKETS).after(1, seed=1)])
def test_a_step_is_a_whole_number_from_0(plan):
    with pytest.raises(IndexError, match="steps count from 0"):
        plan.batch(-1)
    for step in (2.7, "1", None):
        with pytest.raises(TypeError):
            plan.batch(step)
    assert plan.batch(np.int64(0)).digest == plan.batch(0).digest


def test_a_misspelt_keyword_is_answered_with_the_nearest():
    for make, arguments, wrong, right in (
        (Plan, {"lengths": [3], "buckets": BUCKETS}, "sed", "seed"),
        (Bucket, {"length": 8}, "row", "rows"),
    ):
        with pytest.raises(TypeError, match=f"no option '{wrong}'; did you mean '{right}'"):
            make(**arguments, **{wrong: 1})


def test_a_mask_of_whole_numbers_is_no_list_of_examples():
    for mask in ([0, 1, 1, 0], np.array([0, 0, 0, 1], np.uint8)):
        with pytest.raises(
            ValueError, match=r"4 whole numbers that are 0 or 1.*mask\.astype\(bool"
        ):
            Plan([5, 3, 4, 2], [Bucket(1, 8)], exclude=mask)
    plan = Plan([5, 3, 4, 2], [Bucket(1, 8)], exclude=[0, 1])
    assert "left out: 2 examples, as asked" in str(plan)


def test_a_plan_without_examples_says_that_exclude_left_them_out():
    with pytest.raises(ValueError, match=r"to train on \(exclude leaves out 2\)"):
        Plan([5, 3], [Bucket(1, 8)], exclude=[0, 1])
