"""Tokenizers: text to token ids and back; bytes, sentencepiece, and Hugging Face's."""

from typing import Any

from etils import epath

from pipeline.errors import InvalidValue
from pipeline.text.tokenizers.file_tokenizer import UnknownMark
from pipeline.text.tokenizers.hugging_face import HuggingFace
from pipeline.text.tokenizers.markup import Markup
from pipeline.text.tokenizers.sentencepiece import SentencePiece, train_sentencepiece
from pipeline.text.tokenizers.tokenizer import Bytes, Tokenizer

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
    kind = options.pop("kind")
    for file_kind in (SentencePiece, HuggingFace):
        if kind == file_kind.kind:
            return file_kind(directory / file_kind.file, **options)
    if kind != Bytes.kind:
        raise InvalidValue(
            f"the kind of tokenizer is {kind!r:.80}, which is not one of Lockstep's; decode with "
            "your own tokenizer"
        )
    return Bytes(**options)
