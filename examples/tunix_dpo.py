"""Preference tuning with Tunix's DPO trainer, in a few shapes, not only the longest; by Lockstep.

    pip install lockstep-pipeline google-tunix
    python examples/tunix_dpo.py --workdir=runs/dpo

Tunix's DPO sums the log probabilities of a row, and computes the prompt once for each response. So
rows cannot be packed, and responses cannot share their prompt, as in examples/dpo.py. Here rows of
similar lengths share a batch. Copy this file, and load your model and your data in it. Run the
command again, also after a kill: it continues from Tunix's last checkpoint, with the same losses.
Comments that begin with "Lockstep:" say what the line below does.
"""

import argparse
import email
import pathlib
import re

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from tunix.models.llama3.model import Llama3, ModelConfig
from tunix.rl import reshard
from tunix.sft import hooks
from tunix.sft.dpo.dpo_trainer import DPOTrainer, DPOTrainingConfig

import pipeline
from pipeline.loading import StateKey

SIDES = ("prompt", "chosen", "rejected")


def make_examples():
    """Questions about Python's email package; rejected answers are capitals on another function."""
    files = sorted(pathlib.Path(email.__file__).parent.glob("*.py"))
    pattern = re.compile(r'def (\w+)\(.*?\):\n\s+"""(.{,300}?)"""', re.S)
    found = [pair for file in files for pair in pattern.findall(file.read_text("utf-8"))]
    prompts = [f"What does {name} do?\n" for name, _ in found]
    chosen = [text.strip() for _, text in found]
    texts = zip(prompts, chosen, map(str.upper, chosen[1:] + chosen[:1]), strict=True)
    # The ids of bytes, from 1 up.
    return [[np.frombuffer(text.encode(), np.uint8) + 1 for text in three] for three in texts]


def make_model(mesh):
    """A tiny Llama; for a real one, load a checkpoint here."""
    heads = {"num_heads": 2, "head_dim": 16, "num_kv_heads": 2}
    sizes = {"num_layers": 1, "vocab_size": 257, "embed_dim": 32, "hidden_dim": 64} | heads
    model = Llama3(ModelConfig(**sizes, rope_theta=10_000, norm_eps=1e-5), rngs=nnx.Rngs(0))
    return reshard.reshard_model_to_mesh(model, mesh)


class Trainer(DPOTrainer, hooks.DataHooks):
    """A DPOTrainer that builds the batch of its step, and continues only with the same plan."""

    def __init__(self, examples, plan, *arguments):
        self.examples, self.plan = examples, plan
        super().__init__(*arguments)
        self.with_data_hooks(self)
        if self.train_steps:
            # Lockstep: an error says which setting or length has changed.
            StateKey(plan).resume(self._restored_custom_metadata["data"])

    def load_next_train_batch(self, trainer):
        """Ids and masks of this host's rows: int32 `[rows, positions]`."""
        # Lockstep: the row of each example, and one of a few shapes, for any step directly.
        planned = self.plan.batch(self.iter_steps)
        rows, (prompt, response) = planned.bucket.shape
        ids = [np.zeros((rows, length), np.int32) for length in (prompt, response, response)]
        for row, example in planned.segments[:, :2]:
            for side, tokens in enumerate(self.examples[example]):
                size = len(tokens)  # Tunix expects the padding of a prompt before it
                ids[side][row, slice(size) if side else slice(-size, None)] = tokens
        mine = np.split(np.arange(rows), jax.process_count())[jax.process_index()]
        batch = {f"{side}_ids": each[mine] for side, each in zip(SIDES, ids, strict=True)}
        return batch | {f"{side}_mask": np.sign(batch[f"{side}_ids"]) for side in SIDES}

    def load_next_eval_batch(self, trainer): ...

    def custom_checkpoint_metadata(self):
        """The state that Tunix stores beside the parameters."""
        # Lockstep: the step and a fingerprint of the plan, the same on every host.
        return {"data": StateKey(self.plan).state(self.iter_steps)}


def train(workdir, steps):
    """Trains from the last checkpoint in `workdir`, or from the beginning, to `steps`."""
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((jax.device_count(), 1), ("fsdp", "tp"), axis_types=auto)
    examples = make_examples()
    # Lockstep: two lengths for each example: its prompt, and its longer response.
    lengths = [(len(prompt), max(map(len, responses))) for prompt, *responses in examples]
    # Lockstep: a few shapes, and one example in a row. With multiples of 4 rows, the run may
    # continue on 1, 2 or 4 devices.
    buckets = pipeline.fit_buckets(
        lengths,
        tokens_per_batch=2048,
        max_buckets=3,
        length_multiple=32,
        row_multiple=4,
        packing="none",
    )
    plan = pipeline.Plan(lengths, buckets, packing="none", seed=0)
    # Tunix saves a last checkpoint without `custom_checkpoint_metadata`, unless this one saves it.
    policy = ocp.checkpoint_managers.FixedIntervalPolicy(10)
    saving = ocp.CheckpointManagerOptions(save_decision_policy=policy)
    where = {"checkpoint_root_directory": str(workdir), "checkpointing_options": saving}
    config = DPOTrainingConfig(eval_every_n_steps=steps, max_steps=steps, **where)
    with mesh:  # where Tunix looks for its mesh
        models = make_model(mesh), make_model(mesh)  # to train, and for reference
        Trainer(examples, plan, *models, optax.adamw(1e-3), config).train(())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    train(parser.parse_args().workdir.absolute(), steps=40)
