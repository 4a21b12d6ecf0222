"""A Flax Linen loop with TrainState and orbax, fed by Lockstep.

    pip install lockstep-pipeline flax optax orbax-checkpoint
    python examples/linen.py --workdir=runs/linen

Copy this file, and put your model and your text into it. Run the command again, also after a kill:
it continues from its last checkpoint, with the same losses. Comments that begin with "Lockstep:"
say what the line below does.
"""

import argparse
import email
import pathlib

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import pipeline
from pipeline import sources, tokenizers

WIDTH = 32


class Model(nn.Module):
    """One layer of attention: `[rows, length]` tokens to logits `[rows, length, vocabulary]`."""

    vocab_size: int
    positions: int

    @nn.compact
    def __call__(self, batch):
        """Logits of the next tokens."""
        # Lockstep: a row holds several examples, and each attends only to itself.
        mask = pipeline.attention_mask(batch)[:, None]  # the same for every head
        x = nn.Embed(self.vocab_size, WIDTH)(batch["inputs"])
        # Lockstep: positions begin at 0 in each example; do not use the column number.
        x += nn.Embed(self.positions, WIDTH)(batch["inputs_positions"])
        x += nn.MultiHeadDotProductAttention(num_heads=2)(x, mask=mask)
        return nn.Dense(self.vocab_size)(nn.gelu(nn.Dense(2 * WIDTH)(x)))


def train_step(state, batch):
    """The state after one update, and the mean loss of the batch."""

    def mean_loss(params):
        logits = state.apply_fn({"params": params}, batch)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        # Lockstep: batches hold different numbers of tokens; padding has weight 0.
        return (losses * batch["loss_weights"]).sum() / batch["loss_weights"].sum().clip(1e-9)

    loss, gradients = jax.value_and_grad(mean_loss)(state.params)
    return state.apply_gradients(grads=gradients), loss


def make_corpus(directory):
    """The paragraphs of Python's own email package, as a corpus of bytes."""
    files = sorted(pathlib.Path(email.__file__).parent.glob("*.py"))
    texts = [text for file in files for text in file.read_text("utf-8").split("\n\n")]
    # Lockstep: tokenises once; the next call opens the corpus.
    return pipeline.prepare(sources.Records(texts), tokenizers.Bytes(), directory)


def train(workdir, steps, save_every):
    """Trains from the last checkpoint in `workdir`, or from the beginning, to `steps`."""
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=auto)
    corpus = make_corpus(workdir / "corpus")
    # Lockstep: an iterator of global batches of a few shapes; rows are sharded over the mesh. With
    # multiples of 8 rows, the run may continue on 1, 2, 4 or 8 devices.
    loader = pipeline.load(
        corpus,
        sharding=mesh,
        tokens_per_batch=2048,
        max_length=256,
        row_multiple=8,
        width=WIDTH,
        seed=0,
    )
    with loader, ocp.CheckpointManager(workdir / "checkpoints") as manager:
        # Lockstep: the table of positions is as large as the plan needs.
        model = Model(corpus.vocab_size or 0, loader.plan.max_position + 1)

        def init(key, batch):
            params = model.init(key, batch)["params"]
            return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))

        # Lockstep: specs has the shapes of every bucket; any of them will do to initialise.
        like = jax.tree.map(jnp.zeros_like, next(iter(loader.specs.values())))
        everywhere = NamedSharding(mesh, PartitionSpec())
        state = jax.jit(init, out_shardings=everywhere)(jax.random.key(0), like)

        first = manager.latest_step() or 0
        if first:
            items = ocp.args.Composite(
                state=ocp.args.StandardRestore(state), data=ocp.args.JsonRestore()
            )
            restored = manager.restore(first, args=items)
            state = restored["state"]
            # Lockstep: continues with the next batch, or says which setting or text has changed.
            loader.set_state(restored["data"])

        # Lockstep: compiles the step for every bucket now, and refuses any other shape later.
        compiled_step = pipeline.steps.Compiled(train_step, state, loader.specs, donate=True)
        for step in range(first, steps):
            batch = next(loader)
            state, loss = compiled_step(state, batch)
            print("step", step, "shape", batch["inputs"].shape, "loss", float(loss))
            if (step + 1) % save_every == 0 or step + 1 == steps:
                items = ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    # Lockstep: the step and a fingerprint of the plan, the same on every host.
                    data=ocp.args.JsonSave(loader.get_state()),
                )
                manager.save(step + 1, args=items)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=10)
    options = parser.parse_args()
    train(options.workdir.absolute(), options.steps, options.save_every)
