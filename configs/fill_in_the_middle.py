"""A decoder that also fills gaps, on the standard library's own functions.

    python train.py --config=configs/fill_in_the_middle.py

Takes minutes on two cores. Half of the functions are cut twice, elsewhere in every epoch, and their
middle moved to the end.
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config() -> ConfigDict:
    """The configuration of a decoder that fills gaps."""
    config = quickstart.get_config()
    config.task.update(kind="fill_in_the_middle", rate=0.5)
    # A function that is longer than a row would be cut before its middle.
    config.batches.overflow = "drop"
    return config
