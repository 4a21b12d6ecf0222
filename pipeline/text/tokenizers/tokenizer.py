"""Tokenizer: what `prepare` needs to turn text into ids."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from etils import epath

# The ids that this package gives to marks where the choice is its own.
PAD, BEGIN, END = 0, 1, 2


class Tokenizer(Protocol):
    """What `prepare` needs of a tokenizer; pickled once for each worker."""

    @property
    def kind(self) -> str:
        """Its name in the manifest of a corpus, for `load`."""
        ...

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        ...

    @property
    def fingerprint(self) -> str:
        """The same exactly for tokenizers that give the same ids."""
        ...

    @property
    def begin_id(self) -> int | None:
        """The id before each text, or None."""
        ...

    @property
    def end_id(self) -> int | None:
        """The id after each text, or None."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """All ids one after another (int32) and how many each text has (int64).

        Tokens with a meaning of their own, such as the end of a turn, may be parsed in `Markup`
        alone: anybody can spell them in other text.
        """
        ...

    def decode(self, ids: Any) -> str:
        """The text of the ids, marks removed."""
        ...

    def save(self, directory: epath.Path) -> dict[str, Any]:
        """Writes the files it needs into `directory`; returns what `load` takes, as JSON."""
        ...


def with_marks(
    body: np.ndarray, counts: np.ndarray, begin: int | None, end: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """`body` with a begin and an end id around each text; counts with them.

    >>> with_marks(np.array([7, 8, 9], np.int32), np.array([1, 2]), 1, None)
    (array([1, 7, 1, 8, 9], dtype=int32), array([2, 3]))
    """
    counts = counts + (begin is not None) + (end is not None)
    flat = np.empty(int(counts.sum()), np.int32)
    inside = np.ones(len(flat), bool)
    ends = np.cumsum(counts)
    for mark, places in ((begin, ends - counts), (end, ends - 1)):
        if mark is not None:
            flat[places] = mark
            inside[places] = False
    flat[inside] = body
    return flat, counts
