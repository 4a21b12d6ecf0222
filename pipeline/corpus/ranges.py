"""Ranges: consecutive records, the unit of work of an engine, and the files of their tokens."""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa
from etils import epath
from tqdm import tqdm

from pipeline.corpus.engines import Engine
from pipeline.corpus.manifest import RANGES
from pipeline.corpus.parts import WRITE, as_ragged, read_content, read_lists, write_lists
from pipeline.corpus.tokenisation import Job
from pipeline.errors import InvalidState, InvalidValue
from pipeline.fs.atomic import atomic_write
from pipeline.text.ragged import Ragged

# A source has about `COUNT` ranges, unless these would be smaller or larger than the other two.
COUNT, RECORDS, MOST = 1024, 512, 8192

# Names of files of ranges, also while they are written; other files in their folder are left alone.
NAME = re.compile(r"[0-9a-f]{12}-\d{12}-\d{12}\.arrow|\.[-0-9a-f]{38}\.arrow\.[0-9a-f]+\.tmp")


def divide_records(documents: int) -> list[range]:
    """The ranges of a source with this many records; nothing else decides them.

    >>> divide_records(1200)
    [range(0, 512), range(512, 1024), range(1024, 1200)]
    """
    size = RECORDS
    while size < MOST and size * COUNT < documents:
        size *= 2
    return [range(at, min(at + size, documents)) for at in range(0, documents, size)]


@dataclasses.dataclass(frozen=True)
class Receipt:
    """A range that is done, and the number of tokens of each of its records: uint32."""

    records: range
    counts: np.ndarray


def run_ranges(
    engine: Engine,
    function: Callable[[range], Receipt],
    ranges: Sequence[range],
    *,
    name: str,
    progress: bool,
    done: int = 0,
    tokens: int = 0,
) -> list[Receipt]:
    """The receipts of ranges, in their order, with a progress bar.

    Args:
        engine: what runs the function.
        function: does the work of one range.
        ranges: the ranges.
        name: what the bar calls the work.
        progress: whether to show the bar.
        done: the number of records that were done before.
        tokens: how many tokens these have.

    Raises:
        RuntimeError: the engine ended without all receipts.
    """
    new, started = 0, time.monotonic()
    found: dict[int, Receipt] = {}
    # In a log file, a line now and then is enough.
    interval = 0.2 if sys.stderr.isatty() else 10
    options: dict = {"unit": " documents", "unit_scale": True, "mininterval": interval}
    options |= {"initial": done, "total": done + sum(map(len, ranges))}
    with (
        contextlib.closing(engine.run(function, ranges)) as receipts,
        tqdm(desc=name, disable=not progress, **options) as bar,
    ):
        for receipt in receipts:
            if receipt.records.start in found:
                continue
            found[receipt.records.start] = receipt
            new += int(receipt.counts.sum(dtype=np.int64))
            rate = new / max(time.monotonic() - started, 1e-9)
            postfix = f"{(tokens + new) / 1e6:,.1f} M tokens, {rate / 1e6:.2f} M/s"
            bar.set_postfix_str(postfix, refresh=False)
            bar.update(len(receipt.records))
    if missing := [records for records in ranges if records.start not in found]:
        raise InvalidState(
            f"{type(engine).__name__} ended without {len(missing):,} of {len(ranges):,} ranges, "
            f"first that of the records {missing[0].start:,} to {missing[0].stop - 1:,}; run again "
            "to go on"
        )
    return [found[records.start] for records in ranges]


@dataclasses.dataclass(frozen=True)
class RangeFiles:
    """The files of ranges beside the parts of a corpus.

    A file holds its range in chunks, each with its digest. So a file that is whole is known to be
    so, and its range is done, whoever wrote it.

    Args:
        directory: of the corpus.
        origin: a short hash of all that decides the tokens; files of others have other names.
    """

    directory: epath.Path
    origin: str

    @classmethod
    def of(cls, job: Job, directory: epath.Path) -> "RangeFiles":
        """Those of the records and the tokenizer of a job."""
        about = json.dumps([job.origin, job.weighted], sort_keys=True)
        return cls(directory, hashlib.sha256(about.encode()).hexdigest()[:12])

    def path(self, records: range) -> epath.Path:
        """The file of a range."""
        name = f"{self.origin}-{records.start:012d}-{records.stop:012d}.arrow"
        return self.directory / RANGES / name

    def read(
        self, records: range, first: int = 0, last: int | None = None, *, verify: bool = False
    ) -> Iterator[Ragged]:
        """The tokens of the records of a range from `first` up to `last`, as views of its file.

        Args:
            records: the range.
            first: the number of the first record.
            last: the number after that of the last record. None: the end of the range.
            verify: whether to compare digests.

        Raises:
            ValueError: the file is missing or not whole.
        """
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
                lists = as_ragged(path.name, *read_lists(batch))
                chunk = dataclasses.replace(lists, text_bytes=text)
                if verify and metadata[b"sha256"].decode() != _digest(chunk):
                    raise InvalidValue("a digest differs")
                yield chunk.slice(max(first - begin, 0), min(last, at) - begin)
            if at != records.stop:
                raise InvalidValue(f"it ends at record {at}, not {records.stop}")
        except Exception as error:  # of Arrow, or of types that are not as expected
            raise InvalidValue(
                f"{os.fspath(path)} is not whole: {error}. Run again, and it is made anew"
            ) from error

    def remove(self, records: range) -> None:
        """Removes the file of a range."""
        self.path(records).unlink(missing_ok=True)


@dataclasses.dataclass(frozen=True)
class Tokenisation:
    """Tokenises ranges, each into its file."""

    job: Job
    files: RangeFiles

    def __call__(self, records: range) -> Receipt:
        """Writes the file of a range, unless it is there and whole."""
        path = self.files.path(records)
        if path.exists():
            with contextlib.suppress(ValueError):
                there = [
                    chunk.counts.astype(np.uint32)
                    for chunk in self.files.read(records, verify=True)
                ]
                return Receipt(records, np.concatenate(there))
        counts = []
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(atomic_write(path, shared=True, durable=False))
            writer = None
            for chunk in self.job.chunks(records):
                text = pa.array(chunk.text_bytes, pa.int64())
                batch = pa.record_batch({**write_lists(chunk), "text_bytes": text})
                if writer is None:
                    writer = stack.enter_context(pa.ipc.new_file(file, batch.schema, options=WRITE))
                writer.write_batch(batch, custom_metadata={"sha256": _digest(chunk)})
                counts.append(chunk.counts.astype(np.uint32))
                del chunk, text, batch  # before the next is made
        return Receipt(records, np.concatenate(counts))


def _digest(chunk: Ragged) -> str:
    sha = hashlib.sha256(chunk.digest.encode())
    sha.update(np.ascontiguousarray(chunk.text_bytes, "<i8").data)
    return sha.hexdigest()


def clear_ranges(directory: epath.Path) -> None:
    """Removes the files of all ranges beside a corpus, also of those that were given up."""
    folder = directory / RANGES
    for path in folder.iterdir() if folder.exists() else ():
        if NAME.fullmatch(path.name):
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError, ValueError):
        folder.rmdir()
