"""Fine-tuning on chats: questions about the standard library, with a loss on the answers alone.

    python train.py --config=configs/chat.py

Takes minutes on two cores. It can begin with the parameters of a model of the same shape:

    python train.py
    python train.py --config=configs/chat.py --config.start_from=runs/quickstart \\
        --config.tokenizer.model=runs/quickstart/corpus/tokenizer.model

Other chats: `--config.train.source= --config.train.files='chats/*.jsonl'`, whose records have
`messages`, each with a `role` and its `content`.
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config() -> ConfigDict:
    """The configuration of a decoder that learns to answer."""
    config = quickstart.get_config()
    for part in (config.train, config.eval):
        part.source = "configs.python_data:Dialogues"
    config.template.kind = "chat"
    config.template.weights = {"assistant": 1.0}  # of the roles that carry loss
    config.optimizer.learning_rate = 2e-3
    return config
