"""Lines of text files, and whole text files, as records."""

import math
import os
from collections.abc import Callable, Iterator
from typing import IO, Any

from etils import epath

from pipeline.errors import InvalidValue, require_one_of
from pipeline.fs.atomic import as_path
from pipeline.text.sources import files
from pipeline.text.sources.content import LONGEST, is_packed, open_text
from pipeline.text.sources.source import Block, Blocks, Shard, shard_bytes
from pipeline.text.values import read_json

# Bytes that are read at once to count lines.
COUNTED = 1 << 24

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class LineSource(files.FileSource):
    """Records from lines; the base of `TextFiles` and `JsonLines`.

    A line belongs to the span in which its first byte is.
    """

    keep_blank = False  # whether a blank line is a record

    _parse: Callable[[str], dict[str, Any]]

    def read(self, shard: Shard, start: Any = None) -> Iterator[Block]:
        """See `Sharded`."""
        span, at = start or (0, None)
        blocks = Blocks(shard, "byte")
        for number in range(span, len(shard.spans)):
            file, begin, end = shard.spans[number]
            path = self.files[file]
            with open_text(path) as content:
                end = end if content.seekable() else math.inf
                if at is None:
                    at = _skip_line(content, begin, end)
                else:
                    _skip(content, at)
                while data := _read_some(content, blocks, path, at, end):
                    self._add(blocks, path, data, at)
                    at += len(data)
                    more = at < end
                    if not blocks.room and (more or number < len(shard.spans) - 1):
                        yield blocks.take([number, at] if more else [number + 1, None])
            at = None
        yield blocks.take(None)

    def _add(self, blocks: Blocks, path: epath.Path, data: bytes, at: int) -> None:
        """Adds the records of some lines, the first of which begins at byte `at` of a file."""
        records, places = list[Any](), list[int]()
        for line in data.removesuffix(b"\n").split(b"\n"):
            if line.strip() not in (b"", BYTE_ORDER_MARK):
                records.append(self._record(line.rstrip(b"\r\n"), at))
                places.append(at)
            elif self.keep_blank:
                records.append({"text": ""})
                places.append(at)
            at += len(line) + 1
        blocks.add(os.fspath(path), records, places, len(data))

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

    def where(self, block: Block, number: int) -> str:
        """The file, line and byte of a record; the lines before it are counted now."""
        file, at = block.places[number]
        with open_text(as_path(file)) as content:
            line, left = 1, at
            while left and (data := content.read(min(left, COUNTED))):
                line, left = line + data.count(b"\n"), left - len(data)
        return f"{file}, line {line:,} (byte {at:,})"


def _read_some(content: IO[bytes], blocks: Blocks, path: epath.Path, at: int, end: float) -> bytes:
    """The lines of a file that begin from byte `at` on, and before `end`, to complete the block.

    If the file cannot be read there, the block gets that error in place of all further records.
    """
    count = int(min(blocks.room, end - at))
    try:
        data = content.read(count) if count > 0 else b""
        if not data or data.endswith(b"\n"):
            return data
        rest = content.readline(LONGEST)
        if len(rest) < LONGEST:
            return data + rest
        seen = f"it has a line of more than {len(rest):,} bytes; divide it"
    except InvalidValue as error:
        seen = str(error)
    wrong = InvalidValue(f"the rest of the file cannot be read: {seen}")
    blocks.add(os.fspath(path), [wrong], [at], 0)
    return b""


def _skip(content: IO[bytes], at: int) -> None:
    """Goes to byte `at` of a file."""
    if content.seekable():
        content.seek(at)
    else:
        while at and (data := content.read(min(at, COUNTED))):
            at -= len(data)


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

    def _is_whole(self, path: epath.Path) -> bool:
        return self.sample_by == "file" or super()._is_whole(path)

    def read(self, shard: Shard, start: Any = None) -> Iterator[Block]:
        """See `Sharded`."""
        if self.sample_by == "line":
            yield from super().read(shard, start)
            return
        blocks = Blocks(shard, "byte")
        for number in range(start or 0, len(shard.spans)):
            path = self.files[shard.spans[number][0]]
            record, size = self._read_whole(path)
            blocks.add(os.fspath(path), [record], [0], size)
            if not blocks.room and number < len(shard.spans) - 1:
                yield blocks.take(number + 1)
        yield blocks.take(None)

    def _read_whole(self, path: epath.Path) -> tuple[Any, int]:
        """The record of a file, or its error, and the size of its text."""
        try:
            with open_text(path) as content:
                data = content.read(LONGEST)
                if content.read(1):
                    raise InvalidValue(f"it holds a text of more than {LONGEST:,} bytes; divide it")
        except InvalidValue as error:
            return error, 0
        return self._record(data, 0), len(data)

    def where(self, block: Block, number: int) -> str:
        """See `Sharded`."""
        by_file = self.sample_by == "file"
        return block.places[number][0] if by_file else super().where(block, number)

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

    def shards(self) -> list[Shard]:
        """See `Sharded`.

        A span is the number of a pair of files, the bytes of the inputs at which its records begin,
        the byte of the targets to read from, and the lines there to skip.
        """
        pairs = list(zip(*(side.files for side in self.sides), strict=True))
        sizes = [size for size, _ in files.read_stamps(self.files)]
        step, at = shard_bytes(sum(sizes)), 0
        spans: dict[int, list[tuple[int, ...]]] = {}
        for pair, (paths, size) in enumerate(zip(pairs, sizes, strict=True)):
            first, of_inputs, of_targets = at // step, list[int](), list[int]()
            last = first
            if not (whole := any(map(is_packed, paths))):
                (of_inputs, _), (of_targets, _) = self._count(pair)
                last = (at + max(size, 1) - 1) // step
            for shard in range(first, last + 1):
                begin = max(shard * step - at, 0)
                end = size if shard == last else (shard + 1) * step - at
                target = (0, 0) if whole else _find_line(paths[0], of_inputs, begin, of_targets)
                spans.setdefault(shard, []).append((pair, begin, end, *target))
            at += size
        return [
            Shard(each, sum(end - begin for _, begin, end, *_ in each)) for each in spans.values()
        ]

    def _count(self, pair: int) -> list[tuple[list[int], int]]:
        """For each file of a pair, the result of `_count_lines`; refuses unequal numbers."""
        paths = [side.files[pair] for side in self.sides]
        counts = list(map(_count_lines, paths))
        (_, of_inputs), (_, of_targets) = counts
        if of_inputs != of_targets:
            raise InvalidValue(
                f"{os.fspath(paths[0])} has {of_inputs:,} lines and {os.fspath(paths[1])} has "
                f"{of_targets:,}, counting blank ones; give parallel texts with equally many lines"
            )
        return counts

    def read(self, shard: Shard, start: Any = None) -> Iterator[Block]:
        """See `Sharded`."""
        span, *at = start or (0,)
        blocks, (inputs, targets) = Blocks(shard, "byte"), self.sides
        for number in range(span, len(shard.spans)):
            pair, begin, end, byte, lines = shard.spans[number]
            path, other = inputs.files[pair], targets.files[pair]
            with open_text(path) as content, open_text(other) as beside:
                end = end if content.seekable() else math.inf
                if at:
                    _skip(content, at[0])
                    _skip(beside, at[1])
                else:
                    at = [_skip_line(content, begin, end), byte]
                    _skip(beside, byte)
                    at[1] += sum(len(beside.readline()) for _ in range(lines))
                while data := _read_some(content, blocks, path, at[0], end):
                    due = data.count(b"\n") + (not data.endswith(b"\n"))
                    others = [beside.readline() for _ in range(due)]
                    if not others[-1]:
                        self._count(pair)  # which refuses them
                    self._add(blocks, pair, data.split(b"\n")[:due], others, *at)
                    at = [at[0] + len(data), at[1] + sum(map(len, others))]
                    more = at[0] < end
                    if not blocks.room and (more or number < len(shard.spans) - 1):
                        yield blocks.take([number, *at] if more else [number + 1])
                if end == math.inf and beside.read(1):
                    self._count(pair)
            at = []
        yield blocks.take(None)

    def _add(
        self, blocks: Blocks, pair: int, one: list[bytes], other: list[bytes], at: int, beside: int
    ) -> None:
        """Adds the records of lines, which begin at the bytes `at` and `beside` of their files."""
        records, places, size = list[Any](), list[int](), 0
        for lines in zip(one, other, strict=True):
            sides = []
            for side, line, byte in zip(self.sides, lines, (at, beside), strict=True):
                text = line.rstrip(b"\r\n") if line.strip() else b""
                record = side._record(text, byte)
                if isinstance(record, Exception):
                    record = InvalidValue(f"in {os.fspath(side.files[pair])}, {record}")
                sides.append(record)
            wrong = [side for side in sides if isinstance(side, Exception)]
            texts = () if wrong else (side["text"] for side in sides)
            records.append(wrong[0] if wrong else dict(zip(self.fields, texts, strict=True)))
            places.append(at)
            size += sum(map(len, lines)) + 1
            at, beside = at + len(lines[0]) + 1, beside + len(lines[1])
        blocks.add(os.fspath(self.files[pair]), records, places, size)

    def where(self, block: Block, number: int) -> str:
        """See `Sharded`."""
        return self.sides[0].where(block, number)

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
    path: epath.Path, ends: list[int], begin: int, of_other: list[int]
) -> tuple[int, int]:
    """Where in another file the first line is that begins at byte `begin` of a file, or later.

    `ends` and `of_other` are the line ends before each `COUNTED` bytes of both. The result is a
    byte of the other file, and the number of line ends to skip from there.
    """
    if not begin:
        return 0, 0
    block = (begin - 1) // COUNTED
    with path.open("rb") as content:
        content.seek(block * COUNTED)
        line = ends[block] + content.read(begin - 1 - block * COUNTED).count(b"\n") + 1
    block = sum(count < line for count in of_other) - 1
    return block * COUNTED, line - of_other[block]
