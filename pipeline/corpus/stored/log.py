"""The log of an unfinished corpus: records that say which of its parts are sealed.

A record is a JSON file in `shards/` beside the parts. It is created once, atomically, after its
parts, and never changed. Its name has the number of a shard and that of its first part there. A
`Writer` has one shard, with a record for each seal; `prepare` has many, with a record for each
part, which appear in any order. The manifest of the finished corpus lists all parts, and replaces
the records.
"""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from etils import epath

from pipeline.corpus.stored.directory import (
    BESIDE,
    LENGTHS,
    MANIFEST,
    PART_NAME,
    SHARDS,
    TEMPORARY,
    damage,
    part_name,
    read_entries,
    require_sizes,
    write_entries,
)
from pipeline.corpus.stored.manifest import Manifest, is_finished
from pipeline.corpus.stored.parts import Part, range_of_offsets, read_counts_of
from pipeline.corpus.tasks import TASKS, Task
from pipeline.errors import InvalidValue
from pipeline.fs import objects
from pipeline.fs.atomic import (
    atomic_write,
    list_folder,
    make_directory,
    remove_files,
    remove_leftovers,
)
from pipeline.planning import lengths as lengths_module

RECORD = re.compile(r"(\d{6,})-(\d{5,})\.json")
# Names of records, including temporary ones.
NAMES = re.compile(rf"{RECORD.pattern}|\.{RECORD.pattern}\.[0-9a-f]+\.tmp")
# The number of parts whose lengths are read at once.
PARTS_AT_ONCE = 256

# The number of a shard, and that of a part in it.
Key: TypeAlias = tuple[int, int]


def read_sealed(directory: epath.Path) -> tuple[list[Part], Any, bool]:
    """The parts that a writer has sealed in `directory`, its cursor, and whether it has finished.

    The cursor is any JSON; None: unknown.

    Raises:
        ValueError: a record is missing, changed, half-written or out of order.
    """
    parts, cursor, ended = list[Part](), None, False
    for key, record in read_records(directory).items():
        if key != (0, len(parts)):
            path = record_path(directory, 0, len(parts))
            raise damage(path, f"it is missing, and {record_path(directory, *key).name} is there")
        parts += parts_of(directory, record)
        ended = record["next"] is None
        cursor = None if ended else record["next"][0]
    return parts, cursor, ended


def read_counts(directory: epath.Path, parts: Sequence[Part], task: Task) -> list[np.ndarray]:
    """The token counts of the examples of each part: uint32.

    Raises:
        ValueError: a part is missing, or its lengths changed.
    """
    counts: list[np.ndarray] = []
    for first in range(0, len(parts), PARTS_AT_ONCE):
        chunk = parts[first : first + PARTS_AT_ONCE]
        paths = [directory / part.file for part in chunk]
        try:
            contents = objects.get_ranges(paths, *zip(*map(range_of_offsets, chunk), strict=True))
        except OSError:
            require_files(directory, chunk)
            raise
        for part, path, content in zip(chunk, paths, contents, strict=True):
            counts.append(read_counts_of(content))
            if lengths_module.digest(task.lengths(counts[-1])) != part.lengths_digest:
                raise damage(path, "the digest of its lengths differs")
    return counts


def require_files(directory: epath.Path, parts: Sequence[Part]) -> None:
    """Refuses parts whose files are missing or differ in size from their record."""
    require_sizes(directory, {part.file: part.bytes for part in parts})


def remove_log(directory: epath.Path) -> None:
    """Removes the records and what killed processes left, once there is a manifest, or anew."""
    remove_leftovers(directory, TEMPORARY)
    remove_files(directory / SHARDS, NAMES)


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
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    record = read_entries(path, content)
    for name, due in (("shard", shard), ("number", number)):
        if record[name] != due:
            raise damage(path, f"its {name} is {record[name]!r}, not {due}: it is out of order")
    return record


def read_records(directory: epath.Path) -> dict[Key, dict[str, Any]]:
    """All records that are there, by key, in order."""
    keys = list_records(directory)
    records = objects.together(lambda key: read_record(directory, *key), keys)
    return {k: record for k, record in zip(keys, records, strict=True) if record is not None}


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
    content = {"parts": [vars(part) for part in parts], "next": next, "failed": [*failed]}
    content |= {"notes": dict(notes)} if notes else {}
    entries = {"shard": shard, "number": number, **content, "origin": origin}
    write_entries(record_path(directory, shard, number), entries, once=True)


def parts_of(directory: epath.Path, record: Mapping[str, Any]) -> list[Part]:
    """The parts of a record; refuses those of another one."""
    path = record_path(directory, record["shard"], record["number"])
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


# ---- from the first manifest to the last


def begin(directory: epath.Path, manifest: Manifest, *, once: bool = False) -> None:
    """Writes the manifest without parts, before the first part; leaves a finished one.

    With `once`, it raises a `FileExistsError` if there is a manifest.
    """
    make_directory(directory / SHARDS)
    if not is_finished(directory):  # by another writer, which took the lock over
        manifest.write(directory / MANIFEST, once=once)


def refuse_others(directory: epath.Path) -> None:
    """Refuses a directory in which no corpus was begun, but with files that would be in its way."""
    for path in sorted(list_folder(directory)):
        named = PART_NAME.fullmatch(path.name) or path.name in BESIDE
        if named and Manifest.find(directory) is None:  # no other process began one meanwhile
            raise InvalidValue(
                f"{os.fspath(path)} is not of a corpus that was begun here, as there is no "
                f"{MANIFEST}, and it would be in the way of one. Use a directory of its own, or "
                "move that file"
            )


def finish(directory: epath.Path, manifest: Manifest, counts: np.ndarray | None = None) -> None:
    """Writes the lengths of the examples and, last, the manifest, which replaces the log.

    `counts` are the token counts of the examples, if they are known.
    """
    task = TASKS[manifest.task]
    if counts is None:
        counts = np.concatenate(read_counts(directory, manifest.parts, task))
    lengths = task.lengths(counts)
    with atomic_write(directory / LENGTHS) as file:
        np.save(file, lengths)
        size = file.tell()
    digest = lengths_module.digest(lengths)
    manifest = dataclasses.replace(manifest, lengths_digest=digest, lengths_bytes=size)
    manifest.write(directory / MANIFEST)
    remove_log(directory)
