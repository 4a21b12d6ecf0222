"""The interface of a corpus: what planning and loading ask of it."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from pipeline.tokenizers import Tokenizer


class Readable(Protocol):
    """One side of a corpus: the tokens of examples, or of pairs the inputs or the targets."""

    @property
    def weighted(self) -> bool:
        """Whether `read` gives `loss_weights`, too; else every token counts for 1."""

    def __len__(self) -> int: ...

    def read(
        self, examples: Any, starts: Any, lengths: Any, reach: Any = None, epoch: Any = 0
    ) -> dict[str, np.ndarray]:
        """Pieces of examples, one after another; see `Corpus.read`.

        `epoch` decides what a view draws at random; where several corpora are joined, it may be
        one for each piece.
        """


class AnyCorpus(Protocol):
    """A corpus, pairs, a view of one, a corpus without a copy, or several of these as one."""

    @property
    def lengths(self) -> np.ndarray:
        """Positions of each example: unsigned, `[n]`, of pairs `[n, 2]`."""

    @property
    def vocab_size(self) -> int | None:
        """Token ids are below this; None if nobody said."""

    @property
    def text_bytes(self) -> int | None:
        """UTF-8 bytes of the text; None if unknown."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that made the tokens; None if nobody said."""

    @property
    def fingerprint(self) -> str:
        """What the tokens are, as `name=value` with semicolons between."""

    @property
    def in_memory(self) -> bool:
        """Whether reading never waits for a network or a tokenizer."""

    @property
    def num_tokens(self) -> int:
        """Positions of all examples, of both sides of pairs."""

    @property
    def sides(self) -> tuple[Readable, ...]:
        """Where batches read tokens: the corpus itself; of pairs, inputs and targets."""

    def keep(self, name: str, make: Callable[[], bytes]) -> bytes:
        """The file `name` beside the corpus; where there is none, what `make` gives, then stored.

        Where there is no place to store it, it is made each time.
        """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """One example, a 1-D array for each field."""

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]: ...
