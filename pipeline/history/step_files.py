"""Files of steps: what ranges of steps gave, each file whole or absent."""

import hashlib
import re

from etils import epath

from pipeline.fs.atomic import atomic_write, make_directory


class StepFiles:
    """Files `FIRST-LAST-DIGEST.KIND` of ranges of steps, which never change.

    The digest is of the bytes of the file, so that damage is noticed.

    Args:
        directory: where they are; made with the first of them.
        kind: the end of their names.
    """

    def __init__(self, directory: epath.Path, kind: str):
        self.directory, self._kind = directory, kind

    def ranges(self) -> list[range]:
        """The steps of each file, in order."""
        name = re.compile(rf"(\d+)-(\d+)-[0-9a-f]+\.{self._kind}")
        names = [path.name for path in self.directory.glob(f"*.{self._kind}")]
        found = sorted((int(each[1]), int(each[2])) for each in map(name.fullmatch, names) if each)
        return [range(first, last + 1) for first, last in found]

    def read(self, steps: range) -> bytes | None:
        """The content of the file of some steps; None if it is missing or damaged."""
        for path in self._paths(steps):
            content = path.read_bytes()
            if path.name == self._name(steps, content):
                return content
        return None

    def write(self, steps: range, content: bytes) -> None:
        """Writes the file of some steps, whole or not at all."""
        make_directory(self.directory)
        with atomic_write(self.directory / self._name(steps, content)) as file:
            file.write(content)

    def remove(self, first: int) -> None:
        """Removes the files that begin at step `first` or later."""
        for steps in self.ranges():
            for path in self._paths(steps) if steps[0] >= first else ():
                path.unlink(missing_ok=True)

    def _paths(self, steps: range) -> list[epath.Path]:
        return list(self.directory.glob(f"{_range(steps)}-*.{self._kind}"))

    def _name(self, steps: range, content: bytes) -> str:
        return f"{_range(steps)}-{hashlib.sha256(content).hexdigest()[:16]}.{self._kind}"


def _range(steps: range) -> str:
    return f"{steps[0]:09d}-{steps[-1]:09d}"
