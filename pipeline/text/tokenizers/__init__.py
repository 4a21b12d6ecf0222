"""Tokenizers: text to token ids and back; bytes, sentencepiece, and Hugging Face's."""

from typing import Any

from etils import epath

from pipeline import registry
from pipeline.errors import InvalidValue
from pipeline.text.markup import Markup
from pipeline.text.tokenizer import Bytes, Tokenizer, UnknownMark
from pipeline.text.tokenizers.hugging_face import HuggingFace
from pipeline.text.tokenizers.sentencepiece import SentencePiece
from pipeline.text.tokenizers.training import train_sentencepiece

__all__ = [
    "Bytes",
    "HuggingFace",
    "Markup",
    "SentencePiece",
    "Tokenizer",
    "UnknownMark",
    "load",
    "train_sentencepiece",
]


def load(description: dict[str, Any], directory: epath.Path) -> Tokenizer:
    """The tokenizer that `save` described when it wrote into `directory`."""
    options = dict(description)
    if (kind := options.pop("kind")) not in registry.names("tokenizers"):
        raise InvalidValue(
            f"the kind of tokenizer is {kind!r:.80}, which is not one of Lockstep's, nor of a "
            "package that is installed; decode with your own tokenizer"
        )
    make: Any = registry.find("tokenizers", kind).make
    return make(directory / make.file, **options) if hasattr(make, "file") else make(**options)
