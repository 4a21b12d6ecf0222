"""Supervised fine-tuning with Tunix on packed batches: its Llama, its trainer, LoRA; by Lockstep.

    pip install lockstep-pipeline google-tunix
    python examples/tunix_sft.py --workdir=runs/tunix

Tunix's own SFT has no packing ("Sequence packing is not supported in SFT PeftTrainer yet"); here
several examples share a row. Copy this file, and load your model and your data in it. Run the
command again, also after a kill: it continues from Tunix's last checkpoint, with the same losses.
Comments that begin with "Lockstep:" say what the line below does. Tried with google-tunix 0.1.7,
qwix 0.1.8, jax 0.12.0.1 and flax 0.12.12.
"""

import argparse
import email
import pathlib
import re

import jax
import optax
import orbax.checkpoint as ocp
import qwix
from flax import nnx
from tunix.models.llama3.model import Llama3, ModelConfig
from tunix.rl import reshard
from tunix.sft import hooks
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

import pipeline
from pipeline import sources, templates, tokenizers


def make_corpus(directory):
    """Questions after the docstrings of Python's own email package; the loss is on the answers."""
    files = sorted(pathlib.Path(email.__file__).parent.glob("*.py"))
    found = [
        {"question": name, "answer": text.strip()}
        for file in files
        for name, text in re.findall(
            r'def (\w+)\(.*?\):\n\s+"""(.*?)"""', file.read_text("utf-8"), re.S
        )
    ]
    # Lockstep: tokenises once, with weight 0 on the prompts; the next call opens what is there.
    template = templates.Answer(prompt="What does {question} do?\n", answer="{answer}")
    return pipeline.prepare(
        sources.Records(found), tokenizers.Bytes(), directory, template=template
    )


def make_model(vocab_size, mesh):
    """A tiny Llama with LoRA on its attention; for a real one, load a checkpoint here."""
    config = ModelConfig(
        num_layers=2,
        vocab_size=vocab_size,
        embed_dim=64,
        hidden_dim=128,
        num_heads=2,
        head_dim=32,
        num_kv_heads=2,
        rope_theta=10_000,
        norm_eps=1e-5,
    )
    model = Llama3(config, rngs=nnx.Rngs(0))
    lora = qwix.LoraProvider(module_path=".*q_proj|.*v_proj|.*lm_head", rank=16, alpha=32.0)
    inputs = model.get_model_input()
    model = qwix.apply_lora_to_model(model, lora, rngs=nnx.Rngs(1), **inputs)
    return reshard.reshard_model_to_mesh(model, mesh)


def model_input(batch):
    """The arguments of `mean_loss` from a batch of Lockstep."""
    return {
        "inputs": batch["inputs"],
        "positions": batch["inputs_positions"],
        # Lockstep: a row holds several examples; each attends only to itself, and causally.
        "attention_mask": pipeline.attention_mask(batch),
        "targets": batch["targets"],
        "weights": batch["loss_weights"],
    }


def mean_loss(model, inputs, positions, attention_mask, targets, weights):
    """The mean loss of the answers' tokens."""
    logits, _ = model(inputs, positions, None, attention_mask)
    # Lockstep: targets are shifted inside each example already; weights are 0 on prompts and
    # padding. Batches hold different numbers of tokens, so divide by their number.
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return (losses * weights).sum() / weights.sum().clip(1e-9)


class Trainer(PeftTrainer):
    """A PeftTrainer that keeps the data state in its checkpoints."""

    def __init__(self, loader, *arguments):
        self.loader = loader
        super().__init__(*arguments)
        if self.train_steps:
            # Lockstep: continues with the next batch, or says which setting or text has changed.
            loader.set_state(self._restored_custom_metadata["data"])

    def custom_checkpoint_metadata(self):
        """The state that Tunix stores beside the parameters."""
        # Lockstep: the step and a fingerprint of the plan, the same on every host.
        return {"data": self.loader.get_state()}


class Data(hooks.DataHooks):
    """Hands batches to the trainer, which would otherwise draw all past ones again on resuming."""

    def __init__(self, loader):
        self.loader = loader

    def load_next_train_batch(self, train_ctx):
        """The next batch, or None after the last."""
        return next(self.loader, None)

    def load_next_eval_batch(self, train_ctx):
        """No evaluation here."""


def train(workdir, steps, save_every):
    """Trains from the last checkpoint in `workdir`, or from the beginning, to `steps`."""
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((jax.device_count(), 1), ("fsdp", "tp"), axis_types=auto)
    corpus = make_corpus(workdir / "corpus")
    # Lockstep: an iterator of global batches of a few shapes; rows are sharded over `fsdp`, as
    # Tunix expects (TrainingConfig.data_sharding_axis). With multiples of 4 rows, the run may
    # continue on 1, 2 or 4 devices.
    loader = pipeline.load(
        corpus,
        sharding=mesh,
        tokens_per_batch=2048,
        max_length=512,
        row_multiple=4,
        width=64,
        seed=0,
    )
    # Tunix saves a last checkpoint without `custom_checkpoint_metadata`, unless this policy has
    # saved that step.
    policies = ocp.checkpoint_managers
    when = [policies.FixedIntervalPolicy(save_every), policies.SpecificStepsPolicy({steps})]
    config = TrainingConfig(
        eval_every_n_steps=steps,
        max_steps=steps,
        checkpoint_root_directory=str(workdir / "checkpoints"),
        checkpointing_options=ocp.CheckpointManagerOptions(
            save_decision_policy=policies.AnySavePolicy(when), max_to_keep=2
        ),
    )
    print(loader.plan)
    with loader, mesh:  # where Tunix looks for its mesh
        model = make_model(corpus.vocab_size, mesh)
        trainer = Trainer(loader, model, optax.adamw(1e-2), config)
        trainer.with_loss_fn(mean_loss).with_gen_model_input_fn(model_input)
        trainer.with_data_hooks(Data(loader))
        trainer.train(loader)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=10)
    options = parser.parse_args()
    train(options.workdir.absolute(), options.steps, options.save_every)
