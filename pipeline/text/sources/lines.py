"""Lines of many files by number, through a sparse index that one pass over the files builds."""

import collections
import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from etils import epath

from pipeline.errors import InvalidValue
from pipeline.text.sources import files
from pipeline.text.sources.gzip_stream import STEP, Point

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
            raise InvalidValue(
                f"{self} is not UTF-8: byte {self.offset + error.start:,} of the file is "
                f"0x{self.content[error.start]:02x} ({error.reason}). Convert the file to UTF-8, "
                "for example with iconv"
            ) from None


class LineSource(files.FileSource):
    """Records from lines; the base of `TextFiles` and `JsonLines`."""

    handles = ("_cursor", "_points")
    keep_blank = False  # whether a blank line is a record, too

    def _parse(self, line: Line) -> dict[str, Any]:
        """The record that a line holds."""
        raise NotImplementedError

    @functools.cached_property
    def _index(self) -> tuple[list[list[tuple[int, int]]], list[int], int]:
        """Marks of each file, the number of its records, and of all blank lines.

        A mark is the (offset, line number) of every 32nd line that is a record.
        """
        marks: list[list[tuple[int, int]]] = []
        sizes, blank = [], 0
        for path in self.files:
            marks.append([])
            count = 0
            for line in _scan(path, 0, 1, None):
                if not self._is_record(line):
                    blank += 1
                    continue
                if count % STRIDE == 0:
                    marks[-1].append((line.offset, line.number))
                count += 1
            sizes.append(count)
        return marks, sizes, blank

    @functools.cached_property
    def _cursor(self) -> tuple[int, int, Iterator[Line]]:
        """Where reading stopped: a file, the number of its next line, and an iterator from it."""
        return -1, 0, iter(())

    def _is_record(self, line: Line) -> bool:
        return self.keep_blank or bool(line.content)

    @property
    def _sizes(self) -> list[int]:
        return self._index[1]

    @functools.cached_property
    def _points(self) -> dict[int, list[Point]]:
        """Where seeks in `.gz` files may go on, by the number of the file."""
        return collections.defaultdict(list)

    @property
    def blank_lines(self) -> int:
        """How many lines were skipped because they are blank."""
        return self._index[2]

    def _read(self, part: int, numbers: Sequence[int]) -> list[dict[str, Any]]:
        with self._lock:
            return [self._parse(self._read_line(part, number)) for number in numbers]

    def _where(self, part: int, number: int) -> str:
        with self._lock:
            return str(self._read_line(part, number))

    def _read_line(self, file: int, number: int) -> Line:
        marks = self._index[0][file]
        latest, following, lines = self._cursor
        del self._cursor  # should reading fail
        path, skip = self.files[file], number - following
        rank, rest = divmod(number, STRIDE)
        mark = marks[rank]
        goes_on = file == latest and skip >= 0
        if goes_on and skip >= STRIDE:
            goes_on = not _is_far(path, marks[following // STRIDE], mark)
        if not goes_on:
            scan = _scan(path, *mark, self._points[file])
            lines, skip = filter(self._is_record, scan), rest
        line = next(itertools.islice(lines, skip, None), None)
        if line is None:
            raise InvalidValue(
                f"{os.fspath(path)} has fewer lines than when it was opened; open the source anew"
            )
        self._cursor = file, number + 1, lines
        return line


def _is_far(path: epath.Path, here: tuple[int, int], there: tuple[int, int]) -> bool:
    """Whether a seek from one mark of a file to a later one is cheaper than reading on."""
    if path.suffix == ".zst":
        return False
    return path.suffix != ".gz" or there[0] - here[0] > STEP


def _scan(path: epath.Path, offset: int, number: int, points: list[Point] | None) -> Iterator[Line]:
    """The lines of one file from a place on; lines of white space alone have no content."""
    with files.open_file(path, points) as file:
        if file.seekable():
            file.seek(offset)
        else:
            left = offset
            while left:
                left -= len(file.read(min(left, BLOCK)))
        for content in file:
            text = b"" if content.isspace() else content.rstrip(b"\r\n")
            line = [Line(path, number, offset, text)]
            offset += len(content)
            number += 1
            del content, text
            yield line.pop()  # a line may be huge, and this generator keeps nothing of it
