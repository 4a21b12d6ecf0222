"""The interface of a corpus: what planning and loading need, and what all kinds have in common."""

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

import numpy as np

from pipeline.corpus.cache import PartCache
from pipeline.errors import OutOfRange
from pipeline.text.tokenizers import Tokenizer


class Readable(Protocol):
    """One side of a corpus: the tokens of examples, or of pairs the inputs or the targets."""

    @property
    def weighted(self) -> bool:
        """Whether `read` gives `loss_weights`, too; else every token counts for 1."""
        ...

    def __len__(self) -> int: ...

    def read(
        self, examples: Any, starts: Any, lengths: Any, reach: Any = None, epoch: Any = 0
    ) -> dict[str, np.ndarray]:
        """Pieces of examples, one after another; see `Corpus.read`.

        `epoch` decides the random choices of a view; where several corpora are joined, it may be
        one for each piece.
        """
        ...


class AnyCorpus:
    """Examples by number: a corpus, pairs, a view, a corpus without a copy, or several as one.

    Attributes:
        lengths: positions of each example: unsigned, `[n]`, of pairs `[n, 2]`.
        fingerprint: says which tokens these are, as `name=value` with semicolons between.
        vocab_size: token ids are below this; None if nobody said.
        text_bytes: UTF-8 bytes of the text that is learnt; None if unknown.
        in_memory: whether reading hardly ever waits for a network or a tokenizer.
        files: the examples in each file that holds tokens, in order: int64 `[files]`. A large
            corpus is planned in windows of whole files. None: there are no such files.
    """

    lengths: np.ndarray
    fingerprint: str
    vocab_size: int | None = None
    text_bytes: int | None = None
    in_memory: bool = True
    files: np.ndarray | None = None

    @property
    def caches(self) -> tuple[tuple[PartCache, int], ...]:
        """The caches that parts are fetched into, each with the number of its first file."""
        return ()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that made the tokens, for decoding; None if there is none."""
        return None

    @property
    def sides(self) -> tuple[Readable, ...]:
        """Where batches read tokens: the corpus itself; of pairs, inputs and targets."""
        return (cast(Readable, self),)

    @functools.cached_property
    def num_tokens(self) -> int:
        """Positions to train on: the sum of the lengths, of both sides of pairs."""
        return int(self.lengths.sum(dtype=np.int64))

    def cached_file(self, name: str, make: Callable[[], bytes]) -> bytes:
        """The file `name` beside the corpus; where there is none, the result of `make`, stored.

        Without a place to store it, the result is made each time.
        """
        del name
        return make()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """One example, as in epoch 0: a 1-D array for each field, all of its length."""
        number = operator.index(index)
        number += len(self) if number < 0 else 0
        if not 0 <= number < len(self):
            raise OutOfRange(f"example {index} of {len(self):,}")
        return self._example(number)

    def _example(self, number: int) -> dict[str, np.ndarray]:
        fields: dict[str, np.ndarray] = {}
        for side, size in zip(self.sides, np.reshape(self.lengths[number], -1), strict=True):
            fields |= side.read([number], [0], [size])
        return fields

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return (self[index] for index in range(len(self)))
