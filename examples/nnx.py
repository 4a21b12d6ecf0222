"""A Flax NNX loop with nnx.jit, nnx.Optimizer and orbax, fed by Lockstep.

    pip install lockstep-pipeline flax optax orbax-checkpoint
    python examples/nnx.py --workdir=runs/nnx

Copy this file, and put your model and your text into it. Run the command again, also after a kill:
it continues from its last checkpoint, with the same losses. Comments that begin with "Lockstep:"
say what the line below does.
"""

import argparse
import email
import pathlib

import jax
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import pipeline
from pipeline import sources, tokenizers

WIDTH = 32


class Model(nnx.Module):
    """One layer of attention: `[rows, length]` tokens to logits `[rows, length, vocabulary]`."""

    def __init__(self, vocab_size, positions, rngs):
        self.tokens = nnx.Embed(vocab_size, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(positions, WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.hidden = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.head = nnx.Linear(2 * WIDTH, vocab_size, rngs=rngs)

    def __call__(self, batch):
        """Logits of the next tokens."""
        # Lockstep: a row holds several examples, and each attends only to itself.
        mask = pipeline.attention_mask(batch)[:, None]  # the same for every head
        # Lockstep: positions begin at 0 in each example; do not use the column number.
        x = self.tokens(batch["inputs"]) + self.positions(batch["inputs_positions"])
        x += self.attention(x, mask=mask)
        return self.head(nnx.gelu(self.hidden(x)))


def mean_loss(model, batch):
    """The mean loss of the tokens of a batch."""
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch), batch["targets"])
    # Lockstep: batches hold different numbers of tokens; padding has weight 0.
    return (losses * batch["loss_weights"]).sum() / batch["loss_weights"].sum().clip(1e-6)


@nnx.jit(donate_argnums=(0, 1))  # the new values overwrite the old ones
def train_step(model, optimizer, batch):
    """Updates model and optimizer in place; returns the mean loss of the batch."""
    loss, gradients = nnx.value_and_grad(mean_loss)(model, batch)
    optimizer.update(model, gradients)
    return loss


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
        positions = loader.plan.max_position + 1

        @nnx.jit
        def init():
            model = Model(corpus.vocab_size, positions, nnx.Rngs(0))
            return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

        model, optimizer = init()
        everywhere = NamedSharding(mesh, PartitionSpec())
        state = jax.device_put(nnx.state((model, optimizer)), everywhere)

        first = manager.latest_step() or 0
        if first:
            items = ocp.args.Composite(
                state=ocp.args.StandardRestore(state), data=ocp.args.JsonRestore()
            )
            restored = manager.restore(first, args=items)
            state = restored["state"]
            # Lockstep: continues with the next batch, or says which setting or text has changed.
            loader.set_state(restored["data"])
        nnx.update((model, optimizer), state)

        # Lockstep: specs has the shapes of every bucket, so the step is compiled for each now.
        compiled = {
            spec["inputs"].shape: train_step.lower(model, optimizer, spec).compile()
            for spec in loader.specs.values()
        }
        for step in range(first, steps):
            batch = next(loader)
            shape = batch["inputs"].shape
            loss = compiled[shape](model, optimizer, batch)
            print("step", step, "shape", shape, "loss", float(loss))
            if (step + 1) % save_every == 0 or step + 1 == steps:
                items = ocp.args.Composite(
                    state=ocp.args.StandardSave(nnx.state((model, optimizer))),
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
