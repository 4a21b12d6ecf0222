"""Context parallelism: the order of columns, the cost of each part, and models that train with it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import pipeline
from models.config import TransformerConfig
from models.decoder import Decoder
from models.encoder import Encoder
from models.encoder_decoder import EncoderDecoder
from models.loss import cross_entropy
from pipeline import Batches, Bucket, Plan
from pipeline.loading.context import CONTEXT_ORDERS, column_order
from pipeline.loading.sharding import batch_sharding

MODEL = {"vocab_size": 1000, "num_layers": 1, "width": 16, "num_heads": 2, "num_kv_heads": 1}
MODEL |= {"mlp_width": 16}
FIELDS = ("inputs", "inputs_segment_ids", "inputs_positions")
OF_TARGETS = ("decoder_inputs", "targets_segment_ids", "targets_positions")


def mesh_of(**axes):
    devices = jax.devices()[: np.prod([*axes.values()])]
    auto = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=auto, devices=devices)


@pytest.mark.parametrize("order", CONTEXT_ORDERS)
def test_every_field_of_a_batch_is_laid_out_alike(corpus, pairs, buckets, order):
    mesh = mesh_of(data=2, context=2)
    sharding = batch_sharding(mesh)
    assert sharding.spec == PartitionSpec(("data",), "context")
    for data, shapes in ((corpus, buckets), (pairs, [Bucket(4, (64, 32))])):
        plan = Plan(data, shapes, overflow="truncate")
        whole = Batches(data, plan)[1]
        laid = Batches(data, plan, sharding=sharding, context_order=order)[1]
        assert [*laid] == [*whole]
        for name, values in whole.items():
            columns = column_order(order, values.shape[1], 2)
            assert sorted(columns) == [*range(values.shape[1])]
            np.testing.assert_array_equal(laid[name], values[:, columns], name)


@pytest.mark.parametrize("order", CONTEXT_ORDERS)
def test_a_process_that_holds_a_part_of_the_length_builds_the_columns_of_that_part(corpus, order):
    sharding = batch_sharding(mesh_of(data=1, context=4))
    plan = Plan(corpus, [Bucket(4, 64)])
    whole = Batches(corpus, plan)[0]["inputs"]

    class ThirdDevice:
        spec, mesh = sharding.spec, sharding.mesh

        def addressable_devices_indices_map(self, shape):
            return {2: sharding.devices_indices_map(shape)[jax.devices()[2]]}

    part = Batches(corpus, plan, sharding=ThirdDevice(), context_order=order)[0]["inputs"]
    np.testing.assert_array_equal(part, whole[:, column_order(order, 64, 4)[32:48]])


def cost_over_ideal(lengths, length, parts, order):
    """The cost of the costliest part of a row over the mean of its parts, over all rows."""
    plan = Plan(lengths, [Bucket(4, length)])
    costliest = total = 0
    for step in range(plan.num_batches()):
        segments = plan.batch(step).segments
        for row in range(4):
            sizes = segments[segments[:, 0] == row, 3]
            keys = np.concatenate([np.arange(1, size + 1) for size in sizes] or [[]])
            keys = np.pad(keys, (0, length - len(keys)))[column_order(order, length, parts)]
            costs = keys.reshape(parts, -1).sum(axis=1)
            costliest, total = costliest + costs.max(), total + costs.mean()
    return costliest / total


def test_parts_of_a_row_cost_alike_where_contiguous_ones_do_not():
    whole = functools.partial(cost_over_ideal, [4096] * 8, 4096, 4)
    assert whole("contiguous") == pytest.approx(1.75, abs=0.01)
    assert whole("zigzag") == pytest.approx(1, abs=1e-3)
    assert whole("striped") < 1.001
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 1.3, 400), 1, 4096).astype(int)
    packed = functools.partial(cost_over_ideal, lengths, 4096, 4)
    assert packed("contiguous") > 1.5
    assert packed("zigzag") > 1.03  # the halves of a row are not the same segments
    assert packed("striped") < 1.03


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


def assert_trains_alike(data, bucket, mesh, kind, attention, **options):
    """Compares loss and gradients in every order with those of contiguous rows on one device."""
    plan = Plan(data, [bucket], overflow="truncate", max_segments=7)
    state, loss = model_of(kind, attention, **options)
    expected = jax.jit(jax.value_and_grad(loss))(state, Batches(data, plan)[0])
    sharding = batch_sharding(mesh)
    with jax.set_mesh(mesh):
        step = jax.jit(jax.value_and_grad(loss), in_shardings=(None, sharding))
        for order in CONTEXT_ORDERS:
            batches = Batches(data, plan, sharding=sharding, context_order=order)
            found = step(state, pipeline.to_global(batches[0], mesh))
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=order)


def test_a_decoder_trains_alike_in_every_order(corpus):
    mesh = mesh_of(data=2, context=2)
    assert_trains_alike(corpus, Bucket(4, 256), mesh, "decoder", "blocked")


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["dense", "blocked"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [("decoder", {"window": 9}), ("encoder", {}), ("encoder", {"window": 9}), ("pairs", {})],
)
def test_every_model_trains_alike_in_every_order(corpus, pairs, kind, attention, options):
    data, bucket = (pairs, Bucket(4, (256, 128))) if kind == "pairs" else (corpus, Bucket(4, 256))
    meshes = mesh_of(data=1, context=4), mesh_of(context=2, tensor=2)
    for mesh in meshes:
        assert_trains_alike(data, bucket, mesh, kind, attention, **options)
