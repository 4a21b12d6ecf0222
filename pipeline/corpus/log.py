"""The log of a corpus: its sealed parts, in order, so that readers can follow while it grows.

While a corpus is written, `shards/` beside its parts has a record for each seal: a JSON file that
is created once, atomically, after its parts, and never changed. Its name has the number of a shard
and that of its first part there. After it comes the next part of the shard or, if it is the last
one, part 0 of the next shard. Readers look for records in that order. A `Writer` has one shard,
which has no end; `prepare` has many, whose records appear in any order. The manifest of a finished
corpus lists all parts, and replaces the records.
"""

import bisect
import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from etils import epath

from pipeline.corpus.manifest import (
    LENGTHS,
    MANIFEST,
    SHARDS,
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

# What all records belong to: the manifest without parts. It is written before the first part.
ABOUT = "about.json"
RECORD = re.compile(r"(\d{6,})-(\d{5,})\.json")
# Names of all files of a log, including temporary ones.
STEM = r"(about|\d{6,}-\d{5,})\.jsonl?"
NAMES = re.compile(rf"{STEM}|\.{STEM}\.[0-9a-f]+\.tmp")
# The folder of what readers need of the parts, and the names in it.
READERS, READER = "readers", re.compile(r"[\w-]+\.json")
OF_READERS = re.compile(r"[\w-]+\.json|\.[\w-]+\.json\.[0-9a-f]+\.tmp")
# The number of parts whose lengths are read at once.
TOGETHER = 256
# Seconds between polls for the next record: at first, and at most.
LOOK, SELDOM = 0.02, 2.0
# The number of entries kept before the latest one requested; older ones are read again.
KEPT = 1 << 13

# The number of a shard, and that of a part in it.
Key: TypeAlias = tuple[int, int]

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

    handles = ("_known", "_end", "_key", "_ended", "_starts", "_manifest", "_closed", "_waited")

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
        self._place = self.directory / SHARDS
        self.__setstate__({})

    def restart(self) -> None:
        """Forgets what was read; see `Handles`."""
        super().restart()
        self._lock: Any = threading.RLock()
        # Consecutive entries; and the number, first example and `before` of the next entry.
        self._known: list[Entry] = []
        self._end = (0, 0, "")
        # The key of the next record; and whether a writer has written its last one.
        self._key: Key = (0, 0)
        self._ended = False
        # A digest of the first part of the log; and the parts with which records begin.
        self._begin_digest: str | None = None
        self._starts: list[int] | None = None
        self._manifest: Manifest | None = None
        self._closed = self._waited = False

    @property
    def finished(self) -> bool:
        """Whether no part will be added, and all is written."""
        return self._finished_manifest() is not None or (self.at_end and self.first() > 0)

    @property
    def at_end(self) -> bool:
        """Whether a writer has written its last record; a manifest follows if it has all parts."""
        if not self._ended:
            self.tail()
        return self._ended

    def about(self) -> Manifest:
        """The manifest of the corpus, with a sealed part at least.

        Raises:
            FileNotFoundError: nothing is sealed yet.
        """
        if (manifest := self._finished_manifest()) is None:
            about, (path, record) = self.declared(), self._read_first()
            if about is None or record is None:
                raise Missing(self._nothing)
            return dataclasses.replace(about, parts=parts_of(path, record)[:1])
        return manifest

    @property
    def begin(self) -> str:
        """A digest of the first part, which may be deleted by now."""
        if (manifest := self._finished_manifest()) is not None:
            return manifest.parts[0].sha256[:12]
        path, record = self._read_first()
        if record is None:
            raise Missing(self._nothing)
        return record["begin"] or parts_of(path, record)[0].sha256[:12]

    def _read_first(self) -> tuple[epath.Path, dict[str, Any] | None]:
        """The first record that has parts and is kept, and its path."""
        key = 0, self.first()
        while (record := self._read(key)) and not record["parts"] and record["next"] is None:
            key = key[0] + 1, 0
        return self._path(key), record

    def declared(self) -> Manifest | None:
        """The manifest without parts, as it was declared before the first part; or None."""
        path = self._place / ABOUT
        try:
            entries = read_entries(path, path.read_bytes(), damaged)
        except FileNotFoundError:
            return None
        try:
            return Manifest(**entries)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise damaged(path, str(error)) from error

    @property
    def has_records(self) -> bool:
        """Whether anything is sealed, in any shard."""
        return bool(self._sizes())

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
        if self._finished_manifest() is None and self.at_end:  # the examples that are left
            lengths = np.zeros(self._end[1], np.uint32)
            for entry in self.entries(self.first()):
                found = self.lengths(entry.number)
                assert found is not None, "it is sealed"
                lengths[entry.first : entry.first + entry.examples] = found
            return lengths
        manifest = Manifest.of(self.directory)
        lengths = read_lengths(self.directory / LENGTHS, manifest)
        files, digest = manifest.table.numbers("examples"), manifest.lengths_digest
        whole = Finished(lengths, files, digest, manifest.learnt)
        left_out = np.flatnonzero(is_held_out(np.arange(len(lengths)), self.hold_out))
        return lengths_module.Lengths(whole, left_out)

    def wait(self, number: int) -> Entry | None:
        """The entry of a part, once it is sealed; None if the corpus is finished without it."""
        for _ in self.looks(number):
            finished = self._finished_manifest() is not None  # before the poll
            if (entry := self.find(number)) is not None or finished:
                return entry
            if self._ended and self.first():  # parts were deleted, so there will be no manifest
                return None
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
        while not self._ended and (record := self._read(self._key)):
            self._follow(self._key, record)
        if self._end != end or self._ended:
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
        """Reads the records in order, those of a writer from that with part `start` on."""
        sizes = self._sizes()
        self._known, self._end, self._key, self._ended = [], (0, 0, ""), (0, 0), False
        if not (numbers := [number for shard, number in sizes if not shard]):
            return
        if (least := min(numbers)) > start:
            raise Damaged(
                f"the log of {os.fspath(self.directory)} begins at part {least:,}, and part "
                f"{start:,} is needed: its writer deleted earlier parts (keep_parts=), or records "
                "are missing"
            )
        key = 0, max(number for number in numbers if number <= start)
        first = self._read(key)
        if of_writer := first is not None and first["before"] is not None:
            assert first is not None
            self._key, self._end = key, (key[1], first["first"], first["before"])
            self._begin_digest = first["begin"]
        contents = self._contents({key: size for key, size in sizes.items() if key >= self._key})
        while not self._ended and (record := self._read(self._key, contents)):
            self._follow(self._key, record)
        if self._key in sizes:
            raise damaged(self._path(self._key), "it was there and is gone")
        later = [each for each in sizes if each > self._key]
        if of_writer and later:
            name = self._path(min(later)).name
            raise damaged(self._path(self._key), f"it is missing, and {name} is there")

    def records(self) -> dict[Key, dict[str, Any]]:
        """All records that are there, by key."""
        sizes = self._sizes()
        contents = self._contents(sizes)
        found = {key: self._read(key, contents) for key in sizes}
        return {key: record for key, record in found.items() if record is not None}

    def _contents(self, sizes: Mapping[Key, int]) -> dict[Key, bytes]:
        """The bytes of records of these sizes, requested together; nothing in a local directory."""
        if not isinstance(self._place, objects.ObjectPath):
            return {}
        try:
            found = objects.get_ranges(
                [*map(self._path, sizes)], [0] * len(sizes), [*sizes.values()]
            )
        except FileNotFoundError as error:
            raise damaged(self._place, f"a record is gone: {error}") from error
        return dict(zip(sizes, map(bytes, found), strict=True))

    def _sizes(self) -> dict[Key, int]:
        """The bytes of each record, by its key; 0 in a local directory."""
        sizes: dict[str, int] = {}
        if isinstance(self._place, objects.ObjectPath):
            sizes = objects.children(self._place)[0]
        else:
            with contextlib.suppress(FileNotFoundError):
                sizes = dict.fromkeys(os.listdir(self._place), 0)
        named = {name: RECORD.fullmatch(name) for name in sizes}
        return {(int(each[1]), int(each[2])): sizes[n] for n, each in named.items() if each}

    def _place_of_next(self) -> dict[str, Any]:
        """The entries that say where the next record of a writer is."""
        number, first, before = self._end
        return {"number": number, "first": first, "before": before}

    def _path(self, key: Key) -> epath.Path:
        return record_path(self.directory, *key)

    def _read(self, key: Key, contents: Mapping[Key, bytes] | None = None) -> dict[str, Any] | None:
        if contents and key in contents:
            return read_entries(self._path(key), contents[key], damaged)
        return read_record(self.directory, *key)

    def _follow(self, key: Key, record: Mapping[str, Any]) -> None:
        """Adds the parts of the next record; refuses one that does not follow the last."""
        path = self._path(key)
        due = {"shard": key[0], "number": key[1]}
        if record["before"] is not None:
            due |= self._place_of_next()
        for name, expected in due.items():
            if record[name] != expected:
                raise damaged(
                    path,
                    f"its {name} is {record[name]!r}, but the record before it says {expected!r}: "
                    "it is out of order, or of another log",
                )
        parts = parts_of(path, record)
        following = record["next"]
        if record["before"] is None:
            self._number(parts)
        else:
            self._number(parts, following and following[0])
            self._ended = following is None
        self._key = (key[0] + 1, 0) if following is None else (key[0], key[1] + len(parts))

    def _number(self, parts: Sequence[Part], cursor: Any = None) -> None:
        """Adds the next parts; `cursor` belongs to the last of them."""
        for place, part in enumerate(parts, 1):
            number, first, before = self._end
            last = cursor if place == len(parts) else None
            entry = Entry(number=number, part=part, first=first, before=before or "", cursor=last)
            self._end = number + 1, first + entry.examples, entry.after
            self._begin_digest = self._begin_digest or part.sha256[:12]
            self._known.append(entry)

    # ---- writing

    def tail(self) -> Entry | None:
        """The last entry, after which `append` continues; None if there is none."""
        with self._lock:
            self._scan(max((number for shard, number in self._sizes() if not shard), default=0))
            return self._known[-1] if self._known else None

    def declare(self, manifest: Manifest) -> None:
        """Writes the manifest without parts; it must precede the first part."""
        make_directory(self._place)
        write_entries(self._place / ABOUT, manifest.as_json)

    def append(self, parts: Sequence[Part], cursor: Any = None, *, last: bool = False) -> None:
        """Seals parts that are on disk: creates the next record, after what was read or appended.

        The `last` record says that no other follows; it may be without parts.

        Raises:
            FileExistsError: another writer has created that record.
        """
        begin = self._begin_digest or parts[0].sha256[:12]
        following = None if last else [cursor]
        place = self._place_of_next()
        write_record(self.directory, 0, parts=parts, next=following, begin=begin, **place)
        if self._starts is not None:
            self._starts.append(self._end[0])
        self._number(parts, cursor)
        self._key, self._ended = (0, self._end[0]), last
        del self._known[:-1]

    def hold(self, reader: str, number: int) -> None:
        """Protects the parts from a number on, which a reader needs, from deletion.

        Args:
            reader: a name of letters, digits, `_` and `-`, the same for all processes of a run.
            number: the first part that its oldest checkpoint needs.
        """
        name = f"{reader}.json"
        if not READER.fullmatch(name):
            raise InvalidValue(f"reader is {reader!r}; it is a name of letters, digits, _ and -")
        try:
            if self._finished_manifest() is None:
                folder = make_directory(self._place / READERS)
                write_entries(folder / name, {"number": number})
        except OSError:
            if self._finished_manifest() is None:  # else it was finished meanwhile
                raise

    def release(self, reader: str) -> None:
        """Ends the hold of a reader."""
        (self._place / READERS / f"{reader}.json").unlink(missing_ok=True)

    def trim(self, before: int) -> None:
        """Deletes the records whose parts are all before a number, and these parts.

        Parts that a reader holds stay; without any reader, all parts do.
        """
        folder = self._place / READERS
        paths = folder.iterdir() if folder.exists() else ()
        holds = [path for path in paths if READER.fullmatch(path.name)]
        held = [read_entries(path, path.read_bytes(), damaged)["number"] for path in holds]
        before = min(before, *held) if held else 0
        if self._starts is None:  # else the records were listed before
            self._starts = sorted(number for shard, number in self._sizes() if not shard)
        stays = max(bisect.bisect_right(self._starts, before) - 1, 0)
        for number, after in zip(self._starts[:stays], self._starts[1:], strict=False):
            # The record first: a part without a record counts as deleted.
            self._path((0, number)).unlink()
            for part in range(number, after):
                (self.directory / part_name(0, part)).unlink(missing_ok=True)
        del self._starts[:stays]

    def first(self) -> int:
        """The number of the first part that is kept."""
        first = min((number for shard, number in self._sizes() if not shard), default=0)
        # The records of a finished corpus may be half removed.
        return 0 if self._finished_manifest() is not None else first

    def remove(self) -> None:
        """Removes the log, once a manifest has replaced it, or to start over."""
        self.restart()
        remove_files(self._place / READERS, OF_READERS)
        remove_files(self._place, NAMES)


def record_path(directory: epath.Path, shard: int, number: int) -> epath.Path:
    """The file of a record."""
    return directory / SHARDS / f"{shard:06d}-{number:05d}.json"


def read_record(directory: epath.Path, shard: int, number: int) -> dict[str, Any] | None:
    """A record; None if it is not there yet."""
    path = record_path(directory, shard, number)
    try:
        return read_entries(path, path.read_bytes(), damaged)
    except FileNotFoundError:
        return None


def write_record(
    directory: epath.Path,
    shard: int,
    number: int,
    *,
    parts: Sequence[Part],
    next: Any,
    failed: int = 0,
    origin: str | None = None,
    first: int | None = None,
    before: str | None = None,
    begin: str | None = None,
    notes: Mapping[str, Any] | None = None,
) -> None:
    """Creates the record of parts that are on disk.

    Args:
        directory: that of the corpus.
        shard: the number of the shard.
        number: that of the first of the parts in it.
        parts: one, or several of a writer; none if the shard has no examples.
        next: where the shard continues, any JSON; None at its end.
        failed: the number of records that failed, which a file beside the record lists.
        origin: a digest of what decides the parts.
        first: for a writer, the number of the first example.
        before: for a writer, the digest of everything before.
        begin: for a writer, the digest of the first part of the log.
        notes: see `tokenisation.Notes`.

    Raises:
        FileExistsError: it is there.
    """
    given = {"parts": [vars(part) for part in parts], "next": next, "failed": failed}
    given |= {"notes": dict(notes)} if notes else {}
    place = {"shard": shard, "number": number, "first": first, "before": before, "begin": begin}
    path = record_path(directory, shard, number)
    write_entries(path, {**place, **given, "origin": origin}, once=True)


def parts_of(path: epath.Path, record: Mapping[str, Any]) -> list[Part]:
    """The parts of a record; refuses those of another one."""
    try:
        parts = [Part(**part) for part in record["parts"]]
        for number, part in enumerate(parts, record["number"]):
            if part.file != (due := part_name(record["shard"], number)):
                raise InvalidValue(f"a part of it is {part.file!r}, not {due!r}")
    except InvalidValue as error:
        raise damaged(path, str(error)) from error
    if not parts and record["next"] is not None:
        raise damaged(path, "it has no parts")
    return parts


class Damaged(InvalidValue):
    """A file of a corpus that grows is missing, changed, half-written or out of order."""


def damaged(path: epath.Path, seen: str) -> Damaged:
    """The error to raise for a file of a corpus that grows."""
    return Damaged(
        f"the corpus that grows is damaged at {os.fspath(path)}: {seen}. Restore that file from a "
        "copy, or delete the directory and start over; sealed parts are never replaced by others"
    )
