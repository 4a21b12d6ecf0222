"""Ranges: consecutive records, an engine's unit of work; their files, assembled into parts."""

import contextlib
import dataclasses
import functools
import hashlib
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from etils import epath
from tqdm import tqdm

from pipeline.corpus.engines import Engine, refuse_import
from pipeline.corpus.manifest import RANGES, part_name
from pipeline.corpus.parts import (
    WRITE,
    Part,
    json_digest,
    read_batch,
    read_content,
    read_part,
    write_columns,
    write_part,
)
from pipeline.corpus.tasks import Task
from pipeline.corpus.tokenisation import Job
from pipeline.corpus.writer import PartWriter
from pipeline.errors import InvalidState, InvalidValue
from pipeline.fs.atomic import atomic_write, directory_lock
from pipeline.text.features import Feature
from pipeline.text.ragged import Ragged, divide

# A source has about `COUNT` ranges, of `RECORDS` to `MOST` records each.
COUNT, RECORDS, MOST = 1024, 512, 8192

# Names of files of ranges, including temporary ones; other files in their folder stay.
NAME = re.compile(r"[0-9a-f]{12}-\d{12}-\d{12}\.arrow|\.[-0-9a-f]{38}\.arrow\.[0-9a-f]+\.tmp")


class _Bar(tqdm):
    """A progress bar with a thread lock; the lock of tqdm would fix how processes start."""

    _lock = threading.RLock()


def make_once(path: epath.Path, doing: str, make: Callable[[], None]) -> None:
    """Calls `make`, which writes `path` last, unless `path` exists; other processes wait."""
    # Finished work needs no lock, and may lie in a read-only directory.
    if not path.exists():
        refuse_import()
        with directory_lock(path.parent, doing):
            if not path.exists():
                make()


def divide_records(documents: int) -> list[range]:
    """The ranges of a source with this many records; nothing else decides them.

    >>> divide_records(1200)
    [range(0, 512), range(512, 1024), range(1024, 1200)]
    """
    size = RECORDS
    while size < MOST and size * COUNT < documents:
        size *= 2
    return [range(at, min(at + size, documents)) for at in range(0, documents, size)]


def run_ranges(
    engine: Engine,
    function: Callable[[range], np.ndarray],
    ranges: Sequence[range],
    *,
    name: str,
    progress: bool,
    done: int = 0,
    tokens: int = 0,
) -> Iterator[np.ndarray]:
    """The result of `function` for each range, in order: the token counts of its records.

    A progress bar with this `name` begins at `done` records, which have `tokens` tokens.
    """
    new, started = 0, time.monotonic()
    options: dict = {"unit": " documents", "unit_scale": True, "initial": done}
    # In a log file, a line now and then is enough.
    options |= {"mininterval": 0.2 if sys.stderr.isatty() else 10, "disable": not progress}
    with _Bar(desc=name, total=done + sum(map(len, ranges)), **options) as bar:

        def show(records: range, counts: np.ndarray) -> None:
            nonlocal new
            new += int(counts.sum(dtype=np.int64))
            rate = new / max(time.monotonic() - started, 1e-9)
            postfix = f"{(tokens + new) / 1e6:,.1f} M tokens, {rate / 1e6:.2f} M/s"
            bar.set_postfix_str(postfix, refresh=False)
            bar.update(len(records))

        names = [f"that of the records {each.start:,} to {each.stop - 1:,}" for each in ranges]
        yield from _run(engine, function, ranges, show, "ranges", names)


def _run(
    engine: Engine,
    function: Callable,
    items: Sequence,
    show: Callable[[Any, Any], object],
    what: str,
    names: Sequence[str],
) -> Iterator[Any]:
    """The result of `function` for each item, in order; `show` gets the results as they come."""
    missing, waiting, at = {*range(len(items))}, dict[int, Any](), 0
    numbered = list(enumerate(items))
    with contextlib.closing(engine.run(functools.partial(_number, function), numbered)) as results:
        for number, result in results:
            if number not in missing:  # repeated by the engine
                continue
            missing.remove(number)
            show(items[number], result)
            waiting[number] = result
            while at in waiting:
                yield waiting.pop(at)
                at += 1
    if missing:
        raise InvalidState(
            f"{type(engine).__name__} ended without {len(missing):,} of {len(items):,} {what}, "
            f"first {names[min(missing)]}; run again to finish"
        )


def _number(function: Callable, numbered: tuple[int, Any]) -> tuple[int, Any]:
    number, item = numbered
    return number, function(item)


@dataclasses.dataclass(frozen=True)
class RangeFiles:
    """The files of ranges beside the parts of a corpus in `directory`.

    A file holds its range in chunks, each with a digest of it and of the name of the file. So a
    complete file is recognised, and its range is done, whichever process wrote it. The name has
    `origin`, a short hash of all that decides the tokens.
    """

    directory: epath.Path
    origin: str
    features: Mapping[str, Feature]

    @classmethod
    def of(cls, job: Job, directory: epath.Path) -> "RangeFiles":
        """The files of the ranges of a job."""
        return cls(directory, json_digest([job.origin, job.task.has_targets]), job.features)

    def path(self, records: range) -> epath.Path:
        """The file of a range."""
        name = f"{self.origin}-{records.start:012d}-{records.stop:012d}.arrow"
        return self.directory / RANGES / name

    def read(
        self, records: range, first: int = 0, last: int | None = None, *, verify: bool = False
    ) -> Iterator[Ragged]:
        """The records of a range from `first` up to `last`, in chunks, as views of its file."""
        path, at = self.path(records), records.start
        last = records.stop if last is None else last
        content = read_content(path)
        try:
            reader = pa.ipc.open_file(content)
            for number in range(reader.num_record_batches):
                batch, metadata = reader.get_batch_with_custom_metadata(number)
                begin, at = at, at + batch.num_rows
                if at <= first or begin >= last:
                    continue
                text = batch.column("text_bytes").to_numpy()
                chunk = read_batch(path.name, batch, self.features)
                chunk = dataclasses.replace(chunk, text_bytes=text)
                if verify and metadata[b"sha256"].decode() != _digest(path.name, chunk):
                    raise InvalidValue("a digest differs")
                yield chunk.slice(max(first - begin, 0), min(last, at) - begin)
            if at != records.stop:
                raise InvalidValue(f"it ends at record {at}, not {records.stop}")
        except Exception as error:  # from Arrow, or from unexpected types
            raise InvalidValue(
                f"{os.fspath(path)} is not whole: {error}. Run again to replace it"
            ) from error


def write_range(job: Job, files: RangeFiles, records: range) -> np.ndarray:
    """Writes the file of a range, unless it is complete; returns the tokens of each record."""
    path = files.path(records)
    if path.exists():
        with contextlib.suppress(ValueError):
            there = [chunk.counts for chunk in files.read(records, verify=True)]
            return np.concatenate(there, dtype=np.uint32, casting="unsafe")
    counts = []
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(atomic_write(path, shared=True, durable=False))
        writer = None
        for chunk in job.chunks(records):
            text = pa.array(chunk.text_bytes, pa.int64())
            batch = pa.record_batch({**write_columns(chunk), "text_bytes": text})
            if writer is None:
                writer = stack.enter_context(pa.ipc.new_file(file, batch.schema, options=WRITE))
            writer.write_batch(batch, custom_metadata={"sha256": _digest(path.name, chunk)})
            counts.append(chunk.counts.astype(np.uint32))
            del chunk, text, batch  # before the next is made
    return np.concatenate(counts)


def _digest(name: str, chunk: Ragged) -> str:
    """The digest of a chunk in the file `name`: a copy under another name does not match."""
    sha = hashlib.sha256(f"{name} {chunk.digest}".encode())
    sha.update(np.ascontiguousarray(chunk.text_bytes, "<i8").data)
    return sha.hexdigest()


# The number of a part; its ranges, each with its first record there and one past the last.
Layout: TypeAlias = tuple[int, list[tuple[range, int, int]]]


def assemble(
    writer: PartWriter,
    job: Job,
    files: RangeFiles,
    ranges: Sequence[range],
    engine: Engine,
    progress: bool,
) -> None:
    """Makes the parts that `writer` does not have, and seals each but the last as it comes.

    `ranges` are all those that are not completely in parts; the file of each is removed once its
    range is. While the engine tokenises, a thread of this process makes parts of finished ranges;
    then the engine makes the rest, with a progress bar if that takes more than two seconds.
    """
    starts = [max(records.start, writer.examples) for records in ranges]
    make = functools.partial(_assemble_part, files, writer.manifest.origin, writer.task)

    def tokenise() -> Iterator[np.ndarray]:
        function = functools.partial(write_range, job, files)
        done = {"done": writer.examples, "tokens": writer.tokens}
        results = run_ranges(engine, function, ranges, name="preparing", progress=progress, **done)
        for records, first, counts in zip(ranges, starts, results, strict=True):
            yield counts[first - records.start :]

    def take(layout: Layout, part: Part) -> None:
        writer.append(part)
        if layout[1][-1][2] < ranges[-1].stop:
            writer.seal()
        for records, _, last in layout[1]:
            if last == records.stop:
                files.path(records).unlink(missing_ok=True)

    def work(layout: Layout) -> None:
        take(layout, make(layout))

    if ranges:
        writer.seal()  # what an interrupted process left
    pool = ThreadPoolExecutor(1, "sealing")
    running: deque[tuple[Layout, Future[None]]] = deque()
    try:
        with contextlib.closing(divide(tokenise())) as parts:
            for number, part in enumerate(parts, writer.number):
                pieces = [(ranges[at], starts[at] + b, starts[at] + e) for at, b, e in part]
                layout = number, pieces
                running.append((layout, pool.submit(work, layout)))
                while running and running[0][1].done():
                    running.popleft()[1].result()
        # From the last, because the thread takes the first that is not cancelled.
        left = [layout for layout, future in reversed(running) if future.cancel()][::-1]
    finally:
        pool.shutdown(cancel_futures=True)
    for _, future in running:
        if not future.cancelled():
            future.result()
    names = [part_name(number) for number, _ in left]  # parts are added in order
    options: dict = {"unit": " parts", "delay": 2, "disable": not progress}
    with _Bar(desc="assembling", total=len(left), **options) as bar:
        made = _run(engine, make, left, lambda *_: bar.update(), "parts", names)
        for layout, each in zip(left, made, strict=True):
            take(layout, each)


def _assemble_part(
    files: RangeFiles, origin: Mapping[str, Any], task: Task, layout: Layout
) -> Part:
    """Writes a part, unless it is there and complete."""
    number, pieces = layout
    path = files.directory / part_name(number)
    first, examples = pieces[0][1], sum(last - first for _, first, last in pieces)
    with contextlib.suppress(ValueError):
        file = read_part(path)
        file.verify()
        if (file.metadata["first"], file.part.examples) == (first, examples):
            return file.part  # another attempt wrote it
    chunks = [chunk for piece in pieces for chunk in files.read(*piece)]
    return write_part(path, Ragged.concatenate(chunks), origin, task, first).part
