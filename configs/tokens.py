"""Tokens that another program stored, read in place; a share of them is held out for evaluation.

    python train.py --config=configs/tokens.py --config.train.format=megatron \\
        --config.train.files=data/my_text_document --config.train.options.vocab_size=50257

The formats are methods of `pipeline.InPlace`; docs/your_data.md shows the call for each.
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config() -> ConfigDict:
    """The configuration that `python train.py --config=configs/tokens.py` runs."""
    config = quickstart.get_config()
    config.train.source = config.eval.source = ""
    config.train.format = "flat"
    config.hold_out = 0.01
    return config
