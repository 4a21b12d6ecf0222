"""MaxText's own pre-training, model and config, on packed batches of Lockstep.

    pip install lockstep-pipeline, and MaxText as docs/own_loop.md says
    python examples/maxtext_pretrain.py base_output_directory=/tmp/maxtext run_name=first

Copy this file, and give it a config and a corpus of your own. Further arguments are MaxText's. Run
the command again, also after a kill: it continues from MaxText's last checkpoint, with the same
losses. Comments that begin with "Lockstep:" say what the line below does. Tried with maxtext 0.2.5,
jax 0.12.0.1 and flax 0.12.12.
"""

import email
import pathlib
import sys

import grain
import maxtext
from maxtext.input_pipeline import input_pipeline_interface
from maxtext.trainers.pre_train import train
from maxtext.utils.sharding import get_input_data_sharding

import pipeline
from pipeline.sources import Records
from pipeline.tokenizers import Bytes

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
}


def make_corpus(directory):
    """The paragraphs of Python's own email package, as a corpus of bytes."""
    files = sorted(pathlib.Path(email.__file__).parent.glob("*.py"))
    texts = [text for file in files for text in file.read_text("utf-8").split("\n\n")]
    # Lockstep: tokenises once; the next call opens what is there.
    return pipeline.prepare(Records(texts), Bytes(), directory)


def make_train_iterator(config, mesh, process_indices):
    """What MaxText calls for its training data: a Grain iterator of global batches."""
    corpus = pipeline.Corpus.open(config.grain_train_files)
    # Lockstep: MaxText's train step has one shape.
    bucket = pipeline.Bucket(config.global_batch_size_to_load, config.max_target_length)
    plan = pipeline.Plan(corpus, [bucket], seed=config.data_shuffle_seed)
    # Lockstep: each process builds the rows and columns that its devices hold, whatever the mesh.
    sharding = get_input_data_sharding(config, mesh)
    batches = pipeline.Batches(corpus, plan, sharding=sharding).repeat()

    def to_maxtext(batch):
        # Lockstep: MaxText's names; segment ids of 0 in the targets where the weight is 0.
        fields = pipeline.rename(batch, "maxtext")
        return pipeline.to_global(fields, mesh, spec=sharding.spec, shape=bucket.shape)

    ahead = batches.to_iter_dataset().map(to_maxtext)
    return iter(grain.experimental.ThreadPrefetchIterDataset(ahead, prefetch_buffer_size=2))


def main(overrides):
    """Trains MaxText's model, from its last checkpoint or from the beginning."""
    given = dict(override.split("=", 1) for override in overrides)
    corpus = make_corpus(pathlib.Path(given["base_output_directory"]) / "corpus")
    # Lockstep: stands in for MaxText's own Grain pipeline, so MaxText stores its data state, a
    # step and a fingerprint of the plan, in the checkpoint's item `iter`.
    input_pipeline_interface.make_grain_train_iterator = make_train_iterator
    data = {"dataset_type": "grain", "grain_train_files": corpus.directory}
    config = pathlib.Path(maxtext.__file__).parent / "configs/base.yml"
    options = [f"{name}={value}" for name, value in (TINY | data | given).items()]
    train.main(["maxtext_pretrain.py", str(config), *options])


if __name__ == "__main__":
    main(sys.argv[1:])
