"""Faults that are planted in the project while it runs, so that a blind simulator is noticed."""

import contextlib
import os
from typing import Any

from pipeline.corpus import log
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
    append = log.Log.append

    def twice(mine: Any, some: Any, cursor: Any = None, *, last: bool = False) -> None:
        key, before = mine._key, mine.tail()
        append(mine, some, before.cursor if before else 0, last=last)
        if not last:
            path = log.record_path(mine.directory, *key)
            entries = log.read_entries(path, path.read_bytes())
            with contextlib.suppress(KeyError):
                log.write_entries(path, entries | {"next": [cursor]})

    log.Log.append = twice


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
