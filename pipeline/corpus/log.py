"""The log of a corpus that grows: which parts are sealed, in order, so that readers can follow.

While a corpus is written, `log/` beside its parts has a record for each seal: a JSON file with the
number of its first part as its name, created once and whole. Readers poll the next name. A finished
corpus has a manifest, which says the same, and no records.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from pipeline.corpus.manifest import (
    LENGTHS,
    LOG,
    MANIFEST,
    SCHEMA_VERSION,
    Manifest,
    part_name,
    read_lengths,
    require_digest,
    require_sizes,
    write_entries,
)
from pipeline.corpus.parts import Part
from pipeline.corpus.tasks import TASKS, Task
from pipeline.errors import InvalidValue, Missing
from pipeline.fs import objects
from pipeline.fs.atomic import as_path, is_local, make_directory, remove_files
from pipeline.planning import lengths as lengths_module
from pipeline.text.features import WEIGHTS

# What a corpus that grows is, written before the first record; and the mark that it has ended,
# where parts were deleted, so that there is no manifest.
ABOUT, END = "about.json", "end.json"
RECORD = re.compile(r"(\d{8,})\.json")
# The fields of an entry that a record has for each part, and those of where it begins.
OF_PART = "lengths_digest", "learnt", "text_bytes"
OF_PLACE = "number", "first", "before"
# Parts whose lengths are read at once.
TOGETHER = 256
# Names of all files of a log, also while they are written.
STEM = r"(\d{8,}|about|end|reader-[\w-]+)\.json"
NAMES = re.compile(rf"{STEM}|\.{STEM}\.[0-9a-f]+\.tmp")
READER = re.compile(r"reader-[\w-]+\.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A sealed part, which never changes, nor does its place.

    Attributes:
        number: of the part, from 0.
        part: its file and what is in it.
        first: the number of its first example.
        before: a digest of everything before it; "" at the beginning.
        lengths_digest: that of the lengths of its examples, by `pipeline.planning.lengths.digest`;
            None where a manifest has that of all of them.
        learnt, text_bytes: as in `Manifest`, of this part; None where a manifest has the sum.
        cursor: where the source goes on after it, any JSON; None: nobody said.
    """

    number: int
    part: Part
    first: int
    before: str
    lengths_digest: str | None = None
    learnt: int | None = None
    text_bytes: int | None = None
    cursor: Any = None

    @property
    def file(self) -> str:
        """The name of the part's file."""
        return self.part.file

    @property
    def examples(self) -> int:
        """How many examples it has."""
        return self.part.examples

    @property
    def digest(self) -> str:
        """SHA-256 of its lengths, tokens, weights and features; not of times or names."""
        return self.part.sha256

    @property
    def after(self) -> str:
        """A digest of everything up to its end."""
        return hashlib.sha256(f"{self.before} {self.digest}".encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True, kw_only=True)
class About:
    """What a corpus that grows is: entries of `Manifest` that are known before its end.

    Attributes:
        weighted: whether tokens have weights.
        first: the digest of its first part, by which one log is told from another.
    """

    task: str
    origin: dict[str, str | None]
    vocab_size: int | None
    tokenizer: dict[str, Any] | None
    source: str | None
    features: dict[str, dict[str, Any]]
    weighted: bool
    first: str

    @classmethod
    def of(cls, manifest: Manifest) -> "About":
        """That of a finished corpus."""
        names = ("task", "origin", "vocab_size", "tokenizer", "source", "features")
        first = manifest.parts[0]
        entries = {name: getattr(manifest, name) for name in names}
        return cls(**entries, weighted=WEIGHTS in first.columns, first=first.sha256)


class Log:
    """The sealed parts of the corpus in `directory`, growing or finished.

    Args:
        directory: a local path, or one of object storage.
    """

    def __init__(self, directory: epath.PathLike):
        self.directory = as_path(directory)
        self._place = self.directory / LOG
        # The end of what this object has read: the number, the first example and the digest there.
        self._end = (0, 0, "")
        self._manifest: Manifest | None = None
        self._about: About | None = None

    @property
    def finished(self) -> bool:
        """Whether no part will be added."""
        return self._finished_manifest() is not None or (self._place / END).exists()

    def about(self) -> About:
        """What the corpus is.

        Raises:
            FileNotFoundError: nothing is sealed yet.
        """
        if self._about is None:
            self._about = self._read_about()
        return self._about

    def _read_about(self) -> About:
        path = self._place / ABOUT
        with contextlib.suppress(FileNotFoundError):
            return About(**_parse(path, path.read_bytes()))
        if (manifest := self._finished_manifest()) is None:
            raise Missing(
                f"nothing is sealed yet in {os.fspath(self.directory)}; start a pipeline.Writer or "
                "prepare there, or check the path"
            )
        return About.of(manifest)

    @property
    def task(self) -> Task:
        """Decides the lengths."""
        return TASKS[self.about().task]

    def entries(self, start: int = 0) -> list[Entry]:
        """The entries that are there now, from number `start` on; empty at the end of the log.

        Asked again from where it ended, this looks for the next record alone.

        Raises:
            ValueError: a record is missing, changed, half-written or out of order, was deleted, or
                the log is shorter than `start`.
        """
        if start != self._end[0] or not start:
            return self._enter(start)
        found: list[Entry] = []
        while record := self._read(self._end[0]):
            found += self._follow(*record)
        if found:
            return found
        there = (self._place / ABOUT).exists()  # before the look for what takes its place
        if self._finished_manifest() is not None:
            return self._enter(start)
        if there:
            return []
        raise damaged(
            self._place,
            "it is gone: its source was edited while it was written, or it was deleted",
        )

    def lengths(self, entry: Entry) -> np.ndarray:
        """The lengths of the examples of a part: uint32 [examples]."""
        return self.read_lengths([entry])[0]

    def read_lengths(self, entries: Sequence[Entry]) -> list[np.ndarray]:
        """The lengths of the examples of each part.

        Raises:
            ValueError: a part is missing, or its lengths changed.
        """
        sealed = [entry for entry in entries if entry.lengths_digest is not None]
        counts = iter(self.read_counts(sealed, self.task) if sealed else ())
        return [
            self._finished_lengths[entry.first : entry.first + entry.examples]
            if entry.lengths_digest is None
            else self.task.lengths(next(counts))
            for entry in entries
        ]

    @functools.cached_property
    def _finished_lengths(self) -> np.ndarray:
        """The lengths of all examples of a finished corpus."""
        manifest = self._finished_manifest()
        assert manifest is not None, "an entry of a manifest"
        return read_lengths(self.directory / LENGTHS, manifest, is_local(self.directory))

    def read_counts(self, entries: Sequence[Entry], task: Task) -> list[np.ndarray]:
        """The tokens of each example of parts: uint32; errors are those of `read_lengths`."""
        found: list[np.ndarray] = []
        for at in range(0, len(entries), TOGETHER):
            group = entries[at : at + TOGETHER]
            paths = [self.directory / entry.file for entry in group]
            places = [entry.part.columns["offsets"] for entry in group]
            try:
                contents = objects.get_ranges(
                    paths, [each.at for each in places], [each.end for each in places]
                )
            except OSError:
                self.require_files(group)
                raise
            for entry, path, content in zip(group, paths, contents, strict=True):
                found.append(np.diff(np.frombuffer(content, np.int64)).astype(np.uint32))
                if lengths_module.digest(task.lengths(found[-1])) != entry.lengths_digest:
                    raise damaged(path, "the digest of its lengths differs")
        return found

    def require_files(self, entries: Sequence[Entry]) -> None:
        """Refuses parts that are missing, or of another size than was recorded."""
        require_sizes(self.directory, {e.file: e.part.bytes for e in entries}, damaged)

    # ---- reading

    def _finished_manifest(self) -> Manifest | None:
        if self._manifest is None and (self.directory / MANIFEST).exists():
            self._manifest = Manifest.read(self.directory)
        return self._manifest

    def _enter(self, start: int) -> list[Entry]:
        """The entries from `start` on, wherever this object was before."""
        if manifest := self._finished_manifest():
            found = [*_of_manifest(manifest)]
            end = found[-1]
            self._end = end.number + 1, end.first + end.examples, end.after
        else:
            try:
                found = self._scan(start)
            except Damaged:
                if self._finished_manifest() is None:
                    raise
                return self._enter(start)  # its records were being deleted
        if start > self._end[0]:
            raise InvalidValue(
                f"the log of {os.fspath(self.directory)} has {self._end[0]:,} parts, and part "
                f"{start:,} was sealed when it was read before: another log is in its place. Give "
                "back the directory as it was, or begin anew"
            )
        return [entry for entry in found if entry.number >= start]

    def _scan(self, start: int) -> list[Entry]:
        """The entries of all records from that of part `start` on."""
        sizes = self._sizes()
        if sizes and min(sizes) > start:
            raise Damaged(
                f"the log of {os.fspath(self.directory)} begins at part {min(sizes):,}, and part "
                f"{start:,} is asked for: its writer has deleted what was before (keep_parts=), or "
                "records are missing"
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
        found: list[Entry] = []
        self._end = (0, 0, "")
        for path, content, number in zip(paths, contents, numbers, strict=True):
            record = _parse(path, content)
            if not found:
                self._end = number, record["first"], record["before"]
            found += self._follow(path, record)
        return found

    def _sizes(self) -> dict[int, int]:
        """The number of the first part of each record, and in object storage the bytes of that."""
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
            return path, _parse(path, path.read_bytes())
        except FileNotFoundError:
            return None

    def _follow(self, path: epath.Path, record: Mapping[str, Any]) -> Iterator[Entry]:
        """The entries of the next record; refused if it does not follow what was read."""
        number, first, before = self._end
        if path != self._path(number):
            raise damaged(self._path(number), f"it is missing, and {path.name} is there")
        for name, due in zip(OF_PLACE, self._end, strict=True):
            if record[name] != due:
                raise damaged(
                    path,
                    f"its {name} is {record[name]!r}, and what is before it says {due!r}: it is "
                    "out of order, or of another log",
                )
        *others, last = record["parts"]
        for said in [*others, {**last, "cursor": record["cursor"]}]:
            part = Part(**said.pop("part"))
            entry = Entry(**said, part=part, number=number, first=first, before=before)
            if entry.file != part_name(number):
                raise damaged(path, f"part {number} is {entry.file!r}, not {part_name(number)!r}")
            number, first, before = number + 1, first + entry.examples, entry.after
            yield entry
        self._end = number, first, before

    # ---- writing

    def tail(self) -> Entry | None:
        """The last entry, after which `append` goes on; None where there is none."""
        found = self._scan(max(self._sizes(), default=0))
        return found[-1] if found else None

    def begin(self, about: About) -> None:
        """Writes what the corpus is, before the first record."""
        make_directory(self._place)
        entries = {"schema_version": SCHEMA_VERSION, **dataclasses.asdict(about)}
        write_entries(self._place / ABOUT, entries)

    def append(self, entries: Sequence[Entry], cursor: Any = None) -> None:
        """Seals parts that are on disk: creates the next record, after what was read.

        Args:
            entries: of the parts, each after the one before it.
            cursor: that of the last of them, whatever the entries say.

        Raises:
            FileExistsError: another writer has created that record.
        """
        first, last = entries[0], entries[-1]
        assert (first.number, first.first, first.before) == self._end
        parts = [
            {
                "part": dataclasses.asdict(entry.part),
                **{name: getattr(entry, name) for name in OF_PART},
            }
            for entry in entries
        ]
        record = dict(zip(OF_PLACE, self._end, strict=True)) | {"parts": parts, "cursor": cursor}
        path = self._path(first.number)
        write_entries(path, {"schema_version": SCHEMA_VERSION, **record}, once=True)
        self._end = last.number + 1, last.first + last.examples, last.after

    def end(self) -> None:
        """Says that no part will be added, where there is no manifest."""
        write_entries(self._place / END, {"schema_version": SCHEMA_VERSION})

    def hold(self, reader: str, number: int) -> None:
        """Says that a reader needs the parts from a number on, so that no writer deletes them.

        Args:
            reader: a name of letters, digits, `_` and `-`, the same for all processes of a run.
            number: of the first part that its oldest checkpoint needs.
        """
        name = f"reader-{reader}.json"
        if not READER.fullmatch(name):
            raise InvalidValue(f"reader is {reader!r}; it is a name of letters, digits, _ and -")
        entries = {"schema_version": SCHEMA_VERSION, "number": number}
        try:
            if self._finished_manifest() is None:
                write_entries(self._place / name, entries)
        except OSError:
            if self._finished_manifest() is None:  # else it was finished meanwhile
                raise

    def release(self, reader: str) -> None:
        """Says that a reader needs no part any more."""
        (self._place / f"reader-{reader}.json").unlink(missing_ok=True)

    def trim(self, before: int) -> None:
        """Deletes the records whose parts are all before a number, and these parts.

        What a reader holds stays; where there is no reader, everything does.
        """
        paths = [path for path in self._place.iterdir() if READER.fullmatch(path.name)]
        held = [_parse(path, path.read_bytes())["number"] for path in paths]
        before = min(before, *held) if held else 0
        numbers = sorted(self._sizes())
        for number, after in itertools.pairwise([*numbers, self._end[0]]):
            if after > before:
                return
            # The record first: a part without one is known to be deleted.
            self._path(number).unlink()
            for part in range(number, after):
                (self.directory / part_name(part)).unlink(missing_ok=True)

    def first(self) -> int:
        """The number of the first part that is kept."""
        return min(self._sizes(), default=0)

    def remove(self) -> None:
        """Removes the log, of which a manifest or nothing takes the place."""
        self._end = (0, 0, "")
        remove_files(self._place, NAMES)


def _of_manifest(manifest: Manifest) -> Iterator[Entry]:
    """The entries of a finished corpus."""
    first, before = 0, ""
    for number, part in enumerate(manifest.parts):
        entry = Entry(number=number, part=part, first=first, before=before)
        first, before = first + part.examples, entry.after
        yield entry


def _parse(path: epath.Path, content: bytes) -> dict[str, Any]:
    """The entries of a file of the log, whose digest is right."""
    try:
        entries = json.loads(content)
        require_digest(entries)
        if (version := entries.pop("schema_version")) != SCHEMA_VERSION:
            raise InvalidValue(
                f"it has schema version {version}, and this version of Lockstep reads version "
                f"{SCHEMA_VERSION}"
            )
        return entries
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(path, f"it is half-written or changed: {error}") from error


class Damaged(InvalidValue):
    """A file of a corpus that grows is missing, changed, half-written or out of order."""


def damaged(path: epath.Path, seen: str) -> Damaged:
    """The error to raise for a file of a corpus that grows."""
    return Damaged(
        f"the corpus that grows is damaged at {os.fspath(path)}: {seen}. Restore that file from a "
        "copy; what was sealed cannot be made again"
    )
