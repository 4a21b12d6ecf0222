"""Mirror: a local directory whose folders are kept in object storage, for what needs files."""

import os
import tempfile

from etils import epath

from pipeline.fs import objects
from pipeline.fs.atomic import remove_leftovers
from pipeline.fs.objects import ObjectPath

# The last object of a folder to be written, and the first to be deleted: with it, all is there.
# orbax makes one in each checkpoint.
WHOLE = "commit_success.txt"

NAME = "lockstep-mirror"  # how the names of local directories begin


class Mirror:
    """A local directory that stands for one of object storage.

    Of each folder that is whole there, `local` has the files at the top from the beginning, and all
    of them after `fetch`. `push` makes what is there like what is here. Each folder has a file
    `WHOLE`.
    """

    def __init__(self, remote: ObjectPath):
        self._remote = remote
        remove_leftovers(epath.Path(tempfile.gettempdir()), NAME)
        self._scratch = tempfile.TemporaryDirectory(f".{os.getpid()}.tmp", f"{NAME}.")
        self.local = epath.Path(self._scratch.name)
        self._partial: set[str] = set()  # folders of which only the top is here
        for name in objects.children(remote)[1]:
            top, _ = objects.children(remote / name)
            if WHOLE in top:
                self._download([remote / name / each for each in top])
                self._partial.add(name)

    def fetch(self, name: str) -> None:
        """Downloads the whole of a folder, if it is there and not here."""
        if name in self._partial:
            self._download([ObjectPath(each) for each in objects.keys(self._remote / name)])
            self._partial.remove(name)

    def push(self) -> None:
        """Uploads folders that are here and not there, and deletes those that are there alone.

        Then each has only the files at its top here.
        """
        here = {path.name for path in self.local.iterdir() if path.is_dir()}
        there = set(objects.children(self._remote)[1])
        whole = {name for name in here & there if (self._remote / name / WHOLE).exists()}
        for name in there - whole:  # gone here, or cut short there
            objects.delete([self._remote / name / WHOLE])
            objects.delete(objects.keys(self._remote / name))
        for name in here - whole:
            last = self.local / name / WHOLE
            tree = [(epath.Path(root), names) for root, _, names in os.walk(last.parent)]
            files = [root / each for root, names in tree for each in names]
            # One after the other: large ones go up in many parts at once.
            for file in [*(file for file in files if file != last), last]:
                with file.open("rb") as content:
                    objects.put(self._remote / file.relative_to(self.local), content)
        for name in here - self._partial:
            for path in (self.local / name).iterdir():
                if path.is_dir():
                    path.rmtree()
        self._partial = here

    def _download(self, paths: list[ObjectPath]) -> None:
        for path in paths:
            file = self.local / path.relative_to(self._remote)
            file.parent.mkdir(parents=True, exist_ok=True)
            objects.download(path, file)
