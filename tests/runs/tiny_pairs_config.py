"""The smallest run of sequence to sequence: two buckets, evaluations, checkpoints, two epochs."""

from ml_collections import ConfigDict

from configs import pairs
from tests.runs import tiny_config


def get_config() -> ConfigDict:
    """Needs pairs as JSON lines, of `de` and `en`, in the file that TINY_TEXT names."""
    config = tiny_config.shrink(pairs.get_config())
    config.steps = 12
    config.train.field = config.eval.field = "de", "en"
    config.batches.update(tokens_per_batch=1024, max_length=(96, 64), length_multiple=16)
    config.batches.packing = "none"  # so that there is more than one bucket
    config.optimizer.warmup_steps = 2
    config.eval_every, config.checkpoint_every = 6, 4
    return config
