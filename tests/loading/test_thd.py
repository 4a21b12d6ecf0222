"""Rows in THD layout: the lengths that attention kernels read, and one of these kernels."""

import itertools

import jax
import numpy as np
import pytest
from flax import nnx
from optax import softmax_cross_entropy_with_integer_labels as token_losses

import pipeline
from models import transformer
from models.config import TransformerConfig
from models.decoder import Decoder
from models.encoder_decoder import EncoderDecoder
from pipeline import Batches, Bucket, Plan
from pipeline.loading import cu_seqlens

MODEL = TransformerConfig(
    vocab_size=1000, num_layers=1, width=16, num_heads=2, num_kv_heads=1, mlp_width=16,
    attention="dense",
)  # fmt: skip
INPUTS = ("inputs", "inputs_segment_ids", "inputs_positions")
TARGETS = ("decoder_inputs", "targets_segment_ids", "targets_positions")


def test_a_batch_by_hand(tmp_path):
    corpus = pipeline.Corpus.from_arrays([[5, 6, 7, 8], [1, 2, 3], [4] * 8, [9, 9]], tmp_path)
    plan = Plan(corpus, [Bucket(3, 7)], shuffle=False)
    batch = Batches(corpus, plan)[0]
    order = np.argsort(batch["inputs"][:, 0])  # whatever the order of rows
    batch = {name: values[order] for name, values in batch.items()}
    assert batch["inputs"].tolist() == [[0] * 7, [4] * 7, [5, 6, 7, 1, 2, 9, 0]]
    thd = cu_seqlens(batch, 3)
    # An empty row; a full one; three segments and one position of padding.
    ends = [0, *(0, 0, 0, 7), *(14, 14, 14, 14), *(17, 19, 20, 21)]
    assert thd["cu_seqlens_q"].tolist() == thd["cu_seqlens_kv"].tolist() == ends
    assert thd["max_seqlen_q"] == thd["max_seqlen_kv"] == 7
    assert {*thd} == {"cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"}
    # Room for more segments than there are: sequences of length 0.
    assert np.diff(cu_seqlens(batch, 4)["cu_seqlens_q"])[10:].tolist() == [3, 2, 1, 0, 1]
    with pytest.raises(ValueError, match="max_segments is 2, and a row holds 3 segments; give"):
        cu_seqlens(batch, 2)
    with pytest.raises(ValueError, match=r"no inputs_segment_ids; .* before it is renamed"):
        cu_seqlens(pipeline.rename(batch, "maxtext"), 3)


def test_padding_between_aligned_segments_is_in_sequences_of_its_own(tmp_path):
    corpus = pipeline.Corpus.from_arrays([[5, 6, 7, 8], [1, 2, 3], [4] * 9], tmp_path)
    plan = Plan(corpus, [Bucket(3, 8)], shuffle=False, align=4)
    batch = Batches(corpus, plan)[0]
    order = np.argsort(batch["inputs"][:, 0])
    batch = {name: values[order] for name, values in batch.items()}
    assert batch["inputs_segment_ids"].tolist() == [[0] * 8, [1, 1, 0, 0, 2, 2, 2, 0], [1] * 8]
    # Each segment and the padding after it; the empty row is padding after none.
    sizes = [0, 8, 0, 0, *(2, 2, 3, 1), *(8, 0, 0, 0)]
    for fields in (batch, jax.tree.map(jax.numpy.asarray, batch)):
        assert np.diff(cu_seqlens(fields, 2, align=4)["cu_seqlens_q"]).tolist() == sizes
    with pytest.raises(ValueError, match="a row has padding before a segment; give the plan's"):
        cu_seqlens(batch, 2)


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


def kernel(q_TNK, k_TGK, v_TGK, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, causal):
    """Attention of variable length: query sequence i sees key sequence i, and nothing else."""
    heads = q_TNK.shape[1] // k_TGK.shape[1]
    k_TNK, v_TNK = (np.repeat(x, heads, axis=1) for x in (k_TGK, v_TGK))
    out_TNK = np.full(q_TNK.shape, np.nan, np.float32)
    spans = (itertools.pairwise(ends.tolist()) for ends in (cu_seqlens_q, cu_seqlens_kv))
    for (q0, q1), (k0, k1) in zip(*spans, strict=True):
        assert q1 - q0 <= max_seqlen_q
        assert k1 - k0 <= max_seqlen_kv
        scores = np.einsum("qnk,snk->nqs", q_TNK[q0:q1], k_TNK[k0:k1]) / q_TNK.shape[2] ** 0.5
        if causal:
            scores = np.where(np.tri(q1 - q0, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, initial=-1e30, keepdims=True))
        weights /= np.maximum(weights.sum(axis=-1, keepdims=True), 1e-30)
        out_TNK[q0:q1] = np.einsum("nqs,snk->qnk", weights, v_TNK[k0:k1])
    return out_TNK


@pytest.mark.parametrize("kind", ["examples", "pairs"])
def test_a_kernel_that_reads_this_alone_gives_the_losses_of_the_model(
    kind, corpus, pairs, monkeypatch
):
    network, fields, data, bucket = Decoder, INPUTS, corpus, Bucket(4, 64)
    if kind == "pairs":
        network, fields, data, bucket = EncoderDecoder, INPUTS + TARGETS, pairs, Bucket(4, (64, 32))
    plan = Plan(data, [bucket], overflow="truncate" if kind == "pairs" else "split")
    batch = Batches(data, plan)[1]
    expected = losses(network, [batch[name] for name in fields], batch)

    thd = cu_seqlens(batch, plan.most_segments()[bucket])
    flat = {name: values.reshape(-1) for name, values in batch.items() if "segment" not in name}

    def make_attention(segment_ids, *, causal, kv_segment_ids=None, **_):
        # An encoder attends to itself, a decoder to itself, and then to the encoder.
        sides = ("kv", "kv") if kind == "pairs" and not causal else ("q", "q")
        sides = sides if kv_segment_ids is None else ("q", "kv")
        read = [thd[f"{name}_{side}"] for name in ("cu_seqlens", "max_seqlen") for side in sides]

        def call(q, k, v):
            return kernel(*(np.asarray(x[0]) for x in (q, k, v)), *read, causal)[None]

        return lambda q, k, v: jax.pure_callback(
            call, jax.ShapeDtypeStruct(q.shape, q.dtype), q, k, v
        )

    monkeypatch.setattr(transformer, "make_attention", make_attention)
    nothing = np.zeros(1)  # in place of segment ids
    found = losses(network, [flat.get(name, nothing)[None] for name in fields], flat)
    np.testing.assert_allclose(found[0], expected.ravel(), atol=1e-5)
    assert found.sum() > 100


def losses(network, arguments, batch):
    """The weighted loss of each position, from arguments of the model and the fields of a batch."""
    graph, shapes = nnx.split(nnx.eval_shape(lambda: network(MODEL, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32) / 4, shapes)

    @jax.jit
    def nll(state, targets, weights, *arguments):
        logits = nnx.merge(graph, state)(*arguments)
        shape = logits.shape[:2]
        return weights.reshape(shape) * token_losses(logits, targets.reshape(shape))

    return np.asarray(nll(state, batch["targets"], batch["loss_weights"], *arguments))


def test_boundaries_in_a_compiled_step_are_those_of_numpy(pairs):
    plan = Plan(pairs, [Bucket(4, (64, 32))], overflow="truncate")
    most = plan.most_segments()[plan.buckets[0]]
    batch = Batches(pairs, plan)[0]
    ours = cu_seqlens(batch, most)
    theirs = jax.jit(lambda batch: cu_seqlens(batch, most))(batch)
    assert {*ours} == {*theirs}
    for name, values in ours.items():
        assert not isinstance(values, jax.Array)
        np.testing.assert_array_equal(theirs[name], values)
        assert name.startswith("max") or theirs[name].dtype == values.dtype
