"""FileTokenizer: the base of tokenizers that are read from one file."""

import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from pipeline.errors import InvalidValue, Missing
from pipeline.fs.atomic import as_path, atomic_write
from pipeline.text.markup import MEANT, any_of, parts_of
from pipeline.text.tokenizer import UnknownMark


class FileTokenizer:
    """A tokenizer read from a file, whose content it keeps, to store it with corpora.

    A subclass has `_setup`, which takes the options, sets `begin_id`, `end_id` and `vocab_size`,
    and calls `_set_marks`; `_find`, the id of a token by name; and `_encode`, which returns the ids
    of each text, in which no mark is parsed. Texts are of a kind: "alone", a whole example;
    "first", its beginning; or "inside", before which nothing is added. Only of texts that are alone
    spaces may be removed.
    """

    kind: str
    file: str  # its name in the directory of a corpus
    path: str  # where it was read from
    begin_id: int | None
    end_id: int | None
    vocab_size: int
    _setup: Callable[..., None]
    _find: Callable[[str], int | None]
    _encode: Callable[[list[str], str], list[Any]]  # each a list, or an array
    # The spellings of the marks that markup has, and whether they remove spaces on either side.
    marks: Mapping[str, tuple[bool, bool]]

    def __init__(self, path: epath.PathLike, **options: Any):
        file = as_path(path)
        file = file / self.file if file.is_dir() else file
        if not file.exists():
            raise Missing(f"there is no {self.kind} tokenizer {os.fspath(file)}; check the path")
        self._restore(file.read_bytes(), os.fspath(file), options)

    def _restore(self, content: bytes, path: str, options: dict[str, Any]) -> None:
        self._content, self.path, self._options = content, path, options
        self._setup(**options)

    def __getstate__(self) -> tuple[bytes, str, dict[str, Any]]:
        return self._content, self.path, self._options

    def __setstate__(self, state: tuple[bytes, str, dict[str, Any]]) -> None:
        self._restore(*state)

    def _set_marks(self, marks: Mapping[str, tuple[bool, bool]]) -> None:
        self.marks = marks
        self._pattern = re.compile(f"({any_of(sorted(marks, key=len, reverse=True))})")

    def _mark(self, option: str, wanted: bool | str, defaults: Sequence[int]) -> int | None:
        """The id of the begin or end mark: the one of the file, one by name, or none."""
        if isinstance(wanted, str):
            if (mark := self._find(wanted)) is None:
                raise UnknownMark(f"{self.path} has no token {wanted!r}", option)
            return mark
        if wanted and len(defaults) != 1:
            raise UnknownMark(f"{self.path} does not add exactly one {option} mark", option)
        return defaults[0] if wanted else None

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """See `Tokenizer`. Marks are parsed in `Markup` alone."""
        return self.encode_spans(texts, [False] * len(texts))

    def encode_spans(
        self, texts: Sequence[str], inside: Sequence[bool]
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `Tokenizer`. A text is divided at its marks."""
        followed = [*inside[1:], False][: len(texts)]
        divided = [
            self._divide(text, within, not more)
            for text, within, more in zip(texts, inside, followed, strict=True)
        ]
        runs_of: dict[str, list[str]] = {"alone": [], "first": [], "inside": [], "mark": []}
        for run, kind in itertools.chain.from_iterable(divided):
            runs_of[kind].append(run)
        marks = iter([[self._find(mark)] for mark in runs_of.pop("mark")])
        encoded: dict[str, Iterator[Any]] = {"mark": marks}
        for kind, runs in runs_of.items():
            encoded[kind] = iter(self._encode(runs, kind) if runs else ())
        begin, end = ([] if mark is None else [[mark]] for mark in (self.begin_id, self.end_id))
        ids = [[*begin, *(next(encoded[kind]) for _, kind in runs), *end] for runs in divided]
        counts = np.array([sum(map(len, ids_of_runs)) for ids_of_runs in ids], np.int64)
        flat = itertools.chain.from_iterable(itertools.chain.from_iterable(ids))
        return np.fromiter(flat, np.int32, int(counts.sum())), counts

    def _divide(self, text: str, within: bool, last: bool) -> list[tuple[str, str]]:
        """Runs of a text, each with its kind: as for `_encode`, or "mark"."""
        runs = [""]
        for part, is_markup in parts_of(text):
            for number, piece in enumerate(self._pattern.split(part) if is_markup else [part]):
                if number % 2:
                    runs += [piece, ""]
                else:
                    runs[-1] += piece
        for at in range(1, len(runs), 2):
            before, after = self.marks[runs[at]]
            runs[at - 1] = runs[at - 1].rstrip() if before else runs[at - 1]
            runs[at + 1] = runs[at + 1].lstrip() if after else runs[at + 1]
        first = "inside" if within else "alone" if last and len(runs) == 1 else "first"
        kinds = [first, *["mark", "inside"] * (len(runs) // 2)]
        return [(run, kind) for run, kind in zip(runs, kinds, strict=True) if run]

    def spell(self, ids: Any) -> str:
        """The text of the ids of an example, without its begin and end marks, but with others."""
        return self.decode(ids)

    decode: Callable[[Any], str]

    def find_unparsed(self, text: str) -> tuple[str, bool] | None:
        """A mark in a text that stays text, and whether it is a template's own; None: none is."""
        if not self.marks:
            return None
        for part, is_markup in parts_of(text):
            for mark in MEANT.finditer(part) if is_markup else ():
                if mark[0] not in self.marks:
                    seen = f"the template has {mark[0]!r}, which is no special token of"
                    return f"{seen} {self.path}", True
            if not is_markup and (spelt := self._pattern.search(part)):
                return (
                    f"it has {spelt[0]!r}, a special token of {self.path}; to make it a token, "
                    "give a template that returns it as templates.Markup"
                ), False
        return None

    def _strip(self, ids: Any) -> list[int]:
        """Ids as a list, without the begin mark before them and the end mark after them."""
        ids = np.asarray(ids).tolist()
        first = bool(ids) and ids[0] == self.begin_id
        return ids[first : len(ids) - (len(ids) > first and ids[-1] == self.end_id)]

    @property
    def fingerprint(self) -> str:
        """The kind, a hash of the file, the marks around texts, and whether marks are parsed."""
        words = [self.kind, hashlib.sha256(self._content).hexdigest()[:12]]
        if self.begin_id is not None:
            words.append(f"begin{self.begin_id}")
        if self.end_id is not None:
            words.append(f"end{self.end_id}")
        return "-".join([*words, *["markup"] * bool(self.marks)])

    def save(self, directory: epath.Path) -> dict[str, Any]:
        """See `Tokenizer`; writes the file, unless it is there."""
        path = directory / self.file
        if not path.exists():
            with atomic_write(path) as file:
                file.write(self._content)
        elif path.read_bytes() != self._content:
            raise InvalidValue(
                f"{os.fspath(path)} is not the tokenizer of the corpus, {self.path}; prepare into "
                "another directory, or move that file if no corpus needs it"
            )
        return {"kind": self.kind, **self._options}

    def __repr__(self) -> str:
        options = (f"{name}={value!r}" for name, value in self._options.items())
        return f"{type(self).__name__}({', '.join([repr(self.path), *options])})"
