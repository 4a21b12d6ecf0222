"""The disk: files in a directory in memory, and what a loss of power leaves of them.

The files are real, so that maps, Arrow and NumPy work. Beside them, the disk knows the bytes of
each file that were synced, and the changes of names that were not.
"""

import contextlib
import errno
import os
import random
import shutil
import stat
from typing import Any


def is_folder(path: str) -> bool:
    """Whether there is a folder; the name of a file is none."""
    return os.path.lexists(path) and stat.S_ISDIR(os.lstat(path).st_mode)


FOLDER = "folder"  # in place of a file, among names


class File:
    """A file, whatever its names are.

    Attributes:
        names: its paths.
        synced: the bytes that surely survive a loss of power.
        dirty: whether it was changed after that.
        last: its bytes when it lost its last name.
        locked: the descriptor that has locked it, and its process.
    """

    def __init__(self, path: str):
        self.names, self.synced, self.dirty = [path], b"", False
        self.last: bytes | None = None
        self.locked: tuple[int, Any] | None = None

    @property
    def path(self) -> str:
        """One of its names, or its last one."""
        return self.names[-1]

    def read(self) -> bytes:
        """Its bytes."""
        if self.last is not None:
            return self.last
        with open(self.path, "rb") as file:
            return file.read()


class Scan(list):
    """What `os.scandir` gives."""

    def __enter__(self) -> "Scan":
        return self

    def __exit__(self, *_: object) -> None:
        pass


Node = File | str | None
# A folder, and the names in it that change together: path and node.
Change = tuple[str, list[tuple[str, Node]]]


class Disk:
    """What is in the directory `root`.

    Attributes:
        strict: whether a loss of power keeps, for each folder apart, as many changes as it likes
            after the last sync of that folder; else it keeps the first changes of all, as a journal
            does, which each sync of anything writes.
        full, was_full: whether nothing can be written now, or could not before.
    """

    def __init__(self, root: str, chance: random.Random):
        self.root, self._random = root, chance
        self.strict = self.full = self.was_full = False
        self.descriptors: dict[int, File] = {}
        self._files: dict[int, File] = {}
        self._durable: dict[str, Node] = {}
        self._pending: list[Change] = []

    def has(self, path: Any) -> bool:
        """Whether a path is on this disk."""
        if isinstance(path, int):
            return path in self.descriptors
        with contextlib.suppress(TypeError):
            return os.fspath(path).startswith(self.root)
        return False

    def name(self, path: Any) -> str:
        """A path for the trace."""
        file = self.descriptors.get(path)
        whole = file.path if file else os.fspath(path)
        return whole[len(self.root) + 1 :]

    def find(self, path: str) -> File:
        """The file of a path."""
        number = os.stat(path).st_ino
        if number not in self._files:
            self._files[number] = File(path)
        return self._files[number]

    # ---- what stands in for calls

    def refuse_if_full(self, path: Any) -> None:
        """Raises the error of a full disk while it is full."""
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        """In place of `os.open`."""
        new = not os.path.lexists(path)
        if flags & os.O_TRUNC or (new and flags & os.O_CREAT):
            self.refuse_if_full(path)
        number = os.open(path, flags, mode)
        if new:
            self._change((path, self.find(path)))
        file = File(path) if is_folder(path) else self.find(path)
        file.dirty |= bool(flags & os.O_TRUNC)
        self.descriptors[number] = file
        return number

    def add_folder(self, path: str, *mode: int) -> None:
        """In place of `os.mkdir`."""
        self.refuse_if_full(path)
        os.mkdir(path, *mode)
        self._change((path, FOLDER))

    def remove_folder(self, path: str) -> None:
        """In place of `os.rmdir`."""
        os.rmdir(path)
        self._change((path, None))

    def remove(self, path: str) -> None:
        """In place of `os.unlink`."""
        if os.path.lexists(path) and not is_folder(path):
            self._take_name(path)
            self._change((path, None))
        os.unlink(path)

    def _take_name(self, path: str) -> None:
        file = self.find(path)
        if len(file.names) == 1:
            file.last = file.read()
            del self._files[os.stat(path).st_ino]
        else:
            file.names.remove(path)

    def link(self, path: str, new: str, **_: Any) -> None:
        """In place of `os.link`."""
        self.refuse_if_full(new)
        os.link(path, new)
        file = self.find(path)
        file.names.append(new)
        self._change((new, file))

    def rename(self, path: str, new: str) -> None:
        """In place of `os.replace`."""
        self.refuse_if_full(new)
        file = self.find(path)
        if os.path.lexists(new):
            self._take_name(new)
        os.replace(path, new)
        file.names.remove(path)
        file.names.append(new)
        self._change((new, file), (path, None))

    def _change(self, *names: tuple[str, Node]) -> None:
        self._pending.append((os.path.dirname(names[0][0]), [*names]))

    def names(self, path: str) -> list[str]:
        """In place of `os.listdir`, in any order."""
        names = sorted(os.listdir(path))
        self._random.shuffle(names)
        return names

    def scan(self, path: str) -> "Scan":
        """In place of `os.scandir`, in any order."""
        with os.scandir(path) as found:
            entries = Scan(sorted(found, key=lambda entry: entry.name))
        self._random.shuffle(entries)
        return entries

    def write(self, descriptor: int) -> None:
        """Notes that a file changes."""
        self.descriptors[descriptor].dirty = True

    def sync(self, descriptor: int) -> None:
        """In place of `os.fsync`."""
        self.refuse_if_full(None)
        file = self.descriptors[descriptor]
        if is_folder(file.path):
            self._commit([each for each in self._pending if each[0] == file.path])
        elif file.dirty:
            file.synced, file.dirty = file.read(), False
        if not self.strict:
            self._commit(list(self._pending))

    def _commit(self, changes: list[Change]) -> None:
        for change in changes:
            self._pending.remove(change)
            for path, node in change[1]:
                self._durable[path] = node

    # ---- faults

    def lose_power(self) -> list[str]:
        """Makes the directory what a loss of power leaves, in words."""
        if self.strict:
            for folder in sorted({folder for folder, _ in self._pending}):
                mine = [each for each in self._pending if each[0] == folder]
                self._commit(mine[: self._random.randint(0, len(mine))])
        else:
            self._commit(self._pending[: self._random.randint(0, len(self._pending))])
        lost = [path for _, names in self._pending for path, _ in names]
        self._pending.clear()
        contents, story = dict[File, bytes](), [f"the last changes of {len(lost)} names are lost"]
        self._durable = {path: node for path, node in self._durable.items() if node is not None}
        for path, node in sorted(self._durable.items()):
            if isinstance(node, File) and node not in contents:
                contents[node], how = self._keep(node)
                story += [f"{self.name(path)} is {how}"] * bool(how)
        shutil.rmtree(self.root)
        os.mkdir(self.root)
        places: set[File] = set()
        self._files.clear()
        for path, node in sorted(self._durable.items()):
            if not is_folder(os.path.dirname(path)):
                del self._durable[path]
            elif not isinstance(node, File):
                os.mkdir(path)
            elif node in places:
                os.link(node.path, path)
                node.names.append(path)
            else:
                with open(path, "wb") as file:
                    file.write(contents[node])
                places.add(node)
                node.names, node.synced, node.dirty, node.last = [path], contents[node], False, None
                node.locked = None
                self._files[os.stat(path).st_ino] = node
        return story

    def _keep(self, file: File) -> tuple[bytes, str]:
        """What a loss of power leaves of a file."""
        content = file.read()
        if not file.dirty:
            return content, ""
        some = self._random.randint(0, len(content))
        zeros = content[:some] + bytes(len(content) - some)
        kinds = {"as it was before": file.synced, "cut": content[:some], "zeros at its end": zeros}
        kinds |= {"whole": content, "empty": b""}
        how = self._random.choice([*kinds])
        return kinds[how], how
