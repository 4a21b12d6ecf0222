"""The smallest run of each task; `--config=tests/runs/tiny_tasks_config.py:masked`."""

from ml_collections import ConfigDict

from tests.runs import tiny_config


def get_config(task: str) -> ConfigDict:
    """Needs chats as JSON lines, which have `text` too, in the file that TINY_TEXT names."""
    config = tiny_config.get_config()
    config.steps = 12
    config.batches.update(max_buckets=1, max_length=64)
    config.eval_every, config.checkpoint_every = 6, 4
    match task:
        case "chat":
            config.template = ConfigDict({"kind": "chat", "weights": {"assistant": 1.0}})
        case "preference":
            sides = {side: {"kind": "chat", "messages": side} for side in ("chosen", "rejected")}
            config.template = ConfigDict({"kind": "preference", **sides})
            config.preference = ConfigDict({"kind": "sigmoid", "beta": 0.2})
            config.batches.update(overflow="error", max_length=96)
        case "masked":
            config.task = ConfigDict({"kind": "masked", "rate": 0.3})
        case "corrupted":
            config.task = ConfigDict({"kind": "corrupted", "max_length": 40})
            config.batches.overflow = "error"
            with config.batches.ignore_type():
                config.batches.max_length = (64, 32)
    return config
