"""Text as records: the format with a record in each line, and that with one in each file."""

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from etils import epath

from pipeline.errors import InvalidValue
from pipeline.text.content import COUNTED, LONGEST, decode, fail_rest, is_packed, open_text, skip
from pipeline.text.source import Piece

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

RETURNS = (
    "if they end lines, as spreadsheets write text for old systems, convert the file with tr "
    "'\\r' '\\n'; else end the line with a line feed"
)


@dataclass(frozen=True)
class Lines:
    """A format with a record in each line; a line belongs to the span in which its first byte is.

    Attributes:
        name, prefix, unit: see `files.Format`.
        parse: the record of the text of a line.
    """

    name: str
    prefix: str
    parse: Callable[[str], dict[str, Any]]
    unit: str = "byte"

    def is_whole(self, path: epath.Path) -> bool:
        """See `files.Format`."""
        return is_packed(path)

    def read(
        self, path: epath.Path, begin: int, end: float, start: Any, size: int
    ) -> Iterator[Piece]:
        """See `files.Format`."""
        name = os.fspath(path)
        with contextlib.ExitStack() as stack:
            try:
                content = stack.enter_context(open_text(path))
            except InvalidValue as error:
                if not self.is_whole(path):
                    raise
                yield Piece(name, [fail_rest(error)], [0], 0, None)
                return
            end = end if content.seekable() else math.inf
            at = _skip_line(content, begin, end) if start is None else skip(content, start)
            for data in _read_lines(content, at, end, size):
                if isinstance(data, InvalidValue):
                    yield Piece(name, [data], [at], 0, None)
                    return
                records, offsets = self._split(data, at)
                size_of_piece = len(data)
                del data  # a line may be very long
                at += size_of_piece
                yield Piece(name, records, offsets, size_of_piece, at if at < end else None)

    def _split(self, data: bytes, at: int) -> tuple[list[Any], list[int]]:
        """The records of some lines that begin at byte `at` of a file, and where each begins."""
        records, offsets = list[Any](), list[int]()
        if at == 0 and b"\n" not in data and b"\r" in data.strip():
            return [InvalidValue(f"its only line has carriage returns; {RETURNS}")], [at]
        for line in data.removesuffix(b"\n").split(b"\n"):
            if line.strip() not in (b"", BYTE_ORDER_MARK):
                records.append(_record(line.rstrip(b"\r\n"), at, self.parse))
                offsets.append(at)
            at += len(line) + 1
        return records, offsets


def _record(content: bytes, at: int, parse: Callable[[str], dict[str, Any]]) -> Any:
    """The record that begins at byte `at` of a file, or the error of one that is wrong."""
    try:
        # Files that were joined have a byte order mark where each began, and some tools add a
        # second one. Not "utf-8-sig", whose errors count bytes from after the mark.
        return parse(decode(content, at).lstrip("\ufeff"))
    except InvalidValue as error:
        return error


def _read_lines(
    content: IO[bytes], at: int, end: float, size: int
) -> Iterator[bytes | InvalidValue]:
    """The lines that begin from byte `at` on and before `end`, about `size` bytes at once.

    If a file cannot be read to its end, the error comes in place of all further lines.
    """
    while at < end:
        try:
            data = content.read(int(min(size, end - at)))
            if data and not data.endswith(b"\n"):
                rest = content.readline(LONGEST)
                if len(rest) == LONGEST:
                    raise InvalidValue(f"it has a line of more than {LONGEST:,} bytes; divide it")
                data += rest
        except InvalidValue as error:
            yield fail_rest(error)
            return
        if not data:
            return
        yield data
        at += len(data)


def _skip_line(content: IO[bytes], begin: int, end: float) -> int:
    """Goes to the first line from byte `begin` on, or at most to `end`; returns where."""
    at = begin - 1
    if at < 0:
        return 0
    content.seek(at)
    while at < end and (data := content.readline(COUNTED)):
        at += len(data)
        if data.endswith(b"\n"):
            break
    return at


@dataclass(frozen=True)
class Whole:
    """A format with a record of each file; see `Lines`."""

    name: str
    prefix: str
    parse: Callable[[str], dict[str, Any]]
    unit: str = ""

    def is_whole(self, path: epath.Path) -> bool:
        """See `files.Format`."""
        return True

    def read(
        self, path: epath.Path, begin: int, end: int, start: Any, size: int
    ) -> Iterator[Piece]:
        """See `files.Format`."""
        data = b""
        try:
            with open_text(path) as content:
                data = content.read(LONGEST)
                if content.read(1):
                    raise InvalidValue(f"it holds a text of more than {LONGEST:,} bytes; divide it")
            record = _record(data, 0, self.parse)
        except InvalidValue as error:
            record = error
        yield Piece(os.fspath(path), [record], [0], len(data), None)
