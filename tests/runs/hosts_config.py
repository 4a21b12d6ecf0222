"""The tiny run with rows that 1, 2, 3, 4, 6 or 12 hosts can share."""

from ml_collections import ConfigDict

from tests.runs import tiny_config


def get_config() -> ConfigDict:
    """Needs the text in the file that TINY_TEXT names."""
    config = tiny_config.get_config()
    config.steps = 40
    config.batches.update(tokens_per_batch=1536, max_buckets=2, row_multiple=12)
    config.checkpoint_every = 4
    return config
