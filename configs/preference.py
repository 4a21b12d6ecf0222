"""Preference tuning by DPO, on word problems with a right and a wrong answer.

    python train.py --config=configs/preference.py:answers --workdir=runs/answers
    python train.py --config=configs/preference.py --config.start_from=runs/answers

Takes minutes on two cores. The first run learns to answer, from right answers alone; the second
begins with its parameters, which are also the reference, and learns which of two answers to prefer.
Both answers share their question in a row. Without `start_from`, the reference is random.

Other pairs: `--config.train.source= --config.train.files='pairs/*.jsonl'`, with the format strings
of their fields as `--config.template.prompt`, `chosen` and `rejected`. For chats, `chosen` and
`rejected` are templates, whose common turns become the prompt:
`config.template.chosen = ConfigDict({"kind": "chat", "messages": "chosen"})`.
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config(stage: str = "pairs") -> ConfigDict:
    """The configuration of a decoder that learns from "pairs", or first from right "answers"."""
    config = quickstart.get_config()
    for part in (config.train, config.eval):
        part.source = "configs.word_problems:problems"
    config.tokenizer.update(kind="bytes")
    config.batches.update(max_buckets=1, max_length=256, length_multiple=16)
    prompt, right, wrong = "{question}\n", "{right}", "{wrong}"
    if stage == "answers":
        config.steps = 400
        config.template = ConfigDict({"kind": "answer", "prompt": prompt, "answer": right})
        return config
    sides = {"prompt": prompt, "chosen": right, "rejected": wrong}
    config.template = ConfigDict({"kind": "preference", **sides})
    # Options of `models.preference_losses`: kind "sigmoid" (DPO), "ipo" or "hinge".
    config.preference = ConfigDict({"kind": "sigmoid", "beta": 0.1})
    config.batches.overflow = "error"  # or "drop"; a pair cannot be split
    config.optimizer.update(learning_rate=5e-4, weight_decay=0.0)
    return config
