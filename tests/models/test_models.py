"""Models: packing changes nothing, and segments do not leak."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from optax import softmax_cross_entropy_with_integer_labels as token_losses

from models import transformer
from models.config import TransformerConfig
from models.decoder import Decoder
from models.encoder import Encoder
from models.encoder_decoder import EncoderDecoder
from models.loss import cross_entropy
from models.parameters import AXES, decay_mask, parameter_shardings
from models.vision import VisionDecoder
from pipeline import Batches, Bucket, Examples, Pairs, Plan
from tests.alone import require_same_alone

CONFIG = TransformerConfig(
    vocab_size=50,
    num_layers=2,
    width=64,
    num_heads=4,
    num_kv_heads=2,
    mlp_width=48,
    attention="blocked",
    scan_layers=True,
)  # fmt: skip  (kernels want heads of 16 or more)
JAXPRS = (jex.core.Jaxpr, jex.core.ClosedJaxpr)
KINDS = {"decoder": Decoder, "encoder": Encoder, "encoder–decoder": EncoderDecoder}
MODELS = KINDS | {"vision": partial(VisionDecoder, patch_size=12)}


# Compiling is most of what these tests do, so they share programs, and compare results in NumPy.


@cache
def abstract_model(kind, config):
    """A model's graph and the shapes of its state."""
    return nnx.split(nnx.eval_shape(lambda: MODELS[kind](config, rngs=nnx.Rngs(0))))


@cache
def state_of(kind, config=CONFIG):
    """A model's state, which one program makes, whatever its attention."""
    if config != CONFIG and replace(config, attention=CONFIG.attention) == CONFIG:
        return state_of(kind)
    return jax.jit(lambda: nnx.split(KINDS[kind](config, rngs=nnx.Rngs(0)))[1])()


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Three examples for each kind of model, and the length of a row that holds them."""
    rng = np.random.default_rng(0)
    inputs, targets = ([rng.integers(1, 50, n) for n in sizes] for sizes in ((9, 4, 7), (4, 9, 6)))
    pairs = Pairs.from_arrays(inputs, targets, tmp_path_factory.mktemp("pairs"))
    text = Examples(inputs), 24
    return {"decoder": text, "encoder": text, "encoder–decoder": (pairs, (24, 24))}


@pytest.fixture
def batch_of(corpora):
    """`batch_of(kind, count)`: a batch of one row, of the first examples of a kind."""

    def batch_of(kind, count=3):
        corpus, length = corpora[kind]
        plan = Plan(corpus, [Bucket(1, length)], shuffle=False, exclude=range(count, 3))
        return dict(Batches(corpus, plan)[0])

    return batch_of


def losses(kind, state, batch, config=CONFIG):
    """Per-token losses [1, L]."""
    names = ["inputs", "inputs_segment_ids", "inputs_positions"]
    if kind == "encoder–decoder":
        names += ["decoder_inputs", "targets_segment_ids", "targets_positions"]
    logits = nnx.merge(abstract_model(kind, config)[0], state)(*(batch[name] for name in names))
    return token_losses(logits, batch["targets"])


def loss_and_gradient(kind, state, batch, config=CONFIG):
    """Token losses, and the gradient of their weighted sum, in NumPy."""
    return jax.device_get(_loss_and_gradient(kind, state, batch, config))


@partial(jax.jit, static_argnums=(0, 3))
def _loss_and_gradient(kind, state, batch, config):
    def weighted(state):
        nll = losses(kind, state, batch, config)
        return jnp.sum(nll * batch["loss_weights"]), nll

    (_, nll), gradient = jax.value_and_grad(weighted, has_aux=True)(state)
    return nll, gradient


@pytest.mark.parametrize(
    ("kind", "attention"),
    [
        *(("decoder", "blocked"), ("encoder", "dense"), ("encoder–decoder", "blocked")),
        pytest.param("decoder", "dense", marks=pytest.mark.slow),
        pytest.param("encoder", "blocked", marks=pytest.mark.slow),
        pytest.param("encoder–decoder", "dense", marks=pytest.mark.slow),
    ],
)
def test_packed_examples_have_the_losses_and_gradients_they_have_alone(kind, attention, corpora):
    corpus, length = corpora[kind]
    config = replace(CONFIG, attention=attention)
    compute = partial(loss_and_gradient, kind, state_of(kind), config=config)
    require_same_alone(compute, corpus, length, 1, error=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_padding_alone_are_finite_and_teach_nothing(kind, batch_of):
    padding = {name: 0 * values for name, values in batch_of(kind).items()}
    nll, gradient = loss_and_gradient(kind, state_of(kind), padding)
    assert np.isfinite(nll).all()
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize(("kind", "side"), [*((kind, 0) for kind in KINDS), ("encoder–decoder", 1)])
def test_the_order_of_columns_counts_where_attention_is_causal(kind, side, batch_of):
    batch = batch_of(kind, 1)
    both = kind != "encoder–decoder"
    own = [name for name in batch if both or name.startswith("inputs") == (side == 0)]
    turned = batch | {name: batch[name][:, ::-1] for name in own}
    before, after = (loss_and_gradient(kind, state_of(kind), each)[1] for each in (batch, turned))
    same = jax.tree.all(jax.tree.map(partial(np.allclose, atol=1e-5), before, after))
    assert same != (kind == "decoder" or side == 1)


def test_a_window_of_one_column_is_a_segment_of_one(batch_of):
    batch, config = batch_of("decoder", 1), replace(CONFIG, window=1)
    found = jax.jit(lambda state: losses("decoder", state, batch, config))(state_of("decoder"))
    alone = batch["inputs_segment_ids"] * (batch["inputs_positions"] + 1)
    batch = batch | {"inputs_segment_ids": alone}
    expected, _ = loss_and_gradient("decoder", state_of("decoder"), batch)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
def test_scanned_and_rematerialised_layers_compute_the_same(batch_of):
    config = replace(CONFIG, scan_layers=False, remat=True)
    state = state_of("decoder", config)
    layers = [state["transformer"]["layers"][i] for i in range(CONFIG.num_layers)]
    stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *layers)
    same = nnx.State(dict(state))
    same["transformer"] = nnx.State(dict(state["transformer"]) | {"layers": stacked})
    assert jax.tree.map(jnp.shape, same) == jax.tree.map(jnp.shape, state_of("decoder"))

    batch = batch_of("decoder")
    expected, expected_gradient = loss_and_gradient("decoder", state, batch, config)
    found, gradient = loss_and_gradient("decoder", same, batch)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    a, b = (tree["embedding"]["table"][...] for tree in (gradient, expected_gradient))
    np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.parametrize(
    ("platform", "dtype"), [("cpu", "float32"), ("gpu", "bfloat16"), ("tpu", "bfloat16")]
)
def test_auto_computes_in_bfloat16_on_accelerators(platform, dtype, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    assert replace(CONFIG, dtype="auto").compute_dtype == dtype


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_keeps_float32_parameters_and_logits(dtype, batch_of):
    config = replace(CONFIG, dtype=dtype)
    graph, abstract = abstract_model("decoder", config)
    batch = batch_of("decoder")
    arguments = [batch[f"inputs{name}"] for name in ("", "_segment_ids", "_positions")]

    def hidden(state):
        model = nnx.merge(graph, state)
        return model.transformer(model.embedding(arguments[0]), *arguments[1:])

    logits = jax.eval_shape(lambda state: nnx.merge(graph, state)(*arguments), abstract)
    assert (logits.dtype, jax.eval_shape(hidden, abstract).dtype) == (jnp.float32, dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(abstract)} == {jnp.dtype("float32")}
    exact, _ = loss_and_gradient("decoder", state_of("decoder"), batch)
    rough = jax.jit(lambda state: losses("decoder", state, batch, config))(state_of("decoder"))
    np.testing.assert_allclose(rough, exact, atol=0.05)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loss_is_two_sums_over_all_positions_in_float32(dtype):
    rng = np.random.default_rng(0)
    logits = jnp.asarray(4 * rng.normal(size=(3, 5, 37)), dtype)
    targets = rng.integers(0, 37, (3, 5))
    weights = jnp.asarray([[1, 1, 1, 1, 1], [1, 0.5, 0, 0, 0], [0] * 5], dtype)
    found = cross_entropy(logits, targets, weights)
    assert found.total.dtype == found.weight.dtype == jnp.float32
    exact = np.asarray(logits, np.float64)
    of_target = np.take_along_axis(exact, targets[..., None], axis=-1)[..., 0]
    losses = np.log(np.exp(exact).sum(axis=-1)) - of_target
    np.testing.assert_allclose(found, (np.sum(losses * weights), 6.5), rtol=1e-6)


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_every_parameter_has_a_place_on_a_mesh_and_decay_by_kind(kind, scan_layers):
    config = replace(CONFIG, scan_layers=scan_layers)
    _, state = abstract_model(kind, config)
    mesh = jax.make_mesh((1, 1, 1), ("data", "fsdp", "tensor"))
    shardings = jax.tree_util.tree_leaves_with_path(parameter_shardings(state, mesh))
    decays = jax.tree.leaves(decay_mask(state))
    for (path, sharding), decay in zip(shardings, decays, strict=True):
        name = jax.tree_util.keystr(path)
        assert decay == ("fsdp" in sharding.spec) == ("scale" not in name)
        assert ("tensor" in sharding.spec) == ("scale" not in name and "patches" not in name)


def test_a_dimension_that_a_mesh_does_not_divide_is_named_once(caplog):
    mesh = jax.make_mesh((4,), ("tensor",))
    table = {"table": jax.ShapeDtypeStruct((50_257, 8), jnp.float32)}
    for tree in (table, {"moments": table}):
        (sharding,) = jax.tree.leaves(parameter_shardings(tree, mesh))
        assert sharding.spec == jax.P(None, None)
    (told,) = caplog.messages
    assert "'table' [50257, 8] stays whole on the 4 devices of the axis 'tensor'" in told
    assert "50260 would be divided" in told


def test_a_matrix_that_no_table_names_has_no_decay_and_is_named_once(caplog):
    tree = {"query": jnp.ones((4, 2, 2)), "scale": jnp.ones(4), "router": jnp.ones((4, 3))}
    for _ in range(2):
        assert decay_mask(tree) == {"query": True, "scale": False, "router": False}
    (told,) = caplog.messages
    assert told.startswith("'router' is not in AXES of models/parameters.py: it has no weight")


def count_loops(program):
    """Count the loops in a jaxpr and in all that it calls, each as often as it is called."""
    eqns = getattr(program, "jaxpr", program).eqns
    inner = jax.tree.leaves([eqn.params for eqn in eqns])
    here = sum(eqn.primitive.name in ("scan", "while") for eqn in eqns)
    return here + sum(count_loops(each) for each in inner if isinstance(each, JAXPRS))


def test_remat_computes_layers_again_but_not_blocked_attention(monkeypatch):
    config = replace(CONFIG, scan_layers=False, remat=True)
    graph, state = abstract_model("decoder", config)
    fields = [jax.ShapeDtypeStruct((2, 16), jnp.int32)] * 3

    def loops(kept):
        monkeypatch.setattr(transformer, "KEPT", kept)

        def total(state, *fields):
            return nnx.merge(graph, state)(*fields).sum()

        # Of the traced program: a lowered one has each function once that some layers share, and
        # which ones do depends on what was traced before.
        return count_loops(jax.make_jaxpr(jax.grad(total))(state, *fields))

    # Of rows, of blocks of queries, and of the keys that a block sees, in each layer.
    assert loops(transformer.KEPT) == loops("nothing of this name") - 3 * config.num_layers


OPTIMIZERS = {
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=4),
    "adamw": optax.adamw(0.1),
    "muon": optax.contrib.muon(0.1),
    "lion": optax.lion(0.1),
    "sgd": optax.sgd(0.1, momentum=0.9),
    "sm3": optax.sm3(0.1),
}


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_an_optimizer_is_split_as_its_parameters_or_whole(name, scan_layers):
    optimizer = OPTIMIZERS[name]
    config = replace(CONFIG, scan_layers=scan_layers, num_layers=1 + scan_layers)
    params = nnx.to_pure_dict(abstract_model("decoder", config)[1])

    def update(params):
        state = optimizer.init(params)
        updates, state = optimizer.update(params, state, params)
        return optax.apply_updates(params, updates), state

    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"))
    shapes = jax.eval_shape(update, params)
    shardings = jax.tree.leaves(parameter_shardings(shapes, mesh))
    split = 0
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    for (path, leaf), sharding in zip(leaves, shardings, strict=True):
        names = ["", *(each.key for each in path if hasattr(each, "key"))]
        assert len(sharding.spec) <= len(leaf.shape)
        whole = sharding.shard_shape(leaf.shape) == leaf.shape  # raises for unequal parts
        assert whole or len(leaf.shape) >= len(AXES[names[-1]])  # no factor of a parameter
        split += not whole
    assert split >= 2 * len(jax.tree.leaves(params)) // 3
