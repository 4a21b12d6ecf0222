"""Parts: the values of fixed ranges of steps on disk, until all of them are there."""

import io
from collections.abc import Iterator, Mapping

import numpy as np
from etils import epath

from pipeline.errors import InvalidValue
from pipeline.history.loss_archive import StepFiles

# The steps of a part; a run that was killed repeats less than a part. Nothing else decides the
# ranges, so every number of hosts writes the same parts.
STEPS = 64


class Parts:
    """The parts of a range of steps: files that never change.

    A part has arrays with a line for each segment. A damaged part counts as missing.

    Args:
        directory: where they are; nothing else may be there.
        steps: all steps.

    Attributes:
        ranges: the steps of each part.
    """

    def __init__(self, directory: epath.Path, steps: range):
        self._files = StepFiles(directory, "npz")
        self.ranges = [steps[at : at + STEPS] for at in range(0, len(steps), STEPS)]

    def count(self) -> int:
        """How many parts, from the first one on, are whole."""
        contents = map(self._files.read, self.ranges)
        return next((n for n, each in enumerate(contents) if each is None), len(self.ranges))

    def __iter__(self) -> Iterator[Mapping[str, np.ndarray]]:
        """All parts, in the order of their steps.

        Raises:
            ValueError: one is missing or damaged.
        """
        for steps in self.ranges:
            if (content := self._files.read(steps)) is None:
                raise InvalidValue(
                    f"the scores of steps {steps[0]:,} to {steps[-1]:,} in {self._files.directory} "
                    "are missing or damaged; score again, which runs these steps again"
                )
            yield np.load(io.BytesIO(content))

    def write(self, number: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Writes a part, whole or not at all."""
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **arrays)
        self._files.write(self.ranges[number], buffer.getvalue())

    def remove(self) -> None:
        """Removes all parts, and the files of interrupted writes."""
        if self._files.directory.exists():
            self._files.directory.rmtree()
