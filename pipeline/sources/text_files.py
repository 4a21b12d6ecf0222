"""Plain text: a record per line, or per file."""

import functools
import os
from collections.abc import Sequence

from pipeline.sources import files
from pipeline.sources.lines import Line, Lines


class TextFiles:
    """Records `{"text": …}` from UTF-8 files, plain, `.gz` or `.zst`.

    Args:
        paths: names or globs, one or several.
        sample_by: "line" makes a record of each line that is not blank, without its end; "file"
            makes one of each file.

    Raises:
        FileNotFoundError: a file does not exist, or a glob matches none.
        ValueError: from reading, when a file is not UTF-8; names the file, line and byte.
    """

    def __init__(self, paths: files.Paths, *, sample_by: str = "line"):
        if sample_by not in ("line", "file"):
            raise ValueError(f"sample_by is {sample_by!r}; it must be 'line' or 'file'")
        self.files = files.find(paths)
        self.sample_by = sample_by

    @functools.cached_property
    def _lines(self) -> Lines:
        return Lines(self.files)

    @functools.cached_property
    def fingerprint(self) -> str:
        """See `Source`; from names, sizes and content samples of the files."""
        return f"text-{self.sample_by}-{files.digest(self.files)}"

    @property
    def blank_lines(self) -> int:
        """How many lines were skipped because they are blank."""
        return self._lines.blank

    def __len__(self) -> int:
        return len(self._lines if self.sample_by == "line" else self.files)

    def __getitem__(self, index: int) -> dict[str, str]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, str]]:
        """The records with these numbers."""
        if self.sample_by == "line":
            return [{"text": line.text()} for line in self._lines.read(indices)]
        return [{"text": self._whole(index)} for index in indices]

    def where(self, index: int) -> str:
        """The file of a record, and its line."""
        if self.sample_by == "line":
            return str(self._lines.read([index])[0])
        return os.fspath(self.files[index])

    def _whole(self, index: int) -> str:
        path = self.files[index]
        with files.naming(path), files.opened(path) as file:
            content = file.read()
        try:
            return content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            start = content.rfind(b"\n", 0, error.start) + 1
            number = content.count(b"\n", 0, start) + 1
            return Line(path, number, start, content[start : error.end]).text()

    def __str__(self) -> str:
        return f"text, a record per {self.sample_by}, of {files.described(self.files)}"
