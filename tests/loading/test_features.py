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
from tests.loading.definition import join, require_same
from tests.meshes import OneProcess, mesh_of

FEATURES = {
    "seen": Feature("inputs", dtype=bool, fill=True),
    "experts": Feature("inputs", dtype="int8", shape=(2, 3), fill=-3),
    "logprob": Feature("targets", dtype="float32", fill=0.5),
    "halves": Feature("targets", dtype="bfloat16", shape=2, fill=7),
    "reward": Feature("example", dtype="float32", fill=-1),
    "group": Feature("example", dtype="uint32", shape=(2,), fill=9),
}
EXAMPLE_ID = Feature("example", dtype=np.int32)


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
    """A corpus, and for each feature the value of each example, shifted like its fields."""
    task = INPUTS if kind == "masked" else CAUSAL

    def make(seed, leave_out=()):
        columns = columns_of(sizes, seed, task, leave_out)
        values = {name: column for name, column in columns.items() if name != "tokens"}
        for name in values:
            if FEATURES[name].of == "targets":
                values[name] = [each[1:] for each in values[name]]
        return examples_of(columns, task), values

    corpus, values = make(0)
    if kind == "masked":
        return Masked(corpus, mask_id=90), values
    if kind == "split":
        corpus = corpus.split(0.5)[1]
        values = {name: [all_[n] for n in corpus.numbers] for name, all_ in values.items()}
        return corpus, values | {"example_id": corpus.numbers}
    if kind == "corpora":
        lacking = ("seen", "experts", "reward", "halves")
        other, more = make(1, lacking)
        for name in lacking:
            more[name] = [np.full_like(each, FEATURES[name].fill) for each in values[name]]
        corpus = Corpora({"first": corpus, "second": other})
        values = {name: [*values[name], *more[name]] for name in values}
    return corpus, values


def slow_features(features, values, planned, room):
    """The features of a batch built one segment at a time, from the definition."""
    rows, length = planned.bucket.shape
    values, batch = {"example_id": range(1000), **values}, {}
    for name, feature in features.items():
        shape = rows, room if feature.per_example else length, *feature.shape
        batch[name] = np.full(shape, -1 if name == "example_id" else 0, feature.dtype)
    column, segment = np.zeros((2, rows), int)
    for row, example, start, size in planned.segments.tolist():
        for name, feature in features.items():
            if feature.per_example:
                batch[name][row, segment[row]] = values[name][example]
            else:
                places = slice(column[row], column[row] + size)
                batch[name][row, places] = values[name][example][start : start + size]
        segment[row] += 1
        column[row] += size
    return batch


def require_features(batch, expected):
    """A batch has these features, beside other fields."""
    require_same({name: batch[name] for name in expected}, expected)


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
    corpus, values = corpus_of(kind, sizes)
    plan = Plan(corpus, buckets, **options)
    known = {**corpus.features, "example_id": EXAMPLE_ID}
    if names is not None:
        names = [name for name in names if name in known]
    features = {name: known[name] for name in (corpus.features if names is None else names)}

    def make(names=names, **part):
        return Batches(corpus, plan, positions=positions, features=names, **part).repeat()

    def slow(planned):
        room = options["max_segments"] or plan.most_segments()[planned.bucket]
        return slow_features(features, values, planned, room)

    plain, every = make(()), make()
    assert every.features == features
    assert str(every) == str(plain)
    halves = [make(process_index=at, process_count=2) for at in (0, 1)]
    for step in range(0, plan.first_step(2), 3):
        require_same(every[step], plain[step] | slow(plan.batch(step)))
        require_same(join([half[step] for half in halves]), every[step])
    for bucket in buckets:
        nothing = pipeline.PlannedBatch(bucket, np.zeros((0, 4), np.int64))
        require_features(every.empty(bucket), slow(nothing))


# ---- pairs


PAIR = Bucket(4, (20, 28))


def test_pairs_have_features_of_both_sides_and_of_each_example_once(tmp_path):
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 12, (2, 40))
    inputs = columns_of(sizes[0], 0, INPUTS, leave_out=["reward", "group"])
    targets = columns_of(sizes[1] + 1, 1, TARGETS, leave_out=["experts", "seen", "logprob"])
    features = {name: each for name, each in FEATURES.items() if name in inputs | targets}
    both = pipeline.Pairs.from_arrays(inputs, targets, tmp_path / "pairs", features=features)
    plan = Plan(both, [PAIR])
    batches = Batches(both, plan, features=["example_id", *features])
    values = inputs | targets | {"halves": [each[1:] for each in targets["halves"]]}
    room = plan.most_segments()[PAIR]
    for step in range(len(batches)):
        for side, of_side in zip(plan.batch(step).sides, (inputs, targets), strict=True):
            known = {name: features[name] for name in of_side if name != "tokens"}
            known["example_id"] = EXAMPLE_ID
            require_features(batches[step], slow_features(known, values, side, room))


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
        require_features(renamed, {name: batches[0][name] for name in NAMES})


def test_a_plan_that_changes_has_one_shape_before_and_after(corpus):
    plan = Plan(corpus, [SQUARE], max_segments=2).after(2, max_segments=5)
    batches = Batches(corpus, plan, features=["example_id"]).repeat()
    assert {batches[step]["example_id"].shape for step in range(6)} == {(4, 5)}
    assert max((batches[step]["example_id"] >= 0).sum(axis=1).max() for step in range(2)) <= 2
