"""Lines of many files by number, through a sparse index that one pass over the files builds."""

import bisect
import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
        encoding = "utf-8-sig" if self.offset == 0 else "utf-8"
        try:
            return self.content.decode(encoding)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self} is not UTF-8: byte {self.offset + error.start:,} of the file is "
                f"0x{self.content[error.start]:02x} ({error.reason}). Convert the file to UTF-8, "
                "for example with iconv"
            ) from None


class Lines:
    """All lines of the files that are not blank, numbered from 0; `blank` others are counted."""

    def __init__(self, paths: Sequence[epath.Path]):
        self.files = list(paths)
        self.blank = 0
        self._marks: list[list[tuple[int, int]]] = []  # per file: (offset, line number)
        self._first = [0]  # number of the first line of each file, and of all lines
        for path in self.files:
            marks, count = [], 0
            for line in _scan(path, 0, 1):
                if not line.content:
                    self.blank += 1
                    continue
                if count % STRIDE == 0:
                    marks.append((line.offset, line.number))
                count += 1
            self._marks.append(marks)
            self._first.append(self._first[-1] + count)
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        """Where reading stopped: `_ahead` yields the lines of one file, from number `_next` on."""
        self._file, self._next = -1, 0
        self._ahead: Iterator[Line] = iter(())

    def __len__(self) -> int:
        return self._first[-1]

    def read(self, indices: Sequence[int]) -> list[Line]:
        """The lines with these numbers; cheapest when they ascend, which compressed files need."""
        with self._lock:
            return [self._one(index) for index in indices]

    def _one(self, index: int) -> Line:
        if not 0 <= index < len(self):
            raise IndexError(f"line {index} of {len(self):,}")
        file = bisect.bisect_right(self._first, index) - 1
        path, skip = self.files[file], index - self._next
        far = skip < 0 or (skip >= STRIDE and not files.is_compressed(path))
        if far or file != self._file:
            rank, skip = divmod(index - self._first[file], STRIDE)
            lines = _scan(path, *self._marks[file][rank])
            self._ahead = (line for line in lines if line.content)
        ahead = self._ahead
        self._forget()  # should reading fail
        line = next(itertools.islice(ahead, skip, None), None)
        if line is None:
            raise ValueError(
                f"{os.fspath(path)} has fewer lines than when it was opened; open the source anew"
            )
        self._file, self._next, self._ahead = file, index + 1, ahead
        return line

    def __getstate__(self) -> dict:
        return {key: self.__dict__[key] for key in ("files", "blank", "_marks", "_first")}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state, _lock=threading.Lock())
        self._forget()


def _scan(path: epath.Path, offset: int, number: int) -> Iterator[Line]:
    """The lines of one file, from a place on; those of white space alone have no content."""
    with files.naming(path), files.opened(path) as file:
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
