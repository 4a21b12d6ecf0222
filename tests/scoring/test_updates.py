"""Updates: what is packed comes back, example by example, in shapes that stay."""

import collections
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline
from pipeline import Bucket, Examples, Feature, pack, unpack
from pipeline.errors import UserError
from pipeline.scoring.update_plan import count_batches, plan_update
from pipeline.steps import Compiled
from pipeline.steps.compile_log import CompileLog
from tests.planning.corpora import lognormal

FEATURES = {"logprob": Feature("targets"), "reward": Feature("example")}


def make(sizes, seed=0):
    rng = np.random.default_rng(seed)
    columns = {
        "tokens": [rng.integers(1, 99, n) for n in sizes],
        "weights": [rng.integers(0, 2, n) | (np.arange(n) == n - 1) for n in sizes],
        "logprob": [rng.normal(size=n) for n in sizes],
        "reward": rng.normal(size=len(sizes)),
    }
    return Examples(columns, features=FEATURES)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(2, 40), min_size=1, max_size=30),
    st.sampled_from([1, 4]),
    st.sampled_from([
        [Bucket(2, 16), Bucket(1, 16)],
        [Bucket(4, 8), Bucket(3, 40), Bucket(2, 40), Bucket(1, 40)],
    ]),
)  # fmt: skip
def test_what_is_packed_comes_back(sizes, align, buckets):
    examples = make(sizes)
    results = []
    options = {"overflow": "split", "align": align, "max_segments": 8}
    for planned, batch in pack(examples, buckets, **options):
        assert batch["inputs"].shape == planned.bucket.shape
        assert planned.bucket in buckets
        ids = np.asarray(batch["inputs_segment_ids"])
        begins = np.argwhere((np.diff(ids, axis=1, prepend=0) != 0) & (ids > 0))
        assert not (begins[:, 1] % align).any()
        results.append((planned, dict(batch)))
    per = dict.fromkeys(results[0][1], "position") | {"reward": "segment"}
    back = unpack(results, examples, per=per, combine="mean")
    for at, example in enumerate(examples):
        for name in ("inputs", "targets", "loss_weights", "logprob"):
            np.testing.assert_array_equal(back[name][at], example[name])
        np.testing.assert_array_equal(back["inputs_positions"][at], range(sizes[at] - 1))
        np.testing.assert_allclose(back["reward"][at], example["reward"], rtol=1e-6)
    # Nothing is left to chance.
    again = pack(examples, buckets, **options)
    assert [p.digest for p, _ in again] == [p.digest for p, _ in results]


def test_devices_get_rows_of_like_cost_over_the_whole_update():
    sizes = np.random.default_rng(0).lognormal(4, 1, 400).astype(int).clip(2, 512)
    packed = pack(make(sizes.tolist()), [Bucket(4, 512)], features=())
    costs = np.stack(
        [np.bincount(p.segments[:, 0], p.segments[:, 3] ** 2, minlength=4) for p, _ in packed]
    )
    # No order of the rows is better than all of them sorted, and cut.
    best = np.sort(costs, axis=None)[::-1].reshape(-1, 4).max(axis=1).sum()
    assert costs.max(axis=1).sum() == best


@given(st.integers(0, 40), st.sets(st.integers(1, 12), min_size=1, max_size=4))
def test_the_last_rows_have_the_fewest_empty_rows_and_then_the_fewest_batches(rows, sizes):
    sizes = sorted(sizes, reverse=True)
    found = count_batches(rows, [Bucket(size, 8) for size in sizes])
    whole, last = divmod(rows, sizes[0])
    # The rows of every choice of batches up to the size of the largest, and its batches.
    ways = itertools.product(*(range(sizes[0] // size + 1) for size in sizes))
    every = [(np.dot(way, sizes), sum(way)) for way in ways]
    least = min((total - last, number) for total, number in every if total >= last)
    assert (np.dot(found, sizes) - rows, sum(found) - whole) == least
    assert found[0] >= whole


PLAIN = (Bucket(8, 32), Bucket(16, 64))
TAILED = (Bucket(8, 32), Bucket(2, 32), Bucket(16, 64), Bucket(6, 64), Bucket(4, 64))


@pytest.mark.parametrize("count", [300, 120, 3])
@pytest.mark.parametrize("pairs", [False, True])
def test_tails_hold_the_last_rows_of_each_length_and_each_position_comes_once(count, pairs):
    lengths = lognormal(count, least=1)
    tailed, plain = TAILED, PLAIN
    if pairs:
        lengths = np.stack([lengths, np.roll(lengths, 7) // 2], axis=1)
        tailed, plain = ([Bucket(b.rows, (b.length, b.length)) for b in s] for s in (tailed, plain))
    plan, without = (plan_update(lengths, buckets) for buckets in (tailed, plain))
    batches = [plan.batch(step) for step in range(plan.num_batches())]
    found = np.concatenate([batch.segments[:, 1:] for batch in batches])
    assert found[found[:, 0].argsort()].tolist() == [
        [n, 0, *np.atleast_1d(each)] for n, each in enumerate(lengths.tolist())
    ]
    lacking = {}
    for batch in batches:
        sides = zip(batch.sides, batch.bucket.lengths, strict=True)
        assert all((side.columns + side.segments[:, 3]).max() <= most for side, most in sides)
        lacks = batch.bucket.rows - len(np.unique(batch.segments[:, 0]))
        lacking[batch.bucket.lengths] = lacking.get(batch.bucket.lengths, 0) + lacks
    assert all(lacks < 2 for lacks in lacking.values())  # rows are even, but for the last
    positions = sum(batch.bucket.positions for batch in batches)
    assert plan.padding == pytest.approx(1 - lengths.sum() / positions)
    assert plan.padding <= without.padding
    assert plan.buckets == tuple(tailed)
    used = collections.Counter(batch.bucket for batch in batches)
    assert plan.batches_per_bucket == {bucket: used[bucket] for bucket in tailed}
    for wrong in (tailed[::-1], (*tailed, tailed[-1])):
        with pytest.raises(ValueError, match=r"must (ascend by length|descend by rows)"):
            plan_update(lengths, wrong)


def test_other_lengths_compile_nothing():
    def step(scale, batch):
        return batch["logprob"] * batch["loss_weights"] * scale

    rng = np.random.default_rng(1)
    buckets = [Bucket(4, 64), Bucket(2, 64), Bucket(1, 64)]
    first = pack(make([60]), buckets, max_segments=16)
    assert [planned.bucket for planned, _ in first] == [buckets[-1]]
    compiled, used = Compiled(step, 1.0, first.specs), set()
    with CompileLog() as log:
        for seed in range(6):
            examples = make(rng.integers(2, 60, rng.integers(40, 90)).tolist(), seed)
            packed = pack(examples, buckets, max_segments=16)
            assert len(packed) == packed.plan.num_batches()
            results = [(planned, compiled(1.0, batch)) for planned, batch in packed]
            used |= {planned.bucket for planned, _ in results}
            back = unpack(results, examples, per="position")
            for example, values in zip(examples, back, strict=True):
                np.testing.assert_array_equal(values, example["logprob"] * example["loss_weights"])
    assert used == {*buckets}
    assert not log.names


def test_records_of_rows_segments_and_pairs_come_back(tmp_path):
    examples = make([5, 9, 3])
    alone = pack(examples, [Bucket(2, 8)], max_segments=1)
    sums = unpack([(p, b["inputs"].sum(axis=1)) for p, b in alone], examples, per="row")
    assert sums == [example["inputs"].sum() for example in examples]

    def ones_of(overflow, rows=4):
        packed = pack(examples, [Bucket(rows, 4)], overflow=overflow, features=())
        return [(planned, jnp.ones(planned.bucket.shape)) for planned, _ in packed]

    split, dropped = ones_of("split"), ones_of("drop")
    with pytest.raises(ValueError, match="give combine="):
        unpack(split, examples, per="segment")
    later = [(p, np.zeros((p.bucket.rows, 4), np.int32)) for p, _ in split]
    for planned, values in later:
        values[planned.segments[:, 0], planned.numbers] = planned.segments[:, 2] > 0
    assert unpack(later, examples, per="segment", combine="sum") == [0, 1, 0]
    assert unpack(later, examples, per="segment", combine="mean") == [0, 0.5, 0]
    assert [len(each) for each in unpack(dropped, examples, per="position")] == [4, 0, 2]
    second = [each for each in ones_of("split", rows=1) if each[0].segments[0, 2]]
    for wrong in (split + split, second):
        with pytest.raises(ValueError, match="give each batch of a pass once"):
            unpack(wrong, examples, per="position")
    inputs, targets = [[5, 6], [7, 8, 9]], [[1, 2, 3], [1, 4]]
    pairs = pipeline.Pairs.from_arrays(inputs, targets, tmp_path)
    results = list(pack(pairs, [Bucket(2, (8, 8))]))
    for side, due in (("inputs", inputs), ("targets", [[2, 3], [4]])):
        back = unpack([(planned, batch[side]) for planned, batch in results], pairs, per=side)
        assert [each.tolist() for each in back] == due


NOTHING = Examples({"tokens": [[1, 2]], "weights": [[0, 0]]})


@pytest.mark.parametrize(
    ("examples", "options", "sentence"),
    [
        (make([3, 1, 4]), {}, "1 example of 3 have length 0.* 1; remove them"),
        (make([3, 90]), {}, "example 1 has 89 positions, longer than the longest bucket's 8"),
        (make([3]), {"buckets": [Bucket(2, 8), Bucket(2, 8)]}, "length must descend by rows"),
        (make([3]), {"max_segments": None}, "reward have a column for each segment.*max_segments="),
        (make([3]), {"features": ["rewards"]}, "no feature 'rewards'; did you mean 'reward'"),
        (NOTHING, {}, "has a position that carries loss"),
        ([[1, 2]], {}, r"make pipeline\.Examples of arrays"),
    ],
)
def test_an_update_that_cannot_be_packed_is_refused(examples, options, sentence):
    with pytest.raises(UserError, match=sentence):
        pack(examples, **{"buckets": [Bucket(2, 8)], "max_segments": 4, **options})


def test_values_of_a_wrong_shape_are_refused():
    examples = make([5, 9, 3])
    (planned, batch), *_ = pack(examples, [Bucket(4, 16)], max_segments=4)
    values = batch["inputs"]
    both = {"nll": values, "z": values}
    for results, per, sentence in (
        ([values[:, :5]], "position", "shape .4, 5., and per='position' needs 16 pos"),
        ([values[:, 0]], "row", "hold up to"),
        ([values], "token", "per of values is 'token'; it must be one of position"),
        ([both], {"nll": "position"}, "per has nll, and the step returns nll, z"),
        ([both, values], "position", "result 1 has values, and the first one nll, z"),
        ([], "position", "results are empty"),
    ):
        with pytest.raises(ValueError, match=sentence):
            unpack([(planned, each) for each in results], examples, per=per)
    with pytest.raises(ValueError, match="results are for example 2, and there are 2"):
        unpack([(planned, values)], pipeline.Examples([[1, 2]] * 2), per="position")
