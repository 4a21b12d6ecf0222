"""`segment_offsets`: the columns where segments begin, on request, for attention kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import pipeline
from pipeline import Batches, Bucket, Examples, Feature, Pairs, Plan
from pipeline.corpus import INPUTS, TARGETS
from pipeline.loading.loader import Loader
from tests.meshes import mesh_of


def text(sizes, seed=0, **options):
    rng = np.random.default_rng(seed)
    return Examples([rng.integers(1, 99, size + 1) for size in sizes], **options)


def pictures():
    """Texts with pictures, some of them with none."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(2, 12, 60)
    columns = {
        "tokens": [rng.integers(1, 99, size) for size in sizes],
        "patches": [rng.integers(0, 9, rng.integers(0, 5)) for _ in sizes],
    }
    return Examples(columns, features={"patches": Feature("patches", dtype="int32")})


SIZES = np.random.default_rng(1).integers(0, 60, 120)
SHORT = np.random.default_rng(1).integers(1, 20, 60)
TWO = [Bucket(6, 24), Bucket(4, 40)]
CASES = {
    "packed in two buckets": (text(SIZES % 40), TWO, {}),
    "split": (text(SIZES * 3), TWO, {"overflow": "split"}),
    "filled": (text(SIZES), TWO, {"packing": "fill"}),
    "one in a row": (text(SIZES % 24), TWO, {"packing": "none"}),
    "nearly empty": (text([3, 5]), [Bucket(8, 40)], {}),
    "aligned": (text(SIZES % 40), TWO, {"align": 8}),
    "at most three": (text(SIZES % 9), TWO, {"max_segments": 3}),
    "pairs": (
        Pairs(text(SHORT, task=INPUTS), text(SHORT[::-1], 1, task=TARGETS)),
        [Bucket(6, (24, 32))],
        {},
    ),
    "sides": (pictures(), [Bucket(6, {"inputs": 32, "patches": 12})], {}),
}


def fields_of(examples):
    """The fields of offsets, each with that of segment ids."""
    return {f"{side}_segment_offsets": f"{side}_segment_ids" for side in examples.side_names}


def define(ids, most):
    """By the definition, one row and one segment after another; -1 where a segment is empty."""
    rows = []
    for row in ids:
        present = row.max(initial=0)
        end = int(np.flatnonzero(row)[-1]) + 1 if present else 0
        begins = [
            int(np.flatnonzero(row == s)[0]) if (row == s).any() else -1
            for s in range(1, present + 1)
        ]
        rows.append([*begins, *[end] * (most + 1 - present)])
    return np.array(rows)


@pytest.mark.parametrize("case", CASES)
def test_offsets_are_the_first_columns_of_segments_then_the_end(case):
    examples, buckets, options = CASES[case]
    plan, fields = Plan(examples, buckets, **options), fields_of(examples)
    batches = Batches(examples, plan, features=[*fields])
    most, used = plan.most_segments(), set()
    for step in range(len(batches)):
        bucket, batch = plan.batch(step).bucket, batches[step]
        used.add(bucket)
        for name, ids in fields.items():
            found = batch[name]
            assert found.dtype == np.int32
            width = max(most[bucket], options.get("max_segments", 1)) + 1
            assert found.shape == (bucket.rows, width)
            expected = define(batch[ids], width - 1)
            np.testing.assert_array_equal(np.where(expected < 0, -1, found), expected)
            assert (np.diff(found) >= 0).all()  # an empty segment begins where it would end
            assert (np.diff(found)[expected[:, :-1] < 0] == 0).all()
    assert used == set(plan.most_segments())


def test_batches_have_offsets_only_on_request_and_specs_know_them():
    examples, buckets, _ = CASES["packed in two buckets"]
    plan, name = Plan(examples, buckets), "inputs_segment_offsets"
    assert name not in Batches(examples, plan)[0]
    for bucket, fields in Batches(examples, plan, features=[name]).specs.items():
        shape = (bucket.rows, plan.most_segments()[bucket] + 1)
        assert (fields[name].shape, fields[name].dtype) == (shape, np.int32)


@pytest.mark.parametrize("axes", [{"data": 4}, {"data": 2, "context": 2}, {"context": 4}])
def test_devices_get_the_offsets_of_whole_rows(axes):
    examples, name = text(SIZES % 40), "inputs_segment_offsets"
    plan = Plan(examples, [Bucket(4, 40)])
    whole = Batches(examples, plan, features=[name])
    for order in ("contiguous", "striped"):
        batches = Batches(
            examples, plan, sharding=mesh_of(**axes), features=[name], context_order=order
        )
        with Loader(batches) as loader:
            found = next(loader)[name]
            (spec,) = (fields[name] for fields in loader.specs.values())
        np.testing.assert_array_equal(found, whole[0][name])
        assert found.sharding.spec == spec.sharding.spec
        rows = 4 // axes.get("data", 1)
        assert {shard.data.shape for shard in found.addressable_shards} == {(rows, found.shape[1])}


def test_each_process_has_the_offsets_of_its_rows():
    examples, name = text(SIZES % 40), "inputs_segment_offsets"
    plan = Plan(examples, [Bucket(4, 40)])
    whole = Batches(examples, plan, features=[name])[1][name]
    parts = [
        Batches(examples, plan, process_index=p, process_count=2, features=[name])[1][name]
        for p in range(2)
    ]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_offsets_of_a_side_that_is_not_there_or_a_feature_of_their_name_are_refused():
    examples = text([3, 4])
    plan = Plan(examples, [Bucket(2, 8)])
    with pytest.raises(ValueError, match="no feature 'targets_segment_offsets'"):
        Batches(examples, plan, features=["targets_segment_offsets"])
    columns = {"tokens": [[1, 2]], "patches_segment_offsets": [[3]], "patches": [[1]]}
    features = {"patches": Feature("patches"), "patches_segment_offsets": Feature("patches")}
    for unwanted in (columns, {**columns, "inputs_segment_offsets": [[1]]}):
        kinds = {name: features.get(name, Feature("example")) for name in unwanted}
        kinds.pop("tokens")
        with pytest.raises(ValueError, match="_segment_offsets'"):
            Examples(unwanted, features=kinds)


def test_a_loop_in_a_mesh_takes_offsets_as_it_takes_rows(tmp_path):
    corpus = pipeline.Corpus.from_arrays([np.arange(1, n) for n in range(3, 40)], tmp_path / "c")
    mesh = mesh_of(data=2)
    by_row = NamedSharding(mesh, PartitionSpec("data"))
    names = ["inputs_segment_offsets", "example_id"]
    with pipeline.load(corpus, buckets=[Bucket(4, 40)], sharding=mesh, features=names) as loader:
        lengths = jax.jit(lambda batch: jnp.diff(batch[names[0]]))
        for _ in range(3):
            batch = next(loader)
            assert batch[names[0]].sharding.is_equivalent_to(by_row, 2)
            np.testing.assert_array_equal(lengths(batch) > 0, batch["example_id"] >= 0)
