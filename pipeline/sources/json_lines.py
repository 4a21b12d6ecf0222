"""JSON lines: a JSON object per line."""

import functools
import json
from collections.abc import Sequence
from typing import Any

from pipeline.sources import files
from pipeline.sources.lines import Line, Lines


class JsonLines:
    """Records from UTF-8 files, plain, `.gz` or `.zst`, that hold a JSON object per line.

    Args:
        paths: names or globs, one or several. Blank lines are skipped.

    Raises:
        FileNotFoundError: a file does not exist, or a glob matches none.
        ValueError: from reading, when a line is not UTF-8 or not a JSON object; names the line.
    """

    def __init__(self, paths: files.Paths):
        self.files = files.find(paths)

    @functools.cached_property
    def _lines(self) -> Lines:
        return Lines(self.files)

    @functools.cached_property
    def fingerprint(self) -> str:
        """See `Source`; from names, sizes and content samples of the files."""
        return f"jsonl-{files.digest(self.files)}"

    @property
    def blank_lines(self) -> int:
        """How many lines were skipped because they are blank."""
        return self._lines.blank

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """The records with these numbers."""
        return [_parsed(line) for line in self._lines.read(indices)]

    def where(self, index: int) -> str:
        """The file of a record, and its line."""
        return str(self._lines.read([index])[0])

    def __str__(self) -> str:
        return f"JSON lines of {files.described(self.files)}"


def _parsed(line: Line) -> dict[str, Any]:
    try:
        record = json.loads(line.text())
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{line} is broken JSON: {error.msg} at column {error.colno}. Each line must hold one "
            "whole JSON object; mend or remove that line"
        ) from None
    if not isinstance(record, dict):
        raise ValueError(
            f"{line} holds a JSON {type(record).__name__}; each line must hold an object, such as "
            '{"text": "…"}'
        )
    return record
