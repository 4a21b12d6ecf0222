"""Step files: files of ranges of steps, named by their steps and their digest."""

import dataclasses
import hashlib
import re

from etils import epath

from pipeline.fs.atomic import atomic_write, make_directory


@dataclasses.dataclass(frozen=True)
class StepFiles:
    """Files `FIRST-LAST-DIGEST.KIND` of ranges of steps, whole or absent, which never change.

    The digest of the bytes detects damage.
    """

    directory: epath.Path
    kind: str

    def ranges(self) -> list[range]:
        """The steps of each file, in order."""
        name = re.compile(rf"(\d+)-(\d+)-[0-9a-f]+\.{self.kind}")
        found = [name.fullmatch(path.name) for path in self.directory.glob(f"*.{self.kind}")]
        steps = sorted((int(each[1]), int(each[2])) for each in found if each)
        return [range(first, last + 1) for first, last in steps]

    def read(self, steps: range) -> bytes | None:
        """The content of the file of some steps; None if it is missing or damaged."""
        for path in self.directory.glob(self._name(steps, "*")):
            content = path.read_bytes()
            if path.name == self._name(steps, _digest(content)):
                return content
        return None

    def write(self, steps: range, content: bytes) -> None:
        """Writes the file of some steps, whole or not at all."""
        path = make_directory(self.directory) / self._name(steps, _digest(content))
        with atomic_write(path) as file:
            file.write(content)

    def remove(self, first: int) -> None:
        """Removes the files that begin at step `first` or later."""
        for steps in self.ranges():
            for path in self.directory.glob(self._name(steps, "*")) if steps[0] >= first else ():
                path.unlink(missing_ok=True)

    def _name(self, steps: range, digest: str) -> str:
        return f"{steps[0]:09d}-{steps[-1]:09d}-{digest}.{self.kind}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
