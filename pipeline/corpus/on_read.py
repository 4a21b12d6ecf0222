"""TokenizedOnRead: text tokenised when batches are built; only token counts are on disk."""

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np
from etils import epath

from pipeline.corpus.columns import Memory, Pieces
from pipeline.corpus.engines import GUARD, Processes, workers
from pipeline.corpus.gather import Fields
from pipeline.corpus.interface import SingleCorpus
from pipeline.corpus.manifest import (
    read_array,
    read_entries,
    require_same_origin,
    write_entries,
)
from pipeline.corpus.parts import json_digest
from pipeline.corpus.ranges import divide_records, make_once, run_ranges
from pipeline.corpus.tasks import CAUSAL, Task
from pipeline.corpus.tokenisation import Job
from pipeline.errors import InvalidState, InvalidValue
from pipeline.fs.atomic import as_path, atomic_write
from pipeline.fs.fork import Handles
from pipeline.planning.lengths import digest
from pipeline.text.ragged import Ragged
from pipeline.text.sources import Source
from pipeline.text.sources.source import where
from pipeline.text.templates import Template
from pipeline.text.tokenizers import Tokenizer

COUNTS, MANIFEST = "counts.npy", "index.json"


def tokenize_on_read(
    source: Source,
    tokenizer: Tokenizer,
    directory: epath.PathLike,
    *,
    field: str = "text",
    template: Template | None = None,
    task: Task = CAUSAL,
    num_workers: int | None = None,
    readers: int = 0,
    progress: bool = True,
) -> "TokenizedOnRead":
    """The examples of `source`, tokenised each time they are read.

    It is for text too large to store a second time as tokens. One pass over the source counts the
    tokens of each record and stores the counts, 4 bytes each; a later call reads no text. Reading
    costs as much as tokenising: some hundred microseconds for a thousand tokens.

    Arguments and errors are those of `prepare`. `directory` is for the counts; `readers` is the
    number of processes that tokenise batches, where 0 and 1 mean the thread that builds them.
    Batches read the source in any order: `.zst` files are then decompressed from their start for
    each batch, and so are `.gz` files without the extra `gzip`.
    """
    directory = as_path(directory)
    job = Job(source, tokenizer, field, template, task)
    measure = functools.partial(_measure, job, directory, num_workers, progress)
    make_once(directory / MANIFEST, "measuring lengths", measure)
    there, counts = _read(directory)
    require_same_origin(directory, there, job.origin)
    if len(counts) != len(source):
        raise InvalidValue(
            f"{os.fspath(directory)} is the index of {len(counts):,} records, but the source has "
            f"{len(source):,}; delete the index and run again"
        )
    return TokenizedOnRead(job, counts, readers)


def _count_tokens(job: Job, records: range) -> np.ndarray:
    """The number of tokens of each record of a range: uint32; the tokens are not kept."""
    counts = [chunk.counts.astype(np.uint32) for chunk in job.chunks(records)]
    return np.concatenate(counts)


def _measure(job: Job, directory: epath.Path, num_workers: int | None, progress: bool) -> None:
    ranges = divide_records(job.count_records())
    count = functools.partial(_count_tokens, job)
    counts = run_ranges(Processes(num_workers), count, ranges, name="measuring", progress=progress)
    every = np.concatenate([*counts])
    job.require_unchanged()
    with atomic_write(directory / COUNTS) as file:
        np.save(file, every)
    write_entries(directory / MANIFEST, {"origin": job.origin, "counts_digest": digest(every)})


def _read(directory: epath.Path) -> tuple[dict[str, Any], np.ndarray]:
    """The origin of the index in `directory`, and the token counts: uint32 [records]."""

    def damaged(path: epath.Path, seen: str) -> InvalidValue:
        return InvalidValue(
            f"the index is damaged at {os.fspath(path)}: {seen}. Delete {os.fspath(directory)} "
            "and run again"
        )

    path = directory / MANIFEST
    content = read_entries(path, path.read_bytes(), damaged)
    return content["origin"], read_array(directory / COUNTS, content["counts_digest"], damaged)


class TokenizedOnRead(Handles, SingleCorpus):
    """Examples with known lengths, tokenised when they are read; made by `tokenize_on_read`."""

    handles = ("_submit", "_running")

    def __init__(self, job: Job, counts: np.ndarray, readers: int):
        self.task, self.lengths, self.in_memory = job.task, job.task.lengths(counts), False
        self.lengths.flags.writeable = False
        self._job, self._counts, self._readers = job, counts.astype(np.int64), readers
        self.vocab_size = job.tokenizer.vocab_size
        tokens = json_digest([job.origin, digest(self.lengths)])
        tokenizer = job.tokenizer.fingerprint
        self.identity = {"tokens": tokens, "tokenizer": tokenizer, "task": job.task.name}
        self.weighted = job.task.has_targets and job.template is not None
        self.__setstate__({})

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that makes the tokens."""
        return self._job.tokenizer

    def restart(self) -> None:
        """Forgets the workers, which belong to the process that started them; see `Handles`."""
        super().restart()
        self._running = contextlib.ExitStack()
        self._submit: Callable[[Sequence[int]], Future[Ragged]] | None = None
        weakref.finalize(self, self._running.close)

    def _read(self, pieces: Pieces, names: Sequence[str]) -> Fields:
        several, which = np.unique(pieces.examples, return_inverse=True)
        if not len(several):
            return {field: np.zeros(0, np.int32) for field in self.task.shifts}
        chunk = self._tokenise(several)
        if len(wrong := np.flatnonzero(chunk.counts != self._counts[several])):
            record = int(several[wrong[0]])
            raise InvalidValue(
                f"{where(self._job.source, record)} has {chunk.counts[wrong[0]]} tokens, but had "
                f"{self._counts[record]} when it was indexed; delete the index and run again"
            )
        return Memory.of(self.task, chunk).read(pieces._replace(examples=which), ())

    def _tokenise(self, examples: np.ndarray) -> Ragged:
        if self._readers < 2:
            return self._job.run(examples.tolist())
        with self._lock:
            if self._submit is None:
                self._submit = self._running.enter_context(workers(self._job.run, self._readers))
            submit = self._submit
        # Shares with about equally many tokens.
        before = np.cumsum(self._counts[examples])
        edges = np.searchsorted(before, before[-1] * np.arange(1, self._readers) / self._readers)
        shares = [share.tolist() for share in np.split(examples, edges) if len(share)]
        try:
            return Ragged.concatenate([future.result() for future in list(map(submit, shares))])
        except BrokenProcessPool as error:
            self.close()
            raise InvalidState(
                "a process that tokenises batches died. If it was killed for lack of memory, use "
                f"fewer readers; if this is a script, {GUARD}"
            ) from error

    def close(self) -> None:
        """Ends the processes that tokenise; the next read starts them again."""
        with self._lock:
            self._running.close()
            self._submit = None

    def __repr__(self) -> str:
        return f"TokenizedOnRead({self._job.source}, {self._job.tokenizer.fingerprint})"
