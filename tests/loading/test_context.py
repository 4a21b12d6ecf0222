"""Context parallelism: the order of columns, the cost of each part, and models that train so."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

import pipeline
from models.attention import make_attention
from models.config import TransformerConfig
from models.decoder import Decoder
from models.encoder import Encoder
from models.encoder_decoder import EncoderDecoder
from models.loss import cross_entropy
from pipeline import Batches, Bucket, Plan
from pipeline.loading.sharding import CONTEXT_ORDERS, batch_sharding, column_order
from tests.meshes import mesh_of
from tests.properties.accounts import batches_of

MODEL = {"vocab_size": 1000, "num_layers": 1, "width": 16, "num_heads": 4, "num_kv_heads": 2}
MODEL |= {"mlp_width": 16}
FIELDS = ("inputs", "inputs_segment_ids", "inputs_positions")
OF_TARGETS = ("decoder_inputs", "targets_segment_ids", "targets_positions")


@pytest.fixture(autouse=True, scope="module")
def _quickly_compiled():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def test_lengths_divide_or_are_refused_with_the_multiple_that_would_do(corpus):
    options = {"sharding": mesh_of(context=3), "context_order": "zigzag"}
    with pipeline.load(corpus, tokens_per_batch=1024, **options) as loader:
        assert [bucket.length for bucket in loader.plan.buckets] == [384]
        assert len(next(loader)["inputs"].addressable_shards) == 3
    with pytest.raises(
        ValueError, match=r"zigzag order; .* a multiple of 6 \(fit_buckets: length_mul"
    ):
        pipeline.load(corpus, buckets=[Bucket(2, 64)], **options)
    with pytest.raises(ValueError, match="context_order is 'zig'; it must be one of contiguous"):
        Batches(corpus, Plan(corpus, [Bucket(2, 66)]), context_order="zig")
    with pytest.raises(TypeError, match="no option 'context_order'"):
        pipeline.score(corpus, len, per="row", directory="nowhere", **options)


def cost_over_ideal(lengths, length, parts, order):
    """The cost of the costliest part of a row over the mean of its parts, over all rows."""
    costs, columns = [], column_order(order, length, parts)
    for row in batches_of(Plan(lengths, [Bucket(1, length)])):
        keys = np.concatenate([np.arange(1, size + 1) for size in row.segments[:, 3]])
        keys = np.pad(keys, (0, length - len(keys)))[columns]
        costs.append(keys.reshape(parts, -1).sum(axis=1))
    return np.max(costs, axis=1).sum() / np.mean(costs, axis=1).sum()


def test_parts_of_a_row_cost_alike_where_contiguous_ones_do_not():
    whole = functools.partial(cost_over_ideal, [4096] * 8, 4096, 4)
    assert whole("contiguous") == pytest.approx(1.75, abs=0.01)
    assert whole("zigzag") == pytest.approx(1, abs=1e-3)
    assert whole("striped") < 1.001
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 1.3, 1000), 1, 4096).astype(int)
    packed = functools.partial(cost_over_ideal, lengths, 4096, 4)
    assert packed("contiguous") == pytest.approx(1.55, abs=0.01)
    # Zigzag suits one segment; the halves of a packed row are of different ones.
    assert packed("zigzag") == pytest.approx(1.24, abs=0.01)
    assert packed("striped") < 1.002


def model_of(kind, attention, **options):
    """The parameters of a model, and the function of them and a batch that gives its loss."""
    config = TransformerConfig(**MODEL, attention=attention, **options)
    network = {"pairs": EncoderDecoder, "encoder": Encoder, "decoder": Decoder}[kind]
    graph, state = nnx.split(network(config, rngs=nnx.Rngs(0)))

    def loss(state, batch):
        fields = FIELDS + OF_TARGETS * (kind == "pairs")
        logits = nnx.merge(graph, state)(*(batch[name] for name in fields))
        return cross_entropy(logits, batch["targets"], batch["loss_weights"]).total

    return state, loss


def test_attention_compares_positions_where_the_mesh_divides_rows():
    mesh = mesh_of(data=1, context=4)
    ids = np.repeat([[1, 2, 3, 0], [1, 2, 3, 4]], [9, 27, 20, 8], axis=1)
    positions = np.tile(np.concatenate([np.arange(n) + 5 for n in (9, 27, 20, 8)]), (2, 1))
    rng = np.random.default_rng(0)
    q, k, v, g = (rng.normal(size=(2, 64, n, 8)).astype(np.float32) for n in (2, 1, 1, 2))

    @functools.partial(jax.jit, static_argnames="name")
    def attend(q, k, v, g, ids, positions, name):
        attention = make_attention(ids, positions=positions, window=20, implementation=name)
        out, pull_back = jax.vjp(attention, q, k, v)
        return out, *pull_back(g)

    expected = attend(q, k, v, g, ids, positions, "dense")
    sharding = batch_sharding(mesh)
    fields = {"inputs_segment_ids": ids, "inputs_positions": positions}
    mask = pipeline.attention_mask(fields)
    with jax.set_mesh(mesh):
        for order in CONTEXT_ORDERS:
            columns = column_order(order, 64, 4)
            moved = pipeline.attention_mask({name: x[:, columns] for name, x in fields.items()})
            np.testing.assert_array_equal(moved, mask[:, columns][:, :, columns])
            laid = [x[:, columns] for x in (q, k, v, g, ids, positions)]
            found = attend(*jax.device_put(laid, sharding), "blocked")
            assert found[0].sharding.is_equivalent_to(NamedSharding(mesh, sharding.spec), 4)
            for name, a, b in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
                np.testing.assert_allclose(a, b[:, columns], atol=1e-5, err_msg=f"{name}, {order}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "attention", "options"),
    [
        ("decoder", "dense", {"window": 9}),
        ("decoder", "blocked", {"window": 9, "scan_layers": True, "remat": True}),
        ("encoder", "blocked", {}),
        ("pairs", "dense", {}),
        ("pairs", "blocked", {}),
    ],
)
def test_every_model_trains_alike_in_every_order(corpus, pairs, kind, attention, options):
    """Loss and gradients in every order are those of contiguous rows on one device."""
    data, bucket = (pairs, Bucket(4, (256, 128))) if kind == "pairs" else (corpus, Bucket(4, 512))
    mesh = mesh_of(context=2, tensor=2) if kind == "pairs" else mesh_of(data=1, context=4)
    plan = Plan(data, [bucket], overflow="truncate", max_segments=9)
    state, loss = model_of(kind, attention, **options)
    expected = jax.jit(jax.value_and_grad(loss))(state, Batches(data, plan)[0])
    sharding = batch_sharding(mesh)
    with jax.set_mesh(mesh):
        step = jax.jit(jax.value_and_grad(loss), in_shardings=(None, sharding))
        for order in CONTEXT_ORDERS:
            batches = Batches(data, plan, sharding=sharding, context_order=order)
            found = step(state, pipeline.to_global(batches[0], mesh))
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                assert abs(a - b).max() < 1e-5 * abs(b).max(), order
