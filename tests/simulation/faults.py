"""Faults that are planted in the project while it runs, so that a blind simulator is noticed."""

import contextlib
import os
from typing import Any

from pipeline.corpus.stored.directory import read_entries, write_entries
from pipeline.corpus.stored.log import record_path
from pipeline.corpus.stored.writer import Writer
from pipeline.fs import atomic, objects


def leave_names_unsynced() -> None:
    """Names of files do not reach the disk."""
    atomic._sync_directory = lambda path: None


def copy_in_place_of_a_rename() -> None:
    """A file is copied to its name."""

    def copy(old: Any, new: Any) -> Any:
        with open(old, "rb") as there, open(new, "wb") as file:
            file.write(there.read())
            file.flush()
            os.fsync(file.fileno())
        os.unlink(old)
        return new

    atomic.epath.Path("/").__class__.replace = copy


def seal_before_data() -> None:
    """A part need not be on the disk before its record is."""
    sync = atomic._Temporary.sync

    def skip(file: Any) -> None:
        if not file._path.name.startswith("part-"):
            sync(file)

    atomic._Temporary.sync = skip


def store_the_cursor_after_parts() -> None:
    """A record is written with the cursor before it, and then again."""
    seal = Writer._seal

    def twice(mine: Any, cursor: Any, *, last: bool = False) -> None:
        number, before = len(mine._sealed), mine.cursor or 0
        seal(mine, before, last=last)
        if not last and len(mine._sealed) > number:
            path = record_path(mine.directory, 0, number)
            entries = read_entries(path, path.read_bytes())
            with contextlib.suppress(KeyError):
                write_entries(path, entries | {"next": [cursor]})
            mine.cursor = cursor

    Writer._seal = twice


def write_without_the_lock() -> None:
    """A holder that was silent does not look whether it has the lock of a bucket."""
    objects._guard = lambda path: None


FAULTS = {
    "guard": write_without_the_lock,
    "names": leave_names_unsynced,
    "rename": copy_in_place_of_a_rename,
    "data": seal_before_data,
    "cursor": store_the_cursor_after_parts,
}
