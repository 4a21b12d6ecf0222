"""Tokenisation: records to chunks of tokens, in this process or in several."""

import contextlib
import dataclasses
import functools
import itertools
import mmap
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import reduction
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from pipeline import templates
from pipeline.ragged import Ragged
from pipeline.sources import Source
from pipeline.sources.source import read_texts, where
from pipeline.templates import Template
from pipeline.tokenizers import Tokenizer
from pipeline.tokenizers.markup import MarkError

# A worker takes up to `RECORDS` records at a time. It reads them in groups of up to `GROUP`, until
# it has `TEXT` characters, or tokens by a template. None of this changes a result.
RECORDS, GROUP, TEXT = 512, 16, 1 << 22

# Workers cost a second or two to start. Unless told how many to use, work starts without any, and
# goes on with workers if more than `WORTH` seconds of it are left after the first `TRIAL`.
TRIAL, WORTH = 2.0, 15.0

T = TypeVar("T")

GUARD = 'guard its main part with `if __name__ == "__main__":`'


@dataclasses.dataclass(frozen=True)
class Job:
    """Reads and tokenises records by number; workers get a copy of it.

    Where `weighted` is False, the weights that a template gives are left out.
    """

    source: Source
    tokenizer: Tokenizer
    field: str
    template: Template | None = None
    weighted: bool = True

    @functools.cached_property
    def origin(self) -> dict[str, str | None]:
        """Fingerprints of all that decides the tokens, and the field where there is no template.

        They are those of when they were first asked for.
        """
        template = None if self.template is None else templates.fingerprint(self.template)
        return {
            "source": self.source.fingerprint,
            "tokenizer": self.tokenizer.fingerprint,
            "field": self.field if template is None else None,
            "template": template,
        }

    def require_unchanged(self) -> None:
        """Refuses, with a `ValueError`, a source that was edited since `origin` was first read."""
        now = self.source.fingerprint
        if now != self.origin["source"]:
            raise ValueError(
                f"the source changed while it was read ({self.source}): its fingerprint was "
                f"{self.origin['source']} and is now {now}. Let nothing write to it meanwhile, and "
                "run again with the source opened anew"
            )

    def run(self, records: Sequence[int]) -> Ragged:
        """The tokens of the records with these numbers; raises what `run_first` raises."""
        return Ragged.concatenate(list(self.chunks(records)))

    def chunks(self, records: Sequence[int]) -> Iterator[Ragged]:
        """The tokens of the records with these numbers, in chunks; raises what `run_first` does."""
        while len(records):
            # Popped: else this generator, too, would keep a chunk while others work on it.
            chunk = [self.run_first(records)]
            records = records[len(chunk[0].counts) :]
            yield chunk.pop()

    def run_first(self, records: Sequence[int]) -> Ragged:
        """The tokens of the first of some records: of as many as make `TEXT`, or of all.

        Raises:
            ValueError: an id is outside the vocabulary of the tokenizer, or is that of a special
                token and should not be; names the record.
        """
        try:
            return self._run_first(records)
        except MarkError as error:
            if len(records) > 1:  # find out which
                return self.run_first(records[:1])
            raise ValueError(f"{where(self.source, records[0])}: {error}") from error

    def _run_first(self, records: Sequence[int]) -> Ragged:
        groups = _divide(records)
        if (template := self.template) is not None:
            encode = (templates.encode(template, self.source, g, self.tokenizer) for g in groups)
            chunk = Ragged.concatenate(_take(encode, lambda part: len(part.flat)))
        else:
            read = (read_texts(self.source, group, self.field) for group in groups)
            texts = list(itertools.chain(*_take(read, lambda part: sum(map(len, part)))))
            sizes = np.fromiter((len(text.encode()) for text in texts), np.int64, len(texts))
            chunk = Ragged(*self.tokenizer.encode_batch(texts), sizes)
        flat, most = chunk.flat, self.tokenizer.vocab_size
        if flat.min(initial=0) < 0 or flat.max(initial=-1) >= most:
            wrong = np.flatnonzero((flat < 0) | (flat >= most))
            record = records[int(np.searchsorted(np.cumsum(chunk.counts), wrong[0], side="right"))]
            raise ValueError(
                f"{where(self.source, record)}: the tokenizer {self.tokenizer.fingerprint} gave "
                f"the id {flat[wrong[0]]}, and its vocab_size is {self.tokenizer.vocab_size}; ids "
                "must be at least 0 and below it"
            )
        return chunk if self.weighted else dataclasses.replace(chunk, weights=None)


def _divide(records: Sequence[int]) -> Iterator[Sequence[int]]:
    """Groups of records that are read at once: at first small ones, as records may be huge."""
    at, size = 0, 1
    while at < len(records):
        yield records[at : at + size]
        at, size = at + size, min(2 * size, GROUP)


def _take(parts: Iterable[T], size: Callable[[T], int]) -> list[T]:
    """The first of some parts, until their sizes make `TEXT`."""
    taken, total = [], 0
    for part in parts:
        taken.append(part)
        total += size(part)
        if total >= TEXT:
            break
    return taken


def tokenise(
    job: Job,
    num_workers: int | None,
    *,
    name: str,
    progress: bool,
    done: int = 0,
    tokens: int = 0,
) -> Generator[Ragged]:
    """The tokens of all records, in order and in chunks, with a progress bar.

    Args:
        job: the records, and how to tokenise them.
        num_workers: processes to use; 0 or 1: this one; None: as many as are worth it.
        name: what the bar calls the work.
        progress: whether to show the bar.
        done: the records at the beginning to leave out, because they are done.
        tokens: how many tokens these have.
    """
    new, started = 0, time.monotonic()
    documents = len(job.source)
    # In a log file, a line now and then is enough.
    interval = 0.2 if sys.stderr.isatty() else 10
    options: dict = {"unit": " documents", "unit_scale": True, "mininterval": interval}
    with (
        contextlib.closing(_chunks(job, done, documents, num_workers)) as chunks,
        tqdm(desc=name, total=documents, initial=done, disable=not progress, **options) as bar,
    ):

        def show(chunk: Ragged) -> Ragged:
            nonlocal new
            new += len(chunk.flat)
            rate = new / max(time.monotonic() - started, 1e-9)
            postfix = f"{(tokens + new) / 1e6:,.1f} M tokens, {rate / 1e6:.2f} M/s"
            bar.set_postfix_str(postfix, refresh=False)
            bar.update(len(chunk.counts))
            return chunk

        yield from map(show, chunks)


def _chunks(job: Job, begin: int, end: int, num_workers: int | None) -> Generator[Ragged]:
    """The tokens of records `begin` to `end`."""
    ranges = (range(at, min(at + RECORDS, end)) for at in range(begin, end, RECORDS))
    if num_workers is None:
        num_workers, started = 0, time.monotonic()
        for records in ranges:
            yield from job.chunks(records)
            spent = time.monotonic() - started
            if spent > TRIAL:
                left = spent * (end - records.stop) / (records.stop - begin)
                num_workers = _cpus() if left > WORTH else 0
                break
    if num_workers < 2:
        return (yield from itertools.chain.from_iterable(map(job.chunks, ranges)))
    yield from _by_workers(job, ranges, num_workers)


def _cpus() -> int:
    """The CPUs that this process may use, where the system says so."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def _by_workers(job: Job, ranges: Iterator[Sequence[int]], num_workers: int) -> Generator[Ragged]:
    with workers(job, num_workers, Job.run_first) as submit:
        # Two ranges for each worker are on their way; results are taken in order.
        first = itertools.islice(ranges, 2 * num_workers)
        waiting = deque((records, submit(records)) for records in first)
        while waiting:
            records, future = waiting.popleft()
            chunk = [future.result()]
            del future
            if rest := records[len(chunk[0].counts) :]:
                waiting.appendleft((rest, submit(rest)))
            else:
                waiting.extend((more, submit(more)) for more in itertools.islice(ranges, 1))
            yield chunk.pop()


@contextlib.contextmanager
def workers(
    job: Job, number: int, run: Callable[[Job, Sequence[int]], Ragged] = Job.run
) -> Iterator[Callable[[Sequence[int]], Future[Ragged]]]:
    """Processes that run a job on the records they are given, until the block is left.

    Raises:
        RuntimeError: one of them died.
    """
    # The job goes through a file: what is sent to a worker as it starts must fit into a pipe
    # (64 KiB), or a worker that dies before it reads leaves this process waiting for ever. The file
    # has no name: the system removes it with the last process that has it open, even if killed.
    with tempfile.TemporaryFile() as file:
        pickle.dump(job, file)
        file.flush()
        context, given = multiprocessing.get_context("spawn"), (_Descriptor(file.fileno()),)
        pool = ProcessPoolExecutor(number, context, initializer=_start, initargs=given)
        started_in = os.getpid()
        try:
            yield lambda records: pool.submit(_run, run, records)
        except BrokenProcessPool as error:
            raise RuntimeError(
                "a worker died while tokenising. If it was killed for want of memory, use fewer "
                f"num_workers; if this is a script, {GUARD}, and with python - or in a shell use "
                "num_workers=0. Finished parts are kept: run again to go on"
            ) from error
        finally:
            if os.getpid() == started_in:  # in a forked child, the processes are its parent's
                pool.shutdown(wait=True, cancel_futures=True)


@dataclasses.dataclass(frozen=True)
class _Descriptor:
    """The number of an open file, which a worker that starts gets as one of its own."""

    number: int

    def __reduce__(self):
        return _receive, (reduction.DupFd(self.number),)


def _receive(sent: Any) -> _Descriptor:
    return _Descriptor(sent.detach())


_job: Job


def _start(job: _Descriptor) -> None:
    """Sets up a worker, which ends when the process that started it does, even if killed."""
    global _job
    # All workers share the position in the file, and a map has none.
    with mmap.mmap(job.number, 0, access=mmap.ACCESS_READ) as content:
        _job = pickle.loads(content)
    os.close(job.number)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a process for each CPU is enough
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started it will say so

    def follow() -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _run(run: Callable[[Job, Sequence[int]], Ragged], records: Sequence[int]) -> Ragged:
    return run(_job, records)
