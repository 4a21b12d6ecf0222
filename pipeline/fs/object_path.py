"""ObjectPath: a path of object storage with the methods of `etils.epath`."""

import fnmatch
import glob
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from etils import epath
from etils.epath.gpath import PosixGPath
from etils.epath.stat_utils import StatResult

from pipeline.errors import Exists, InvalidValue, Missing, StorageError
from pipeline.fs import transfers
from pipeline.fs.requests import SCHEMES, split

# What a reader takes at once, first and at most, in bytes.
READ, MOST = 1 << 18, 32 << 20
# What a writer keeps in memory before it takes a temporary file.
WRITTEN = 64 << 20


class ObjectPath(PosixGPath):
    """A path of object storage.

    There are no directories in it: one is there while there are objects whose keys begin with its
    name. So `mkdir` does nothing, and an empty directory does not exist. What is written to an open
    file becomes the object, at once and whole, when the file is closed; a block that raises leaves
    what was there. Files cannot be appended to.
    """

    def resolve(self, strict: bool = False) -> "ObjectPath":
        """Itself."""
        del strict
        return self

    def exists(self) -> bool:
        """Whether it is an object, or there are some in it."""
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        """Whether it is an object."""
        if not split(self)[1]:
            return False
        try:
            transfers.head(self)
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        """Whether there are objects in it, or it is a bucket."""
        return bool(transfers.keys(self, limit=1)) or not split(self)[1]

    def iterdir(self) -> "Iterator[ObjectPath]":
        """The objects and directories in it."""
        objects, folders = transfers.children(self)
        return iter([self / name for name in (*folders, *objects)])

    def glob(self, pattern: str) -> "Iterator[ObjectPath]":
        """Objects and directories whose paths match; `*`, `?` and `[…]` stand for no `/`."""
        if "**" in pattern:
            raise NotImplementedError(f"{pattern} has **, which is not supported; use * instead")
        found: list[ObjectPath] = [self]
        for part in pattern.split("/"):
            if glob.has_magic(part):
                found = [each for path in found for each in _match(path, part)]
            else:
                found = [path / part for path in found]
        if pattern and not glob.has_magic(pattern.rpartition("/")[2]):
            found = [path for path in found if path.exists()]
        return iter(found)

    def walk(
        self, *, top_down: bool = True, on_error: Callable[[OSError], object] | None = None
    ) -> "Iterator[tuple[ObjectPath, list[str], list[str]]]":
        """Each directory from this one down, with the names of directories and objects in it."""
        del on_error
        objects, folders = transfers.children(self)
        if top_down:
            yield self, folders, list(objects)
        for name in folders:
            yield from (self / name).walk(top_down=top_down)
        if not top_down:
            yield self, folders, list(objects)

    def stat(self) -> Any:
        """The size in bytes and the time of the last change; of a directory neither."""
        try:
            seen, directory = transfers.head(self), False
        except FileNotFoundError:
            if not self.is_dir():
                raise
            seen, directory = transfers.Head(0, 0), True
        return StatResult(
            is_directory=directory,
            length=seen.size,
            mtime=int(seen.changed),
            owner=None,
            group=None,
            mode=None,
        )

    def open(self, mode: str = "r", *, encoding: str | None = None, **options: Any) -> Any:
        """A file to read (`r`, `rb`) or to write (`w`, `wb`)."""
        if mode.replace("b", "") not in ("r", "w") or any(options.values()):
            raise InvalidValue(
                f"mode is {mode!r}; objects can be read and written, not appended to"
            )
        if mode[0] == "r":
            file: Any = io.BufferedReader(Reader(self))
        else:
            file = Writer(self)
        return file if "b" in mode else Text(file, encoding or "utf-8")

    def read_bytes(self) -> bytes:
        """Its content."""
        return bytes(transfers.get(self))

    def write_bytes(self, data: bytes) -> int:
        """Makes `data` its content; returns its size."""
        transfers.put(self, data)
        return len(data)

    def mkdir(self, mode: int | None = None, parents: bool = False, exist_ok: bool = False) -> None:
        """Does nothing, or raises a `FileExistsError` for what must not exist."""
        del mode, parents
        if not exist_ok and self.exists():
            raise Exists(f"{self} exists")

    def rmdir(self) -> None:
        """Does nothing: an empty directory is not there."""
        if self.is_dir():
            raise StorageError(f"{self} is not empty")

    def rmtree(self, missing_ok: bool = False) -> None:
        """Deletes all objects in it."""
        found = transfers.keys(self)
        if not found and not missing_ok:
            raise Missing(f"there is nothing in {self}")
        transfers.delete(found)

    def unlink(self, missing_ok: bool = False) -> None:
        """Deletes the object."""
        if not missing_ok:
            transfers.head(self)
        transfers.delete([self])

    def rename(self, target: epath.PathLike) -> "ObjectPath":
        """Copies it, or all that is in it, to where nothing is, and deletes it then."""
        if ObjectPath(target).exists():
            raise Exists(f"{self} cannot become {target}, which exists")
        return self.replace(target)

    def replace(self, target: epath.PathLike) -> "ObjectPath":
        """Copies it, or all that is in it, and deletes it then; not in one step."""
        to, here = ObjectPath(target), os.fspath(self)
        moved = [here] if self.is_file() else transfers.keys(self)
        if not moved:
            raise Missing(f"there is no {self}")
        for path in moved:
            transfers.copy(path, os.fspath(to) + path.removeprefix(here))
        transfers.delete(moved)
        return to

    def copy(self, dst: epath.PathLike, overwrite: bool = False) -> Any:
        """Copies the object, to object storage or a local file."""
        to = epath.Path(dst)
        if not overwrite and to.exists():
            raise Exists(f"{to} exists; {self} cannot be copied there")
        if isinstance(to, ObjectPath):
            transfers.copy(self, to)
        else:
            transfers.download(self, to)
        return to


class Reader(io.RawIOBase):
    """The bytes of an object, of which more are fetched at once while they are read in order."""

    def __init__(self, path: epath.Path):
        self._path, self._size, self._at = path, transfers.head(path).size, 0
        self._begin, self._window = 0, memoryview(b"")  # what was fetched last

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """The place in the object."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Goes to a byte of the object."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Reads up to the size of `buffer`; 0 at the end."""
        if not self._begin <= self._at < self._begin + len(self._window):
            follows = self._window and self._at == self._begin + len(self._window)
            self._fetch(max(min(2 * len(self._window), MOST) if follows else READ, len(buffer)))
        found = self._window[self._at - self._begin :][: len(buffer)]
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)

    def readall(self) -> bytes:
        """The rest of the object."""
        self._fetch(self._size)
        self._at += len(self._window)
        return bytes(self._window)

    def _fetch(self, count: int) -> None:
        end = max(min(self._at + count, self._size), self._at)
        self._begin = self._at
        (self._window,) = transfers.get_ranges(self._path, [self._at], [end])


class Writer(io.RawIOBase):
    """A file whose content becomes an object when it is closed, but not after an error."""

    def __init__(self, path: epath.Path):
        self._path = path
        self._file = tempfile.SpooledTemporaryFile(WRITTEN)  # noqa: SIM115

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, data: Any) -> int:
        """Takes all of `data`."""
        return self._file.write(data)

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """The place in the content."""
        return self._file.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Goes to a byte of the content."""
        return self._file.seek(offset, whence)

    def close(self) -> None:
        """Writes the object."""
        if not self.closed:
            try:
                transfers.put(self._path, self._file)
            finally:
                self.discard()

    def discard(self) -> None:
        """Closes the file, and writes nothing."""
        self._file.close()
        super().close()

    def __exit__(self, kind: Any, *_: object) -> None:
        self.close() if kind is None else self.discard()

    def __del__(self) -> None:  # which would write it
        self.discard()


class Text(io.TextIOWrapper):
    """Text of a `Reader` or a `Writer`."""

    def __exit__(self, kind: Any, *details: Any) -> None:
        if kind is not None and isinstance(self.buffer, Writer):
            self.buffer.discard()
        else:
            self.close()


def _match(path: ObjectPath, pattern: str) -> list[ObjectPath]:
    """What is in a directory and matches, as `glob.glob` does: names with a dot only if asked."""
    return [
        each
        for each in path.iterdir()
        if fnmatch.fnmatchcase(each.name, pattern)
        and (pattern.startswith(".") or not each.name.startswith("."))
    ]


def register() -> None:
    """Lets `epath.Path` give `ObjectPath`s, also to orbax, for `SCHEMES`."""
    epath.register_path_cls(SCHEMES)(ObjectPath)
