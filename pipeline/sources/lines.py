"""Lines of many files by number, through a sparse index that one pass over the files builds."""

import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from etils import epath

from pipeline.sources import files

# The index holds the place of every 32nd line: half a byte per line, and at most 31 lines are
# read in vain to reach one at random. Lines in order are read without looking at the index.
STRIDE = 32
BLOCK = 1 << 20


@dataclass(frozen=True)
class Line:
    """One line without its end, and where it is."""

    file: epath.Path
    number: int  # from 1, blank lines counted
    offset: int  # of its first byte, after decompression
    content: bytes

    def __str__(self) -> str:
        return f"{os.fspath(self.file)}, line {self.number}"

    def text(self) -> str:
        """The line as text; a byte order mark at the start of a file is left out.

        Raises:
            ValueError: it is not UTF-8; names the file, the line and the byte.
        """
        try:
            text = self.content.decode()
            # Not "utf-8-sig", whose errors count bytes from after the mark.
            return text.removeprefix("\ufeff") if self.offset == 0 else text
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self} is not UTF-8: byte {self.offset + error.start:,} of the file is "
                f"0x{self.content[error.start]:02x} ({error.reason}). Convert the file to UTF-8, "
                "for example with iconv"
            ) from None


class LineSource(files.FileSource):
    """Records from all lines that are not blank; the base of `TextFiles` and `JsonLines`."""

    handles = ("_cursor",)

    def _parse(self, line: Line) -> dict[str, Any]:
        """The record that a line holds."""
        raise NotImplementedError

    @functools.cached_property
    def _index(self) -> tuple[list[list[tuple[int, int]]], list[int], int]:
        """Marks of each file, the number of its first record and of all records, blank lines.

        A mark is the (offset, line number) of every 32nd line that is not blank.
        """
        marks: list[list[tuple[int, int]]] = []
        first, blank = [0], 0
        for path in self.files:
            marks.append([])
            count = 0
            for line in _scan(path, 0, 1):
                if not line.content:
                    blank += 1
                    continue
                if count % STRIDE == 0:
                    marks[-1].append((line.offset, line.number))
                count += 1
            first.append(first[-1] + count)
        return marks, first, blank

    @functools.cached_property
    def _cursor(self) -> tuple[int, int, Iterator[Line]]:
        """Where reading stopped: a file, the number of its next line, and an iterator from it."""
        return -1, 0, iter(())

    @property
    def blank_lines(self) -> int:
        """How many lines were skipped because they are blank."""
        return self._index[2]

    def __len__(self) -> int:
        return self._index[1][-1]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """The records with these numbers; cheapest ascending, which compressed files need."""
        return [self._parse(line) for line in self._read(indices)]

    def where(self, index: int) -> str:
        """The file of a record, and its line."""
        return str(self._read([index])[0])

    def _read(self, indices: Sequence[int]) -> list[Line]:
        with self._lock:
            return [self._read_line(index) for index in indices]

    def _read_line(self, index: int) -> Line:
        marks, first, _ = self._index
        file, within = files.locate(first, index)
        latest, following, lines = self._cursor
        del self._cursor  # should reading fail
        path, skip = self.files[file], index - following
        far = skip < 0 or (skip >= STRIDE and not files.is_compressed(path))
        if far or file != latest:
            rank, skip = divmod(within, STRIDE)
            lines = (line for line in _scan(path, *marks[file][rank]) if line.content)
        line = next(itertools.islice(lines, skip, None), None)
        if line is None:
            raise ValueError(
                f"{os.fspath(path)} has fewer lines than when it was opened; open the source anew"
            )
        self._cursor = file, index + 1, lines
        return line


def _scan(path: epath.Path, offset: int, number: int) -> Iterator[Line]:
    """The lines of one file from a place on; lines of white space alone have no content."""
    with files.open_file(path) as file:
        if not files.is_compressed(path):
            file.seek(offset)
        else:
            left = offset
            while left:
                left -= len(file.read(min(left, BLOCK)))
        for content in file:
            text = b"" if content.isspace() else content.rstrip(b"\r\n")
            yield Line(path, number, offset, text)
            offset += len(content)
            number += 1
