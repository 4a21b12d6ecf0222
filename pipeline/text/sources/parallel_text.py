"""Parallel text: two texts of which line i of one belongs to line i of the other."""

import os
from collections.abc import Sequence
from typing import Any

from pipeline.errors import InvalidValue
from pipeline.text.sources import files
from pipeline.text.sources.parts import Parts
from pipeline.text.sources.source import read_texts, where
from pipeline.text.sources.text_files import TextFiles


class ParallelText(Parts):
    """Records `{"inputs": …, "targets": …}`: line i of one text and line i of another.

    A blank line is an empty text, so that the lines after it stay beside each other.

    Args:
        inputs: names or globs of UTF-8 files, plain, `.gz` or `.zst`.
        targets: as many; each has as many lines as the file at its place in `inputs`.

    Raises:
        FileNotFoundError: a file does not exist, or a glob matches none.
        ValueError: the numbers of files differ; or, when lines are counted or read, the numbers of
            lines of two files, or a line is not UTF-8.
    """

    fields = "inputs", "targets"

    def __init__(self, inputs: files.Paths, targets: files.Paths):
        self.sides = tuple(TextFiles(paths, keep_blank=True) for paths in (inputs, targets))
        of_inputs, of_targets = (len(side.files) for side in self.sides)
        if of_inputs != of_targets:
            raise InvalidValue(
                f"there are {of_inputs:,} files of inputs and {of_targets:,} of targets; give as "
                "many of both, in the same order"
            )

    @property
    def fingerprint(self) -> str:
        """See `Source`."""
        return "parallel-" + "-".join(side.fingerprint for side in self.sides)

    @property
    def _sizes(self) -> list[int]:
        inputs, targets = self.sides
        counts = zip(inputs._sizes, targets._sizes, strict=True)
        for number, (of_inputs, of_targets) in enumerate(counts):
            if of_inputs != of_targets:
                raise InvalidValue(
                    f"{os.fspath(inputs.files[number])} has {of_inputs:,} lines and "
                    f"{os.fspath(targets.files[number])} has {of_targets:,}, blank ones counted; "
                    "parallel texts need as many lines of both, line i with line i"
                )
        return [len(inputs)]

    def _read(self, part: int, numbers: Sequence[int]) -> list[dict[str, Any]]:
        texts = (read_texts(side, numbers, "text") for side in self.sides)
        return [dict(zip(self.fields, pair, strict=True)) for pair in zip(*texts, strict=True)]

    def _where(self, part: int, number: int) -> str:
        return " and ".join(where(side, number) for side in self.sides)

    def __str__(self) -> str:
        return " beside ".join(map(str, self.sides))
