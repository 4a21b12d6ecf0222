"""The smallest run that has evaluations, checkpoints and two epochs.

Others go by a name, as in `--config=tests/runs/tiny_config.py:hosts`: with two buckets, also with
rows that 1, 2, 3, 4, 6 or 12 hosts can share; of each task; and of a mixture of two shares of the
text, one of them three times as heavy.
"""

import os
import pathlib

from ml_collections import ConfigDict

from configs import pairs, quickstart
from pipeline.fs.atomic import as_path, write_once


def get_config(kind: str = "") -> ConfigDict:
    """Needs the text in the file that TINY_TEXT names; with TINY_MORE there is more to add.

    Pairs are JSON lines of `de` and `en`; those of the other tasks have chats and `text`.
    """
    config = (pairs if kind == "pairs" else quickstart).get_config()
    for part, share in ((config.train, (0.0, 0.8)), (config.eval, (0.8, 1.0))):
        part.source, part.files = "", share_of_text(*share)
    if "TINY_MORE" in os.environ:
        config.added = ConfigDict({"more": config.eval})
    config.tokenizer.kind = "bytes"
    config.model.update(num_layers=1, width=32, num_heads=2, num_kv_heads=1, mlp_width=64)
    config.model.attention = "dense"  # compiles sooner
    config.optimizer.warmup_steps = 3
    config.steps, config.eval_every, config.checkpoint_every = 12, 6, 4
    batches = config.batches
    batches.update(tokens_per_batch=1024, max_buckets=1, length_multiple=16)
    if kind != "pairs":
        batches.max_length = 64
    match kind:
        case "" | "buckets":
            config.steps, config.eval_every, config.checkpoint_every = 30, 10, 5
            batches.max_length = 128
            if kind:
                batches.update(max_buckets=2, max_length=192)
        case "hosts":
            config.steps, config.eval_every = 40, 10
            batches.update(tokens_per_batch=1920, max_buckets=2, max_length=160, row_multiple=12)
            batches.packing = "none"  # so that there is more than one bucket
        case "mixture":
            config.eval_every, config.checkpoint_every, batches.max_length = 12, 6, 128
            shares = {
                "first": {**config.train, "files": share_of_text(0.0, 0.4)},
                "second": {**config.train, "files": share_of_text(0.4, 0.8)},
            }
            if "TINY_MORE" in os.environ:  # of a name that comes before the others
                shares["another"] = config.eval
            config.sources = ConfigDict(shares)
            config.mixture = ConfigDict({"weights": ((0, {"first": 3, "second": 1}),)})
            del config.train
        case "pairs":
            config.train.field = config.eval.field = "de", "en"
            batches.update(max_buckets=2, max_length=(96, 64))
            batches.packing = "none"
        case "chat":
            config.template = ConfigDict({"kind": "chat", "weights": {"assistant": 1.0}})
        case "masked":
            config.task = ConfigDict({"kind": "masked", "rate": 0.3})
            config.architecture = "encoder"
        case "middle":
            config.task = ConfigDict({"kind": "fill_in_the_middle", "rate": 0.5})
    return config


def share_of_text(first: float, last: float) -> str:
    """A file beside the text, with a share of its lines."""
    text = pathlib.Path(os.environ["TINY_TEXT"])
    lines = text.read_bytes().splitlines(keepends=True)
    some = lines[int(first * len(lines)) : int(last * len(lines))]
    path = as_path(text.with_name(f"{text.stem}-{first}-{last}.jsonl"))
    return os.fspath(write_once(path, "dividing the text", lambda file: file.writelines(some)))
