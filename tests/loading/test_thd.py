"""Rows in THD layout: the lengths that attention kernels read."""

import jax
import numpy as np
import pytest

import pipeline
from pipeline import Batches, Bucket, Plan
from pipeline.loading import cu_seqlens


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


@pytest.mark.parametrize("kind", ["examples", "pairs"])
def test_boundaries_have_one_size_for_each_bucket_and_are_those_of_the_segments(
    kind, corpus, pairs, buckets
):
    data, shapes = (pairs, [Bucket(8, (64, 32))]) if kind == "pairs" else (corpus, buckets)
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
            assert ends.dtype == np.int32
            assert len(ends) == bucket.rows * (most[bucket] + 1) + 1
            assert (ends[0], ends[-1]) == (0, tokens.size)
            sizes = np.diff(ends)
            assert 0 <= sizes.min() <= sizes.max() <= thd[f"max_seqlen_{side}"] == tokens.shape[1]
            # Sequence k of a row is segment k of that row, on both sides; the last is padding.
            found = np.repeat(np.tile([*range(1, most[bucket] + 1), 0], bucket.rows), sizes)
            np.testing.assert_array_equal(found, ids[side].ravel())
    theirs = jax.jit(lambda rows: cu_seqlens(rows, most[bucket]))(rows)  # in a compiled step
    assert {*thd} == {*theirs}
    for name, values in thd.items():
        assert not isinstance(values, jax.Array)
        np.testing.assert_array_equal(theirs[name], values)
        assert name.startswith("max") or theirs[name].dtype == values.dtype
