"""Updates of several batches: as if the batches were one, also across checkpoints."""

import functools
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

import pipeline
from pipeline.errors import UserError
from pipeline.history import read_history
from pipeline.steps import accumulate, flush, make_train_step
from pipeline.steps.compiled import program_memory
from pipeline.steps.microbatches import summed
from tests.meshes import mesh_of
from tests.runs.runs import lines, run, segment_losses, steps, tiny
from trainer import TrainingLog


def problem(params, batch):
    """Σ weight · squared error of a line, and Σ weight."""
    error = batch["x"] @ params["w"] + params["b"] - batch["y"]
    return (batch["weight"] * error**2).sum(), batch["weight"].sum()


CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, weight_decay=0.1))


def _scale_by_value(gradients, state, params, *, value, **_):
    return jax.tree.map(lambda leaf: -1e-3 * value * leaf, gradients), state


BY_VALUE = optax.GradientTransformationExtraArgs(optax.init_empty_state, _scale_by_value)


def test_short_floats_are_added_up_in_float32():
    # In bfloat16, 256 + 1 is 256.
    one = jnp.full(3, 1, jnp.bfloat16)
    optimizer = accumulate(optax.sgd(1.0), batches=512)
    state = optimizer.init(one)
    update = jax.jit(lambda state: optimizer.update(one, state, one, weight=jnp.float32(1)))
    for _ in range(512):
        mean, state = update(state)
    assert mean.dtype == jnp.bfloat16
    assert mean.tolist() == [-1] * 3

    def sums(params, batch):
        return (params * batch["x"]).sum(), batch["x"].sum()

    found = summed(
        jax.value_and_grad(sums, has_aux=True),
        jnp.bfloat16(1),
        {"x": jnp.ones(512, jnp.bfloat16)},
        microbatches=512,
        sharding=None,
    )
    assert jax.tree.map(float, found) == ((512, 512), 512)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(found))


@pytest.mark.parametrize(("accumulated", "copies"), [(1, 4.5), (4, 5.25)])
def test_a_step_of_adam_takes_few_copies_of_the_parameters(accumulated, copies):
    """Four layers: parameters, both moments and sums are arguments, gradients temporaries."""
    width, layers = 512, 4

    def loss(params, batch):
        hidden = batch["x"]
        for weights in params:
            hidden = jnp.tanh(hidden @ weights)
        return hidden.sum(), batch["loss_weights"].sum()

    init, train_step = make_train_step(loss, optax.adam(1e-3), accumulated=accumulated)
    params = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * layers
    batch = {"x": jnp.ones((8, width)), "loss_weights": jnp.ones(8)}
    step = jax.jit(train_step, donate_argnums=0).lower(jax.eval_shape(init, params), batch)
    found = program_memory(step.compile()) / (layers * width**2 * 4)
    assert found == pytest.approx(copies, abs=0.3)


@pytest.mark.parametrize("at", range(4))
def test_a_batch_that_is_not_finite_leaves_what_is_accumulated(at):
    init, train_step = make_train_step(problem, CLIPPED, accumulated=2)
    rng = np.random.default_rng(0)
    good = [
        {"x": rng.normal(size=(4, 3)), "y": rng.normal(size=4), "weight": rng.uniform(size=4)}
        for _ in range(4)
    ]
    bad = {**good[0], "y": np.full(4, np.nan)}
    ends = []
    for batches in (good, [*good[:at], bad, *good[at:]]):
        state = init({"w": jnp.ones(3), "b": jnp.float32(0)})
        for batch in batches:
            state, values = jax.jit(train_step)(state, batch)
            assert bool(values["finite"]) == (batch is not bad)
        ends.append(state)
    jax.tree.map(np.testing.assert_array_equal, *ends)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_batch_in_which_nothing_has_a_weight_is_a_finite_step_that_moves_nothing(accumulated):
    start = {"w": jnp.ones(3), "b": jnp.float32(0)}
    batch = {"x": jnp.ones((4, 3)), "y": jnp.zeros(4), "weight": jnp.zeros(4)}
    optimizer = optax.chain(optax.sgd(1e-2), optax.contrib.reduce_on_plateau())
    init, train_step = make_train_step(problem, optimizer, accumulated=accumulated)
    state = init(start)
    for done in (1, 2):
        state, values = jax.jit(train_step)(state, batch)
        found = {name: float(each) for name, each in values.items()}
        assert found == {"loss": 0, "gradient_norm": 0, "finite": True}
        assert int(state["steps"]) == done
    jax.tree.map(np.testing.assert_array_equal, state["params"], start)


def test_a_finite_loss_whose_gradient_is_not_finite_changes_nothing():
    def root(params, batch):
        return jnp.sqrt(params["w"]).sum(), batch["weight"].sum()

    init, train_step = make_train_step(root, optax.sgd(1e-2))
    before = init({"w": jnp.zeros(2)})
    after, values = train_step(before, {"weight": jnp.ones(4)})
    assert (float(values["loss"]), bool(values["finite"])) == (0, False)
    jax.tree.map(np.testing.assert_array_equal, after, before)


@pytest.mark.parametrize("columns", [None, "length"], ids=["rows", "columns"])
def test_losses_of_segments_microbatches_and_a_loss_scale_change_no_update(columns):
    def loss(params, batch):
        error = batch["x"] @ params["w"] + params["b"]
        return (batch["loss_weights"] * error**2).sum(), batch["loss_weights"].sum()

    rng, start = np.random.default_rng(0), {"w": jnp.ones(3), "b": jnp.float32(0)}
    batch = {
        "x": rng.normal(size=(8, 6, 3)).astype(np.float32),
        "inputs_segment_ids": np.array([[1, 1, 2, 2, 3, 0], [1, 0, 2, 3, 3, 3]] * 4),
        "loss_weights": rng.integers(0, 3, (8, 6)).astype(np.float32),
    }
    ids, squares = batch["inputs_segment_ids"], batch["x"].sum(axis=-1) ** 2
    weights = [np.where(ids == number, batch["loss_weights"], 0) for number in (1, 2, 3)]
    sums = [np.stack([(each * by).sum(axis=1) for each in weights], 1) for by in (squares, 1)]
    sharding = NamedSharding(mesh_of(data=2, length=2), PartitionSpec("data", columns))
    batch, ends, losses = jax.device_put(batch, sharding), [], []
    for options in ({}, {"most_segments": 4}, {"most_segments": 3, "loss_scale": 1024.0}):
        init, train_step = make_train_step(loss, optax.sgd(1.0), sharding=sharding, **options)
        for microbatches in (1, 2, 4):
            state, values = jax.jit(train_step, static_argnums=2)(init(start), batch, microbatches)
            ends.append(state["params"])
            losses.append(float(values["loss"]))
            if options:
                np.testing.assert_allclose(values["segments"][..., :3], sums, rtol=1e-5)
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)
    jax.tree.map(lambda *each: np.testing.assert_allclose(each, [each[0]] * 9, rtol=1e-5), *ends)


@pytest.mark.parametrize(
    ("left", "dtype", "inner"),
    [
        (0, jnp.float32, CLIPPED),
        (1, jnp.bfloat16, CLIPPED),
        (3, jnp.float32, optax.sgd(1e-2)),
        (3, jnp.float32, BY_VALUE),  # like reduce_on_plateau, it must be told the mean loss
        (2, jnp.bfloat16, optax.adamw(1e-2, mu_dtype=jnp.float32)),  # its updates are float32
    ],
)
def test_what_is_left_of_the_last_update_is_applied_once(left, dtype, inner):
    rng, start = np.random.default_rng(0), {"w": jnp.ones(3, dtype), "b": dtype(0)}
    batches = [
        {
            "x": rng.normal(size=(4, 3)).astype(np.float32),
            "y": rng.normal(size=4).astype(np.float32),
            "weight": np.float32([0, 1, 2, number]),
        }
        for number in range(4 + left)
    ]
    init, train_step = make_train_step(problem, inner, accumulated=4)
    state = init(start)
    for batch in batches:
        state, _ = jax.jit(train_step)(state, batch)
    for _ in range(2):  # the second one has nothing to apply
        state["params"], state["optimizer"] = jax.jit(flush, static_argnums=0)(
            inner, state["optimizer"], state["params"]
        )
    init, whole_step = make_train_step(problem, inner)
    expected = init(start)
    for some in (batches[:4], batches[4:]):
        if some:
            fields = {name: np.concatenate([one[name] for one in some]) for name in some[0]}
            expected, _ = jax.jit(whole_step)(expected, fields)
    found, close = state["params"], 1e-4 if dtype == jnp.float32 else 0.02
    for pair in zip(jax.tree.leaves(found), jax.tree.leaves(expected["params"]), strict=True):
        np.testing.assert_allclose(*map(np.float32, pair), rtol=close)
    assert found["w"].dtype == dtype


def test_steps_and_masks_promote_neither_dtypes_nor_ranks_implicitly():
    def loss(params, batch):
        weights = batch["loss_weights"]
        return (params.astype(jnp.float32) * weights).sum(), weights.sum()

    ids = jnp.array([[1, 1, 2, 0]] * 4)
    positions = jnp.array([[0, 1, 0, 0]] * 4)
    batch = {"inputs_segment_ids": ids, "inputs_positions": positions}
    batch |= {"loss_weights": (ids > 0).astype(jnp.float32)}
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        pipeline.attention_mask(batch)
        for options in ({}, {"accumulated": 2}, {"most_segments": 2}, {"loss_scale": 8.0}):
            init, train_step = make_train_step(loss, optax.sgd(1.0), **options)
            state = init(jnp.ones((), jnp.bfloat16))
            compiled = jax.jit(functools.partial(train_step, microbatches=2))
            for _ in range(2):
                state, values = compiled(state, batch)
            assert values["finite"]


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_the_norm_of_short_gradients_is_that_of_float32(dtype):
    def loss(params, batch):
        return (params * batch["loss_weights"]).astype(jnp.float32).sum(), jnp.float32(1)

    gradient = np.full(300, 301, dtype)
    init, train_step = make_train_step(loss, optax.sgd(1.0))
    _, values = train_step(init(jnp.zeros(300, dtype)), {"loss_weights": jnp.array(gradient)})
    assert values["gradient_norm"] == pytest.approx(np.linalg.norm(gradient.astype(float)), 1e-6)
    assert values["finite"]


def test_numbers_that_make_no_update_or_do_not_split_the_rows_are_refused():
    for number in (0, 1.5, True, "2", 3):
        with pytest.raises(ValueError, match=r"microbatches is .*it must be"):
            summed(lambda *_: 0.0, 0, {"x": jnp.ones((4, 2))}, microbatches=number, sharding=None)
    with pytest.raises(ValueError, match=r"batches is 0; it must be"):
        accumulate(optax.sgd(1.0), batches=0)
    with pytest.raises(ValueError, match=r"accumulated is 0; it must be"):
        make_train_step(problem, optax.sgd(1.0), accumulated=0)


def test_an_update_without_its_weight_and_a_flush_of_another_state_are_sentences():
    optimizer = accumulate(optax.sgd(1.0), batches=2)
    state = optimizer.init(jnp.float32(0))
    with pytest.raises(UserError, match="update needs weight="):
        optimizer.update(jnp.float32(1), state)
    with pytest.raises(UserError, match="flush needs the optimizer that accumulate was given"):
        flush(optimizer, state, jnp.float32(0))
    with pytest.raises(TypeError, match=r"give it alone, which is state\['optimizer'\]"):
        flush(optax.sgd(1.0), {"optimizer": state}, jnp.float32(0))
    whole = optax.sgd(1.0).init(jnp.float32(0))  # if nothing is accumulated
    assert flush(optax.sgd(1.0), whole, jnp.float32(0)) == (jnp.float32(0), whole)


@pytest.mark.slow
def test_the_program_makes_an_update_of_each_block_of_tiers(text, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = {"steps": 8, "accumulate": 4, "checkpoint_every": 100, "batches__tiers": 4}
    run(tiny(text, **options), whole)
    _, plan = read_history(epath.Path(whole))
    assert plan.options.tiers == 4
    rates = [line["learning_rate"] for line in steps(whole)]
    assert [len(set(rates[first : first + 4])) for first in (0, 4)] == [1, 1]
    assert rates[0] != rates[4]

    # Stopped in the middle of each update.
    stops, add = [3, 6], TrainingLog.add

    def add_and_stop(self, step, planned, values):
        add(self, step, planned, values)
        if step + 1 in stops:
            stops.remove(step + 1)
            signal.raise_signal(signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingLog, "add", add_and_stop)
        for _ in range(3):
            run(tiny(text, **options), parts)
    assert not stops
    for one, other in zip(segment_losses(parts), segment_losses(whole), strict=True):
        np.testing.assert_array_equal(one, other)
    assert lines(parts) == lines(whole)
