"""FileTokenizer: the base of tokenizers that are read from one file."""

import hashlib
import itertools
import logging
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from etils import epath

from pipeline.errors import InvalidValue, Missing
from pipeline.fs.atomic import as_path, atomic_write
from pipeline.text.tokenizers.markup import join, parts_of

log = logging.getLogger(__name__)


class FileTokenizer:
    """A tokenizer read from a file, whose content it keeps, to store it with corpora.

    A subclass has `_setup`, which takes the options, sets `begin_id`, `end_id` and `vocab_size`,
    and calls `_set_marks`; and `_encode`, which returns the ids of each text. Marks in the text are
    tokens if `parse`, and text otherwise.
    """

    kind: str
    file: str  # its name in the directory of a corpus
    begin_id: int | None
    end_id: int | None
    vocab_size: int
    _setup: Callable[..., None]
    _encode: Callable[..., list[list[int]]]
    _marks: re.Pattern[str] | None = None  # the spellings of marks that `_encode` can parse
    _warned = False

    def __init__(self, path: epath.PathLike, **options: Any):
        place = as_path(path)
        if not place.exists():
            raise Missing(f"there is no {self.kind} tokenizer {os.fspath(place)}; check the path")
        self.__setstate__((place.read_bytes(), os.fspath(place), options))

    def __getstate__(self) -> tuple[bytes, str, dict[str, Any]]:
        return self._content, self._name, self._options

    def __setstate__(self, state: tuple[bytes, str, dict[str, Any]]) -> None:
        self._content, self._name, self._options = state
        self._setup(**self._options)

    def _set_marks(self, marks: Sequence[str]) -> None:
        longest = sorted(marks, key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, longest))) if marks else None

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """See `Tokenizer`. Marks are parsed in `Markup` alone.

        If a part of a text has a mark that is parsed, the parts around it are encoded separately.
        """
        runs = [self._divide(text) if self._marks else [(text, False)] for text in texts]
        encoded = {}
        for parse in (False, True):
            chosen = [text for each in runs for text, parsed in each if parsed == parse]
            encoded[parse] = iter(self._encode(chosen, parse=parse))
        marks = self.begin_id, self.end_id
        begin, end = ([] if mark is None else [[mark]] for mark in marks)
        ids = [[*begin, *(next(encoded[parse]) for _, parse in each), *end] for each in runs]
        counts = np.array([sum(map(len, each)) for each in ids], np.int64)
        flat = itertools.chain.from_iterable(itertools.chain.from_iterable(ids))
        return np.fromiter(flat, np.int32, int(counts.sum())), counts

    def _divide(self, text: str) -> Sequence[tuple[str, bool]]:
        """Runs of a text, each with whether it is markup with a mark in it."""
        assert self._marks is not None
        runs = []
        for part, own in parts_of(text):
            mark = self._marks.search(part)
            if mark and not own and not self._warned:
                self._warned = True
                log.warning(
                    "a record has %r, a special token of %s; it stays text. To make it a token, "
                    "give a template that returns it as templates.Markup",
                    mark[0],
                    self._name,
                )
            runs.append((part, mark is not None and own))
        return join(*runs).parts or runs  # also of an empty text

    @property
    def fingerprint(self) -> str:
        """The kind, a hash of the file, the marks around texts, and whether marks are parsed."""
        parts = [self.kind, hashlib.sha256(self._content).hexdigest()[:12]]
        if self.begin_id is not None:
            parts.append(f"begin{self.begin_id}")
        if self.end_id is not None:
            parts.append(f"end{self.end_id}")
        return "-".join([*parts, *["markup"] * (self._marks is not None)])

    def save(self, directory: epath.Path) -> dict[str, Any]:
        """See `Tokenizer`; writes the file, unless it is there."""
        path = directory / self.file
        if not path.exists():
            with atomic_write(path) as file:
                file.write(self._content)
        elif path.read_bytes() != self._content:
            raise InvalidValue(
                f"{os.fspath(path)} is not the tokenizer of the corpus, {self._name}; prepare into "
                "another directory, or move that file if no corpus needs it"
            )
        return {"kind": self.kind, **self._options}

    def __repr__(self) -> str:
        options = (f"{name}={value!r}" for name, value in self._options.items())
        return f"{type(self).__name__}({', '.join([repr(self._name), *options])})"
