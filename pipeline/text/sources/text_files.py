"""Plain text: a record per line, or per file."""

import os
from collections.abc import Sequence
from typing import Any

from etils import epath

from pipeline.errors import InvalidValue
from pipeline.text.sources import files
from pipeline.text.sources.lines import Line, LineSource


class TextFiles(LineSource):
    """Records `{"text": …}` from UTF-8 files, plain, `.gz` or `.zst`.

    Args:
        paths: names or globs, one or several.
        sample_by: "line" makes a record of each line that is not blank, without its end; "file"
            makes one of each file.
        keep_blank: whether a blank line is a record of empty text, so that record i is line i.

    Raises:
        FileNotFoundError: a file does not exist, or a glob matches none.
        ValueError: from reading, when a file is not UTF-8; names the file, line and byte.
    """

    def __init__(self, paths: files.Paths, *, sample_by: str = "line", keep_blank: bool = False):
        if sample_by not in ("line", "file"):
            raise InvalidValue(f"sample_by is {sample_by!r}; it must be 'line' or 'file'")
        super().__init__(paths)
        self.sample_by, self.keep_blank = sample_by, keep_blank
        self.format, self.prefix = f"text, a record per {sample_by},", f"text-{sample_by}"
        if keep_blank:
            self.prefix += "-or-blank"

    def _parse(self, line: Line) -> dict[str, Any]:
        return {"text": line.text()}

    @property
    def _sizes(self) -> list[int]:
        return [1] * len(self.files) if self.sample_by == "file" else super()._sizes

    def _read(self, part: int, numbers: Sequence[int]) -> list[dict[str, Any]]:
        if self.sample_by == "line":
            return super()._read(part, numbers)
        return [{"text": _read_text(self.files[part])} for _ in numbers]

    def _where(self, part: int, number: int) -> str:
        by_file = self.sample_by == "file"
        return os.fspath(self.files[part]) if by_file else super()._where(part, number)


def _read_text(path: epath.Path) -> str:
    with files.open_file(path) as file:
        content = file.read()
    try:
        return content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        start = content.rfind(b"\n", 0, error.start) + 1
        number = content.count(b"\n", 0, start) + 1
        return Line(path, number, start, content[start : error.end]).text()
