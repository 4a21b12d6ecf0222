"""Writers of corpora: parts in order, sealed as they come, and at the end the manifest."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import numpy as np
from etils import epath

from pipeline.corpus.stored.directory import PART_NAME, TEMPORARY, part_name
from pipeline.corpus.stored.log import (
    begin,
    finish,
    read_sealed,
    refuse_others,
    remove_log,
    require_files,
    write_record,
)
from pipeline.corpus.stored.manifest import Manifest, require_same_origin
from pipeline.corpus.stored.parts import Part, write_part
from pipeline.corpus.tasks import A_TASK, CAUSAL, Task
from pipeline.errors import (
    Exists,
    InvalidState,
    InvalidType,
    InvalidValue,
    counted,
    require_type,
    require_whole,
)
from pipeline.fs.atomic import as_path, directory_lock
from pipeline.text.features import LOSS_WEIGHTS, TOKENS, WEIGHTS, Feature
from pipeline.text.ragged import Buffer, Ragged
from pipeline.text.tokenizers import Tokenizer

# The origin of a corpus that is made from arrays.
NO_ORIGIN: dict[str, str | None] = {"source": None, "tokenizer": None, "field": None}


class Writer:
    """Writes a corpus of a stream, a queue, or any other iterator.

    Examples are appended, and `seal` makes them durable: from then on they are on the disk itself,
    and they never change. Examples that are not sealed are lost with the process. So to write each
    example of a source exactly once, give `seal` a cursor, and continue from `cursor` after a kill:

    >>> with Writer(directory) as writer:  # doctest: +SKIP
    ...     for number, tokens in stream(start=writer.cursor or 0):
    ...         writer.append(tokens)
    ...         if number % 10_000 == 9_999:
    ...             writer.seal(cursor=number + 1)
    ...     writer.finish()

    Without a cursor, nothing tells which examples of the source a killed writer has sealed. One
    process writes in a directory at a time; another one waits for it. The corpus can be opened once
    it is finished.

    Args:
        directory: a local path, or one of object storage. After a killed writer, this one continues
            after the sealed examples.
        features: the features of examples, by name.
        vocab_size: if given, ids must be below it. None: that of the tokenizer, if there is one.
        tokenizer: made the ids; it is stored with the corpus, which can then be decoded, and
            mixed with others of this tokenizer.
        task: decides the fields and the lengths; see `pipeline.corpus.tasks`.

    Attributes:
        cursor: the last sealed cursor; None if there is none.

    Raises:
        FileExistsError: the corpus in `directory` is finished.
        ValueError: there is a corpus with other features, weights or task, or one that is damaged.
    """

    def __init__(
        self,
        directory: epath.PathLike,
        *,
        features: Mapping[str, Feature] | None = None,
        vocab_size: int | None = None,
        tokenizer: Tokenizer | None = None,
        task: Task = CAUSAL,
    ):
        require_type("task", task, Task, A_TASK)
        if tokenizer is not None:
            require_type("tokenizer", tokenizer, "fingerprint", "one, as tokenizers.Bytes()")
        self.directory, self._task, self._tokenizer = as_path(directory), task, tokenizer
        schemas, origin = task.check(features), NO_ORIGIN
        vocab_size = None if vocab_size is None else require_whole("vocab_size", vocab_size, 1)
        if tokenizer is not None:
            origin = NO_ORIGIN | {"tokenizer": tokenizer.fingerprint}
            vocab_size = vocab_size or tokenizer.vocab_size
        self._manifest = Manifest(task=task.name, origin=origin, vocab_size=vocab_size)
        self._sealed: list[Part] = []
        self._pending: list[Part] = []  # parts on disk that are not sealed
        self._written = 0  # the number of examples in all of these
        self.cursor: Any = None
        with contextlib.ExitStack() as stack:
            stack.enter_context(directory_lock(self.directory, "writing a corpus"))
            schemas = self._continue(schemas)
            self._buffer = Buffer(schemas, vocab_size)
            self._stack = stack.pop_all()
        self._closed = False

    def _continue(self, schemas: dict[str, Feature]) -> dict[str, Feature]:
        """Continues after the sealed parts, and removes others; returns the features of an example.

        Those of a new corpus are `schemas`. Weights are among them if sealed examples have
        weights.
        """
        if (begun := Manifest.find(self.directory)) is None:
            refuse_others(self.directory)
            return schemas
        ended = begun.finished
        if not ended:
            require_same_origin(self.directory, begun.origin, self._manifest.origin)
            self._sealed, self.cursor, ended = read_sealed(self.directory)
            if ended:  # a writer was killed after its last record
                finish(self.directory, dataclasses.replace(begun, parts=self._sealed))
        if ended:
            remove_log(self.directory)  # or before it had removed all of it
            raise Exists(
                f"the corpus in {os.fspath(self.directory)} is finished; read it with Corpus.open, "
                "or write into another directory"
            )
        if self._sealed:
            schemas = self._resume(begun, schemas)
        self._remove_rest()
        return schemas

    def _resume(self, begun: Manifest, schemas: dict[str, Feature]) -> dict[str, Feature]:
        """Continues a corpus that has sealed examples; see `_continue`."""
        path = os.fspath(self.directory)
        for name in ("task", "vocab_size"):
            if (then := getattr(begun, name)) != (now := getattr(self._manifest, name)):
                raise InvalidValue(
                    f"{path} holds a corpus that was begun with {name} {then}, not {now}; give "
                    "what it was begun with, or another directory"
                )
        for name in {**schemas, **begun.features}:
            mine, theirs = schemas.get(name), begun.features.get(name)
            if not (mine and theirs and mine.infer(np.zeros(0, theirs.dtype), "") == theirs):
                raise InvalidValue(
                    f"{path} holds a corpus that was begun with the feature {name!r} as {theirs}, "
                    f"and features say {mine}; give the same features, or another directory"
                )
        require_files(self.directory, self._sealed[-1:])
        self._manifest, self._written = begun, sum(part.examples for part in self._sealed)
        return begun.features | ({WEIGHTS: LOSS_WEIGHTS} if self._sealed[0].weighted else {})

    def _remove_rest(self) -> None:
        """Removes parts that are not sealed, and what a killed writer left."""
        for path in self.directory.iterdir():
            part = PART_NAME.fullmatch(path.name)
            if (part and int(part[2]) >= len(self._sealed)) or TEMPORARY.fullmatch(path.name):
                path.unlink(missing_ok=True)

    @property
    def examples(self) -> int:
        """The number of examples appended, by this writer and those before it."""
        return self._written + len(self._buffer)

    def append(self, /, tokens: Any, weights: Any = None, **features: Any) -> None:
        """Adds an example; `seal` makes it durable.

        Args:
            tokens: a 1-D integer array (or list) of token ids, marks included. A causal example of
                n ids has length n - 1.
            weights: loss weights, a number from 0 up for each token; for all examples or for none.
            **features: a value for each of the writer's `features`.

        Raises:
            ValueError: an argument is not as above, or does not match the features.
        """
        self._require_open()
        example = {TOKENS: tokens, **features} | ({} if weights is None else {WEIGHTS: weights})
        buffer = self._buffer
        if not self.examples:  # the first example decides for all
            buffer.features.pop(WEIGHTS, None)
            buffer.features |= {WEIGHTS: LOSS_WEIGHTS} if WEIGHTS in example else {}
        due = {TOKENS: None, **buffer.features}
        if {*example} != {*due}:
            raise InvalidValue(
                f"example {self.examples:,} has {', '.join(example)}, and the examples of this "
                f"writer have {', '.join(due)}; give a value for each of its features, and weights "
                "to all examples (1 where there are none) or to none"
            )
        buffer.add(example, self.examples)
        if buffer.full:
            with self._closing():
                self._flush()

    def seal(self, cursor: Any = None) -> None:
        """Makes all that was appended durable, atomically; does nothing if that is nothing.

        Args:
            cursor: where the source continues after these examples, any JSON.

        Raises:
            TypeError: the cursor is not JSON.
            OSError: the disk is full or cannot be written. The writer is closed then; another one
                continues after the sealed examples.
        """
        same = False
        with contextlib.suppress(TypeError, ValueError):
            same = json.loads(json.dumps(cursor)) == cursor
        if not same:
            raise InvalidType(
                f"cursor is {cursor!r:.80}, which JSON does not give back as it is; give numbers, "
                "strings, lists or dicts of them with names as keys"
            )
        with self._closing():
            self._flush()
            self._seal(cursor)

    def finish(self) -> None:
        """Finishes the corpus, with all that was appended, and closes the writer.

        Raises:
            ValueError: there is no example.
        """
        with self._closing():
            self._flush()
            if not self._written:
                raise InvalidValue("examples is empty; a corpus holds at least one example")
            self._seal(None, last=True)  # of several writers, one creates the last record
            finish(self.directory, dataclasses.replace(self._manifest, parts=self._sealed))
        self.close()

    def close(self) -> None:
        """Lets another writer begin; appended examples that are not sealed are lost."""
        self._closed = True
        self._stack.close()

    def _flush(self) -> None:
        if len(self._buffer):
            self.append_part(self._buffer.take())

    def append_part(self, examples: Ragged) -> None:
        """Adds checked examples as a part of their own; `seal` makes it durable."""
        number = len(self._sealed) + len(self._pending)
        if not number:
            schemas, saved = examples.features, None
            schemas.pop(WEIGHTS, None)
            if self._tokenizer is not None:
                saved = self._tokenizer.save(self.directory)
            self._manifest = dataclasses.replace(self._manifest, features=schemas, tokenizer=saved)
            begin(self.directory, self._manifest)
        path, origin = self.directory / part_name(0, number), self._manifest.origin
        options: Any = {"task": self._task, "origin": origin, "once": True}
        part = write_part(path, examples, vocab_size=self._manifest.vocab_size, **options).part
        self._pending.append(part)
        self._written += part.examples

    def _seal(self, cursor: Any, *, last: bool = False) -> None:
        """Seals the parts that are not sealed, together; the `last` ones end the corpus.

        Raises:
            FileExistsError: another writer has created the next record.
        """
        if not self._pending and not last:
            return
        parts, following = self._pending, None if last else [cursor]
        write_record(self.directory, 0, len(self._sealed), parts=parts, next=following)
        self._sealed += parts
        self._pending, self.cursor = [], cursor

    @contextlib.contextmanager
    def _closing(self) -> Iterator[None]:
        """Closes the writer if the block raises: what it holds may be lost."""
        self._require_open()
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _require_open(self) -> None:
        if self._closed:
            raise InvalidState(
                f"this writer of {os.fspath(self.directory)} is closed; begin another, which "
                "continues after the sealed examples"
            )

    def __enter__(self) -> "Writer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        lost = len(self._buffer) + sum(part.examples for part in self._pending)
        self._closed, closed = True, self._closed
        self._stack.__exit__(kind, error, trace)
        if kind is None and lost and not closed:
            raise InvalidState(
                f"what was appended to {os.fspath(self.directory)} and not sealed is lost, "
                f"{counted(lost, 'example')}; call seal or finish before the block ends"
            )
