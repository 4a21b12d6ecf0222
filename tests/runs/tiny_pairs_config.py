"""The smallest run of sequence to sequence: two buckets, evaluations, checkpoints, two epochs."""

import os

from ml_collections import ConfigDict

from configs import pairs


def get_config() -> ConfigDict:
    """Needs pairs as JSON lines, of `de` and `en`, in the file that TINY_TEXT names."""
    config = pairs.get_config()
    config.steps = 12
    for part, begin, end in ((config.train, 0.0, 0.8), (config.eval, 0.8, 1.0)):
        part.source, part.files = "", os.environ["TINY_TEXT"]
        part.field = "de", "en"
        part.begin, part.end = begin, end
    config.tokenizer.kind = "bytes"
    config.batches.update(tokens_per_batch=1024, max_length=(96, 64), length_multiple=16)
    config.batches.packing = "none"  # so that there is more than one bucket
    config.model.update(num_layers=1, width=32, num_heads=2, num_kv_heads=1, mlp_width=64)
    config.model.attention = "dense"  # compiles sooner
    config.optimizer.warmup_steps = 2
    config.eval_every, config.checkpoint_every = 6, 4
    return config
