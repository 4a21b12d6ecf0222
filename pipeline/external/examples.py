"""What a corpus without a copy has in common with one on disk."""

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pipeline.storage.pieces import as_pieces, require_within
from pipeline.tasks import Task
from pipeline.tokenizers import Tokenizer


class Examples:
    """Examples of one task whose tokens are not a corpus on disk; to be used as one.

    Attributes:
        lengths: positions to train on, of each example; uint32 [examples].
        task: what the model is asked.
        vocab_size: token ids are below this; None if nobody said.
        tokenizer: what made the tokens; None if nobody said.
        fingerprint: what the tokens are.
        text_bytes: UTF-8 bytes of the text; None if unknown.
        in_memory: as of `Corpus`; not where tokens are made when they are read.
    """

    in_memory = True
    weighted = False
    vocab_size: int | None
    tokenizer: Tokenizer | None
    text_bytes: int | None
    fingerprint: str

    def __init__(self, counts: np.ndarray, task: Task):
        self.task, self.lengths = task, task.lengths(counts)
        self.lengths.flags.writeable = False

    def read(
        self, examples: Any, starts: Any, lengths: Any, reach: Any = None, epoch: Any = 0
    ) -> dict[str, np.ndarray]:
        """See `Corpus.read`."""
        raise NotImplementedError

    def _asked(self, examples: Any, starts: Any, lengths: Any, reach: Any):
        """What `read` takes as int64 arrays without pieces of length 0, checked.

        Raises:
            IndexError: there is no such example, or it is too short for its piece.
        """
        pieces = as_pieces(examples, starts, lengths, reach, len(self))
        examples, starts, lengths, _ = pieces
        require_within(np.asarray(self.lengths[examples], np.int64), examples, starts, lengths)
        return pieces

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """One example, a 1-D array for each field, all of its length."""
        number = operator.index(index)
        number += len(self) if number < 0 else 0
        if not 0 <= number < len(self):
            raise IndexError(f"example {index} of {len(self):,}")
        return self.read([number], [0], self.lengths[number : number + 1])

    @functools.cached_property
    def num_tokens(self) -> int:
        """Positions to train on: the sum of the lengths."""
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def sides(self) -> tuple["Examples"]:
        """See `AnyCorpus`."""
        return (self,)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return (self[index] for index in range(len(self)))

    def keep(self, name: str, make: Callable[[], bytes]) -> bytes:
        """What `make` gives: there is no directory to store it in."""
        del name
        return make()

    def __str__(self) -> str:
        return (
            f"{self!r}\n"
            f"documents    {len(self):,}\n"
            f"tokens       {self.num_tokens:,} to train on\n"
            f"lengths      longest {int(self.lengths.max(initial=0)):,}\n"
            f"fingerprint  {self.fingerprint}"
        )
