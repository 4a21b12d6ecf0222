import collections
import itertools
import pickle
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import Bucket, Plan, fit_buckets
from pipeline.planning import fit
from pipeline.planning import lengths as lengths_lib
from pipeline.planning.fit import SURE, WORTH, WORTH_UNPACKED, typical_lengths
from pipeline.planning.members import Members
from pipeline.planning.packing import row_cost
from tests.planning.corpora import lognormal

LENGTHS = lognormal(20_000, 4.2, 0.9, least=3, most=512)


def draw(seed):
    """Lengths, and options of `fit_buckets`, drawn by a seed; and those that `Plan` takes too."""
    rng = np.random.default_rng(seed)
    longest, count = int(rng.choice([60, 200, 512])), int(rng.choice([60, 400, 3000]))
    kinds = [
        rng.lognormal(np.log(longest) * 0.7, rng.uniform(0.3, 1.2), count),
        np.where(
            rng.random(count) < rng.uniform(0.3, 0.97),
            rng.normal(longest * 0.15, longest * 0.04, count),
            rng.normal(longest * 0.8, longest * 0.1, count),
        ),
        rng.choice(rng.integers(1, longest, int(rng.integers(1, 5))), count),
        np.where(rng.random(count) < 0.45, longest, rng.integers(longest * 0.4, longest, count)),
        longest - rng.exponential(longest * 0.1, count),
        np.repeat([longest * 0.51, longest * 0.34, longest], [count, count // 3 + 1, 1]),
    ]
    lengths = np.clip(kinds[seed % len(kinds)], 1, longest).astype(int)
    packing = str(rng.choice(["best_fit", "best_fit", "best_fit", "none"]))
    shared = {"packing": packing}
    multiple = -(-longest // int(rng.integers(6, 11)))
    if rng.random() < 0.3:
        shared["align"], multiple = 8, -(-multiple // 8) * 8
    if packing != "none" and rng.random() < 0.3:
        shared["max_segments"] = int(rng.integers(1, 6))
    if rng.random() < 0.3:
        shared["overflow"] = str(rng.choice(["drop", "truncate"]))
    if rng.random() < 0.3:
        lengths = np.append(lengths, longest * 3)
        shared["exclude"] = [len(lengths) - 1]
    options = {
        "tokens_per_batch": int(rng.choice([4, 12])) * longest * 2,
        "length_multiple": multiple,
        "attention": str(rng.choice(["dense", "segment"])),
        "width": int(rng.choice([32, 128, 1024])),
        "max_length": int(longest * rng.choice([0.6, 0.9, 1.5])) if rng.random() < 0.7 else None,
    }
    return lengths, options, shared


@pytest.mark.parametrize(
    "seeds", [range(4), *(pytest.param(range(n, n + 12), marks=pytest.mark.slow) for n in (4, 40))]
)
def test_buckets_are_as_good_as_the_best_of_all_sets_of_as_many_each_set_planned(seeds):
    for seed in seeds:
        lengths, options, shared = draw(seed)
        tokens, multiple = options["tokens_per_batch"], options["length_multiple"]
        dense = options["attention"] == "dense" and shared["packing"] != "none"

        def cost(buckets, of_attention=1.0):
            """The cost of a plan; infinite if it does not use all buckets."""
            counts = Plan(lengths, buckets, **shared).batches_per_bucket  # noqa: B023
            if not all(counts.get(bucket) for bucket in buckets):
                return np.inf
            return sum(
                count * bucket.rows * bucket.length
                * (1 + dense * of_attention * bucket.length / (6 * options["width"]))  # noqa: B023
                for bucket, count in counts.items()
            )  # fmt: skip

        top = tokens if options["max_length"] is None else options["max_length"]
        top = -(-top // multiple) * multiple
        there = np.delete(lengths, shared.get("exclude", []))
        if shared.get("overflow") == "drop":
            there = there[there <= top]
        longest = min(-(-int(there.max()) // multiple) * multiple, top)
        grid = range(multiple, min(top, 2 * longest) + 1, multiple)[:12]
        best = {}
        for count in (1, 2, 3):
            sets = [
                [Bucket(tokens // length, length) for length in each]
                for each in itertools.combinations(grid, count)
                if each[-1] >= longest
            ]
            if sets:
                best[count] = min(sets, key=cost)
        chosen = fit_buckets(lengths, **options, **shared, max_buckets=3)
        assert cost(chosen) <= 1.02 * cost(best[len(chosen)]), seed
        # A further bucket must save 1% of the positions and a third of the attention.
        worth = WORTH_UNPACKED if shared["packing"] == "none" else WORTH
        for count, buckets in best.items():
            further = count - len(chosen)
            if further and cost(buckets) < np.inf:
                ours, other = cost(chosen, SURE), cost(buckets, SURE)
                assert ours * (1 - worth * further) <= 1.02 * other, seed


def test_an_excluded_example_does_not_decide_the_longest_bucket():
    lengths = np.append(LENGTHS, 9000)
    options = {"tokens_per_batch": 16_384, "max_buckets": 3}
    few = fit_buckets(lengths, **options, exclude=lambda lengths: lengths > 512)
    assert few == fit_buckets(LENGTHS, **options)
    both = {"a": LENGTHS, "b": lengths}
    options |= {"weights": {"a": 1, "b": 1}}
    assert fit_buckets(both, **options, exclude=[2 * len(LENGTHS)])[-1].length == 512


@pytest.mark.parametrize(
    ("sizes", "packing", "multiple"),
    [((3, 60), "none", 16), ((3, 60), "best_fit", 128), ((3, 2048), "best_fit", 128)],
)
def test_lengths_are_multiples_of_less_than_128_where_that_saves_padding(sizes, packing, multiple):
    lengths = np.random.default_rng(0).integers(*sizes, 5000)
    options = {"tokens_per_batch": 8192, "max_buckets": 3, "packing": packing}
    found = fit_buckets(lengths, **options, length_multiple=None)
    assert found == fit_buckets(lengths, **options, length_multiple=multiple)
    tight = {"tokens_per_batch": 100, "max_buckets": 1, "length_multiple": None}
    assert fit_buckets([40, 40], **tight) == (Bucket(1, 80),)


@pytest.mark.parametrize(
    ("lengths", "max_length", "last"),
    [
        ([5, 9, 4000], 200, Bucket(20, 200)),
        ([[500, 30], [20, 400], [20, 20]], (64, 48), Bucket(36, (64, 48))),
        ([[20, 30], [0, 0]], (64, 48), Bucket(73, (24, 32))),  # one has nothing to train on
        ([[3, 5], [5, 0]], None, Bucket(256, (8, 8))),
    ],
)
def test_max_length_bounds_the_longest_bucket(lengths, max_length, last):
    options = {"tokens_per_batch": 4096, "max_buckets": 3, "length_multiple": 8}
    assert fit_buckets(lengths, **options, max_length=max_length, packing="none")[-1] == last


@pytest.mark.parametrize(("by", "due"), [("tokens", 100), ("examples", 1)])
def test_several_corpora_have_the_shares_of_examples_that_batches_of_them_have(by, due):
    given = {"short": [2] * 60, "long": [200] * 40, "never": [999]}
    phases = [(0, {"short": 3, "long": 1, "never": 0}), (9, {"short": 1, "long": 3, "never": 0})]
    counts = np.bincount(typical_lengths(Members.of_several(given), phases, by)[:, 0])
    assert counts[2] / counts[200] == pytest.approx(due, rel=0.01)
    assert len(counts) == 201  # none of the corpus that no batch has


def test_typical_lengths_are_those_of_a_whole_corpus(monkeypatch):
    monkeypatch.setattr(fit, "TYPICAL", 10)
    members = Members.of_several({"a": [1] * 50 + [9] * 50})
    found = typical_lengths(members, {"a": 1}, "tokens")
    assert np.bincount(found[:, 0])[1] == 5


def test_one_huge_example_costs_no_memory():
    lengths = np.append(np.arange(100, 300).repeat(9), 1 << 31).astype(np.uint32)
    options = {"tokens_per_batch": 8192, "max_buckets": 2, "max_length": 512}
    tracemalloc.start()
    try:
        buckets = fit_buckets(lengths, **options)
        assert tracemalloc.get_traced_memory()[1] < 1 << 26
    finally:
        tracemalloc.stop()
    # 2**31 positions are 2**22 pieces of 512.
    assert buckets == fit_buckets(np.append(lengths[:-1], [512] * (1 << 22)), **options)


@given(st.lists(st.integers(0, 20) | st.integers(1 << 20, (1 << 32) - 1), max_size=30))
def test_a_histogram_counts_each_length(lengths):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lengths_lib, "CHUNK", 4)
        sizes, counts = lengths_lib.histogram(np.array(lengths, np.uint32))
    assert dict(zip(sizes.tolist(), counts.tolist(), strict=True)) == collections.Counter(lengths)
    assert sizes.tolist() == sorted(set(lengths))


def test_two_kinds_of_pairs_get_a_bucket_each_and_not_a_grid():
    rng = np.random.default_rng(0)
    long, short = rng.integers(200, 256, 3000), rng.integers(20, 32, 3000)
    pairs = np.concatenate([np.stack([long, short], 1), np.stack([short, long], 1)])
    options = {"tokens_per_batch": 4096, "max_buckets": 3, "length_multiple": 16}
    buckets = fit_buckets(pairs, **options, packing="none")
    assert [bucket.length for bucket in buckets] == [(32, 256), (256, 32), (256, 256)]
    plan = Plan(pairs, buckets, packing="none", overflow="drop")
    assert plan.batches_per_bucket[buckets[-1]] <= 1


@pytest.mark.parametrize("packing", ["none", "best_fit"])
@pytest.mark.parametrize("attention", ["dense", "segment"])
def test_two_buckets_are_nearly_as_cheap_as_the_best_two_of_a_grid(packing, attention):
    rng, sigma = np.random.default_rng(0), {"none": 0.7, "best_fit": 0.8}[packing]
    sides = [
        np.clip(rng.lognormal(mean, sigma, 600), 1, most).astype(int)
        for mean, most in ((3.5, 128), (3, 64))
    ]
    pairs = np.stack(sides, axis=1)

    def cost(buckets):
        plan = Plan(pairs, buckets, packing=packing)
        dense = attention == "dense" and packing != "none"
        kind = {"attention": "dense" if dense else "segment", "width": 64}
        batches = plan.batches_per_bucket
        return sum(n * b.rows * row_cost(*b.lengths, **kind) for b, n in batches.items())

    options = {"tokens_per_batch": 1024, "max_buckets": 2, "length_multiple": 32, "row_multiple": 2}
    chosen = fit_buckets(pairs, **options, packing=packing, attention=attention, width=64)
    assert all(each.positions <= 1024 and each.rows % 2 == 0 for each in chosen)
    shapes = [*itertools.product((32, 64, 96, 128), (32, 64))]
    every = [Bucket(1024 // sum(shape) // 2 * 2, shape) for shape in shapes]
    sets = [(every[-1],)] if len(chosen) == 1 else [(each, every[-1]) for each in every[:-1]]
    assert cost(chosen) <= 1.02 * min(map(cost, sets))


@pytest.mark.parametrize(
    ("rows", "said"), [(8, "6,144 positions of tokens_per_batch=8,192"), (1, "")]
)
def test_a_budget_that_batches_leave_unused_is_said_with_one_that_they_use(rows, said, caplog):
    options = {"max_buckets": 1, "row_multiple": rows}
    fit_buckets([700] * 100, tokens_per_batch=8192, **options)
    assert said in caplog.text
    assert bool(said) == ("tokens_per_batch=12,288 has room" in caplog.text)
    caplog.clear()
    fit_buckets([700] * 100, tokens_per_batch=12_288, **options)
    assert not caplog.text


def test_rows_of_pairs_may_be_as_long_as_allowed():
    rng = np.random.default_rng(0)
    inputs = np.clip(rng.lognormal(np.log(19), 0.32, 3000), 4, 60).astype(int)
    targets = np.clip(inputs * 0.88 * rng.lognormal(0, 0.18, 3000), 3, 60).astype(int)
    options = {"tokens_per_batch": 8192, "max_buckets": 1, "length_multiple": 16}
    pairs = np.stack([inputs, targets], axis=1)
    shapes = [None, (112, 96), (160, 144)]
    plans = [Plan(pairs, fit_buckets(pairs, **options, max_length=shape)) for shape in shapes]
    free, *limited = (
        sum(n * b.rows * plan.options.price(b) for b, n in plan.batches_per_bucket.items())
        for plan in plans
    )
    assert max(limited) <= 1.02 * free


def test_a_plan_has_the_model_that_its_buckets_were_fitted_for():
    lengths = np.repeat([38, 925], [20_000, 88])
    options = {"tokens_per_batch": 1024, "max_buckets": 2, "max_length": 512}
    buckets = fit_buckets(lengths, **options, width=128, attention="segment")
    plan = Plan(lengths, buckets)
    assert (plan.options.attention, plan.options.width) == ("segment", 128)
    same = Plan(lengths, [*buckets], attention="segment", width=128)
    assert plan.fingerprint == same.fingerprint == pickle.loads(pickle.dumps(plan)).fingerprint
    assert Plan(lengths, pickle.loads(pickle.dumps(buckets))).fingerprint == plan.fingerprint
    assert Plan(lengths, buckets, width=7).options.width == 7
    assert Plan(lengths, [*buckets]).options.width == 1024
    assert plan.after(3, seed=1).options.attention == "segment"
    assert Plan(lengths, [*buckets]).after(3, buckets=buckets).options.width == 128
