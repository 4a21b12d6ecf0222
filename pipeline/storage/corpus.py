"""Corpus: tokenised examples on disk, with their lengths and a fingerprint."""

import errno
import functools
import json
import operator
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from etils import epath

from pipeline import tokenizers
from pipeline.atomic import atomic_write, directory_lock, is_local
from pipeline.planning import lengths as lengths_module
from pipeline.ragged import Ragged, chunks_of, cut
from pipeline.storage.parts import Part, read_part
from pipeline.storage.pieces import MappedPieces, RangedPieces, as_pieces
from pipeline.storage.writer import LENGTHS, MANIFEST, SCHEMA_VERSION, Writer, require_same_origin
from pipeline.tasks import CAUSAL, TASKS, Task


class Corpus:
    """Examples of token ids in a directory; made by `prepare`, `from_arrays` or `open`.

    Opening reads a small manifest and maps the lengths; tokens are mapped when first read, and
    never copied whole. A corpus pickles as its directory.

    Attributes:
        directory: where it lies.
        lengths: positions to train on, of each example; uint32, [examples], read-only.
        task: what the model is asked; its `shifts` are the fields of `corpus[i]`.
    """

    def __init__(self, directory: epath.Path, manifest: dict[str, Any], memory_map: bool):
        self.directory, self._manifest, self._memory_map = directory, manifest, memory_map
        self.task = TASKS[manifest["task"]]
        self._parts = [Part(**part) for part in manifest["parts"]]
        self.lengths = _read_lengths(directory / LENGTHS, memory_map, manifest["examples"])

    @classmethod
    def open(cls, directory: epath.PathLike, *, memory_map: bool | None = None) -> "Corpus":
        """The corpus in `directory`, after cheap checks that all of it is there.

        Args:
            directory: a local path, or one of object storage (`gs://…`).
            memory_map: whether to map the files or to read ranges of them; by default, mapped
                where they are local.

        Raises:
            FileNotFoundError: there is no corpus there.
            ValueError: it is half-written, damaged, or of another schema version.
        """
        directory = epath.Path(directory).expanduser()
        manifest = _read_manifest(directory)
        if memory_map is None:
            memory_map = is_local(directory)
        try:
            _require_whole(directory / LENGTHS, manifest["lengths_bytes"])
            for part in manifest["parts"]:
                _require_whole(directory / part["file"], part["bytes"])
            return cls(directory, manifest, memory_map)
        except (KeyError, TypeError) as error:
            raise ValueError(
                _damaged(directory / MANIFEST, f"it does not have what it should: {error!r}")
            ) from error

    @classmethod
    def from_arrays(
        cls,
        examples: Iterable[Any],
        directory: epath.PathLike,
        *,
        vocab_size: int | None = None,
        weights: Iterable[Any] | None = None,
        task: Task = CAUSAL,
    ) -> "Corpus":
        """A corpus of examples that are tokenised already.

        Args:
            examples: 1-D integer arrays (or lists) of token ids, marks included; may be a
                generator. A causal example of `n` ids has length `n - 1`.
            directory: where to write. If it holds a corpus of the same examples, that is opened.
            vocab_size: if given, ids must be below it.
            weights: for each example, what a loss at each of its tokens counts for: 1-D arrays of
                numbers from 0 up. None: 1 everywhere, which takes no room.
            task: what the model is asked; see `pipeline.tasks`.

        Raises:
            ValueError: an example is not a 1-D array of ids, there is none, or `directory` holds
                other data.
        """
        directory = epath.Path(directory).expanduser()
        vocab_size = None if vocab_size is None else operator.index(vocab_size)
        parts = cut(chunks_of(examples, vocab_size, weights))
        origin = {"source": None, "tokenizer": None, "field": None}
        with directory_lock(directory, "writing a corpus"):
            if (directory / MANIFEST).exists():
                corpus = cls.open(directory)
                require_same_origin(directory, corpus.origin, origin)
                corpus.require_task(task)
                corpus._require_same(parts, vocab_size)
                return corpus
            writer = Writer(directory, task, origin, resume=False)
            for part in parts:
                writer.add(part)
            if not writer.examples:
                raise ValueError("examples is empty; a corpus holds at least one example")
            writer.finish(vocab_size=vocab_size, tokenizer=None, source=None)
        return cls.open(directory)

    def __len__(self) -> int:
        return self._manifest["examples"]

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """One example, a 1-D array for each field, all of its length."""
        number = operator.index(index)
        number += len(self) if number < 0 else 0
        if not 0 <= number < len(self):
            raise IndexError(f"example {index} of a corpus of {len(self):,}")
        return self.read([number], [0], self.lengths[number : number + 1])

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return (self[index] for index in range(len(self)))

    def read(
        self, examples: Any, starts: Any, lengths: Any, reach: Any = None, epoch: Any = 0
    ) -> dict[str, np.ndarray]:
        """Pieces of examples, one after another: the one way that batches get tokens.

        Args:
            examples: the example of each piece; ints, [pieces].
            starts: the first position of each piece, within its example.
            lengths: the positions of each piece; may be 0.
            reach: how many places each piece takes in the result, at least its length, or 0 for
                a piece of length 0; what is in the places after it is left open. None: `lengths`.
            epoch: ignored: a corpus is the same in every epoch.

        Returns:
            A flat int32 array of `sum(reach)` for each field of the task (of causal text `inputs`
            and `targets`), and float32 `loss_weights` where tokens have weights.

        Raises:
            IndexError: there is no such example, or it is too short for its piece.
        """
        del epoch
        examples, starts, lengths, reach = as_pieces(examples, starts, lengths, reach, len(self))
        return self._pieces.read(examples, starts, lengths, reach, self.task.shifts)

    @functools.cached_property
    def _pieces(self) -> MappedPieces | RangedPieces:
        return (MappedPieces if self._memory_map else RangedPieces)(self.directory, self._parts)

    @property
    def weighted(self) -> bool:
        """See `Readable`."""
        return any(part.weights_at is not None for part in self._parts)

    @property
    def sides(self) -> tuple["Corpus"]:
        """See `AnyCorpus`."""
        return (self,)

    @property
    def in_memory(self) -> bool:
        """Whether tokens are read from memory, and not over a network."""
        return self._memory_map

    @property
    def fingerprint(self) -> str:
        """What the tokens are, part by part, so that a refusal can say which part changed.

        It depends on content alone: not on paths, times, or how many workers prepared it.
        """
        tokenizer = self.origin["tokenizer"] or "none"
        return (
            f"tokens={self._manifest['tokens_digest']};tokenizer={tokenizer};task={self.task.name}"
        )

    @property
    def origin(self) -> dict[str, str | None]:
        """What it was made from: fingerprints of the source and the tokenizer, and the field."""
        return self._manifest["origin"]

    @property
    def num_tokens(self) -> int:
        """Positions to train on: the sum of the lengths."""
        return self._manifest["num_tokens"]

    @property
    def text_bytes(self) -> int | None:
        """UTF-8 bytes of the text that is learnt, for bits per byte; None if made from arrays."""
        return self._manifest["text_bytes"]

    @property
    def vocab_size(self) -> int | None:
        """Token ids are below this; None if nobody said."""
        return self._manifest["vocab_size"]

    @functools.cached_property
    def tokenizer(self) -> tokenizers.Tokenizer | None:
        """The tokenizer that made the tokens, for decoding; None if it was made from arrays."""
        description = self._manifest["tokenizer"]
        return None if description is None else tokenizers.load(description, self.directory)

    def keep(self, name: str, make: Callable[[], bytes]) -> bytes:
        """See `AnyCorpus`.

        Of several processes one makes it, where they share a local directory.
        """
        path = self.directory / name
        if path.exists():
            return path.read_bytes()
        try:
            with directory_lock(self.directory, f"making {name}"):
                if not path.exists():
                    content = make()
                    with atomic_write(path) as file:
                        file.write(content)
                return path.read_bytes()
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            return make()

    def verify(self) -> None:
        """Reads everything and compares digests, which `open` does not.

        Raises:
            ValueError: names the first file whose content is not what was written.
        """
        if lengths_module.digest(np.asarray(self.lengths)) != self._manifest["lengths_digest"]:
            raise ValueError(_damaged(self.directory / LENGTHS, "its digest differs"))
        for part in self._parts:
            path = self.directory / part.file
            try:
                seen = read_part(path)[0]
            except ValueError as error:
                raise ValueError(_damaged(path, str(error))) from error
            if seen.sha256 != part.sha256:
                raise ValueError(_damaged(path, "its digest differs"))

    def require_task(self, task: Task) -> None:
        """Refuses to take this corpus for one of another task, with a `ValueError`."""
        if self.task != task:
            raise ValueError(
                f"{os.fspath(self.directory)} holds a corpus of the task {self.task.name!r}, not "
                f"{task.name!r}. Choose another directory, or delete this one"
            )

    def _require_same(self, parts: Iterable[Ragged], vocab_size: int | None) -> None:
        """Refuses other examples than those stored."""
        digests = [part.digest for part in parts]
        if digests != [part.sha256 for part in self._parts] or vocab_size != self.vocab_size:
            raise ValueError(
                f"{os.fspath(self.directory)} holds a corpus of other examples ({len(self):,} of "
                f"them, {self.fingerprint}). Choose another directory, or delete this one"
            )

    def __reduce__(self):
        return _reopen, (os.fspath(self.directory), self._memory_map)

    def __repr__(self) -> str:
        return f"Corpus.open({os.fspath(self.directory)!r})"

    def __str__(self) -> str:
        counts = np.cumsum(lengths_module.histogram(self.lengths))
        shares = [f"p{p} {np.searchsorted(counts, p / 100 * len(self)):,}" for p in (50, 90, 99)]
        text = "" if self.text_bytes is None else f", from {self.text_bytes:,} bytes of text"
        empty = self._manifest["empty"]
        vocab = "unknown" if self.vocab_size is None else f"{self.vocab_size:,} ids"
        return "\n".join(
            [
                f"corpus       {os.fspath(self.directory)}",
                f"documents    {len(self):,}" + (f", {empty:,} of them of length 0" * bool(empty)),
                f"tokens       {self.num_tokens:,} to train on{text}",
                f"lengths      {', '.join(shares)}, longest {len(counts) - 1:,}",
                f"vocabulary   {vocab}",
                f"fingerprint  {self.fingerprint}",
            ]
        )


def _reopen(directory: str, memory_map: bool) -> Corpus:
    return Corpus.open(directory, memory_map=memory_map)


def _read_manifest(directory: epath.Path) -> dict[str, Any]:
    """The manifest of a corpus of this schema version, or a sentence about what is there."""
    place = os.fspath(directory)
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        version = manifest["schema_version"]
    except FileNotFoundError:
        if directory.exists() and any(directory.glob("part-*.arrow")):
            raise ValueError(
                f"the corpus in {place} is half-written: it has parts but no {MANIFEST}. Prepare "
                "it again with the same source and tokenizer, and it goes on from there"
            ) from None
        raise FileNotFoundError(
            f"there is no corpus in {place} (no {MANIFEST}); prepare one there, or check the path"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(_damaged(directory / MANIFEST, f"it cannot be read: {error}")) from error
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"the corpus in {place} has schema version {version}, and this version of Lockstep "
            f"reads {SCHEMA_VERSION}: prepare it anew in another directory, or use the version "
            "that wrote it"
        )
    return manifest


def _require_whole(path: epath.Path, size: int) -> None:
    """Refuses a file that is missing or of another size than recorded."""
    try:
        seen = path.stat().length
    except FileNotFoundError:
        raise ValueError(_damaged(path, "it is missing")) from None
    if seen != size:
        raise ValueError(_damaged(path, f"it has {seen:,} bytes instead of {size:,}"))


def _damaged(path: epath.Path, seen: str) -> str:
    return (
        f"the corpus is damaged at {os.fspath(path)}: {seen}. Restore that file from a copy, or "
        f"delete {MANIFEST} and prepare again, which redoes what is not whole"
    )


def _read_lengths(path: epath.Path, memory_map: bool, examples: int) -> np.ndarray:
    try:
        if memory_map:
            lengths = np.asarray(np.load(os.fspath(path), mmap_mode="r"))
        else:
            with path.open("rb") as file:
                lengths = np.load(file)
            lengths.flags.writeable = False
    except ValueError as error:
        raise ValueError(_damaged(path, f"it is not an array: {error}")) from error
    if lengths.shape != (examples,):
        raise ValueError(_damaged(path, f"it has shape {lengths.shape}, not ({examples},)"))
    return lengths
