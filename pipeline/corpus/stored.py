"""Stored: a corpus of parts in a directory, finished or growing, by its manifest."""

import functools
from collections.abc import Mapping
from typing import Any

from etils import epath

from pipeline.corpus.interface import SingleCorpus
from pipeline.corpus.manifest import MANIFEST, Manifest, damage
from pipeline.corpus.reader import Reader
from pipeline.corpus.tasks import TASKS
from pipeline.errors import InvalidValue
from pipeline.text import tokenizers
from pipeline.text.features import Feature
from pipeline.text.tokenizers import Tokenizer


class Stored(SingleCorpus):
    """Examples of token ids in the parts of a directory.

    Attributes:
        directory: where it is.
        origin: fingerprints of the source and the tokenizer that it was made from, and the field.
        identity, fingerprint: the digest of its `tokens`, its tokenizer and its task, so that an
            error can say which of them changed; and a short digest of these.
    """

    _stored: Reader  # pyright: ignore  # of any columns elsewhere

    def __init__(self, directory: epath.Path, manifest: Manifest, tokens: str):
        self.directory, self._manifest = directory, manifest
        self.task, self.origin = TASKS[manifest.task], manifest.origin
        self.weighted, self.vocab_size = manifest.weighted, manifest.vocab_size
        self.features: Mapping[str, Feature] = manifest.features
        tokenizer = self.origin["tokenizer"] or "none"
        self.identity: Mapping[str, Any] = {
            "tokens": tokens,
            "tokenizer": tokenizer,
            "task": manifest.task,
        }

    @functools.cached_property
    def tokenizer(self) -> Tokenizer | None:  # pyright: ignore
        """The tokenizer that made the tokens, for decoding; None if there is none."""
        if self._manifest.tokenizer is None:
            return None
        try:
            loaded = tokenizers.load(self._manifest.tokenizer, self.directory)
            if loaded.fingerprint != self.origin["tokenizer"]:
                raise InvalidValue(f"it is {loaded.fingerprint}")
            return loaded
        except (KeyError, TypeError, ValueError) as error:
            seen = f"its tokenizer, {self.origin['tokenizer']}, cannot be loaded: {error}"
            raise damage(self.directory / MANIFEST, seen) from error
