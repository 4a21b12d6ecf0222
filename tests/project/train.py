"""A small project of somebody else's, in Flax Linen: python train.py DIRECTORY STEPS.

It goes on from its last checkpoint, and prints the loss of every step as JSON.
"""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import pipeline


class Model(nn.Module):
    """Guesses the next byte from this one and its position: enough to learn something."""

    @nn.compact
    def __call__(self, inputs, positions):
        hidden = nn.Embed(300, 32)(inputs) + nn.Embed(512, 32)(jnp.minimum(positions, 511))
        return nn.Dense(300)(nn.relu(nn.Dense(64)(hidden)))


@jax.jit
def train_step(state, batch):
    """One update; the loss is a mean over the real tokens of the global batch."""

    def mean_loss(params):
        logits = state.apply_fn({"params": params}, batch["inputs"], batch["inputs_positions"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return (losses * batch["loss_weights"]).sum() / batch["loss_weights"].sum()

    loss, gradients = jax.value_and_grad(mean_loss)(state.params)
    return state.apply_gradients(grads=gradients), loss


def main(directory: pathlib.Path, steps: int):
    """Trains to step `steps`."""
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=auto)
    source = pipeline.sources.TextFiles(str(directory / "*.txt"))
    corpus = pipeline.prepare(source, pipeline.tokenizers.Bytes(), directory / "corpus")
    buckets = pipeline.Bucket(16, 64), pipeline.Bucket(8, 128)
    loader = pipeline.load(corpus, sharding=mesh, buckets=buckets)
    model = Model()
    empty = jnp.zeros((1, 8), jnp.int32)
    params = model.init(jax.random.key(0), empty, empty)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))
    state = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))
    with ocp.CheckpointManager(directory / "checkpoints") as manager, loader:
        first = manager.latest_step() or 0
        if first:
            items = manager.restore(
                first,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(state), data=ocp.args.JsonRestore()
                ),
            )
            state = items["state"]
            loader.set_state(items["data"])
        for step in range(first, steps):
            batch = next(loader)
            rows = batch["inputs"].addressable_shards[0].data.shape[0]
            state, loss = train_step(state, batch)
            shape = batch["inputs"].shape
            print(json.dumps({"step": step, "loss": float(loss), "shape": shape, "rows": rows}))
        manager.save(
            steps,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(loader.get_state())
            ),
        )


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
