"""Features in batches: the numbers of each segment, and their shapes and devices."""

import pickle

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import pipeline
from pipeline import Batches, Bucket, Corpora, Examples, Masked, Plan
from pipeline.corpus import INPUTS
from pipeline.corpus.tasks import CAUSAL
from pipeline.loading.sharding import CONTEXT_ORDERS, batch_sharding, column_order, field_specs
from pipeline.steps import microbatches
from tests.loading.definition import (
    require_same,
)
from tests.loading.drawn import FEATURES, Drawn
from tests.meshes import OneProcess, mesh_of


def draw(sizes, task=CAUSAL):
    """Examples of these sizes with all features."""
    drawn = Drawn(np.random.default_rng(0), task, tokens=sizes)
    drawn.add_features()
    return drawn


PAIR = Bucket(4, (20, 28))


def test_pairs_of_spans_have_the_features_of_the_examples_they_are_cut_from():
    drawn = draw([40] * 20, INPUTS)
    spans = pipeline.SpanCorruption(drawn.examples(vocab_size=90), max_length=15, end_id=2)
    assert {*spans.features} == {"reward", "group"}
    plan = Plan(spans, [PAIR])
    batches = Batches(spans, plan, features=["reward", "example_id"])
    for step in range(len(batches)):
        number, reward = batches[step]["example_id"], batches[step]["reward"]
        assert (number >= 0).sum() == len(plan.batch(step).segments)
        whole = np.where(
            number < 0, 0, np.array(drawn.columns["reward"])[spans.examples_of(number)]
        )
        np.testing.assert_array_equal(reward, whole)


def test_numbers_of_examples_are_those_before_a_split():
    """Also of corpora that are joined before or after, and of pieces in views."""
    one, other = (draw([5] * size, INPUTS).examples(vocab_size=90) for size in (30, 50))
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
    return draw(sizes).examples()


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
