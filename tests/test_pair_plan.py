"""Plans of pairs: the contract of plans of one length, where two lengths must fit at once."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import Bucket, Plan
from pipeline.planning import figures
from pipeline.planning.pair_packing import best_fit_pairs, volume_bound

BUCKETS = (Bucket(4, (16, 8)), Bucket(3, (16, 32)), Bucket(2, (64, 32)))
pair_lists = st.lists(
    st.tuples(st.integers(0, 80), st.integers(0, 40)), min_size=1, max_size=150
).filter(lambda pairs: any(0 < t <= 32 and i <= 64 for i, t in pairs))


def translations(count=29_000, ratio=1.0, seed=0):
    """Lengths as of sentences and their translations: 5 to 45 tokens, correlated."""
    rng = np.random.default_rng(seed)
    inputs = np.clip(np.round(rng.lognormal(2.75, 0.45, count)), 5, 45)
    targets = np.round(inputs * ratio * np.exp(rng.normal(0, 0.18, count)))
    return np.stack([inputs, np.clip(targets, 5, 45)], axis=1).astype(np.int64)


def bounds_of(plan):
    """The most of its positions, and of each side's, that any packing of a plan could use."""
    (stage,) = plan.stages
    (source,) = stage.sources
    return volume_bound(
        source.whole.pieces.positions_per_example().sum(axis=0), stage.options.buckets
    )


def epoch_of(plan, epoch=0):
    steps = plan.num_batches()
    return [plan.batch(epoch * steps + step) for step in range(steps)]


def assert_epoch_is_a_partition(plan, pairs, epoch=0):
    """Each pair that is trained on exactly once and whole, in rows that hold it on both sides."""
    expected = np.array(pairs).reshape(-1, 2)
    room = np.array(plan.buckets[-1].lengths)
    over = (expected > room).any(axis=1)
    expected = np.minimum(expected, room)
    if plan.options.overflow == "drop":
        expected[over] = 0
    expected[expected[:, 1] == 0] = 0
    seen = np.zeros_like(expected)
    times = np.zeros(len(seen), np.int64)
    for batch in epoch_of(plan, epoch):
        row, example, start, *sides = batch.segments.T
        assert batch.segments.dtype == np.int64
        assert (np.diff(row) >= 0).all()
        assert (start == 0).all()
        for length, side in zip(batch.bucket.lengths, sides, strict=True):
            filled = np.bincount(row, side, minlength=batch.bucket.rows)
            assert len(filled) == batch.bucket.rows
            assert filled.max() <= length
        most = 1 if plan.options.packing == "none" else plan.options.max_segments
        assert most is None or np.bincount(row).max() <= most
        np.add.at(times, example, 1)
        seen[example] = np.stack(sides, axis=1)
    np.testing.assert_array_equal(seen, expected)
    np.testing.assert_array_equal(times, expected[:, 1] > 0)


@given(
    pair_lists,
    st.sampled_from(["best_fit", "none"]),
    st.sampled_from(["truncate", "drop"]),
    st.booleans(),
    st.integers(1, 300),
    st.one_of(st.none(), st.integers(1, 4)),
    st.integers(0, 2**63 - 1),
)
def test_every_epoch_is_a_partition_of_the_pairs(
    pairs, packing, overflow, shuffle, window, max_segments, seed
):
    plan = Plan(
        np.array(pairs),
        BUCKETS,
        packing=packing,
        overflow=overflow,
        shuffle=shuffle,
        window=window,
        max_segments=max_segments,
        seed=seed,
    )
    for epoch in (0, 1, 5):
        assert_epoch_is_a_partition(plan, pairs, epoch)


@given(pair_lists, st.integers(1, 300))
def test_padding_is_that_of_the_batches_and_one_batch_at_most_is_under_filled(pairs, window):
    plan = Plan(np.array(pairs), BUCKETS, window=window, overflow="truncate")
    batches = epoch_of(plan)
    positions = sum(batch.bucket.positions for batch in batches)
    assert plan.padding == pytest.approx(1 - sum(b.num_tokens for b in batches) / positions)
    assert plan.num_tokens == sum(batch.num_tokens for batch in batches)
    most, sides = bounds_of(plan)
    assert 1 - plan.padding <= most + 1e-9
    for used, bound in zip(figures.side_fills(plan), sides, strict=True):
        assert used <= bound + 1e-9
    partly_empty = [b for b in batches if len(np.unique(b.segments[:, 0])) < b.bucket.rows]
    assert len(partly_empty) <= 1
    assert all(batch.bucket == BUCKETS[-1] for batch in partly_empty)


@pytest.mark.parametrize("ratio", [0.8, 0.97, 1.0, 1.1])
def test_sentence_pairs_fill_the_fuller_side_and_the_other_as_far_as_their_ratio_allows(ratio):
    pairs = translations(ratio=ratio)
    plan = Plan(pairs, [Bucket(16, (256, 256))], overflow="drop")
    totals = pairs.sum(axis=0)
    most, sides = bounds_of(plan)
    assert sides == pytest.approx(tuple(totals / totals.max()))
    fuller, fills = int(totals.argmax()), figures.side_fills(plan)
    assert fills[fuller] >= 0.97
    assert fills[1 - fuller] >= totals.min() / totals.max() - 0.02
    # And much better than that: within one point, empty rows of the last batch included.
    assert 1 - plan.padding >= most - 0.01


def test_pairs_of_a_ratio_of_exactly_one_fill_both_sides():
    pairs = translations(14_500)
    plan = Plan(np.concatenate([pairs, pairs[:, ::-1]]), [Bucket(8, (256, 256))], overflow="drop")
    assert min(figures.side_fills(plan)) >= 0.98


def test_long_pairs_that_are_all_of_different_sizes_are_packed_as_well():
    rng = np.random.default_rng(0)
    inputs = np.clip(rng.lognormal(6, 1, 5000), 1, 8192)
    pairs = np.stack([inputs, np.clip(inputs * np.exp(rng.normal(0, 0.3, 5000)), 1, 8192)], 1)
    plan = Plan(pairs.astype(int), [Bucket(1, (8192, 8192))], overflow="drop")
    assert max(figures.side_fills(plan)) >= 0.98
    # Of other ratios and shapes, too: no candidate is left standing that fits nowhere.
    pairs = rng.integers(1, 8192, (8000, 2))
    plan = Plan(pairs, [Bucket(1, (16384, 16384))], overflow="drop")
    assert min(figures.side_fills(plan)) >= 0.97


def test_golden_digests_of_pairs_that_are_all_of_different_sizes():
    number = np.arange(1, 4000)
    pairs = np.stack([number % 1987 + 1, number * 13 % 1999 + 1], axis=1)
    plan = Plan(pairs, [Bucket(2, (4096, 4096))], seed=7, overflow="drop")
    digests = ["8740b200eea1b9ee", "2f97aff7f3b0a210", "2ec593d2eb89f585"]
    assert [plan.batch(step).digest for step in (0, 1, 3333)] == digests


def test_a_plan_of_pairs_by_hand():
    pairs = [[6, 2], [2, 6], [5, 5], [3, 3], [0, 4], [4, 0], [9, 1]]
    plan = Plan(pairs, [Bucket(2, (8, 8))], shuffle=False, overflow="truncate")
    assert [batch.segments.tolist() for batch in epoch_of(plan)] == [
        # 6 + 2 and 2 + 6; 5 + 3 of both
        [[0, 0, 0, 6, 2], [0, 1, 0, 2, 6], [1, 2, 0, 5, 5], [1, 3, 0, 3, 3]],
        # inputs of 9 cut to 8, and the pair that has targets alone; one without targets is in none
        [[0, 6, 0, 8, 1], [0, 4, 0, 0, 4]],
    ]
    assert figures.losses(plan) == figures.Losses(excluded=0, empty=1, overlong=1, lost=1)
    assert plan.max_position == 7
    assert plan.padding == pytest.approx(1 - 45 / 64)


def test_golden_plan_so_that_a_changed_algorithm_raises_the_version():
    pairs = [[3, 1], [1, 2], [2, 2], [2, 2], [4, 3], [1, 1], [3, 5]]
    plan = Plan(pairs, [Bucket(2, (4, 4)), Bucket(1, (8, 6))], seed=7, overflow="drop")
    assert plan.fingerprint == (
        "plan=3;lengths=8c3600d799e48421;buckets=2x4/4+1x8/6;seed=7;shuffle=yes;packing=best_fit;"
        "overflow=drop;window=all;max_segments=any"
    )
    assert [batch.segments.tolist() for batch in epoch_of(plan, 0) + epoch_of(plan, 1)] == [
        [[0, 4, 0, 4, 3], [1, 2, 0, 2, 2], [1, 1, 0, 1, 2]],
        [[0, 6, 0, 3, 5], [0, 0, 0, 3, 1]],
        [[0, 3, 0, 2, 2], [0, 5, 0, 1, 1]],
        [[0, 3, 0, 2, 2], [0, 5, 0, 1, 1]],
        [[0, 4, 0, 4, 3], [1, 2, 0, 2, 2], [1, 1, 0, 1, 2]],
        [[0, 6, 0, 3, 5], [0, 0, 0, 3, 1]],
    ]


@pytest.mark.parametrize(
    ("options", "digests"),
    [
        ({}, ["a9609c1504839e57", "fc9fb52932b04470", "0f16a36285aac4f3"]),
        ({"window": 100}, ["2558e756bd9836a2", "5c60cf71e94cdec5", "e6160627a63b4138"]),
        ({"packing": "none"}, ["9d576730eda26ce3", "54b83fb4df313564", "54b4af80cd259ea3"]),
    ],
)
def test_golden_digests_of_larger_plans(options, digests):
    number = np.arange(1, 400)
    pairs = np.stack([number % 23 + 1, number % 17 + number % 5], axis=1)
    buckets = [Bucket(2, (24, 24)), Bucket(1, (64, 48))]
    plan = Plan(pairs, buckets, seed=7, overflow="drop", **options)
    assert [plan.batch(step).digest for step in (0, 1, 3333)] == digests


def test_another_process_makes_the_same_plan():
    pairs = translations(2000)
    code = (
        "import sys, pickle\n"
        "from pipeline import Bucket, Plan\n"
        "pairs, steps = pickle.load(sys.stdin.buffer)\n"
        "plan = Plan(pairs, [Bucket(4, (64, 64)), Bucket(2, (128, 128))], overflow='drop',"
        " window=900)\n"
        "heavy = [m for m in ('jax', 'grain', 'tensorflow', 'pyarrow') if m in sys.modules]\n"
        "print(repr((plan.fingerprint, [plan.batch(step).digest for step in steps], heavy)))\n"
    )
    plan = Plan(pairs, [Bucket(4, (64, 64)), Bucket(2, (128, 128))], overflow="drop", window=900)
    steps = [0, plan.num_batches() - 1, 7 * plan.num_batches() + 5, 10**9]
    out = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps((pairs, steps)),
        capture_output=True,
        check=True,
    )
    assert eval(out.stdout) == (plan.fingerprint, [plan.batch(s).digest for s in steps], [])


def test_windows_of_pairs_have_equal_epochs_that_differ_and_plans_pickle():
    pairs = translations(6000)
    plan = Plan(pairs, [Bucket(4, (128, 128))], window=1500, overflow="drop")
    assert "window=1500" in plan.fingerprint
    firsts = set()
    for epoch in range(3):
        assert_epoch_is_a_partition(plan, pairs, epoch)
        firsts.add(plan.batch(epoch * plan.num_batches()).digest)
    assert len(firsts) == 3
    assert 1 - plan.padding >= bounds_of(plan)[0] - 0.05
    copy = pickle.loads(pickle.dumps(plan))
    assert copy.batch(4000).digest == plan.batch(4000).digest


def test_contiguous_rows_are_an_even_share_for_every_number_of_hosts():
    plan = Plan(translations(8000), [Bucket(16, (128, 128))], overflow="drop")
    costs = []
    for batch in map(plan.batch, range(min(plan.num_batches(), 64))):
        squares = (batch.segments[:, 3:] ** 2).sum(axis=1)
        costs.append(np.bincount(batch.segments[:, 0], squares, 16).reshape(4, 4).sum(axis=1))
    assert np.mean([cost.max() / cost.mean() for cost in costs]) < 1.15


def test_pairs_that_fit_need_no_word_on_overflow():
    plan = Plan([[6, 3], [8, 2]], [Bucket(2, (8, 4))])
    assert plan.options.overflow == "error"
    assert ";overflow=error;" in plan.fingerprint
    assert Plan([6, 8], [Bucket(2, 4)]).options.overflow == "split"


def test_printing_a_plan_of_pairs_shows_both_sides_and_their_bounds():
    text = str(Plan([[6, 3], [9, 2], [4, 0]], [Bucket(2, (8, 4))], overflow="drop"))
    assert "2x8/4" in text
    most = "the ratio of inputs to targets allows at most 100.00%"
    assert f"inputs: 37.50% of positions used; {most}" in text
    assert "targets: 37.50% of positions used" in text
    assert "1 examples have nothing to train on" in text
    assert "1 examples longer than 8 and 4 are dropped, 11 positions lost" in text


def test_the_bound_of_several_buckets_is_the_cheapest_mix_of_them():
    # Inputs alone fill 100/0; with targets, rows of the first bucket are enough for both.
    total, sides = volume_bound(np.array([900, 100]), [Bucket(1, (90, 10)), Bucket(1, (100, 100))])
    assert (total, *sides) == pytest.approx((1.0, 1.0, 1.0))
    total, _ = volume_bound(np.array([950, 1000]), [Bucket(1, (90, 10)), Bucket(1, (100, 100))])
    assert total == pytest.approx(1950 / 2000)


@given(pair_lists, st.one_of(st.none(), st.integers(1, 4)))
def test_rows_hold_what_was_taken_from_the_counts(pairs, max_segments):
    room = (64, 32)
    sizes = np.unique([pair for pair in pairs if 0 < pair[1] <= 32 and pair[0] <= 64], axis=0)
    sizes = np.concatenate([[[0, 0]], sizes])
    counts = np.arange(len(sizes)) % 7
    left = counts.copy()
    rows = best_fit_pairs(left, room, sizes, np.arange(len(sizes)) % 3 > 0, max_segments)
    placed = np.zeros_like(counts)
    for pattern in rows:
        inside = np.zeros(2, np.int64)
        for number, times in pattern.pieces:
            placed[number] += times * pattern.rows
            inside += times * sizes[number]
        assert (inside <= room).all()
        assert pattern.fill == inside.sum()
        assert max_segments is None or sum(t for _, t in pattern.pieces) <= max_segments
    np.testing.assert_array_equal(placed, counts - left)
    assert not left[np.arange(len(sizes)) % 3 > 0].any()  # what opens rows is all placed


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"overflow": "split"}, "a target cut in two would lose its inputs"),
        ({"overflow": "wrap"}, "it must be one of truncate, drop, error"),
        ({"overflow": "error"}, "example 1 has 3 and 100"),
        ({"packing": "optimal"}, "packing='optimal' is for one length"),
        ({"buckets": [Bucket(2, 64)]}, "pairs need buckets with two lengths"),
        ({"lengths": [3, 4]}, "and others with one"),
        ({"lengths": [[3, 4, 5]]}, "has shape (1, 3)"),
        ({"lengths": [[3, 0], [4, 0]]}, "none of the 2 examples has a position"),
        ({"lengths": np.zeros((0, 2), int)}, "none of the 0 examples has a position"),
        ({"buckets": [Bucket(2, 8), Bucket(2, (8, 8))]}, "they must all be whole numbers"),
        ({"buckets": [Bucket(2, (8, 8)), Bucket(2, (4, 4))]}, "ascend by their sum"),
        ({"buckets": [Bucket(2, (8, 4)), Bucket(2, (4, 9))]}, "end with one of (8, 9)"),
    ],
)
def test_bad_arguments_get_a_sentence(arguments, sentence):
    good = {"lengths": [[3, 4], [3, 100]], "buckets": BUCKETS, "overflow": "drop"}
    with pytest.raises(ValueError) as error:
        Plan(**(good | arguments))
    assert sentence in str(error.value)


@pytest.mark.parametrize("bad", [(0, 3), (3, 2.5), (3, True), "88", (1, 2, 3)])
def test_a_bucket_of_pairs_refuses_what_is_no_size(bad):
    with pytest.raises(ValueError, match="whole number of at least 1"):
        Bucket(rows=8, length=bad)
