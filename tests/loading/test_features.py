"""Features in batches: the numbers of each segment, and their shapes and devices."""

import pickle

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import pipeline
from pipeline import Batches, Bucket, Corpora, Examples, Feature, Masked, Plan
from pipeline.corpus import INPUTS
from pipeline.corpus.tasks import CAUSAL, TARGETS
from pipeline.loading.sharding import CONTEXT_ORDERS, batch_sharding, column_order, field_specs
from pipeline.steps import microbatches
from tests.loading.definition import (
    define_batch,
    define_fields,
    define_numbers,
    join,
    require_defined,
    require_same,
)
from tests.meshes import OneProcess, mesh_of

FEATURES = {
    "seen": Feature("inputs", dtype=bool, fill=True),
    "experts": Feature("inputs", dtype="int8", shape=(2, 3), fill=-3),
    "logprob": Feature("targets", dtype="float32", fill=0.5),
    "halves": Feature("targets", dtype="bfloat16", shape=2, fill=7),
    "reward": Feature("example", dtype="float32", fill=-1),
    "group": Feature("example", dtype="uint32", shape=(2,), fill=9),
}


def columns_of(sizes, seed=0, task=CAUSAL, leave_out=()):
    """Tokens of examples of these sizes, and random values for each of their features."""
    rng = np.random.default_rng(seed)
    columns = {"tokens": [rng.integers(1, 90, size) for size in sizes]}
    for name, feature in FEATURES.items():
        if name not in leave_out and (feature.of != "targets" or task.has_targets):
            low = 0 if feature.dtype.kind in "bu" else -90
            shapes = [feature.shape if feature.per_example else (n, *feature.shape) for n in sizes]
            columns[name] = [rng.integers(low, 90, shape).astype(feature.dtype) for shape in shapes]
    return columns


def examples_of(columns, task=CAUSAL):
    features = {name: FEATURES[name] for name in columns if name != "tokens"}
    return Examples(columns, features=features, vocab_size=90, task=task)


def corpus_of(kind, sizes):
    """A corpus, and the columns that all its examples have; of a masked one without its tokens."""
    task = INPUTS if kind == "masked" else CAUSAL
    columns = columns_of(sizes, task=task)
    corpus = examples_of(columns, task)
    if kind == "masked":
        del columns["tokens"]
        return Masked(corpus, mask_id=90), columns
    if kind == "split":
        corpus = corpus.split(0.5)[1]
        columns = {name: [all_[n] for n in corpus.numbers] for name, all_ in columns.items()}
    if kind == "corpora":
        lacking = ("seen", "experts", "reward", "halves")
        more = columns_of(sizes, 1, leave_out=lacking)
        corpus = Corpora({"first": corpus, "second": examples_of(more)})
        more |= {
            name: [np.full_like(each, FEATURES[name].fill) for each in columns[name]]
            for name in lacking
        }
        columns = {name: [*columns[name], *more[name]] for name in columns}
    return corpus, columns


@st.composite
def cases(draw):
    kind = draw(st.sampled_from(["plain", "masked", "split", "corpora"]))
    sizes = draw(st.lists(st.integers(0, 30), min_size=20, max_size=30))
    sizes[:10] = [5] * 10  # so that something is held out, and in rows of several
    options = {
        "packing": draw(st.sampled_from(["best_fit", "none"])),
        "overflow": draw(st.sampled_from(["split", "truncate", "drop"])),
        "max_segments": draw(st.sampled_from([None, 2, 8])),
        "seed": draw(st.integers(0, 9)),
    }
    if kind == "corpora" and draw(st.booleans()):
        options["weights"] = {"first": 1, "second": 2}
    every = st.permutations([*FEATURES, "example_id"])
    names = draw(st.none() | st.tuples(every, st.integers(0, 7)).map(lambda x: x[0][: x[1]]))
    buckets = draw(st.sampled_from([[(4, 24)], [(4, 8), (2, 16)], [(6, 6)]]))
    return kind, sizes, [Bucket(*each) for each in buckets], options, names


@given(cases(), st.sampled_from(["continue", "restart"]))
@settings(max_examples=40)
def test_every_segment_has_the_features_of_its_example(case, positions):
    kind, sizes, buckets, options, names = case
    corpus, columns = corpus_of(kind, sizes)
    plan = Plan(corpus, buckets, **options)
    task = "inputs" if kind == "masked" else "causal"
    fields = define_fields(columns, corpus.features, task)
    fields |= define_numbers(corpus.numbers if kind == "split" else range(len(corpus)))
    if names is not None:
        names = [name for name in names if name in fields]
    chosen = [*corpus.features] if names is None else names
    left_out = {*corpus.features, "example_id"}.difference(chosen)
    fields = {name: field for name, field in fields.items() if name not in left_out}

    def make(names=names, **part):
        return Batches(corpus, plan, positions=positions, features=names, **part).repeat()

    def defined(planned):
        room = options["max_segments"] or plan.most_segments()[planned.bucket]
        return define_batch(fields, planned, positions=positions, example=room)

    plain, every = make(()), make()
    assert list(every.features) == chosen
    assert str(every) == str(plain)
    halves = [make(process_index=at, process_count=2) for at in (0, 1)]
    for step in range(0, plan.first_step(2), 3):
        assert list(every[step]) == [*plain[step], *chosen]
        require_defined(every[step], {**plain[step], **defined(plan.batch(step))})
        require_same(join([half[step] for half in halves]), every[step])
    for bucket in buckets:
        nothing = defined(pipeline.PlannedBatch(bucket, np.zeros((0, 4), np.int64)))
        require_defined(every.empty(bucket), {**plain.empty(bucket), **nothing})


# ---- pairs


PAIR = Bucket(4, (20, 28))


def test_pairs_have_features_of_both_sides_and_of_each_example_once(tmp_path):
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 12, (2, 40))
    inputs = columns_of(sizes[0], 0, INPUTS, leave_out=["reward", "group"])
    targets = columns_of(sizes[1] + 1, 1, TARGETS, leave_out=["experts", "seen", "logprob"])
    features = {name: each for name, each in FEATURES.items() if name in inputs | targets}
    both = pipeline.Pairs.from_arrays(inputs, targets, tmp_path / "pairs", features=features)
    fields = define_numbers(range(40))
    for columns, task in ((inputs, "inputs"), (targets, "targets")):
        own = {name: feature for name, feature in features.items() if name in columns}
        fields |= define_fields(columns, own, task)
    plan = Plan(both, [PAIR])
    batches = Batches(both, plan, features=["example_id", *features])
    room = plan.most_segments()[PAIR]
    for step in range(len(batches)):
        expected = define_batch(fields, plan.batch(step), example=room)
        require_defined(batches[step], expected)


def test_pairs_of_spans_have_the_features_of_the_examples_they_are_cut_from():
    columns = columns_of([40] * 20, task=INPUTS)
    spans = pipeline.SpanCorruption(examples_of(columns, INPUTS), max_length=15, end_id=2)
    assert {*spans.features} == {"reward", "group"}
    plan = Plan(spans, [PAIR])
    batches = Batches(spans, plan, features=["reward", "example_id"])
    for step in range(len(batches)):
        number, reward = batches[step]["example_id"], batches[step]["reward"]
        assert (number >= 0).sum() == len(plan.batch(step).segments)
        whole = np.where(number < 0, 0, np.array(columns["reward"])[spans.examples_of(number)])
        np.testing.assert_array_equal(reward, whole)


def test_numbers_of_examples_are_those_before_a_split():
    """Also of corpora that are joined before or after, and of pieces in views."""
    one, other = (examples_of(columns_of([5] * size, task=INPUTS), INPUTS) for size in (30, 50))
    both = Corpora({"one": one, "other": other})
    joined = {number for part in both.split(0.5) for number in numbers_in(part)}
    assert joined == {*range(80)}
    for held_out in (other.split(0.5)[1], Masked(other, mask_id=90).split(0.5)[1]):
        assert numbers_in(held_out) == {*held_out.numbers.tolist()}
        assert numbers_in(Masked(other.split(0.5)[1], mask_id=90)) == numbers_in(held_out)
    mixed = Corpora({"masked": Masked(one, mask_id=90), "held": held_out})
    assert numbers_in(mixed) == {*range(30), *(30 + held_out.numbers).tolist()}


def numbers_in(corpus):
    """All numbers of an epoch of batches."""
    batches = Batches(corpus, Plan(corpus, [Bucket(4, 16)]), features=["example_id"])
    found = np.concatenate([batches[step]["example_id"].ravel() for step in range(len(batches))])
    return {*found[found >= 0].tolist()}


# ---- devices


@pytest.fixture(scope="module")
def corpus():
    sizes = np.random.default_rng(3).integers(0, 30, 60)
    return examples_of(columns_of(sizes))


# A row has as many columns of segments as positions, so no shape tells them apart.
SQUARE = Bucket(4, 16)


@pytest.fixture(scope="module")
def plan(corpus):
    return Plan(corpus, [SQUARE], max_segments=16)


NAMES = [*FEATURES, "example_id"]


def divide(batch, columns):
    """Some columns of a batch, with all segments of its rows."""
    by_row = "reward", "group", "example_id"
    return {name: each if name in by_row else each[:, columns] for name, each in batch.items()}


@pytest.mark.parametrize("order", CONTEXT_ORDERS)
def test_columns_are_divided_like_positions_and_segments_like_rows(corpus, plan, order):
    whole = Batches(corpus, plan, features=NAMES)
    sharding = batch_sharding(mesh_of(data=2, context=2))
    by_row = NamedSharding(sharding.mesh, PartitionSpec(("data",)))
    batches = Batches(corpus, plan, sharding=sharding, context_order=order, features=NAMES)
    columns = column_order(order, 16, 2)
    with pipeline.Loader(batches) as loader:
        for step, batch in enumerate(loader):
            require_same(batch, divide(whole[step], columns))
            assert list(batch) == list(loader.specs[SQUARE])
            for name, array in batch.items():
                per_example = name in batches.features and batches.features[name].per_example
                spec = loader.specs[SQUARE][name]
                assert (array.shape, array.dtype) == (spec.shape, spec.dtype)
                for placed in (by_row if per_example else sharding, spec.sharding):
                    assert array.sharding.is_equivalent_to(placed, array.ndim), name
        assert step > 3
    # A part of the length has its columns, and all segments of its rows.
    third = OneProcess(batch_sharding(mesh_of(data=1, context=4)), [2])
    part = Batches(corpus, plan, sharding=third, context_order=order, features=NAMES)
    columns = column_order(order, 16, 4)[8:12]
    for step in range(len(part)):
        require_same(part[step], divide(whole[step], columns))
        specs = field_specs(part[step], third, SQUARE, part.features)
        shapes = {name: values.shape for name, values in whole[step].items()}
        assert {name: spec.shape for name, spec in specs.items()} == shapes


def test_microbatches_are_divided_like_their_batch(corpus, plan):
    sharding = batch_sharding(mesh_of(data=2, context=2))
    batches = Batches(corpus, plan, sharding=sharding, features=NAMES)
    whole = pipeline.to_global(batches[0], sharding, features=batches.features)
    parts = jax.jit(lambda batch: microbatches.split(batch, 2, sharding))(whole)
    for name, array in parts.items():
        assert array.sharding.spec == PartitionSpec(None, *whole[name].sharding.spec), name
        np.testing.assert_array_equal(
            array.reshape(whole[name].shape), np.asarray(whole[name])[[0, 2, 1, 3]]
        )


# ---- options


def test_only_the_features_that_are_asked_for_are_read(corpus, plan, monkeypatch):
    read = []

    def note(method):
        return lambda self, *given: read.extend(given[-1]) or method(self, *given)

    for name in ("_read", "_read_examples"):
        monkeypatch.setattr(Examples, name, note(getattr(Examples, name)))
    for names in ((), ["example_id"], ["reward", "logprob"], None):
        read.clear()
        Batches(corpus, plan, features=names)[0]
        assert sorted(read) == sorted(FEATURES if names is None else {*names} - {"example_id"})


def test_features_are_no_part_of_a_state(corpus, plan):
    every, none = (Batches(corpus, plan, features=names).repeat(2) for names in (NAMES, ()))
    assert none.origin.resume(every.origin.state(3)) == 3
    there = pickle.loads(pickle.dumps(every))
    planned, batch = there.with_plans()[plan.num_batches()]
    assert planned.epoch == 1
    require_same(batch, every[plan.num_batches()])


def test_renamed_batches_keep_features_under_their_names(corpus):
    plan = Plan(corpus, [Bucket(4, 32)], packing="none", overflow="drop")
    batches, plain = (Batches(corpus, plan, features=names) for names in (NAMES, ()))
    for convention in ("maxtext", "tunix", "huggingface"):
        renamed = pipeline.rename(batches[0], convention)
        assert list(renamed) == [*pipeline.rename(plain[0], convention), *NAMES]
        require_same(*({name: each[name] for name in NAMES} for each in (renamed, batches[0])))


def test_a_plan_that_changes_has_one_shape_before_and_after(corpus):
    plan = Plan(corpus, [SQUARE], max_segments=2).after(2, max_segments=5)
    batches = Batches(corpus, plan, features=["example_id"]).repeat()
    assert {batches[step]["example_id"].shape for step in range(6)} == {(4, 5)}
    assert max((batches[step]["example_id"] >= 0).sum(axis=1).max() for step in range(2)) <= 2
