"""Sequence to sequence: from the docstrings of the standard library to their functions' signatures.

    python train.py --config=configs/pairs.py

Takes minutes on two cores. Other pairs: records of .jsonl files with two texts, as in
`--config.train.source= --config.train.files='pairs/*.jsonl' --config.train.field="('de','en')"`; or
two parallel texts, with a class of your own as `--config.train.source` (docs/pairs.md).
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config() -> ConfigDict:
    """The configuration of an encoder–decoder."""
    config = quickstart.get_config()
    config.steps = 300
    for part in (config.train, config.eval):
        part.source = "configs.python_data:Docstrings"
        with part.ignore_type():
            part.field = ("docstring", "signature")  # of a record: the inputs and the targets

    # `tokens_per_batch` counts the positions of both sides; lengths are (inputs, targets).
    config.batches.update(tokens_per_batch=4096, max_buckets=2, length_multiple=64)
    with config.batches.ignore_type():
        config.batches.max_length = (512, 128)
    config.batches.overflow = "truncate"  # or "drop"; pairs cannot be split

    config.architecture = "encoder_decoder"
    config.model.num_layers = 2  # in the encoder, and 2 in the decoder
    return config
