"""A model of one layer of attention, whose training is divided over devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from models.attention import make_attention
from models.mesh import gather_table

VOCABULARY, WIDTH = 40, 16


def attend(ids, positions, x, until=None):
    heads = x[:, :, None]
    attention = make_attention(
        ids, positions=positions, visible_until=until, implementation="blocked", causal=True
    )
    return attention(heads, heads, heads)[:, :, 0]


def loss(params, batch):
    """Attention of the models, which compare positions where the mesh has an axis `context`."""
    x = gather_table(params["table"])[batch["inputs"]]
    until = batch.get("visible_until")
    x = x + attend(batch["inputs_segment_ids"], batch["inputs_positions"], x, until)
    logits = x @ params["table"].T
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return (nll * batch["loss_weights"]).sum(), batch["loss_weights"].sum()


def begin(init, mesh=None):
    table = np.random.default_rng(1).normal(size=(VOCABULARY, WIDTH)).astype(np.float32) / 4
    state = init({"table": jnp.asarray(table)})
    if mesh is None:
        return state
    split = NamedSharding(mesh, PartitionSpec(None, tuple(mesh.axis_names)))
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: jax.device_put(x, split if x.ndim == 2 else whole), state)


def shardings_of(state):
    return jax.tree.map(lambda leaf: leaf.sharding, state)
