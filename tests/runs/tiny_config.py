"""The smallest run that has everything: three buckets, evaluations, checkpoints, two epochs."""

import os

from ml_collections import ConfigDict

from configs import quickstart


def shrink(config: ConfigDict) -> ConfigDict:
    """The config of a small model for the text in the file that TINY_TEXT names."""
    for part, begin, end in ((config.train, 0.0, 0.8), (config.eval, 0.8, 1.0)):
        part.source, part.files = "", os.environ["TINY_TEXT"]
        part.begin, part.end = begin, end
    config.tokenizer.kind = "bytes"
    config.model.update(num_layers=1, width=32, num_heads=2, num_kv_heads=1, mlp_width=64)
    config.model.attention = "dense"  # compiles sooner
    return config


def get_config() -> ConfigDict:
    """Needs the text in the file that TINY_TEXT names; with TINY_MORE there is more to add."""
    config = shrink(quickstart.get_config())
    config.steps = 30
    if "TINY_MORE" in os.environ:
        config.added = ConfigDict({"more": config.eval})
    config.batches.update(tokens_per_batch=1024, max_buckets=3, max_length=128, length_multiple=16)
    config.optimizer.warmup_steps = 3
    config.eval_every, config.checkpoint_every = 10, 5
    return config
