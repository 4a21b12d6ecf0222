"""View: a corpus, and what of it stays the same whatever is asked."""

import operator
import os
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
from etils import epath

from pipeline.storage.corpus import Corpus
from pipeline.storage.interface import Readable
from pipeline.tasks import INPUTS
from pipeline.tokenizers import Tokenizer


class View:
    """A corpus as seen for a task whose fields are made when batches are built.

    Its sides are read like a corpus; random choices depend on the epoch.

    Attributes:
        corpus: where the tokens are; of the task "inputs".
        lengths: positions of each example; of pairs, of inputs and targets.
    """

    kind: ClassVar[str]
    lengths: np.ndarray
    vocab_size: int
    num_tokens: int

    def __init__(self, corpus: Corpus):
        if corpus.task != INPUTS:
            raise ValueError(
                f"{type(self).__name__} needs tokens as they are, and {corpus!r} has those of the "
                f"task {corpus.task.name!r}; prepare it with task=pipeline.tasks.INPUTS"
            )
        self.corpus = corpus

    @property
    def sides(self) -> tuple[Readable, ...]:
        """See `AnyCorpus`."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """One example as in epoch 0, a 1-D array for each field."""
        number = operator.index(index)
        number += len(self) if number < 0 else 0
        if not 0 <= number < len(self):
            raise IndexError(f"example {index} of {len(self):,}")
        sizes = np.reshape(self.lengths[number], -1)
        reads = zip(self.sides, sizes, strict=True)
        parts = [side.read([number], [0], [size]) for side, size in reads]
        return {name: values for part in parts for name, values in part.items()}

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return (self[index] for index in range(len(self)))

    def __len__(self) -> int:
        return len(self.corpus)

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
    def text_bytes(self) -> int | None:
        """None: the loss of some tokens, given the others, says nothing of bits per byte."""
        return None

    def keep(self, name: str, make: Callable[[], bytes]) -> bytes:
        """See `AnyCorpus`."""
        return self.corpus.keep(name, make)

    @property
    def directory(self) -> epath.Path:
        """Where the corpus lies."""
        return self.corpus.directory

    @property
    def in_memory(self) -> bool:
        """See `Corpus`."""
        return self.corpus.in_memory

    @property
    def options(self) -> dict[str, Any]:
        """What it was made with, as JSON."""
        raise NotImplementedError

    @property
    def description(self) -> dict[str, Any]:
        """What `view_of` takes, as JSON."""
        return {"kind": self.kind, **self.options}

    @property
    def about(self) -> dict[str, object]:
        """What decides the fields, by name."""
        raise NotImplementedError

    @property
    def fingerprint(self) -> str:
        """That of the corpus, and what decides the fields."""
        parts = (f"{name}={value}" for name, value in self.about.items())
        return ";".join([self.corpus.fingerprint, *parts])

    def __str__(self) -> str:
        about = ", ".join(f"{name} {value}" for name, value in self.about.items())
        return f"{self.corpus}\nseen as      {type(self).__name__}: {about}"

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {os.fspath(self.corpus.directory)}"


def require_vocabulary(corpus: Corpus, new: str) -> int:
    """The vocabulary size of a corpus, which new ids are counted from.

    Raises:
        ValueError: nobody said.
    """
    if corpus.vocab_size is None:
        raise ValueError(
            f"{corpus!r} does not say the size of its vocabulary; give {new}=, or write the corpus "
            "with vocab_size="
        )
    return corpus.vocab_size
