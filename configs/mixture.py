"""A mixture of code and prose: Python's own library, and its language reference.

    python train.py --config=configs/mixture.py
    lockstep report configs/mixture.py

To change the weights of a run from a later step on, add a phase:

    --config.mixture.weights="((0, {'library': 7, 'reference': 3}), \\
        (150, {'library': 1, 'reference': 1}))"
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config() -> ConfigDict:
    """The configuration that `python train.py --config=configs/mixture.py` runs."""
    config = quickstart.get_config()
    library = config.train
    del config.train
    reference = ConfigDict({**library, "source": "configs.python_data:Reference"})
    config.sources = ConfigDict({"library": library, "reference": reference})

    # Options of `pipeline.Plan`: the weights of each phase, from its first step on, as shares
    # of tokens (or of "examples"). A source that ends is repeated.
    config.mixture = ConfigDict({"by": "tokens"})
    config.mixture.weights = ((0, {"library": 0.7, "reference": 0.3}),)
    return config
