"""Lines of text files, and whole text files, as records."""

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from typing import IO, Any

from etils import epath

from pipeline.errors import InvalidValue, require_one_of
from pipeline.text.sources import files
from pipeline.text.sources.content import COUNTED, LONGEST, is_packed, open_text
from pipeline.text.sources.source import Piece, Shard
from pipeline.text.values import read_json

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class LineSource(files.FileSource):
    """Records from lines; the base of `TextFiles` and `JsonLines`.

    A line belongs to the span in which its first byte is.
    """

    keep_blank = False  # whether a blank line is a record

    _parse: Callable[[str], dict[str, Any]]

    def _read_span(self, span: Any, start: Any, size: int) -> Iterator[Piece]:
        file, begin, end = span
        name = os.fspath(self.files[file])
        with contextlib.ExitStack() as stack:
            try:
                content = stack.enter_context(open_text(self.files[file]))
            except InvalidValue as error:
                if not self._is_whole(file):
                    raise
                yield Piece(name, [_rest(error)], [0], 0, None)
                return
            end = end if content.seekable() else math.inf
            at = _skip_line(content, begin, end) if start is None else _skip(content, start)
            for data in _read_lines(content, at, end, size):
                if isinstance(data, InvalidValue):
                    yield Piece(name, [data], [at], 0, None)
                    return
                records, places = self._split(data, at)
                at += len(data)
                yield Piece(name, records, places, len(data), at if at < end else None)

    def _split(self, data: bytes, at: int) -> tuple[list[Any], list[int]]:
        """The records of some lines that begin at byte `at` of a file, and where each begins."""
        records, places = list[Any](), list[int]()
        for line in data.removesuffix(b"\n").split(b"\n"):
            if line.strip() not in (b"", BYTE_ORDER_MARK):
                records.append(self._record(line.rstrip(b"\r\n"), at))
                places.append(at)
            elif self.keep_blank:
                records.append({"text": ""})
                places.append(at)
            at += len(line) + 1
        return records, places

    def _record(self, content: bytes, at: int) -> Any:
        """The record that begins at byte `at` of a file, or the error of one that is wrong."""
        try:
            text = content.decode()
            # Files that were joined have a byte order mark where each began, and some tools add a
            # second one. Not "utf-8-sig", whose errors count bytes from after the mark.
            return self._parse(text.lstrip("\ufeff"))
        except UnicodeDecodeError as error:
            return InvalidValue(
                f"it is not UTF-8: byte {at + error.start:,} of the file is "
                f"0x{content[error.start]:02x} ({error.reason}). Convert the file to UTF-8, for "
                "example with iconv"
            )
        except InvalidValue as error:
            return error


def _rest(error: InvalidValue) -> InvalidValue:
    """The error in place of the records that a file would have had."""
    return InvalidValue(f"the rest of the file cannot be read: {error}")


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
            yield _rest(error)
            return
        if not data:
            return
        yield data
        at += len(data)


def _skip(content: IO[bytes], at: int) -> int:
    """Goes to byte `at` of a file; returns it."""
    left = 0 if content.seekable() else at
    while left and (data := content.read(min(left, COUNTED))):
        left -= len(data)
    return content.seek(at) if content.seekable() else at


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


class TextFiles(LineSource):
    """Records `{"text": …}` from UTF-8 files, plain or packed; see `content`.

    Args:
        paths: names or globs, one or several.
        sample_by: "line" makes a record of each line that is not blank, without its end; "file"
            makes one of each file.
        keep_blank: whether a blank line is a record of empty text, so that record i is line i.
    """

    def __init__(self, paths: files.Paths, *, sample_by: str = "line", keep_blank: bool = False):
        require_one_of("sample_by", sample_by, ("line", "file"))
        super().__init__(paths)
        self.sample_by, self.keep_blank = sample_by, keep_blank
        self.format = f"text, a record per {sample_by},"
        self.prefix = f"text-{sample_by}" + "-or-blank" * keep_blank
        self.unit = "byte" if sample_by == "line" else ""

    def _is_whole(self, file: int) -> bool:
        return self.sample_by == "file" or super()._is_whole(file)

    def _read_span(self, span: Any, start: Any, size: int) -> Iterator[Piece]:
        if self.sample_by == "line":
            yield from super()._read_span(span, start, size)
            return
        path = self.files[span[0]]
        data = b""
        try:
            with open_text(path) as content:
                data = content.read(LONGEST)
                if content.read(1):
                    raise InvalidValue(f"it holds a text of more than {LONGEST:,} bytes; divide it")
            record = self._record(data, 0)
        except InvalidValue as error:
            record = error
        yield Piece(os.fspath(path), [record], [0], len(data), None)

    def _parse(self, text: str) -> dict[str, Any]:
        if "\0" in text:
            raise InvalidValue(
                "it has NUL bytes, as a crash leaves in a file and as binary files have; "
                "remove them"
            )
        return {"text": text}


class JsonLines(LineSource):
    """Records from UTF-8 files, plain or packed, that hold a JSON object per line.

    Args:
        paths: names or globs, one or several. Blank lines are skipped.
    """

    format, prefix = "JSON lines", "jsonl"

    def _parse(self, text: str) -> dict[str, Any]:
        try:
            record = read_json(text)
        except InvalidValue as error:
            raise InvalidValue(
                f"{error}. Each line must hold one whole JSON object; correct or remove that line, "
                "or convert an array with jq -c '.[]'"
            ) from None
        if not isinstance(record, dict):
            raise InvalidValue(
                f"it holds a JSON {type(record).__name__}; each line must hold an object, such as "
                '{"text": "…"}; convert an array with jq -c \'.[]\''
            )
        return record


class ParallelText(files.FileSource):
    """Records `{"inputs": …, "targets": …}`: line i of one text and line i of another.

    A blank line is an empty text, so that the lines after it stay aligned. Lines of plain files are
    counted before they are read, so that shards can begin inside a file. A pair of files of which
    one is compressed is in one shard.

    Args:
        inputs: names or globs of UTF-8 files, plain or packed; see `content`.
        targets: as many files; each has as many lines as the file at its place in `inputs`.

    Raises:
        ValueError: the numbers of files differ, or, when they are read, those of their lines.
    """

    fields = "inputs", "targets"

    def __init__(self, inputs: files.Paths, targets: files.Paths):
        found = [files.find(paths) for paths in (inputs, targets)]
        of_inputs, of_targets = map(len, found)
        if of_inputs != of_targets:
            raise InvalidValue(
                f"there are {of_inputs:,} files of inputs and {of_targets:,} of targets; give "
                "equally many, in the same order"
            )
        found = files.leave_out_repeats(*found)  # a text may have several translations
        self.sides = tuple(TextFiles(each[0], keep_blank=True) for each in found)
        for side, each in zip(self.sides, found, strict=True):
            side.files = each
        self.files = found[0]

    @property
    def fingerprint(self) -> str:
        """See `Source`."""
        return "parallel-" + "-".join(side.fingerprint for side in self.sides)

    def _is_whole(self, file: int) -> bool:
        return any(is_packed(side.files[file]) for side in self.sides)

    def shards(self) -> list[Shard]:
        """See `Sharded`.

        A span is the number of a pair of files, the bytes of the inputs at which its records begin,
        the byte of the targets to read from, and the lines there to skip.
        """
        shards, counts = super().shards(), dict[int, list[list[int]]]()
        for shard in shards:
            for number, (pair, begin, end) in enumerate(shard.spans):
                target = 0, 0
                if begin:
                    if pair not in counts:
                        counts[pair] = self._count(pair)
                    target = _find_line(self.files[pair], begin, *counts[pair])
                shard.spans[number] = pair, begin, end, *target
        return shards

    def _count(self, pair: int) -> list[list[int]]:
        """For each file of a pair, the result of `_count_lines`; refuses unequal numbers."""
        paths = [side.files[pair] for side in self.sides]
        (ends, of_inputs), (others, of_targets) = map(_count_lines, paths)
        if of_inputs != of_targets:
            raise InvalidValue(
                f"{os.fspath(paths[0])} has {of_inputs:,} lines and {os.fspath(paths[1])} has "
                f"{of_targets:,}, counting blank ones; give parallel texts with equally many lines"
            )
        return [ends, others]

    def _read_span(self, span: Any, start: Any, size: int) -> Iterator[Piece]:
        pair, begin, end, byte, lines = span
        paths = [side.files[pair] for side in self.sides]
        with open_text(paths[0]) as content, open_text(paths[1]) as beside:
            end = end if content.seekable() else math.inf
            if start is None:
                at, other = _skip_line(content, begin, end), _skip(beside, byte)
                other += sum(len(beside.readline()) for _ in range(lines))
            else:
                at, other = map(_skip, (content, beside), start)
            for data in _read_lines(content, at, end, size):
                if isinstance(data, InvalidValue):
                    yield Piece(os.fspath(paths[0]), [data], [at], 0, None)
                    return
                rows = data.count(b"\n") + (not data.endswith(b"\n"))
                others = [beside.readline() for _ in range(rows)]
                if not others[-1]:
                    self._count(pair)  # which refuses them
                records, places = self._pair(pair, data, at, b"".join(others), other)
                at, other = at + len(data), other + sum(map(len, others))
                following = [at, other] if at < end else None
                yield Piece(os.fspath(paths[0]), records, places, len(data), following)
            if not content.read(1) and beside.read(1):
                self._count(pair)

    def _pair(
        self, pair: int, data: bytes, at: int, others: bytes, other: int
    ) -> tuple[list[Any], list[int]]:
        """The records of lines, which begin at the bytes `at` and `other` of their files."""
        (inputs, places), (targets, _) = (
            side._split(lines, byte)
            for side, lines, byte in zip(self.sides, (data, others), (at, other), strict=True)
        )
        records = list[Any]()
        for sides in zip(inputs, targets, strict=True):
            wrong = [n for n, each in enumerate(sides) if isinstance(each, Exception)]
            if wrong:
                path = os.fspath(self.sides[wrong[0]].files[pair])
                records.append(InvalidValue(f"in {path}, {sides[wrong[0]]}"))
            else:
                texts = (side["text"] for side in sides)
                records.append(dict(zip(self.fields, texts, strict=True)))
        return records, places

    def __str__(self) -> str:
        return " beside ".join(map(str, self.sides))


def _count_lines(path: epath.Path) -> tuple[list[int], int]:
    """The line ends before each `COUNTED` bytes of a file, and the number of its lines."""
    ends, last = [0], b"\n"
    with open_text(path) as content:
        while data := content.read(COUNTED):
            ends.append(ends[-1] + data.count(b"\n"))
            last = data[-1:]
    return ends[: max(len(ends) - 1, 1)], ends[-1] + (last != b"\n")


def _find_line(
    path: epath.Path, begin: int, ends: list[int], of_other: list[int]
) -> tuple[int, int]:
    """Where in another file the first line is that begins at byte `begin` of a file, or later.

    `ends` and `of_other` are the line ends before each `COUNTED` bytes of both. The result is a
    byte of the other file, and the number of line ends to skip from there.
    """
    block = (begin - 1) // COUNTED
    with path.open("rb") as content:
        content.seek(block * COUNTED)
        line = ends[block] + content.read(begin - 1 - block * COUNTED).count(b"\n") + 1
    block = sum(count < line for count in of_other) - 1
    return block * COUNTED, line - of_other[block]
