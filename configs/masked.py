"""A bidirectional encoder that guesses masked tokens, on the standard library's own functions.

    python train.py --config=configs/masked.py

Takes minutes on two cores. Every epoch hides other tokens.
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config() -> ConfigDict:
    """The configuration of an encoder."""
    config = quickstart.get_config()
    config.steps = 300
    config.task.update(kind="masked", rate=0.15)
    config.architecture = "encoder"
    config.batches.max_length = 512
    return config
