"""Preference tuning by DPO in Flax Linen: groups, log-probabilities of a reference, and a loss.

    pip install lockstep-pipeline flax optax orbax-checkpoint
    python examples/dpo.py --workdir=runs/dpo

A tiny model learns to prefer answers whose words are in order. Both answers share their prompt in a
row, so it is computed once. The log-probabilities of the reference are computed once, too, and
stored beside the corpus. Copy this file, and put your model and your pairs into it. Run the command
again, also after a kill: it continues from its last checkpoint, with the same losses. Comments that
begin with "Lockstep:" say what the line below does.
"""

import argparse
import email
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec

import pipeline
from pipeline import sources, templates, tokenizers
from pipeline.steps import Compiled, make_train_step, sum_continuations

REFERENCE, TOKENIZER = "reference_logprob", tokenizers.Bytes()
LENGTH, WIDTH, VOCABULARY = 256, 32, TOKENIZER.vocab_size
BETA = 0.1  # the smaller, the farther the model may go from the reference
# Lockstep: the shapes, each compiled once. With 8 rows, a run may continue on 1, 2, 4 or 8 devices.
BUCKETS = [pipeline.Bucket(rows=8, length=LENGTH)]


class Model(nn.Module):
    """One layer of attention: `[rows, length]` tokens to logits `[rows, length, vocabulary]`."""

    @nn.compact
    def __call__(self, batch):
        """Logits of the next tokens."""
        # Lockstep: an answer sees its prompt and itself, but not the other answer.
        mask = pipeline.attention_mask(batch)[:, None]  # the same for every head
        x = nn.Embed(VOCABULARY, WIDTH)(batch["inputs"])
        # Lockstep: the positions of both answers continue those of their prompt.
        x += nn.Embed(LENGTH, WIDTH)(batch["inputs_positions"])
        x += nn.MultiHeadDotProductAttention(num_heads=2)(x, mask=mask)
        return nn.Dense(VOCABULARY)(nn.gelu(nn.Dense(2 * WIDTH)(x)))


def answer_logprobs(params, batch, most):
    """The log-probability of each answer, `[rows, most]`."""
    logits: Any = Model().apply({"params": params}, batch)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    # Lockstep: the sum over answer b of a row is in column b - 1; prompts do not count.
    return sum_continuations(-losses * batch["loss_weights"], batch, most)


def preference_losses(logprobs, reference):
    """The losses and reward margins of pairs, from log-probabilities `[…, (chosen, rejected)]`."""
    rewards = BETA * (logprobs - reference)
    margins = rewards[..., 0] - rewards[..., 1]
    # DPO, arXiv:2305.18290. IPO is ((margins - 0.5) / BETA) ** 2, hinge jax.nn.relu(1 - margins).
    return -jax.nn.log_sigmoid(margins), margins


def sum_over_pairs(params, batch):
    """Over the pairs of a batch: the sums of losses, margins and margins above 0; their number."""
    rows, most = batch[REFERENCE].shape
    pairs = rows, most // 2, 2
    logprobs = answer_logprobs(params, batch, most)
    losses, margins = preference_losses(logprobs.reshape(pairs), batch[REFERENCE].reshape(pairs))
    # Lockstep: segment ids number the pairs of a row; it may have fewer than others.
    exists = jnp.arange(most // 2) < batch["inputs_segment_ids"].max(axis=1, keepdims=True)
    values = jnp.stack([losses, margins, margins > 0, jnp.ones_like(losses)])
    return (values * exists).sum(axis=(1, 2))


def loss(params, batch):
    """The sum of the losses of a batch, and the number of its pairs."""
    total, *_, pairs = sum_over_pairs(params, batch)
    return total, pairs


def make_corpus(directory):
    """Docstrings of Python's own email package, and their words in reverse, as groups of bytes."""
    files = sorted(pathlib.Path(email.__file__).parent.glob("*.py"))
    pattern = re.compile(r'(?:class|def) (\w+).*:\n\s+"""(\w+ [^"\n]{,80})')
    found = [pair for file in files for pair in pattern.findall(file.read_text("utf-8"))]
    records = [{"name": n, "is": text, "not": " ".join(text.split()[::-1])} for n, text in found]
    # Lockstep: an example is a prompt with two answers, the preferred one first.
    pair = templates.Preference(prompt="{name}?\n", chosen="{is}", rejected="{not}")
    # Lockstep: tokenises once; the next call opens the corpus.
    return pipeline.prepare(sources.Records(records), TOKENIZER, directory, template=pair)


def train(workdir, steps):
    """Trains from the last checkpoint in `workdir`, or from the beginning, to `steps`."""
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=auto)
    corpus = make_corpus(workdir / "corpus")
    row = dict.fromkeys(("inputs", "inputs_segment_ids", "inputs_positions"), jnp.ones((1, 1), int))
    # The reference is the model that training begins with: load a supervised one here.
    params = Model().init(jax.random.key(0), row)["params"]
    # Lockstep: the step divides by the number of pairs in the global batch.
    init, train_step = make_train_step(loss, optax.adam(3e-3))
    state = jax.device_put(init(params), NamedSharding(mesh, PartitionSpec()))
    # Lockstep: continues where a killed call stopped; once done, it only opens the table.
    table = pipeline.score(
        corpus,
        lambda params, batch: {REFERENCE: answer_logprobs(params, batch, most=LENGTH)},
        directory=workdir / "reference",
        per="continuation",
        state=state["params"],
        buckets=BUCKETS,
        sharding=mesh,
    )
    columns = {REFERENCE: table[REFERENCE].to_pylist()}
    # Lockstep: a number for each answer, in all batches from here on.
    corpus = corpus.with_features(columns, features={REFERENCE: pipeline.Feature("continuation")})
    training, held_out = corpus.split(hold_out=0.2)
    loader = pipeline.load(training, buckets=BUCKETS, sharding=mesh, seed=0)
    # Lockstep: each held-out pair once.
    once = pipeline.load(held_out, buckets=BUCKETS, sharding=mesh, shuffle=False, num_epochs=1)
    evaluate = jax.jit(sum_over_pairs)
    with loader, once, ocp.CheckpointManager(workdir / "checkpoints") as manager:
        if first := manager.latest_step() or 0:
            items = ocp.args.Composite(
                state=ocp.args.StandardRestore(state), data=ocp.args.JsonRestore()
            )
            restored = manager.restore(first, args=items)
            state = restored["state"]
            # Lockstep: continues with the next batch, or says which setting or text has changed.
            loader.set_state(restored["data"])
        # Lockstep: compiles the step for every bucket now, and refuses any other shape later.
        compiled_step = Compiled(train_step, state, loader.specs, donate=True)
        for step in range(first, steps):
            batch = next(loader)
            state, values = compiled_step(state, batch)
            print("step", step, "shape", batch["inputs"].shape, "loss", float(values["loss"]))
            if (step + 1) % 10 == 0 or step + 1 == steps:
                items = ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    # Lockstep: the step and a fingerprint of the plan, the same on every host.
                    data=ocp.args.JsonSave(loader.get_state()),
                )
                manager.save(step + 1, args=items)
        *sums, pairs = jnp.stack([evaluate(state["params"], batch) for batch in once]).sum(0)
    print("held out: loss {} margin {} accuracy {}".format(*(each / pairs for each in sums)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    train(options.workdir.absolute(), options.steps)
