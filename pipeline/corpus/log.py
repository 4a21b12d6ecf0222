"""The log of a corpus: its sealed parts, in order, so that readers can follow while it grows.

While a corpus is written, `log/` beside its parts has a record for each seal: a JSON file, named by
the number of its first part and created once, atomically. Readers poll for the next name. The
manifest of a finished corpus lists all parts, and replaces the records.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from pipeline.corpus.manifest import (
    LENGTHS,
    LOG,
    MANIFEST,
    Manifest,
    part_name,
    read_entries,
    read_lengths,
    require_sizes,
    write_entries,
)
from pipeline.corpus.parts import Part
from pipeline.corpus.prng import is_held_out
from pipeline.corpus.tasks import TASKS, Task
from pipeline.errors import InvalidState, InvalidValue, Missing, NotSealed
from pipeline.fs import objects
from pipeline.fs.atomic import as_path, make_directory, remove_files
from pipeline.fs.fork import Handles
from pipeline.planning import lengths as lengths_module

logger = logging.getLogger(__name__)

# The manifest with the first part, written before the first record; and the file that ends a log
# whose first parts were deleted, since such a corpus gets no manifest.
ABOUT, END = "about.json", "end.json"
RECORD = re.compile(r"(\d{8,})\.json")
# The fields of a record that say where its first part is.
OF_PLACE = "number", "first", "before"
# The number of parts whose lengths are read at once.
TOGETHER = 256
# Names of all files of a log, including temporary ones.
STEM = r"(\d{8,}|about|end|reader-[\w-]+)\.json"
NAMES = re.compile(rf"{STEM}|\.{STEM}\.[0-9a-f]+\.tmp")
READER = re.compile(r"reader-[\w-]+\.json")
# Seconds between polls for the next record: at first, and at most.
LOOK, SELDOM = 0.02, 2.0
# The number of entries kept before the latest one requested; older ones are read again.
KEPT = 1 << 13

# By directory, the error that stopped the writer in this process.
_failures: dict[str, BaseException] = {}


def fail_growing(directory: epath.PathLike, error: BaseException) -> None:
    """Keeps the error of the writer of a corpus; the next wait in this process raises it."""
    _failures[os.fspath(directory)] = error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A sealed part and its place in the corpus, which never change.

    Attributes:
        number: the number of the part, from 0.
        part: its file and contents.
        first: the number of its first example.
        before: a digest of everything before it; "" at the beginning.
        cursor: where the source continues after it, any JSON; None: unknown.
    """

    number: int
    part: Part
    first: int
    before: str
    cursor: Any = None

    @property
    def file(self) -> str:
        """The name of the part's file."""
        return self.part.file

    @property
    def examples(self) -> int:
        """The number of examples in the part."""
        return self.part.examples

    @property
    def digest(self) -> str:
        """SHA-256 of its lengths, tokens, weights and features; not of times or names."""
        return self.part.sha256

    @property
    def after(self) -> str:
        """A digest of everything up to the end of the part."""
        return hashlib.sha256(f"{self.before} {self.digest}".encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Finished:
    """What a plan needs of a finished corpus; see `pipeline.planning.lengths.Corpus`."""

    lengths: np.ndarray
    files: np.ndarray
    lengths_digest: str | None
    num_learnt: int


class Log(Handles):
    """The sealed parts of the corpus in `directory`, growing or finished.

    Any number of threads may use it. A `Plan` of it waits for parts that
    are not sealed yet.

    Args:
        directory: a local path, or one of object storage.
        wait_seconds: the longest wait for a part, in seconds; None: as long as it takes.
        hold_out: the share of examples that plans leave out, as for `AnyCorpus.split`.
    """

    handles = ("_known", "_end", "_manifest", "_closed", "_waited")

    def __init__(
        self,
        directory: epath.PathLike,
        wait_seconds: float | None = None,
        hold_out: float = 0.0,
    ):
        if wait_seconds is not None and not wait_seconds >= 0:
            raise InvalidValue(
                f"wait_seconds is {wait_seconds!r}; it must be a number of seconds from 0 up, or "
                "None to wait as long as it takes"
            )
        self.directory, self.wait_seconds = as_path(directory), wait_seconds
        self.hold_out = hold_out
        self._place = self.directory / LOG
        self.__setstate__({})

    def restart(self) -> None:
        """Forgets what was read; see `Handles`."""
        super().restart()
        self._lock: Any = threading.RLock()
        # Consecutive entries; and the number, first example and `before` of the next entry.
        self._known: list[Entry] = []
        self._end = (0, 0, "")
        self._manifest: Manifest | None = None
        self._closed = self._waited = False

    @property
    def finished(self) -> bool:
        """Whether no part will be added."""
        return self._finished_manifest() is not None or (self._place / END).exists()

    def about(self) -> Manifest:
        """The manifest of the corpus, with the first part at least.

        Raises:
            FileNotFoundError: nothing is sealed yet.
        """
        with contextlib.suppress(FileNotFoundError):
            return self._read_about()
        if (manifest := self._finished_manifest()) is None:
            raise Missing(self._nothing)
        return manifest

    def _read_about(self) -> Manifest:
        path = self._place / ABOUT
        entries = read_entries(path, path.read_bytes(), damaged)
        try:
            return Manifest.parse(entries)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise damaged(path, str(error)) from error

    @property
    def _nothing(self) -> str:
        return (
            f"nothing is sealed yet in {os.fspath(self.directory)}; start a pipeline.Writer or "
            "prepare there, or check the path"
        )

    @functools.cached_property
    def task(self) -> Task:
        """The task of the corpus, which decides the lengths."""
        return TASKS[self.about().task]

    def entries(self, start: int = 0) -> list[Entry]:
        """The entries sealed so far, from number `start` on; empty at the end of the log.

        Raises:
            ValueError: a record is missing, changed, half-written or out of order, was deleted, or
                the log is shorter than `start`.
        """
        with self._lock:
            if self._begin <= start <= self._end[0] and self._known:
                self._go_on(start)
            else:
                self._enter(start)
            return self._known[start - self._begin :]

    def find(self, number: int) -> Entry | None:
        """The entry of a part; None if it is the next one to be sealed."""
        with self._lock:
            if not self._knows(number):
                self.entries(number)
            if (old := number - self._begin - KEPT) > 0:
                del self._known[:old]
            return None if number == self._end[0] else self._known[number - self._begin]

    # ---- as `pipeline.planning.growing.Parts`

    def lengths(self, number: int) -> np.ndarray | None:
        """See `pipeline.planning.growing.Parts`.

        Raises:
            NotSealed: no part was sealed within `wait_seconds`.
            InvalidState: `close` was called.
        """
        if (entry := self.wait(number)) is None:
            return None
        (lengths,) = self.read_lengths([entry.part])
        lengths[is_held_out(entry.first + np.arange(entry.examples), self.hold_out)] = 0
        return lengths

    def digest(self, number: int) -> str | None:
        """See `pipeline.planning.growing.Parts`."""
        if not number:
            return ""
        with self._lock:
            entry = self.find(number)
            return self._end[2] if entry is None else entry.before

    def whole(self) -> Any:
        """See `pipeline.planning.growing.Parts`."""
        manifest = Manifest.of(self.directory)
        lengths = read_lengths(self.directory / LENGTHS, manifest)
        files, digest = manifest.table.numbers("examples"), manifest.lengths_digest
        whole = Finished(lengths, files, digest, manifest.learnt)
        left_out = np.flatnonzero(is_held_out(np.arange(len(lengths)), self.hold_out))
        return lengths_module.Lengths(whole, left_out)

    def wait(self, number: int) -> Entry | None:
        """The entry of a part, once it is sealed; None if the corpus is finished without it."""
        for _ in self.looks(number):
            finished = not self._knows(number) and self.finished  # before the poll
            if (entry := self.find(number)) is not None or finished:
                return entry
        raise AssertionError("looks() ends only with an error")

    def looks(self, number: int) -> Iterator[None]:
        """Pauses between polls for a part, without end; errors are those of `lengths`."""
        begin, pause, said = time.monotonic(), LOOK, False
        place = os.fspath(self.directory)
        while True:
            yield
            if (error := _failures.pop(place, None)) is not None:
                raise error
            waited = time.monotonic() - begin
            if waited > 1 and not said:
                # A first wait may look like a hang; in a stream, later ones are normal.
                say = logger.info if self._waited else logger.warning
                say(f"waiting for part {number:,} of {place} to be sealed")
                said = self._waited = True
            if self.wait_seconds is not None and waited >= self.wait_seconds:
                limit = f"{self.wait_seconds:g} s (wait_seconds)"
                if not number:
                    raise NotSealed(f"{self._nothing} (waited {limit})")
                raise NotSealed(
                    f"no part was added to {place} for {limit}: it has {number:,}, and is not "
                    "finished. Start its writer again, or finish it, and continue from the last "
                    "checkpoint"
                )
            if self._closed:
                raise InvalidState("the loader was closed while it waited for a part")
            left = pause if self.wait_seconds is None else self.wait_seconds - waited
            time.sleep(min(pause, max(left, LOOK)))
            pause = min(1.5 * pause, SELDOM)

    def close(self) -> None:
        """Ends all waits, with an error in each waiting thread."""
        self._closed = True

    def open(self) -> None:
        """Lets threads wait again."""
        self._closed = False

    # ---- reading

    def read_lengths(self, parts: Sequence[Part]) -> list[np.ndarray]:
        """The lengths of the examples of each part: uint32; see `read_counts`."""
        return [*map(self.task.lengths, self.read_counts(parts, self.task))]

    def read_counts(self, parts: Sequence[Part], task: Task) -> list[np.ndarray]:
        """The token counts of the examples of each part: uint32.

        Raises:
            ValueError: a part is missing, or its lengths changed.
        """
        found: list[np.ndarray] = []
        for at in range(0, len(parts), TOGETHER):
            group = parts[at : at + TOGETHER]
            paths = [self.directory / part.file for part in group]
            try:
                begins = [part.offsets for part in group]
                ends = [part.offsets + 8 * (part.examples + 1) for part in group]
                contents = objects.get_ranges(paths, begins, ends)
            except OSError:
                self.require_files(group)
                raise
            for part, path, content in zip(group, paths, contents, strict=True):
                found.append(np.diff(np.frombuffer(content, np.int64)).astype(np.uint32))
                if lengths_module.digest(task.lengths(found[-1])) != part.lengths_digest:
                    raise damaged(path, "the digest of its lengths differs")
        return found

    def require_files(self, parts: Sequence[Part]) -> None:
        """Refuses parts whose files are missing or differ in size from their record."""
        require_sizes(self.directory, {part.file: part.bytes for part in parts}, damaged)

    @property
    def _begin(self) -> int:
        """The number of the first known entry."""
        return self._end[0] - len(self._known)

    def _knows(self, number: int) -> bool:
        return self._begin <= number < self._end[0]

    def _finished_manifest(self) -> Manifest | None:
        if self._manifest is None and (self.directory / MANIFEST).exists():
            self._manifest = Manifest.of(self.directory)
        return self._manifest

    def _go_on(self, start: int) -> None:
        """Reads the records after the known entries."""
        end = self._end
        while record := self._read(self._end[0]):
            self._follow(*record)
        if self._end != end:
            return
        there = (self._place / ABOUT).exists()  # before the look for a manifest, which replaces it
        if self._finished_manifest() is not None:
            self._enter(start)
        elif not there:
            raise damaged(
                self._place,
                "it is gone: its source was edited while it was written, or it was deleted",
            )

    def _enter(self, start: int) -> None:
        """Reads entries from `start`, or an earlier one, on; forgets what was read before."""
        manifest = self._finished_manifest()
        try:
            if manifest:
                self._known, self._end = [], (0, 0, "")
                self._number(manifest.parts)
            else:
                self._scan(start)
            if start > self._end[0]:
                raise Damaged(
                    f"the log of {os.fspath(self.directory)} has {self._end[0]:,} parts, and part "
                    f"{start:,} was sealed when it was last read: this is another log. Restore the "
                    "directory as it was, or start over"
                )
        except Damaged:
            if manifest or self._finished_manifest() is None:
                raise
            self._enter(start)  # its writer was deleting the records: it has a manifest now

    def _scan(self, start: int) -> None:
        """Reads all records, from that with part `start` on."""
        sizes = self._sizes()
        if sizes and min(sizes) > start:
            raise Damaged(
                f"the log of {os.fspath(self.directory)} begins at part {min(sizes):,}, and part "
                f"{start:,} is needed: its writer deleted earlier parts (keep_parts=), or records "
                "are missing"
            )
        first = max((number for number in sizes if number <= start), default=0)
        numbers = sorted(number for number in sizes if number >= first)
        paths = [self._path(number) for number in numbers]
        try:
            if isinstance(self._place, objects.ObjectPath):
                ends = [sizes[number] for number in numbers]
                contents = [bytes(e) for e in objects.get_ranges(paths, [0] * len(paths), ends)]
            else:
                contents = [path.read_bytes() for path in paths]
        except FileNotFoundError as error:
            raise damaged(self._place, f"a record is gone: {error}") from error
        self._known, self._end = [], (0, 0, "")
        for path, content, number in zip(paths, contents, numbers, strict=True):
            record = read_entries(path, content, damaged)
            if not self._known:
                self._end = number, record["first"], record["before"]
            self._follow(path, record)

    def _sizes(self) -> dict[int, int]:
        """The bytes of each record, by the number of its first part; 0 in a local directory."""
        sizes: dict[str, int] = {}
        if isinstance(self._place, objects.ObjectPath):
            sizes = objects.children(self._place)[0]
        else:
            with contextlib.suppress(FileNotFoundError):
                sizes = dict.fromkeys(os.listdir(self._place), 0)
        named = {name: RECORD.fullmatch(name) for name in sizes}
        return {int(found[1]): sizes[name] for name, found in named.items() if found}

    def _path(self, number: int) -> epath.Path:
        return self._place / f"{number:08d}.json"

    def _read(self, number: int) -> tuple[epath.Path, dict[str, Any]] | None:
        path = self._path(number)
        try:
            return path, read_entries(path, path.read_bytes(), damaged)
        except FileNotFoundError:
            return None

    def _follow(self, path: epath.Path, record: Mapping[str, Any]) -> None:
        """Adds the parts of the next record; refuses one that does not follow the last."""
        if path != self._path(self._end[0]):
            raise damaged(self._path(self._end[0]), f"it is missing, and {path.name} is there")
        for name, due in zip(OF_PLACE, self._end, strict=True):
            if record[name] != due:
                raise damaged(
                    path,
                    f"its {name} is {record[name]!r}, but the record before it says {due!r}: it is "
                    "out of order, or of another log",
                )
        try:
            parts = [Part(**part) for part in record["parts"]]
            for number, part in enumerate(parts, self._end[0]):
                if part.file != (due := part_name(number)):
                    raise InvalidValue(f"part {number} is {part.file!r}, not {due!r}")
        except InvalidValue as error:
            raise damaged(path, str(error)) from error
        self._number(parts, record["cursor"])

    def _number(self, parts: Sequence[Part], cursor: Any = None) -> None:
        """Adds the next parts; `cursor` belongs to the last of them."""
        for part in parts:
            number, first, before = self._end
            last = cursor if part is parts[-1] else None
            entry = Entry(number=number, part=part, first=first, before=before, cursor=last)
            self._end = number + 1, first + entry.examples, entry.after
            self._known.append(entry)

    # ---- writing

    def tail(self) -> Entry | None:
        """The last entry, after which `append` continues; None if there is none."""
        with self._lock:
            self._scan(max(self._sizes(), default=0))
            return self._known[-1] if self._known else None

    def begin(self, manifest: Manifest) -> None:
        """Writes the manifest with the first part; it must precede the first record."""
        make_directory(self._place)
        write_entries(self._place / ABOUT, manifest.as_json)

    def append(self, parts: Sequence[Part], cursor: Any = None) -> None:
        """Seals parts that are on disk: creates the next record, after what was read or appended.

        Raises:
            FileExistsError: another writer has created that record.
        """
        record = {
            **dict(zip(OF_PLACE, self._end, strict=True)),
            "parts": [dataclasses.asdict(part) for part in parts],
            "cursor": cursor,
        }
        write_entries(self._path(self._end[0]), record, once=True)
        self._number(parts, cursor)
        del self._known[:-1]

    def end(self) -> None:
        """Marks the log as ended, if there is no manifest to do so."""
        write_entries(self._place / END, {})

    def hold(self, reader: str, number: int) -> None:
        """Protects the parts from a number on, which a reader needs, from deletion.

        Args:
            reader: a name of letters, digits, `_` and `-`, the same for all processes of a run.
            number: the first part that its oldest checkpoint needs.
        """
        name = f"reader-{reader}.json"
        if not READER.fullmatch(name):
            raise InvalidValue(f"reader is {reader!r}; it is a name of letters, digits, _ and -")
        try:
            if self._finished_manifest() is None:
                write_entries(self._place / name, {"number": number})
        except OSError:
            if self._finished_manifest() is None:  # else it was finished meanwhile
                raise

    def release(self, reader: str) -> None:
        """Ends the hold of a reader."""
        (self._place / f"reader-{reader}.json").unlink(missing_ok=True)

    def trim(self, before: int) -> None:
        """Deletes the records whose parts are all before a number, and these parts.

        Parts that a reader holds stay; without any reader, all parts do.
        """
        paths = [path for path in self._place.iterdir() if READER.fullmatch(path.name)]
        held = [read_entries(path, path.read_bytes(), damaged)["number"] for path in paths]
        before = min(before, *held) if held else 0
        numbers = sorted(self._sizes())
        for number, after in itertools.pairwise([*numbers, self._end[0]]):
            if after > before:
                return
            # The record first: a part without a record counts as deleted.
            self._path(number).unlink()
            for part in range(number, after):
                (self.directory / part_name(part)).unlink(missing_ok=True)

    def first(self) -> int:
        """The number of the first part that is kept."""
        return min(self._sizes(), default=0)

    def remove(self) -> None:
        """Removes the log, once a manifest has replaced it, or to start over."""
        self.restart()
        remove_files(self._place, NAMES)


class Damaged(InvalidValue):
    """A file of a corpus that grows is missing, changed, half-written or out of order."""


def damaged(path: epath.Path, seen: str) -> Damaged:
    """The error to raise for a file of a corpus that grows."""
    return Damaged(
        f"the corpus that grows is damaged at {os.fspath(path)}: {seen}. Restore that file from a "
        "copy, or delete the directory and start over; sealed parts are never replaced by others"
    )
