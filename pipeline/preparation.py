"""Prepare: text to a corpus; once, in parallel, and from where it was interrupted."""

import contextlib
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np
from etils import epath
from tqdm import tqdm

from pipeline.atomic import alone
from pipeline.chunks import Chunk, cut
from pipeline.corpus import Corpus
from pipeline.sources import Source
from pipeline.sources.source import read_texts, where
from pipeline.tasks import CAUSAL
from pipeline.tokenizers import Tokenizer
from pipeline.writer import MANIFEST, Writer, require_same_origin

# A worker takes this many records at a time. It changes no result.
RECORDS = 512

# Workers cost a second or two to start. Unless told how many to use, work starts without any, and
# goes on with workers if more than `WORTH` seconds of it are left after the first `TRIAL`.
TRIAL, WORTH = 2.0, 15.0

GUARD = 'guard its main part with `if __name__ == "__main__":`'


@dataclass(frozen=True)
class Job:
    """What a worker needs: it reads and tokenises records by number."""

    source: Source
    tokenizer: Tokenizer
    field: str

    def run(self, begin: int, end: int) -> Chunk:
        """The tokens of records `begin` to `end`.

        Raises:
            ValueError: an id is outside the vocabulary of the tokenizer.
        """
        texts = read_texts(self.source, range(begin, end), self.field)
        flat, counts = self.tokenizer.encode_batch(texts)
        sizes = np.fromiter((len(text.encode()) for text in texts), np.int64, len(texts))
        wrong = np.flatnonzero((flat < 0) | (flat >= self.tokenizer.vocab_size))
        if len(wrong):
            record = begin + int(np.searchsorted(np.cumsum(counts), wrong[0], side="right"))
            raise ValueError(
                f"{where(self.source, record)}: the tokenizer {self.tokenizer.fingerprint} gave "
                f"the id {flat[wrong[0]]}, and its vocab_size is {self.tokenizer.vocab_size}; ids "
                "must be at least 0 and below it"
            )
        return Chunk(flat, counts, sizes)


def prepare(
    source: Source,
    tokenizer: Tokenizer,
    directory: epath.PathLike,
    *,
    field: str = "text",
    num_workers: int | None = None,
    progress: bool = True,
) -> Corpus:
    """The corpus of `source`, tokenised into `directory`; opened at once if it is there already.

    It may be killed at any time: run again, it keeps the parts that are whole and does the rest,
    and the corpus is the same, bit for bit, as if nothing had happened. When several processes of
    a machine (or of a shared file system) ask for it together, one prepares it and the others
    wait. The corpus does not depend on `num_workers`.

    Args:
        source: records by number; see `pipeline.sources`.
        tokenizer: see `pipeline.tokenizers`; it is stored with the corpus.
        directory: where to write.
        field: the field of each record that holds its text.
        num_workers: processes to tokenise in; 0 or 1 mean in this one. By default as many as
            there are CPUs, if there is enough to do. They start by `spawn`, so a script must
            guard its main part with `if __name__ == "__main__":`.
        progress: whether to show a progress bar.

    Raises:
        ValueError: the source is empty, a record is not text, an id is outside the vocabulary, or
            `directory` holds a corpus of another source or tokenizer.
        OSError: the disk is full; what is finished is kept.
        RuntimeError: a worker died.
    """
    directory = epath.Path(directory).expanduser()
    origin = {
        "source": source.fingerprint,
        "tokenizer": tokenizer.fingerprint,
        "field": field,
    }
    # A finished corpus needs no lock, and may lie where nothing can be written.
    if not (directory / MANIFEST).exists():
        # A worker that runs the script that started it would wait for this lock for ever.
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise RuntimeError(f"prepare was called by the import of a script: {GUARD}")
        with alone(directory, "preparing a corpus"):
            if not (directory / MANIFEST).exists():
                _prepare(Job(source, tokenizer, field), directory, origin, num_workers, progress)
    corpus = Corpus.open(directory)
    require_same_origin(directory, corpus.origin, origin)
    return corpus


def _prepare(
    job: Job, directory: epath.Path, origin: dict, num_workers: int | None, progress: bool
) -> None:
    documents = len(job.source)
    if not documents:
        raise ValueError(
            f"the source is empty ({job.source}); a corpus holds at least one record. Check that "
            "it names the right files"
        )
    writer = Writer(directory, CAUSAL, origin)
    chunks = _tokenised(job, writer.examples, documents, num_workers)
    # Closing the chunks ends the workers at once, also when a part cannot be written.
    with _Progress(documents, writer, shown=progress) as bar, contextlib.closing(chunks):
        for part in cut(map(bar.counted, chunks)):
            writer.add(part)
    writer.finish(
        vocab_size=job.tokenizer.vocab_size,
        tokenizer=job.tokenizer.save(directory),
        source=str(job.source),
    )


def _tokenised(job: Job, begin: int, end: int, num_workers: int | None) -> Generator[Chunk]:
    """The chunks of records `begin` to `end`, in order."""
    ranges = ((at, min(at + RECORDS, end)) for at in range(begin, end, RECORDS))
    if num_workers is None:
        num_workers, started = 0, time.monotonic()
        for at, until in ranges:
            yield job.run(at, until)
            spent = time.monotonic() - started
            if spent > TRIAL:
                left = spent * (end - until) / (until - begin)
                num_workers = _cpus() if left > WORTH else 0
                break
    if num_workers < 2:
        return (yield from itertools.starmap(job.run, ranges))
    yield from _tokenised_by_workers(job, ranges, num_workers)


def _cpus() -> int:
    """The CPUs that this process may use, where the system says so."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def _tokenised_by_workers(job: Job, ranges: Iterator, num_workers: int) -> Iterator[Chunk]:
    # The job goes through a file: what is sent to a worker as it starts must fit into a pipe
    # (64 KiB), or a worker that dies before it reads leaves this process waiting for ever.
    with tempfile.NamedTemporaryFile("wb", prefix="lockstep-job-", delete=False) as file:
        pickle.dump(job, file)
    pool = ProcessPoolExecutor(
        num_workers, multiprocessing.get_context("spawn"), initializer=_start, initargs=(file.name,)
    )
    try:
        # Two ranges for each worker are on their way; results are taken in order.
        waiting = deque(
            pool.submit(_run, *each) for each in itertools.islice(ranges, 2 * num_workers)
        )
        while waiting:
            chunk = waiting.popleft().result()
            waiting.extend(pool.submit(_run, *each) for each in itertools.islice(ranges, 1))
            yield chunk
    except BrokenProcessPool as error:
        raise RuntimeError(
            "a worker died while tokenising. If it was killed for want of memory, use fewer "
            f"num_workers; if this is a script, {GUARD}, and with python - or in a shell use "
            "num_workers=0. Finished parts are kept: run again to go on"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        os.unlink(file.name)


_job: Job


def _start(job: str) -> None:
    """Sets up a worker, which ends when the process that started it does, even if killed."""
    global _job
    with open(job, "rb") as file:
        _job = pickle.load(file)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started it will say so

    def follow() -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
        with contextlib.suppress(OSError):
            os.unlink(job)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _run(begin: int, end: int) -> Chunk:
    return _job.run(begin, end)


class _Progress:
    """A bar of documents, with tokens, rate and time left."""

    def __init__(self, documents: int, writer: Writer, *, shown: bool):
        self._bar = tqdm(
            total=documents,
            initial=writer.examples,
            disable=not shown,
            unit=" documents",
            unit_scale=True,
            desc="preparing",
            # In a log file, a line now and then is enough.
            mininterval=0.2 if sys.stderr.isatty() else 10,
        )
        self._tokens, self._new, self._started = writer.tokens, 0, time.monotonic()

    def counted(self, chunk: Chunk) -> Chunk:
        self._new += len(chunk.flat)
        rate = self._new / max(time.monotonic() - self._started, 1e-9)
        self._bar.set_postfix_str(
            f"{(self._tokens + self._new) / 1e6:,.1f} M tokens, {rate / 1e6:.2f} M/s",
            refresh=False,
        )
        self._bar.update(len(chunk.counts))
        return chunk

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
