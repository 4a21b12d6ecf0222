"""Policy gradient in Flax NNX: sample, pack, step, unpack; by Lockstep.

    pip install lockstep-pipeline flax optax
    python examples/rollouts.py

A tiny model learns to repeat the first token of its prompt. The rollouts of a prompt share it in a
row, so it is computed once. Every update has other lengths, and still nothing is compiled after the
first. Copy this file, and put your model, your prompts and your reward into it. Comments that begin
with "Lockstep:" say what the line below does.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import pipeline
from pipeline.steps import sum_continuations

END, VOCABULARY = 0, 8  # the mark that ends a rollout, and the number of ids
PROMPT, LONGEST = 4, 20  # the most tokens of a prompt, and of a prompt with its continuation
PROMPTS, GROUP = 16, 8  # prompts of an update, and rollouts of each
WIDTH, PASSES, CLIP = 32, 2, 0.2

# Lockstep: the shapes, each compiled once; here one is enough, since short groups share its rows.
BUCKETS = [pipeline.Bucket(rows=8, length=160)]
# Lockstep: an advantage for each rollout, and a log-probability for each token that is predicted.
FEATURES = {
    "advantage": pipeline.Feature("continuation", dtype="float32"),
    "old_logprobs": pipeline.Feature("targets", dtype="float32"),
}


class Model(nnx.Module):
    """One layer of attention: `[rows, length]` tokens to logits `[rows, length, vocabulary]`."""

    def __init__(self, rngs):
        self.tokens = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(LONGEST, WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.hidden = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.head = nnx.Linear(2 * WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, inputs, positions, mask):
        x = self.tokens(inputs) + self.positions(positions)
        x += self.attention(x, mask=mask[:, None])
        return jax.nn.log_softmax(self.head(nnx.gelu(self.hidden(x))))


@nnx.jit
def sample(model, tokens, sizes, key):
    """Continues prompts `[n, LONGEST]` of these sizes: all tokens, and the log-probs of each."""
    positions, mask = jnp.arange(LONGEST)[None], jnp.tril(jnp.ones((1, LONGEST, LONGEST), bool))

    def extend(at, tokens):
        logits = model(tokens, positions, mask)[:, at - 1]
        drawn = jax.random.categorical(jax.random.fold_in(key, at), logits)
        return tokens.at[:, at].set(jnp.where(at < sizes, tokens[:, at], drawn))

    tokens = jax.lax.fori_loop(1, LONGEST, extend, tokens)
    found = jnp.take_along_axis(model(tokens, positions, mask)[:, :-1], tokens[:, 1:, None], 2)
    return tokens, jnp.pad(found[..., 0], ((0, 0), (1, 0)))


def make_rollouts(model, random):
    """The groups of an update as columns of `Examples.from_groups`, and their mean reward."""
    prompts = random.integers(1, VOCABULARY, (PROMPTS, LONGEST)).repeat(GROUP, axis=0)
    sizes = random.integers(1, PROMPT + 1, PROMPTS).repeat(GROUP)
    key = jax.random.key(random.integers(1 << 31))
    tokens, logprobs = map(np.asarray, sample(model, jnp.asarray(prompts), sizes, key))
    at = np.arange(LONGEST)
    ends = (tokens == END) & (at >= sizes[:, None])
    lengths = np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, LONGEST)
    sampled = (at >= sizes[:, None]) & (at < lengths[:, None])
    # The share of the prompt's first token in the longest possible continuation.
    rewards = (sampled & (tokens == tokens[:, :1])).sum(axis=1) / (LONGEST - sizes)
    groups = rewards.reshape(PROMPTS, GROUP)
    spread = groups.std(axis=1, keepdims=True) + 1e-4
    advantages = (groups - groups.mean(axis=1, keepdims=True)) / spread

    def nest(column):
        """(of the prompt, [of each continuation, …]), group by group."""
        rows = [(row[:p], row[p:n]) for row, p, n in zip(column, sizes, lengths, strict=True)]
        return [
            (rows[first][0], [own for _, own in rows[first : first + GROUP]])
            for first in range(0, len(rows), GROUP)
        ]

    # Lockstep: tokens as (prompt, [continuation, …]), and values of tokens nested like them.
    columns = {"tokens": tokens, "weights": sampled.astype(np.float32), "old_logprobs": logprobs}
    groups = {name: nest(column) for name, column in columns.items()}
    return groups | {"advantage": [*advantages]}, rewards.mean()


def weighted_loss(model, batch):
    """The sum of the losses of a batch, and the fall of each rollout's log-probability."""
    # Lockstep: each rollout sees its prompt and itself, and no other in its row.
    mask = pipeline.attention_mask(batch)
    logits = model(batch["inputs"], batch["inputs_positions"], mask)
    logprobs = jnp.take_along_axis(logits, batch["targets"][..., None], 2)[..., 0]
    # Lockstep: the advantage of rollout b is in column b - 1; prompts and padding have weight 0.
    rollout = jnp.maximum(batch["inputs_branch_ids"] - 1, 0)
    advantages = jnp.take_along_axis(batch["advantage"], rollout, 1)
    change = (logprobs - batch["old_logprobs"]) * batch["loss_weights"]
    ratio = jnp.exp(change)
    clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
    losses = -jnp.minimum(ratio * advantages, clipped * advantages)
    most = batch["advantage"].shape[1]
    return (losses * batch["loss_weights"]).sum(), -sum_continuations(change, batch, most)


@nnx.jit
def add_gradients(model, gradients, batch):
    """The sum of `gradients` and those of a batch, and the falls of `weighted_loss`."""
    more, lost = nnx.grad(weighted_loss, has_aux=True)(model, batch)
    return jax.tree.map(jnp.add, gradients, more), lost


@nnx.jit
def update(model, optimizer, gradients, weight):
    """Takes one step, from the gradients of a sum of losses with this sum of weights."""
    optimizer.update(model, jax.tree.map(lambda each: each / weight.clip(1e-9), gradients))


def train(updates):
    """Trains, and prints the mean reward of each update and the KL divergence of its last pass."""
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=auto)
    everywhere = NamedSharding(mesh, PartitionSpec())
    random, model = np.random.default_rng(0), Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    state = jax.device_put(nnx.state((model, optimizer)), everywhere)
    nnx.update((model, optimizer), state)
    zeros = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
    results: list = []
    for step in range(updates):
        columns, reward = make_rollouts(model, random)
        # Lockstep: a corpus in memory; its length is that of the update.
        examples = pipeline.Examples.from_groups(columns, features=FEATURES)
        learnt = np.float32(examples.num_learnt)
        for _ in range(PASSES):
            gradients, results = zeros, []
            # Lockstep: batches of this shape, and the places of the rollouts in them.
            for planned, batch in pipeline.pack(examples, BUCKETS, sharding=mesh, max_segments=16):
                gradients, lost = add_gradients(model, gradients, batch)
                results.append((planned, lost))
            # One division for the update: a sum does not depend on the packing.
            update(model, optimizer, gradients, learnt)
        # Lockstep: for each group, an array with a value for each rollout, in sampling order.
        found = pipeline.unpack(results, examples, per="continuation")
        kl, shapes = np.sum(found) / learnt, [each.bucket.shape for each, _ in results]
        print(f"update {step} reward {reward:.3f} kl {kl:.5f} batches {shapes}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=40)
    train(parser.parse_args().updates)
