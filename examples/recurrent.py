"""A gated linear recurrence with a short convolution, in Flax NNX, on packed rows of Lockstep.

    pip install lockstep-pipeline flax optax
    python examples/recurrent.py

The state of a recurrent layer leaks from one document of a row into the next unless it is reset.
Here every document has the logits and gradients that it has alone. The layer works on chunks of
columns, as fast kernels do. Copy this file, and put your model and your text into it. Comments that
begin with "Lockstep:" say what the line below does.
"""

import argparse
import email
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import pipeline
from pipeline.fields import segment_starts

WIDTH, LAYERS, HEADS = 32, 2, 4
CHUNK, TAPS = 16, 4  # columns of a chunk, and of the convolution


class Convolution(nnx.Module):
    """Adds to each column a mixture of it and the `TAPS - 1` columns before it."""

    def __init__(self, rngs):
        self.taps = nnx.Param(0.5 * jax.random.normal(rngs.params(), (TAPS, WIDTH)))

    def __call__(self, x, segment_ids):
        def shift(array, tap):
            return jnp.pad(array, ((0, 0), (tap, 0), *[(0, 0)] * (array.ndim - 2)))[:, : x.shape[1]]

        mixed = x
        for tap in range(TAPS):
            # Lockstep: look back only into the same segment. Positions cannot tell: those of a
            # later piece of a split document do not begin at 0.
            same = shift(segment_ids, tap) == segment_ids
            mixed += jnp.where(same[..., None], shift(x, tap), 0) * self.taps[tap]
        return mixed


class Recurrence(nnx.Module):
    """Adds `q S`, where in each head `S = decay · S + k vᵀ`, computed by chunks of columns."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.gate = nnx.Linear(WIDTH, HEADS, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, starts):
        chunks = (len(x), -1, CHUNK, HEADS)
        normal = self.norm(x)
        q, k, v = (
            each.reshape(*chunks, WIDTH // HEADS)
            for each in jnp.split(self.qkv(normal), 3, axis=-1)
        )
        decay = jnp.cumsum(-nnx.softplus(self.gate(normal).reshape(chunks)), axis=2)  # logarithm
        # Inside a chunk: [rows, chunks, column, earlier column, heads].
        earlier = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))[..., None]
        kept = jnp.exp(jnp.where(earlier, decay[:, :, :, None] - decay[:, :, None], -jnp.inf))
        inside = jnp.einsum("rnqhd,rnkhd,rnqkh,rnkhe->rnqhe", q, k, kept, v)
        # From chunk to chunk.
        end = decay[:, :, -1]
        added = jnp.einsum("rnkh,rnkhd,rnkhe->rnhde", jnp.exp(end[:, :, None] - decay), k, v)
        # Lockstep: with align=CHUNK, a document begins only where a chunk does. So a chunk has
        # columns of one document, and only the state that enters it must be reset.
        new = starts.reshape(len(x), -1, CHUNK)[:, :, 0]

        def enter(state, chunk):
            end, added, new = chunk
            state = jnp.where(new[:, None, None, None], 0, state)
            return jnp.exp(end)[..., None, None] * state + added, state

        by_chunk = [jnp.moveaxis(each, 1, 0) for each in (end, added, new)]
        _, states = jax.lax.scan(enter, jnp.zeros_like(added[:, 0]), by_chunk)
        carried = jnp.einsum("rnqh,rnqhd,nrhde->rnqhe", jnp.exp(decay), q, states)
        return x + self.out((inside + carried).reshape(x.shape))


class Model(nnx.Module):
    """Two layers: `[rows, length]` tokens to logits `[rows, length, vocabulary]`."""

    def __init__(self, vocab_size, rngs):
        self.tokens = nnx.Embed(vocab_size, WIDTH, rngs=rngs)
        self.convolutions = nnx.List([Convolution(rngs) for _ in range(LAYERS)])
        self.recurrences = nnx.List([Recurrence(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, vocab_size, rngs=rngs)

    def __call__(self, batch):
        # Lockstep: where a document, or a piece of one, begins.
        starts = segment_starts(batch)
        x = self.tokens(batch["inputs"])
        for convolve, recur in zip(self.convolutions, self.recurrences, strict=True):
            x = recur(convolve(x, batch["inputs_segment_ids"]), starts)
        return self.head(self.norm(x))


def total_loss(model, batch):
    """The sum of the losses of a batch."""
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch), batch["targets"])
    return (losses * batch["loss_weights"]).sum()


@nnx.jit
def train_step(model, optimizer, batch):
    """Updates model and optimizer in place; returns the mean loss of the batch."""
    weight = batch["loss_weights"].sum().clip(1e-6)
    loss, gradients = nnx.value_and_grad(total_loss)(model, batch)
    optimizer.update(model, jax.tree.map(lambda each: each / weight, gradients))
    return loss / weight


def train(steps):
    """Trains on the paragraphs of Python's own email package; an id is a byte."""
    files = sorted(pathlib.Path(email.__file__).parent.glob("*.py"))
    texts = [text for file in files for text in file.read_text("utf-8").split("\n\n")]
    ids = [np.frombuffer(text.encode(), np.uint8) for text in texts]
    # Lockstep: a corpus in memory; for more text, see pipeline.prepare.
    corpus = pipeline.Examples(ids, vocab_size=256)
    model = Model(corpus.vocab_size, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    # Lockstep: documents longer than 256 are split; a piece has no state to continue from.
    with pipeline.load(
        corpus, tokens_per_batch=2048, max_length=256, align=CHUNK, seed=0
    ) as loader:
        for step in range(steps):
            batch = next(loader)
            loss = train_step(model, optimizer, batch)
            print("step", step, "shape", batch["inputs"].shape, "loss", float(loss))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    train(parser.parse_args().steps)
