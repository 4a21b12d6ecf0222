"""The smallest run of a mixture: two shares of one file, one of them three times as heavy."""

import os

from ml_collections import ConfigDict

from tests.runs import tiny_config


def get_config() -> ConfigDict:
    """Needs the text in the file that TINY_TEXT names; with TINY_MORE there is a third share."""
    config = tiny_config.get_config()
    config.steps = 12
    config.eval_every, config.checkpoint_every = 12, 6
    config.sources = ConfigDict(
        {"first": {**config.train, "end": 0.4}, "second": {**config.train, "begin": 0.4}}
    )
    if "TINY_MORE" in os.environ:  # of a name that comes before the others
        config.sources.another = config.eval
    del config.train
    config.mixture = ConfigDict({"weights": ((0, {"first": 3, "second": 1}),)})
    return config
