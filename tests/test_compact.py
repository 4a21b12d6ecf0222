import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import pipeline
from pipeline import Batches, Bucket, Plan


def assert_same(one, other):
    assert set(one) == set(other)
    for name in one:
        assert one[name].dtype == other[name].dtype
        np.testing.assert_array_equal(np.asarray(one[name]), np.asarray(other[name]), name)


@pytest.mark.parametrize("overflow", ["split", "truncate"])
@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_spread_inside_a_compiled_step_gives_the_same_batch(corpus, buckets, packing, overflow):
    plan = Plan(corpus, buckets, packing=packing, overflow=overflow)
    whole, compact = Batches(corpus, plan), Batches(corpus, plan, compact=True)
    step = jax.jit(pipeline.expand)
    for number in range(len(whole)):
        batch = compact[number]
        assert set(batch) == {"inputs", "targets", "segments"}
        assert_same(step(batch), whole[number])


def test_pairs_expand_to_the_same_batch_on_the_host_and_in_a_compiled_step(pairs):
    plan = Plan(pairs, [Bucket(8, (48, 32))], overflow="truncate")
    whole, compact = Batches(pairs, plan), Batches(pairs, plan, compact=True)
    step = jax.jit(pipeline.expand)
    tokens = {"inputs", "decoder_inputs", "targets"}
    for number in range(len(whole)):
        batch = compact[number]
        assert set(batch) == tokens | {"inputs_segments", "targets_segments"}
        assert_same(step(batch), whole[number])
        assert_same(pipeline.expand(batch), whole[number])
    assert all(isinstance(values, np.ndarray) for values in pipeline.expand(batch).values())


def test_shapes_are_those_of_the_bucket_whatever_the_batch(corpus, buckets):
    plan = Plan(corpus, buckets)
    compact = Batches(corpus, plan, compact=True)
    most = plan.most_segments()
    for number in range(len(compact)):
        bucket = plan.batch(number).bucket
        assert compact[number]["segments"].shape == (bucket.rows, most[bucket], 2)
    counts = [np.bincount(plan.batch(n).segments[:, 0]).max() for n in range(len(compact))]
    assert max(counts) == max(most.values())
    assert not compact.empty(buckets[0])["segments"].any()


@pytest.mark.parametrize("compact", [False, True])
def test_ranged_reads_build_the_same_batches_as_maps(corpus, buckets, compact):
    ranged = pipeline.Corpus.open(corpus.directory, memory_map=False)
    plan = Plan(corpus, buckets, packing="none")  # much padding, which must be 0
    mapped, read = (Batches(each, plan, compact=compact) for each in (corpus, ranged))
    for number in range(0, len(mapped), 3):
        assert_same(read[number], mapped[number])


def test_a_batch_that_is_not_compact_is_left_as_it_is(corpus, buckets):
    batch = Batches(corpus, Plan(corpus, buckets))[0]
    assert_same(pipeline.expand(batch), batch)


@pytest.mark.parametrize("process_count", [2, 4])
def test_processes_hold_the_boundaries_of_their_rows(corpus, buckets, process_count):
    plan = Plan(corpus, buckets)
    whole = Batches(corpus, plan, compact=True)
    parts = [
        Batches(corpus, plan, process_index=index, process_count=process_count, compact=True)
        for index in range(process_count)
    ]
    joined = {
        name: np.concatenate([part[2][name] for part in parts])
        for name in ("inputs", "targets", "segments")
    }
    assert_same(joined, whole[2])


@pytest.mark.parametrize(
    ("shape", "axes", "spec"),
    [
        ((4,), ("data",), PartitionSpec("data")),
        ((2, 2), ("data", "sequence"), PartitionSpec("data", "sequence")),
    ],
)
def test_the_loader_gives_compact_batches_under_any_mesh(corpus, buckets, shape, axes, spec):
    devices = np.array(jax.devices()).reshape(shape)
    mesh = Mesh(devices, axes, axis_types=(AxisType.Auto,) * len(axes))
    sharding = NamedSharding(mesh, spec)
    options = {"buckets": buckets, "mesh": mesh, "spec": spec, "num_epochs": 1}
    whole = Batches(corpus, Plan(corpus, buckets))
    compile_ = jax.jit(pipeline.expand, out_shardings=sharding)
    with pipeline.load(corpus, compact=True, **options) as loader:
        steps = {
            bucket.shape: compile_.lower(spec).compile() for bucket, spec in loader.specs.items()
        }
        for number, batch in enumerate(loader):
            assert_same(steps[batch["inputs"].shape](batch), whole[number])


@pytest.mark.parametrize("compact", [False, True])
def test_batches_have_the_same_fields_where_some_corpora_have_weights(tmp_path, compact):
    texts = [list(range(1, 9))] * 12
    plain = pipeline.Corpus.from_arrays(texts, tmp_path / "plain")
    weights = [[0.5] * 8] * 12
    weighted = pipeline.Corpus.from_arrays(texts, tmp_path / "weighted", weights=weights)
    joined = pipeline.Corpora({"plain": plain, "weighted": weighted})
    plan = Plan(joined, [Bucket(1, 7)])
    batches = Batches(joined, plan, compact=compact)
    assert {frozenset(batches[step]) for step in range(24)} == {
        frozenset(batches.empty(Bucket(1, 7)))
    }
    seen = [float(batches[step]["loss_weights"].mean()) for step in range(24)]
    assert sorted(seen) == [0.5] * 12 + [1] * 12


def test_a_batch_by_hand(tmp_path):
    corpus = pipeline.Corpus.from_arrays([[5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8]], tmp_path)
    plan = Plan(corpus, [Bucket(2, 5)], shuffle=False)
    batch = Batches(corpus, plan, compact=True)[0]
    assert sorted(batch["segments"].tolist()) == [[[2, 0], [2, 5]], [[5, 0], [0, 0]]]
    fields = pipeline.expand(batch)
    assert sorted(fields["inputs_positions"].tolist()) == [[0, 1, 2, 3, 4], [0, 1, 5, 6, 0]]
    assert sorted(fields["inputs_segment_ids"].tolist()) == [[1, 1, 1, 1, 1], [1, 1, 2, 2, 0]]
