"""Functions of batches give the same under explicit axes, the default of `jax.make_mesh`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import pipeline
from pipeline import Bucket, Examples
from pipeline.fields import cu_seqlens, segment_starts, targets_ahead
from pipeline.steps import (
    Compiled,
    make_eval_step,
    make_score_step,
    make_train_step,
    segment_last,
    segment_mean,
    sum_continuations,
    sum_segments,
)

VOCABULARY = 16
ROWS, ROWS_AND_LENGTH = {"data": 4}, {"data": 2, "context": 2}


def lookup(table, batch):
    """The losses of a table of logits, as JAX asks for them under explicit axes."""
    inputs, more = batch["inputs"], {}
    if jax.typeof(table).sharding.spec != PartitionSpec(None, None):
        table = jax.sharding.reshard(table, PartitionSpec())  # as its user would write it
    placed = jax.typeof(inputs).sharding
    if placed.mesh.explicit_axes:
        more["out_sharding"] = PartitionSpec(*placed.spec, None)
    logp = jax.nn.log_softmax(table.at[inputs].get(**more))
    return -(logp * jax.nn.one_hot(batch["targets"], VOCABULARY)).sum(-1)


def loss(table, batch):
    return (lookup(table, batch) * batch["loss_weights"]).sum(), batch["loss_weights"].sum()


def make_table(loader, spec=()):
    placed = NamedSharding(loader.sharding.mesh, PartitionSpec(*spec))
    return jax.device_put(jnp.zeros((VOCABULARY, VOCABULARY)), placed)


def train(loader, batch, microbatches=2, spec=(), **options):
    init, step = make_train_step(loss, optax.adam(0.1), sharding=loader.sharding, **options)
    state = init(make_table(loader, spec))
    compiled = Compiled(step, state, loader.specs, microbatches=microbatches)
    for _ in range(2):
        state, values = compiled(state, batch)
    return state["params"], values


def of_fields(loader, batch):
    """The functions of batches, in one program."""

    @jax.jit
    def compute(table, batch):
        losses = lookup(table, batch)
        return {
            "an evaluation": make_eval_step(loss, sharding=loader.sharding)(
                table, batch, microbatches=2
            ),
            "scores": make_score_step(loss)(table, batch),
            "sums of segments": sum_segments(losses, batch, (8, 8)),
            "means of segments": segment_mean(losses[..., None], batch, most=8),
            "last values of segments": segment_last(losses, batch, most=8),
            "a mask": pipeline.attention_mask(batch),
            "a mask that is not causal": pipeline.attention_mask(batch, causal=False),
            "starts of segments": segment_starts(batch),
            "targets further ahead": targets_ahead(batch, 2),
            "cu_seqlens": cu_seqlens(batch, 8),
            "aligned cu_seqlens": cu_seqlens(batch, 8, align=4),
        }

    return compute(make_table(loader), batch), cu_seqlens(batch, 8)["cu_seqlens_kv"]


@jax.jit
def of_groups(batch):
    sums = sum_continuations(batch["loss_weights"], batch, most=16)
    return pipeline.attention_mask(batch), sums, batch["reward"]


FUNCTIONS = {
    "a step": lambda *given: train(*given, microbatches=1),
    "losses of segments": lambda *given: train(*given, most_segments=8),
    "a loss scale and accumulated steps": lambda *given: train(
        *given, loss_scale=4.0, accumulated=2
    ),
    "sharded parameters": lambda *given: train(*given, spec=("data",)),
    "functions of fields": of_fields,
    "functions of groups": lambda loader, batch: of_groups(batch),
}
rng = np.random.default_rng(0)
EXAMPLES = Examples([rng.integers(1, VOCABULARY, size) for size in rng.integers(4, 30, 60)])
GROUPS = Examples.from_groups(
    {"tokens": [([1, 2, 3], [[4, 5], [6]])] * 32, "reward": [[0.5, 1.0]] * 32},
    features={"reward": pipeline.Feature("continuation")},
)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *((name, ROWS_AND_LENGTH) for name in FUNCTIONS),
        ("a step", ROWS),
        ("functions of fields", ROWS),
    ],
)
def test_explicit_axes_give_what_auto_axes_give(name, sizes):
    corpus, found = GROUPS if "groups" in name else EXAMPLES, []
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((*sizes.values(),), (*sizes,), axis_types=(kind,) * len(sizes))
        with (
            jax.set_mesh(mesh),
            pipeline.load(corpus, sharding=mesh, buckets=[Bucket(8, 32)]) as it,
        ):
            found.append(jax.tree.map(np.asarray, FUNCTIONS[name](it, next(it))))
    jax.tree.map(lambda *both: np.testing.assert_allclose(*both, rtol=1e-5, atol=1e-6), *found)
