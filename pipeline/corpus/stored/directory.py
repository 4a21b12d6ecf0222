"""Directory: the names of the files of a corpus, their sizes, and JSON that is whole or refused."""

import contextlib
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from etils import epath

from pipeline.corpus.stored.parts import json_digest
from pipeline.errors import InvalidValue
from pipeline.fs import objects
from pipeline.fs.atomic import atomic_write, is_local

SCHEMA_VERSION = 7
MANIFEST = "corpus.json"
LENGTHS, PARTS = "lengths.npy", "parts.arrow"
# The folder of the records of parts until the manifest lists them; and what failed, a line each.
SHARDS, SKIPPED = "shards", "skipped.jsonl"
# The files besides parts that are written just before the manifest.
BESIDE = LENGTHS, PARTS, SKIPPED
PART_NAME = re.compile(r"part-(\d{6,})-(\d{5,})\.arrow")
# Temporary names of files of a corpus; see `pipeline.fs.atomic.atomic_write`.
TEMPORARY = re.compile(
    rf"\.({PART_NAME.pattern}|{'|'.join(map(re.escape, (*BESIDE, MANIFEST)))})"
    r"\.[0-9a-f]+\.tmp"
)


def part_name(shard: int, number: int) -> str:
    """The file of a part of a shard."""
    return f"part-{shard:06d}-{number:05d}.arrow"


class Damaged(InvalidValue):
    """A file of a corpus is missing, changed, half-written or out of order."""


def damage(path: epath.Path, seen: str) -> Damaged:
    """The error to raise for a damaged file of a corpus, finished or not."""
    return Damaged(
        f"the corpus is damaged at {os.fspath(path)}: {seen}. Restore that file from a copy, or "
        "delete the directory and make the corpus again; no part is ever replaced by another"
    )


def require_sizes(directory: epath.Path, sizes: Mapping[str, int]) -> None:
    """Refuses a directory in which a file is missing or of another size than recorded."""
    listed: Mapping[str, int] | None = None
    if isinstance(directory, objects.ObjectPath):  # which lists all at once
        listed = objects.children(directory)[0]
    for name, size in sizes.items():
        seen = _size_of(directory / name) if listed is None else listed.get(name)
        if seen is None:
            raise damage(directory / name, "it is missing")
        if seen != size:
            raise damage(directory / name, f"it has {seen:,} bytes instead of {size:,}")


def _size_of(path: epath.Path) -> int | None:
    """The bytes of a file; None if there is none."""
    with contextlib.suppress(FileNotFoundError):
        return os.stat(path).st_size if is_local(path) else path.stat().length
    return None


def write_entries(path: epath.Path, entries: Mapping[str, Any], *, once: bool = False) -> None:
    """Writes JSON to a file, with a digest of it among its entries; see `atomic_write`."""
    content = {"schema_version": SCHEMA_VERSION, **entries}
    content |= {"digest": json_digest(content)}
    with atomic_write(path, once=once) as file:
        file.write((json.dumps(content, indent=1) + "\n").encode())


def read_entries(path: epath.Path, content: bytes) -> dict[str, Any]:
    """The entries that `write_entries` wrote; refuses anything else."""
    try:
        entries = json.loads(content)
        if (version := entries["schema_version"]) == SCHEMA_VERSION:
            digest = entries.pop("digest")
            if digest != json_digest(entries):
                raise InvalidValue("its entries do not match its digest")
            return entries
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damage(path, f"it is half-written or changed: {error!r}") from error
    raise InvalidValue(
        f"{os.fspath(path)} has schema version {version}, but this version of Lockstep reads "
        f"version {SCHEMA_VERSION}; write the corpus again in another directory, or use the "
        "version that wrote it"
    )
