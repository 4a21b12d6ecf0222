"""What columns of a row have to do with one another, from the definition."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline
from pipeline import Batches, Bucket, Examples, Plan, attention_mask
from pipeline.fields import cu_seqlens, segment_starts, targets_ahead
from pipeline.loading.loader import Loader
from pipeline.loading.sharding import batch_sharding, column_order
from pipeline.steps import segment_last, segment_mean
from tests.loading.definition import define_segments
from tests.meshes import OneProcess, mesh_of


@settings(max_examples=25)
@given(
    st.lists(st.integers(2, 20), min_size=1, max_size=12),
    st.sampled_from([(1, "best_fit"), (1, "fill"), (4, "best_fit")]),
    st.integers(1, 9),
    st.booleans(),
    st.sampled_from([(), (3,), (2, 3)]),
)
def test_columns_know_their_own_segment_alone(sizes, rows, ahead, weighted, shape):
    (align, packing), rng = rows, np.random.default_rng(len(sizes))
    columns = {"tokens": [rng.integers(1, 99, size) for size in sizes]}
    weights = [rng.integers(1, 4, size) / 2 if weighted else np.ones(size) for size in sizes]
    corpus = Examples(columns | ({"weights": weights} if weighted else {}))
    plan = Plan(corpus, [Bucket(2, 8)], align=align, packing=packing)
    for planned, batch in Batches(corpus, plan).with_plans():
        values = rng.normal(size=(2, 8, *shape)).astype(np.float32)
        values[batch["inputs_segment_ids"] == 0] = np.nan  # padding counts for nothing
        starts, later = np.zeros((2, 8), bool), np.zeros((2, 2, 8))
        means, last = np.zeros((2, 2, 8, *shape), np.float32)
        mask = np.eye(8, dtype=bool)[None].repeat(2, axis=0)
        for row, example, start, places in define_segments(planned, align):
            (begin, size), (number, _) = places["inputs"], places["example"]
            here = slice(begin, begin + size)
            starts[row, begin] = True
            for of_tokens, each in zip(later, (columns["tokens"], weights), strict=True):
                targets = each[example][start + 1 : start + size + 1]
                of_tokens[row, begin : begin + max(size - ahead, 0)] = targets[ahead:]
            means[row, number] = values[row, here].mean(axis=0)
            last[row, number] = values[row, here][-1]
            mask[row, here, here] = True
        np.testing.assert_array_equal(segment_starts(batch), starts)
        found = targets_ahead(batch, ahead)
        np.testing.assert_array_equal(found, later)
        assert [each.dtype for each in found] == [np.int32, np.float32]
        np.testing.assert_allclose(segment_mean(values, batch, 8), means, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(segment_last(values, batch, 8), last)
        np.testing.assert_array_equal(attention_mask(batch), np.tril(mask))
        alone = {"inputs_segment_ids": batch["inputs_segment_ids"]}
        for fields in (batch, alone):
            np.testing.assert_array_equal(attention_mask(fields, causal=False), mask)


@pytest.mark.parametrize("order", ["zigzag", "striped"])
def test_columns_in_another_order_know_their_neighbours_or_are_refused(corpus, order):
    sharding = batch_sharding(mesh_of(data=2, context=2))
    plan = Plan(corpus, [Bucket(8, 64)])
    options = {"sharding": sharding, "context_order": order}
    expected, moved = Batches(corpus, plan)[0], column_order(order, 64, 2)
    with Loader(Batches(corpus, plan, **options)) as loader:
        on_devices = next(loader)
    values = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    last = segment_last(values, expected, 30)
    for batch in (Batches(corpus, plan, **options)[0], on_devices):
        for ahead in (1, 3):
            found = jax.jit(functools.partial(targets_ahead, ahead=ahead))(batch)
            for now, due in zip(found, targets_ahead(expected, ahead), strict=True):
                np.testing.assert_array_equal(now, due[:, moved])
        np.testing.assert_array_equal(segment_last(values[:, moved], batch, 30), last)
        for call in (
            segment_starts,
            lambda batch: cu_seqlens(batch, 30),
            lambda batch: cu_seqlens(batch, 30, side="inputs"),
            lambda batch: pipeline.rename(batch, "tunix"),
            lambda batch: pipeline.rename(batch, "huggingface"),
        ):
            with pytest.raises(
                ValueError, match=r"inputs_columns tells; .* columns in order; load"
            ):
                call(batch)
    assert "inputs_columns" not in pipeline.rename(batch, "maxtext")
    part = OneProcess(batch_sharding(mesh_of(data=1, context=4)), [2])
    some = Batches(corpus, plan, sharding=part, context_order=order)[0]
    with pytest.raises(ValueError, match="only some columns of each row"):
        targets_ahead(some, 1)


def test_the_decoder_of_pairs_has_its_own_order_of_columns(pairs):
    plan = Plan(pairs, [Bucket(8, (96, 64))], overflow="truncate")
    whole = Batches(pairs, plan)[0]
    alone = {"inputs_segment_ids": whole["targets_segment_ids"]}
    np.testing.assert_array_equal(segment_starts(whole, side="targets"), segment_starts(alone))
    sharding = batch_sharding(mesh_of(context=4))
    batch = Batches(pairs, plan, sharding=sharding, context_order="striped")[0]
    for side, length in (("inputs", 96), ("targets", 64)):
        np.testing.assert_array_equal(
            batch[f"{side}_columns"], np.tile(column_order("striped", length, 4), (8, 1))
        )
        with pytest.raises(ValueError, match=f"{side}_columns tells"):
            segment_starts(batch, side=side)
    with pytest.raises(ValueError, match="_columns tells"):
        cu_seqlens(batch, 30)


def test_what_has_no_such_columns_is_refused():
    samples = Examples.from_groups([([1, 5, 2], [[7, 3], [8, 9, 3]])])
    ((_, groups),) = pipeline.pack(samples, [Bucket(1, 8)])
    ((_, inputs),) = pipeline.pack(Examples([[1, 2]], task=pipeline.corpus.INPUTS), [Bucket(1, 8)])
    for call, batch, sentence in (
        (segment_starts, groups, "the batch has groups"),
        (segment_starts, {"ids": groups["inputs"]}, "has no inputs_segment_ids; it has ids"),
        (lambda batch: targets_ahead(batch, 1), groups, "the batch has groups"),
        (lambda batch: targets_ahead(batch, 1), {"decoder_inputs": 0}, "the batch is of pairs"),
        (lambda batch: targets_ahead(batch, 1), inputs, "the batch has no targets"),
        (lambda batch: targets_ahead(batch, 0), inputs, "ahead is 0"),
        (lambda batch: cu_seqlens(batch, 3), groups, "the batch has groups"),
        (lambda batch: cu_seqlens(batch, 3), {"ids": 0}, "no inputs_segment_ids; .* is renamed"),
        (lambda batch: attention_mask(batch, causal=False), groups, "groups.* causal attention"),
        (attention_mask, {**inputs, "decoder_inputs": 0}, "of pairs is not causal; give side"),
    ):
        with pytest.raises(ValueError, match=sentence):
            call(batch)


def test_padding_between_aligned_segments_is_in_sequences_of_its_own(tmp_path):
    corpus = pipeline.Corpus.from_arrays([[5, 6, 7, 8], [1, 2, 3], [4] * 9], tmp_path)
    plan = Plan(corpus, [Bucket(3, 8)], shuffle=False, align=4)
    batch = Batches(corpus, plan)[0]
    order = np.argsort(batch["inputs"][:, 0])
    batch = {name: values[order] for name, values in batch.items()}
    assert batch["inputs_segment_ids"].tolist() == [[0] * 8, [1] * 8, [1, 1, 1, 0, 2, 2, 0, 0]]
    # Each segment and the padding after it; the empty row is padding after none.
    sizes = [0, 8, 0, 0, *(8, 0, 0, 0), *(3, 1, 2, 2)]
    for fields in (batch, jax.tree.map(jax.numpy.asarray, batch)):
        assert np.diff(cu_seqlens(fields, 2, align=4)["cu_seqlens_q"]).tolist() == sizes
    with pytest.raises(ValueError, match="a row has padding before a segment; give the plan's"):
        cu_seqlens(batch, 2)
    with pytest.raises(ValueError, match="max_segments is 1, but a row holds 2 segments; give"):
        cu_seqlens(batch, 1, align=4)


@pytest.mark.parametrize("kind", ["corpus", "pairs"])
def test_boundaries_have_one_size_for_each_bucket_and_are_those_of_the_segments(
    kind, request, buckets
):
    data = request.getfixturevalue(kind)
    shapes = [Bucket(8, (64, 32))] if kind == "pairs" else buckets
    plan = Plan(data, shapes, overflow="truncate")
    whole, most = Batches(data, plan), plan.most_segments()
    for step in range(plan.num_batches()):
        rows, bucket = whole[step], plan.batch(step).bucket
        thd = cu_seqlens(rows, most[bucket])
        assert {*thd} == {"cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"}
        sides = {"q": rows["targets"], "kv": rows["inputs"]}
        ids = {"q": rows.get("targets_segment_ids", rows["inputs_segment_ids"])}
        ids["kv"] = rows["inputs_segment_ids"]
        for side, tokens in sides.items():
            ends = thd[f"cu_seqlens_{side}"]
            assert len(ends) == bucket.rows * (most[bucket] + 1) + 1
            sizes = np.diff(ends)
            assert 0 <= sizes.min() <= sizes.max() <= thd[f"max_seqlen_{side}"] == tokens.shape[1]
            # Sequence k of a row is segment k of that row, on both sides; the last is padding.
            found = np.repeat(np.tile([*range(1, most[bucket] + 1), 0], bucket.rows), sizes)
            np.testing.assert_array_equal(found, ids[side].ravel())
    theirs = jax.jit(lambda rows: cu_seqlens(rows, most[bucket]))(rows)  # in a compiled step
    for name, values in thd.items():
        assert not isinstance(values, jax.Array)
        np.testing.assert_array_equal(theirs[name], values)
        assert name.startswith("max") or theirs[name].dtype == values.dtype == np.int32
