"""View: a corpus, and what of it stays the same whatever is asked."""

import os
from collections.abc import Callable
from typing import Any, ClassVar

from etils import epath

from pipeline.corpus.cache import PartCache
from pipeline.corpus.corpus import Corpus
from pipeline.corpus.interface import AnyCorpus
from pipeline.corpus.tasks import INPUTS
from pipeline.errors import InvalidValue
from pipeline.text.tokenizers import Tokenizer


class View(AnyCorpus):
    """A corpus for another task, whose fields are made when batches are built.

    Its sides are read like a corpus; random choices depend on the epoch. There are no `text_bytes`:
    the loss of some tokens, given the others, says nothing of bits per byte.

    Args:
        corpus: the tokens; of the task "inputs".

    Attributes:
        corpus: as given.
        description: the argument of `view_of`, as JSON.
        fingerprint: the parts of the corpus's fingerprint, and what decides the fields.

    Raises:
        ValueError: the corpus is of another task.
    """

    kind: ClassVar[str]

    def __init__(self, corpus: Corpus):
        if corpus.task != INPUTS:
            raise InvalidValue(
                f"{type(self).__name__} needs tokens as they are, and {corpus!r} has those of the "
                f"task {corpus.task.name!r}; prepare it with task=pipeline.corpus.INPUTS"
            )
        self.corpus, self.in_memory, self.files = corpus, corpus.in_memory, corpus.files

    @property
    def marks(self) -> tuple[int | None, int | None]:
        """The ids that begin and end each example; None where there is none."""
        tokenizer = self.corpus.tokenizer
        return (None, None) if tokenizer is None else (tokenizer.begin_id, tokenizer.end_id)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """See `Corpus`. Ids that the view added are not its own."""
        return self.corpus.tokenizer

    @property
    def caches(self) -> tuple[tuple[PartCache, int], ...]:
        """See `AnyCorpus`."""
        return self.corpus.caches

    def cached_file(self, name: str, make: Callable[[], bytes]) -> bytes:
        """See `AnyCorpus`."""
        return self.corpus.cached_file(name, make)

    @property
    def directory(self) -> epath.Path:
        """Where the corpus is."""
        return self.corpus.directory

    def _describe(self, options: dict[str, Any], **decisive: object) -> None:
        """Sets `description`, from what the view was made with, and the fingerprint."""
        self.description = {"kind": self.kind, **options}
        self._decisive = decisive
        parts = (f"{name}={value}" for name, value in decisive.items())
        self.fingerprint = ";".join([self.corpus.fingerprint, *parts])

    def __str__(self) -> str:
        about = ", ".join(f"{name} {value}" for name, value in self._decisive.items())
        return f"{self.corpus}\nseen as      {type(self).__name__}: {about}"

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {os.fspath(self.corpus.directory)}"


def require_vocabulary(corpus: Corpus, new: str) -> int:
    """The vocabulary size of a corpus, which new ids are counted from.

    Raises:
        ValueError: nobody said.
    """
    if corpus.vocab_size is None:
        raise InvalidValue(
            f"{corpus!r} does not say the size of its vocabulary; give {new}=, or write the corpus "
            "with vocab_size="
        )
    return corpus.vocab_size
