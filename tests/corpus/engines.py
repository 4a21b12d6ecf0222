"""Engines and tokenizers for tests of preparation."""

from pipeline.text.tokenizers import Bytes


class Twice:
    """Runs each task twice, the last one first."""

    def run(self, function, tasks):
        for task in reversed([*tasks, *tasks]):
            yield function(task)


class Untouchable(Bytes):
    """A tokenizer that nobody may use."""

    def encode_batch(self, texts):
        raise AssertionError("tokenised")
