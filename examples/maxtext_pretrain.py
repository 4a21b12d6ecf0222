"""MaxText's own pre-training, model and config, on batches that Lockstep packs.

    pip install lockstep-pipeline, and MaxText as docs/migration.md says
    python examples/maxtext_pretrain.py base_output_directory=runs/maxtext run_name=first

Copy this file, and give it a config and a corpus of your own. Further arguments are MaxText's. Run
the command again, also after a kill: it continues from MaxText's last checkpoint, with the same
losses. Comments that begin with "Lockstep:" say what the line below does. Tried with maxtext 0.2.5,
jax 0.12.0.1 and flax 0.12.12.
"""

import email
import pathlib
import sys

import maxtext
from maxtext.input_pipeline import input_pipeline_interface
from maxtext.trainers.pre_train import train
from maxtext.utils.sharding import get_input_data_sharding

import pipeline
from pipeline import sources, tokenizers

# A tiny model, for a CPU.
TINY = {
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "attention": "dot_product",
    "base_emb_dim": 32,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 2,
    "base_mlp_dim": 64,
    "base_num_decoder_layers": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "per_device_batch_size": 2,
    "max_target_length": 256,
    "learning_rate": 0.01,
    "steps": 40,
    "checkpoint_period": 10,
    "eval_interval": 20,
}


def make_corpora(directory):
    """The paragraphs of Python's own email package, as corpora of bytes: to train on, held out."""
    files = sorted(pathlib.Path(email.__file__).parent.glob("*.py"))
    texts = [text for file in files for text in file.read_text("utf-8").split("\n\n")]
    shares = {"train": [text for n, text in enumerate(texts) if n % 20], "eval": texts[::20]}
    # Lockstep: tokenises once; the next call opens the corpus.
    return [
        pipeline.prepare(sources.Records(share), tokenizers.Bytes(), directory / name)
        for name, share in shares.items()
    ]


def rename(batch):
    """A batch under MaxText's names."""
    # Lockstep: targets of weight 0 get the segment id 0, which MaxText's loss leaves out.
    return pipeline.rename(batch, "maxtext")


def make_train_iterator(config, mesh, process_indices):
    """An endless Grain iterator of training batches, for MaxText to call."""
    rows, length = config.global_batch_size_to_load, config.max_target_length
    # Lockstep: two shapes of equally many positions. MaxText compiles its own, the longest, before
    # the first step, and the other at its first batch.
    return pipeline.load(
        config.grain_train_files,
        # Lockstep: each process builds the rows and columns that its devices hold.
        sharding=get_input_data_sharding(config, mesh),
        tokens_per_batch=rows * length,
        max_length=length,
        max_buckets=2,
        row_multiple=rows,
        width=config.emb_dim,
        seed=config.data_shuffle_seed,
        transform=rename,
    )


class Evaluation:
    """The batches of an evaluation, for MaxText to iterate over: one pass, the same each time."""

    def __init__(self, config, mesh, process_indices):
        self.config, self.mesh = config, mesh

    def __iter__(self):
        config = self.config
        shape = config.global_batch_size_to_load_eval, config.max_target_length
        # Lockstep: a finite pass ends at the same step on every host.
        return pipeline.load(
            config.grain_eval_files,
            sharding=get_input_data_sharding(config, self.mesh),
            buckets=[pipeline.Bucket(*shape)],
            num_epochs=1,
            shuffle=False,
            transform=rename,
        )


def main(overrides):
    """Trains MaxText's model, from its last checkpoint or from the beginning."""
    given = dict(override.split("=", 1) for override in overrides)
    corpus, held_out = make_corpora(pathlib.Path(given["base_output_directory"]) / "corpus")
    # Lockstep: replaces MaxText's own Grain pipeline, so MaxText stores its data state, a step and
    # a fingerprint of the plan, in the checkpoint's item `iter`.
    input_pipeline_interface.make_grain_train_iterator = make_train_iterator
    input_pipeline_interface.make_grain_eval_iterator = Evaluation
    data = {
        "dataset_type": "grain",
        "grain_train_files": corpus.directory,
        "grain_eval_files": held_out.directory,
    }
    config = pathlib.Path(maxtext.__path__[0]) / "configs/base.yml"
    options = [f"{name}={value}" for name, value in (TINY | data | given).items()]
    train.main(["maxtext_pretrain.py", str(config), *options])


if __name__ == "__main__":
    main(sys.argv[1:])
