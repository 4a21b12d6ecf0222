"""Speech to text: an encoder–decoder in Flax NNX over packed frames and tokens, fed by Lockstep.

    pip install lockstep-pipeline flax optax
    python examples/speech.py

The speech is made here: each letter is a tone. Put your own recordings into `make_examples`.
Comments that begin with "Lockstep:" say what the line below does.
"""

import argparse
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import pipeline
from pipeline import Feature
from pipeline.corpus import TARGETS

RATE, HOP, WINDOW, MELS = 8_000, 80, 200, 40  # samples a second, a frame, a window; bands
BEGIN, END, LETTERS = 0, 1, 8
WIDTH = 64


def log_mel(wave):
    """Logarithms of the energy in `MELS` bands, a frame for each `HOP` samples: [frames, MELS]."""
    starts = np.arange(0, len(wave) - WINDOW + 1, HOP)
    windows = wave[starts[:, None] + np.arange(WINDOW)] * np.hanning(WINDOW)
    power = np.abs(np.fft.rfft(windows, 256)) ** 2
    mel = np.linspace(0, 2595 * np.log10(1 + RATE / 2 / 700), MELS + 2)
    edges = 700 * (10 ** (mel / 2595) - 1)
    bins = np.fft.rfftfreq(256, 1 / RATE)
    up = (bins[:, None] - edges[:-2]) / np.diff(edges)[:-1]
    down = (edges[2:] - bins[:, None]) / np.diff(edges)[1:]
    return np.log(power @ np.maximum(np.minimum(up, down), 0) + 1e-3).astype(np.float32)


def make_examples(count):
    """Utterances of 2 to 20 letters, each a tone of 50 to 150 milliseconds."""
    rng = np.random.default_rng(0)
    columns: dict[str, list] = {"tokens": [], "frames": []}
    for size in rng.integers(2, 21, count):
        letters = rng.integers(0, LETTERS, size)
        tones = (250 * 1.35**letters).repeat(rng.integers(RATE // 20, RATE * 3 // 20, size))
        wave = np.sin(2 * np.pi * np.cumsum(tones) / RATE) + rng.normal(0, 0.1, len(tones))
        columns["tokens"].append([BEGIN, *(letters + 2), END])
        columns["frames"].append(log_mel(wave))
    # Lockstep: targets are a side of token ids, frames a side of arrays; both are packed.
    features = {"frames": Feature("frames", dtype="float32", shape=(MELS,))}
    return pipeline.Examples(columns, features=features, task=TARGETS)


def positions_of(positions):
    """Sines and cosines of positions: [rows, length, WIDTH]."""
    angles = positions[:, :, None] * 1_000.0 ** (-np.arange(WIDTH // 2) / (WIDTH // 2))
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=2)


def same(queries, keys):
    """Whether each key is in the segment of a query: [rows, 1, queries, keys]."""
    # Lockstep: the frames and the tokens of an example have the same segment id; 0 is padding.
    return ((queries[:, :, None] == keys[:, None]) & (queries > 0)[:, :, None])[:, None]


class Layer(nnx.Module):
    """Attention to the own side, to a memory if there is one, and a feed-forward layer."""

    def __init__(self, rngs):
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(3)])
        self.attention, self.cross = (
            nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs) for _ in range(2)
        )
        self.up, self.down = nnx.Linear(WIDTH, 256, rngs=rngs), nnx.Linear(256, WIDTH, rngs=rngs)

    def __call__(self, x, mask, memory=None, memory_mask=None):
        """[rows, length, WIDTH]."""
        x += self.attention(self.norms[0](x), mask=mask)
        if memory is not None:
            x += self.cross(self.norms[1](x), memory, mask=memory_mask)
        return x + self.down(nnx.gelu(self.up(self.norms[2](x))))


class Model(nnx.Module):
    """Logits of the next letter: [rows, length of targets, letters and marks]."""

    def __init__(self, rngs):
        self.taps = nnx.List([nnx.Linear(MELS, WIDTH, rngs=rngs) for _ in range(3)])
        self.tokens = nnx.Embed(LETTERS + 2, WIDTH, rngs=rngs)
        self.encoder = nnx.List([Layer(rngs) for _ in range(2)])
        self.decoder = nnx.List([Layer(rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, LETTERS + 2, rngs=rngs)

    def shrink(self, frames, ids):
        """A convolution of three taps at every second frame, inside segments."""
        # Lockstep: segments of frames begin at even columns, with align={"frames": 2}.
        frames, padded = (jnp.pad(x, [(0, 0), (1, 0), (0, 0)]) for x in (frames, ids[:, :, None]))
        found: Any = 0
        for at, tap in enumerate(self.taps):  # the frames before, at, and after each second one
            inside = padded[:, at::2][:, : ids.shape[1] // 2] == ids[:, ::2, None]
            found += jnp.where(inside, tap(frames[:, at::2][:, : ids.shape[1] // 2]), 0)
        return nnx.gelu(found)

    def __call__(self, batch):
        """Reads the fields of a batch."""
        heard, said = batch["frames_segment_ids"][:, ::2], batch["targets_segment_ids"]
        memory = self.shrink(batch["frames"] / 4, batch["frames_segment_ids"])
        memory += positions_of(batch["frames_positions"][:, ::2] // 2)
        for layer in self.encoder:
            memory = layer(memory, same(heard, heard))
        x = self.tokens(batch["decoder_inputs"]) + positions_of(batch["targets_positions"])
        causal = same(said, said) & np.tri(said.shape[1], dtype=bool)
        for layer in self.decoder:
            x = layer(x, causal, memory, same(said, heard))
        return self.head(self.norm(x))


def loss_sum(model, batch):
    """The sum of the losses of the letters; padding has weight 0."""
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch), batch["targets"])
    return (losses * batch["loss_weights"]).sum()


@nnx.jit
def train_step(model, optimizer, batch):
    """Updates model and optimizer in place; returns the mean loss of the batch."""
    weight = batch["loss_weights"].sum().clip(1)
    loss, gradients = nnx.value_and_grad(lambda model: loss_sum(model, batch) / weight)(model)
    optimizer.update(model, gradients)
    return loss


def train(utterances, steps, tokens_per_batch):
    """Trains from the beginning, and prints the losses."""
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(2e-3), wrt=nnx.Param)
    # Lockstep: what a position costs; with it, a batch has a few static shapes, both sides full.
    loader = pipeline.load(
        make_examples(utterances),
        tokens_per_batch=tokens_per_batch,
        max_buckets=2,
        length_multiple={"targets": 16, "frames": 64},
        cost={"targets": 1, "frames": 0.5},
        align={"frames": 2},
    )
    with loader:
        print(loader.plan)
        for step, batch in zip(range(steps), loader, strict=False):
            print("step", step, "loss", float(train_step(model, optimizer, batch)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--utterances", type=int, default=4_000)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--tokens-per-batch", type=int, default=4096)
    options = parser.parse_args()
    train(options.utterances, options.steps, options.tokens_per_batch)
