"""Mirror: a local directory whose folders are kept in object storage, for code that needs files."""

import contextlib
import os
import shutil
import tempfile
from typing import IO

from etils import epath

from pipeline.errors import Exists, InvalidValue
from pipeline.fs import objects
from pipeline.fs.atomic import open_locked
from pipeline.fs.objects import ObjectPath

# The last object of a folder to be written, and the first to be deleted: a folder that has it is
# complete. orbax makes one in each checkpoint.
WHOLE = "commit_success.txt"

PREFIX = "lockstep-mirror-"  # of the names of local directories
LOCK = ".lock"  # in each of them, held by its process


class Mirror:
    """A local directory that mirrors the numbered folders of a directory in object storage.

    For each complete remote folder, `local` has the files at its top, and its mark, from the
    beginning, and all its files after `fetch`. `push` makes the remote folders equal to the local
    ones. Each folder has a file `WHOLE`, and a folder `mark`, which is written first and deleted
    last. A remote folder without a number as its name, without a mark, or from another process
    belongs to somebody else and stays as it is.
    """

    def __init__(self, remote: ObjectPath, mark: str):
        self._remote, self._mark = remote, mark
        _remove_leftovers()
        self._scratch, self._lock = _make_scratch()
        self.local = epath.Path(self._scratch.name)
        self._ours: set[str] = set()  # remote folders that have the mark
        self._whole: set[str] = set()  # remote folders that are complete
        for name in filter(str.isdecimal, objects.children(remote)[1]):
            top, folders = objects.children(remote / name)
            if mark in folders:
                self._ours.add(name)
            if WHOLE in top:
                marks = map(ObjectPath, objects.keys(remote / name / mark))
                self._download([*(remote / name / each for each in top), *marks])
                self._whole.add(name)
        self._partial = {*self._whole}  # folders whose top alone is local

    def fetch(self, name: str) -> None:
        """Downloads all of a folder, if it is remote and not yet local."""
        if name in self._partial:
            self._download([ObjectPath(each) for each in objects.keys(self._remote / name)])
            self._partial.remove(name)

    def push(self) -> None:
        """Uploads folders that are only local, and deletes our folders that are only remote.

        Afterwards, each local folder has only the files at its top, and its mark.
        """
        here = {path.name for path in self.local.iterdir() if path.is_dir()}
        for name in self._ours - (here & self._whole):  # deleted here, or incomplete there
            folder = self._remote / name
            marks = objects.keys(folder / self._mark)
            others = [each for each in objects.keys(folder) if each not in marks]
            objects.delete([folder / WHOLE, *others, *marks])
            self._ours.remove(name)
        for name in here - self._whole:
            if (self._remote / name).is_dir():
                raise Exists(
                    f"{self._remote / name} exists, and this process did not write it; use another "
                    "directory, or delete it"
                )
            self._ours.add(name)
            last, mark = self.local / name / WHOLE, self.local / name / self._mark
            tree = [(epath.Path(root), names) for root, _, names in os.walk(last.parent)]
            files = [root / each for root, names in tree for each in names]
            files.sort(key=lambda file: (file == last, not file.is_relative_to(mark)))
            # One after the other: large files are uploaded in many parts at once.
            for file in files:
                with file.open("rb") as content:
                    objects.put(self._remote / file.relative_to(self.local), content)
            self._whole.add(name)
        for name in here - self._partial:
            for path in (self.local / name).iterdir():
                if path.is_dir() and path.name != self._mark:
                    path.rmtree()
        self._partial, self._whole = here, {*here}

    def _download(self, paths: list[ObjectPath]) -> None:
        for path in paths:
            file = self.local / path.relative_to(self._remote)
            file.parent.mkdir(parents=True, exist_ok=True)
            objects.download(path, file)


def _make_scratch() -> tuple[tempfile.TemporaryDirectory, IO[bytes]]:
    """A local directory, and its lock, which ends with this process."""
    while True:
        scratch = tempfile.TemporaryDirectory(prefix=PREFIX)
        lock = open_locked(os.path.join(scratch.name, LOCK))
        if os.fstat(lock.fileno()).st_nlink:
            return scratch, lock
        lock.close()  # another process removed it as a leftover before it was locked


def _remove_leftovers() -> None:
    """Removes the local directories of killed processes, whose locks nobody holds."""
    for left in epath.Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, InvalidValue):  # it may belong to another user
            if (left / LOCK).exists():
                with open_locked(left / LOCK, wait=False):
                    shutil.rmtree(left, ignore_errors=True)
