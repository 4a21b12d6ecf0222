"""The base of corpora whose tokens are not stored by this package."""

from typing import Any

import numpy as np

from pipeline.corpus.gather import as_pieces, require_within
from pipeline.corpus.interface import AnyCorpus
from pipeline.corpus.tasks import Task


class Examples(AnyCorpus):
    """Examples of one task, whose tokens are stored elsewhere or nowhere.

    Args:
        counts: tokens of each example, integers [examples].
        task: decides the fields and the lengths.

    Attributes:
        lengths: positions to train on, of each example; uint32 [examples], read-only.
        task: as given.
        weighted: whether tokens have loss weights.
    """

    weighted = False

    def __init__(self, counts: np.ndarray, task: Task):
        self.task, self.lengths = task, task.lengths(counts)
        self.lengths.flags.writeable = False

    def _pieces(
        self, examples: Any, starts: Any, lengths: Any, reach: Any
    ) -> tuple[np.ndarray, ...]:
        """The arguments of `read` as int64 arrays without pieces of length 0, checked.

        Raises:
            IndexError: there is no such example, or it is too short for its piece.
        """
        pieces = as_pieces(examples, starts, lengths, reach, len(self))
        examples, starts, lengths, _ = pieces
        require_within(np.asarray(self.lengths[examples], np.int64), examples, starts, lengths)
        return pieces

    def __str__(self) -> str:
        return (
            f"{self!r}\n"
            f"documents    {len(self):,}\n"
            f"tokens       {self.num_tokens:,} to train on\n"
            f"lengths      longest {int(self.lengths.max(initial=0)):,}\n"
            f"fingerprint  {self.fingerprint}"
        )
