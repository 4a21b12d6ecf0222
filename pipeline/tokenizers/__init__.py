"""Tokenizers: text to token ids and back; bytes, sentencepiece, and Hugging Face's."""

from typing import Any

from etils import epath

from pipeline.tokenizers.bytes import Bytes
from pipeline.tokenizers.hugging_face import FILE, HuggingFace
from pipeline.tokenizers.sentencepiece import MODEL, SentencePiece
from pipeline.tokenizers.tokenizer import Tokenizer
from pipeline.tokenizers.training import train_sentencepiece

__all__ = ["Bytes", "HuggingFace", "SentencePiece", "Tokenizer", "load", "train_sentencepiece"]


def load(description: dict[str, Any], directory: epath.Path) -> Tokenizer:
    """The tokenizer that `save` described when it wrote into `directory`."""
    options = dict(description)
    kind = options.pop("kind")
    if kind == SentencePiece.kind:
        return SentencePiece(directory / MODEL, **options)
    if kind == HuggingFace.kind:
        return HuggingFace(directory / FILE, **options)
    return Bytes(**options)
