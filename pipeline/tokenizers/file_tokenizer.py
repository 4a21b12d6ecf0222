"""FileTokenizer: what tokenizers that are read from one file share."""

import hashlib
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from etils import epath

from pipeline.atomic import atomic_write
from pipeline.tokenizers.tokenizer import with_marks


class FileTokenizer:
    """A tokenizer read from a file, whose content it keeps, to be stored with corpora.

    A subclass has `_setup`, which takes the options and sets `begin_id`, `end_id` and `vocab_size`,
    and `_encode`.
    """

    kind: str
    file: str  # its name in the directory of a corpus
    begin_id: int | None
    end_id: int | None
    vocab_size: int
    _setup: Callable[..., None]

    def __init__(self, path: epath.PathLike, **options: Any):
        place = epath.Path(path).expanduser()
        if not place.exists():
            raise FileNotFoundError(f"there is no {self.kind} tokenizer {os.fspath(place)}")
        self.__setstate__((place.read_bytes(), os.fspath(place), options))

    def __getstate__(self) -> tuple[bytes, str, dict[str, Any]]:
        return self._content, self._name, self._options

    def __setstate__(self, state: tuple[bytes, str, dict[str, Any]]) -> None:
        self._content, self._name, self._options = state
        self._setup(**self._options)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text, without marks."""
        raise NotImplementedError

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """See `Tokenizer`."""
        ids = self._encode(list(texts))
        counts = np.fromiter(map(len, ids), np.int64, len(ids))
        body = np.fromiter(itertools.chain.from_iterable(ids), np.int32, int(counts.sum()))
        return with_marks(body, counts, self.begin_id, self.end_id)

    def _digest(self) -> str:
        return hashlib.sha256(self._content).hexdigest()[:12]

    def save(self, directory: epath.Path) -> dict[str, Any]:
        """See `Tokenizer`; writes the file."""
        with atomic_write(directory / self.file) as file:
            file.write(self._content)
        return {"kind": self.kind, **self._options}

    def __repr__(self) -> str:
        options = (f"{name}={value!r}" for name, value in self._options.items())
        return f"{type(self).__name__}({', '.join([repr(self._name), *options])})"
