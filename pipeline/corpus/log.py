"""The log of a corpus: its sealed parts, in order, so that readers can follow while it grows.

While a corpus is written, `shards/` beside its parts has a record for each seal: a JSON file that
is created once, atomically, after its parts, and never changed. Its name has the number of a shard
and that of its first part there. After it comes the next part of the shard or, if it is the last
one, part 0 of the next shard. Readers look for records in that order. A `Writer` has one shard,
which has no end; `prepare` has many, whose records appear in any order. The manifest of a finished
corpus lists all parts, and replaces the records.
"""

import dataclasses
import functools
import hashlib
import logging
import numbers
import os
import re
import threading
import time
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from etils import epath

from pipeline.corpus.manifest import (
    LENGTHS,
    MANIFEST,
    SHARDS,
    TEMPORARY,
    Damaged,
    Manifest,
    damage,
    is_finished,
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
from pipeline.fs.atomic import (
    as_path,
    list_folder,
    make_directory,
    remove_files,
    remove_leftovers,
)
from pipeline.fs.fork import Handles
from pipeline.planning import lengths as lengths_module

logger = logging.getLogger(__name__)

RECORD = re.compile(r"(\d{6,})-(\d{5,})\.json")
# Where the parts begin that are kept.
BEGIN = "begin.json"
# Names of all files of a log, including temporary ones.
NAMES = re.compile(r"(begin|\d{6,}-\d{5,})\.json|\.(begin|\d{6,}-\d{5,})\.json\.[0-9a-f]+\.tmp")
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
class Begin:
    """Where the parts that are kept begin; `keep_parts` moves it.

    Attributes:
        number: the number of parts before it.
        first: the number of examples before it.
        before: a digest of these parts.
        of: a digest of the first part of all; "" if that is kept.
    """

    number: int = 0
    first: int = 0
    before: str = ""
    of: str = ""

    @classmethod
    def read(cls, directory: epath.Path) -> "Begin":
        """The beginning of the log in `directory`."""
        entries = _read_entries(directory / SHARDS / BEGIN)
        return cls() if entries is None else cls(**{k: entries[k] for k in vars(cls())})


class Log(Handles):
    """The sealed parts of the corpus in `directory`, growing or finished.

    Any number of threads may use it. A `Plan` of it waits for parts that are not sealed yet.

    Args:
        directory: a local path, or one of object storage.
        wait_seconds: the longest wait for a part, in seconds; None: as long as it takes.
        hold_out: the share of examples that plans leave out, as for `AnyCorpus.split`.
    """

    handles = ("_known", "_end", "_key", "_ended", "_manifest", "_closed", "_waited")

    def __init__(
        self,
        directory: epath.PathLike,
        wait_seconds: float | None = None,
        hold_out: float = 0.0,
    ):
        is_number = isinstance(wait_seconds, numbers.Real)
        if wait_seconds is not None and not (is_number and wait_seconds >= 0):
            raise InvalidValue(
                f"wait_seconds is {wait_seconds!r}; it must be a number of seconds from 0 up, or "
                "None to wait as long as it takes"
            )
        self.directory, self.wait_seconds = as_path(directory), wait_seconds
        self.hold_out = hold_out
        self.__setstate__({})

    def restart(self) -> None:
        """Forgets what was read; see `Handles`."""
        super().restart()
        self._lock: Any = threading.RLock()
        self._manifest: Manifest | None = None  # of the finished corpus, once it is
        self._closed = self._waited = False
        self._rewind(Begin())

    def _rewind(self, begin: Begin) -> None:
        # Consecutive entries; and the number, first example and `before` of the next entry.
        self._known: list[Entry] = []
        self._end = begin.number, begin.first, begin.before
        # The key of the next record; and whether a writer has written its last one.
        self._key: Key = (0, begin.number)
        self._ended = False

    @property
    def finished(self) -> bool:
        """Whether no part will be added, and all is written."""
        return self._finished() is not None or (self.at_end and self.first() > 0)

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
        if (manifest := self._finished()) is not None:
            return manifest
        declared = self._declared()
        with self._lock:
            if not self._known:
                self._scan()
            if not self._known:
                raise Missing(self._nothing)
            return dataclasses.replace(declared, parts=[self._known[0].part])

    @property
    def begin(self) -> str:
        """A digest of the first part, which may be deleted by now."""
        kept = Begin.read(self.directory) if self._finished() is None else Begin()
        return kept.of or self.about().parts[0].sha256[:12]

    def _declared(self) -> Manifest:
        if (manifest := Manifest.find(self.directory)) is None:
            raise Missing(self._nothing)
        return manifest

    @property
    def _nothing(self) -> str:
        return (
            f"nothing is sealed yet in {os.fspath(self.directory)}; start a pipeline.Writer or "
            "prepare there, or check the path"
        )

    @functools.cached_property
    def task(self) -> Task:
        """The task of the corpus, which decides the lengths."""
        return TASKS[self._declared().task]

    def entries(self, start: int = 0) -> list[Entry]:
        """The entries sealed so far, from number `start` on; empty at the end of the log.

        Raises:
            ValueError: a record is missing, changed, half-written or out of order, was deleted, or
                the log is shorter than `start`.
        """
        with self._lock:
            if self._known:
                self._read_on()
            if not (self._known and self._begin <= start <= self._end[0]):
                self._scan()
            least, place = self._begin, os.fspath(self.directory)
            if start > self._end[0]:
                raise Damaged(
                    f"the log of {place} has {self._end[0]:,} parts, and part {start:,} was sealed "
                    "when it was last read: this is another log. Restore the directory as it was, "
                    "or start over"
                )
            if start < least:
                raise Damaged(
                    f"the log of {place} begins at part {least:,}, and part {start:,} is needed: "
                    "its writer deleted earlier parts (keep_parts=)"
                )
            return self._known[start - least :]

    def find(self, number: int) -> Entry | None:
        """The entry of a part; None if it is the next one to be sealed."""
        with self._lock:
            if not self._begin <= number < self._end[0]:
                self.entries(number)
            if (old := number - self._begin - KEPT) > 0:
                del self._known[:old]
            return None if number == self._end[0] else self._known[number - self._begin]

    def tail(self) -> Entry | None:
        """The last entry, after which `append` continues; None if there is none."""
        with self._lock:
            self._read_on() if self._known else self._scan()
            return self._known[-1] if self._known else None

    # ---- as `pipeline.planning.lengths.Parts`

    def lengths(self, number: int) -> np.ndarray | None:
        """See `pipeline.planning.lengths.Parts`.

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
        """See `pipeline.planning.lengths.Parts`."""
        if not number:
            return ""
        with self._lock:
            entry = self.find(number)
            return self._end[2] if entry is None else entry.before

    def whole(self) -> lengths_module.Lengths:
        """See `pipeline.planning.lengths.Parts`; parts that were deleted are one file of zeros."""
        entries, manifest = self.entries(self.first()), self._finished()
        parts, deleted = [entry.part for entry in entries], np.zeros(entries[0].first, np.uint32)
        if manifest is None:
            lengths = np.concatenate([deleted, *self.read_lengths(parts)])
        else:
            lengths = read_lengths(self.directory / LENGTHS, manifest)
        files = np.array([len(deleted)] * bool(len(deleted)) + [part.examples for part in parts])
        whole = types.SimpleNamespace(
            lengths=lengths,
            files=files,
            num_learnt=sum(part.learnt for part in parts),
            lengths_digest=None if manifest is None else manifest.lengths_digest,
        )
        left_out = np.flatnonzero(is_held_out(np.arange(len(lengths)), self.hold_out))
        return lengths_module.Lengths(whole, left_out)

    def wait(self, number: int) -> Entry | None:
        """The entry of a part, once it is sealed; None if the corpus is finished without it."""
        for _ in self.looks(number):
            finished = number < self._end[0] or self._finished() is not None  # before the poll
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
                    raise damage(path, "the digest of its lengths differs")
        return found

    def require_files(self, parts: Sequence[Part]) -> None:
        """Refuses parts whose files are missing or differ in size from their record."""
        require_sizes(self.directory, {part.file: part.bytes for part in parts})

    @property
    def _begin(self) -> int:
        """The number of the first known entry."""
        return self._end[0] - len(self._known)

    def _finished(self) -> Manifest | None:
        """The manifest of the finished corpus; None while it grows."""
        if self._manifest is None and is_finished(self.directory):
            self._manifest = Manifest.of(self.directory)
        return self._manifest

    def _read_on(self) -> None:
        """Reads what was sealed after the known entries."""
        if (manifest := self._finished()) is not None:
            self._add(manifest.parts[self._end[0] :])
            return
        while not self._ended and (record := read_record(self.directory, *self._key)) is not None:
            self._follow(record)
        if Manifest.find(self.directory) is None:
            raise damage(
                self.directory / MANIFEST,
                "it is gone: its source was edited while it was written, or it was deleted",
            )

    def _scan(self) -> None:
        """Reads all entries from the first that is kept on; forgets what was read before."""
        while True:
            begin = Begin.read(self.directory)
            self._rewind(begin)
            if (manifest := self._finished()) is not None:
                self._add(manifest.parts)
                return
            try:
                self._read_records()
            except Damaged:  # unless its writer deleted records meanwhile
                if self._finished() is None and Begin.read(self.directory) == begin:
                    raise
            else:
                if self._finished() is None:
                    return

    def _read_records(self) -> None:
        """Reads the records that are there, in order; refuses a gap within a shard."""
        keys = [key for key in list_records(self.directory) if key >= self._key]
        for at in range(0, len(keys), TOGETHER):
            for key, record in _read_together(self.directory, keys[at : at + TOGETHER]):
                path = record_path(self.directory, *self._key)
                if key[0] > self._key[0]:
                    return
                if key > self._key:
                    name = record_path(self.directory, *key).name
                    raise damage(path, f"it is missing, and {name} is there")
                if record is None:
                    raise damage(path, "it was deleted while it was read")
                self._follow(record)

    def _follow(self, record: Mapping[str, Any]) -> None:
        """Adds the parts of the next record."""
        shard, number = self._key
        parts, following = parts_of(record_path(self.directory, *self._key), record), record["next"]
        of_writer = record["origin"] is None
        self._add(parts, following[0] if of_writer and following else None)
        self._ended = of_writer and following is None
        self._key = (shard + 1, 0) if following is None else (shard, number + len(parts))

    def _add(self, parts: Sequence[Part], cursor: Any = None) -> None:
        """Adds the next parts; `cursor` belongs to the last of them."""
        for place, part in enumerate(parts, 1):
            number, first, before = self._end
            last = cursor if place == len(parts) else None
            entry = Entry(number=number, part=part, first=first, before=before, cursor=last)
            self._end = number + 1, first + entry.examples, entry.after
            self._known.append(entry)

    # ---- writing

    def append(self, parts: Sequence[Part], cursor: Any = None, *, last: bool = False) -> None:
        """Seals parts that are on disk: creates the next record, after what was read or appended.

        The `last` record says that no other follows; it may be without parts.

        Raises:
            FileExistsError: another writer has created that record.
        """
        write_record(self.directory, *self._key, parts=parts, next=None if last else [cursor])
        self._add(parts, cursor)
        self._key, self._ended = (0, self._end[0]), last

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
            if self._finished() is None:
                folder = make_directory(self.directory / SHARDS / READERS)
                write_entries(folder / name, {"number": number})
        except OSError:
            if self._finished() is None:  # else it was finished meanwhile
                raise

    def release(self, reader: str) -> None:
        """Ends the hold of a reader."""
        (self.directory / SHARDS / READERS / f"{reader}.json").unlink(missing_ok=True)

    def trim(self, before: int) -> None:
        """Deletes the records whose parts are all before a number, and these parts.

        Parts that a reader holds stay; without any reader, all parts do.
        """
        readers = list_folder(self.directory / SHARDS / READERS)
        holds = [path for path in readers if READER.fullmatch(path.name)]
        held = [read_entries(path, path.read_bytes())["number"] for path in holds]
        before = min(before, *held) if held else 0
        begin = Begin.read(self.directory)
        if before <= begin.number:
            return
        known = self.entries(begin.number)[: before - begin.number + 1]
        paths = {entry.number: record_path(self.directory, 0, entry.number) for entry in known}
        starts = [entry for entry in known[1:] if paths[entry.number].exists()]
        if not starts:
            return
        first = starts[-1]
        moved = Begin(first.number, first.first, first.before, self.begin)
        # The beginning first: what is before it counts as deleted.
        write_entries(self.directory / SHARDS / BEGIN, vars(moved))
        for entry in known[: first.number - begin.number]:
            paths[entry.number].unlink(missing_ok=True)
            (self.directory / entry.part.file).unlink(missing_ok=True)
        del self._known[: first.number - self._begin]

    def first(self) -> int:
        """The number of the first part that is kept."""
        return 0 if self._finished() is not None else Begin.read(self.directory).number

    def remove(self) -> None:
        """Removes the records and what killed processes left, once there is a manifest, or anew."""
        self.restart()
        remove_leftovers(self.directory, TEMPORARY)
        remove_files(self.directory / SHARDS / READERS, OF_READERS)
        remove_files(self.directory / SHARDS, NAMES)


# ---- records


def record_path(directory: epath.Path, shard: int, number: int) -> epath.Path:
    """The file of a record."""
    return directory / SHARDS / f"{shard:06d}-{number:05d}.json"


def list_records(directory: epath.Path) -> list[Key]:
    """The keys of the records that are there, in order."""
    named = [RECORD.fullmatch(path.name) for path in list_folder(directory / SHARDS)]
    return sorted((int(name[1]), int(name[2])) for name in named if name)


def read_record(directory: epath.Path, shard: int, number: int) -> dict[str, Any] | None:
    """A record; None if it is not there yet."""
    path = record_path(directory, shard, number)
    record = _read_entries(path)
    for name, due in (("shard", shard), ("number", number)):
        if record is not None and record[name] != due:
            raise damage(path, f"its {name} is {record[name]!r}, not {due}: it is out of order")
    return record


def read_records(directory: epath.Path) -> dict[Key, dict[str, Any]]:
    """All records that are there, by key."""
    found = _read_together(directory, list_records(directory))
    return {key: record for key, record in found if record is not None}


def _read_together(
    directory: epath.Path, keys: Sequence[Key]
) -> Iterable[tuple[Key, dict[str, Any] | None]]:
    """Records, which are requested together."""
    records = objects.together(lambda key: read_record(directory, *key), keys)
    return zip(keys, records, strict=True)


def _read_entries(path: epath.Path) -> dict[str, Any] | None:
    """The entries of a small file; None if there is none."""
    in_bucket = isinstance(path, objects.ObjectPath)
    try:
        content = objects.get_version(path)[0] if in_bucket else path.read_bytes()
        return read_entries(path, content)
    except FileNotFoundError:
        return None


def write_record(
    directory: epath.Path,
    shard: int,
    number: int,
    *,
    parts: Sequence[Part],
    next: Any,
    failed: Sequence[Mapping[str, Any]] = (),
    origin: str | None = None,
    notes: Mapping[str, Any] | None = None,
) -> None:
    """Creates the record of parts that are on disk; raises a `FileExistsError` if it is there.

    A writer has one shard, and several parts in a record; its `next` is a list of its cursor, and
    its `origin` None, for a digest of what decides the parts. At the end of a shard, `next` is
    None. `failed` describes each record that failed.
    """
    given = {"parts": [vars(part) for part in parts], "next": next, "failed": [*failed]}
    given |= {"notes": dict(notes)} if notes else {}
    entries = {"shard": shard, "number": number, **given, "origin": origin}
    write_entries(record_path(directory, shard, number), entries, once=True)


def parts_of(path: epath.Path, record: Mapping[str, Any]) -> list[Part]:
    """The parts of a record; refuses those of another one."""
    try:
        parts = [Part(**part) for part in record["parts"]]
        for number, part in enumerate(parts, record["number"]):
            if part.file != (due := part_name(record["shard"], number)):
                raise InvalidValue(f"a part of it is {part.file!r}, not {due!r}")
    except InvalidValue as error:
        raise damage(path, str(error)) from error
    if not parts and record["next"] is not None:
        raise damage(path, "it has no parts")
    return parts
