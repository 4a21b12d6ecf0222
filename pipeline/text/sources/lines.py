"""Lines of text files by number, through a sparse index that one pass over the files builds."""

import functools
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from etils import epath

from pipeline.errors import InvalidValue, require_one_of
from pipeline.text.sources import files
from pipeline.text.sources.source import PartedSource, read_texts, where

# The index holds the place of every 32nd line: half a byte per line, and at most 31 lines are
# read and skipped to reach any line. Reading in order does not use the index.
STRIDE = 32
BLOCK = 1 << 20  # bytes that are skipped at once


@dataclass(frozen=True)
class Line:
    """One line without its end, or a whole file, and where it is."""

    file: epath.Path
    number: int  # from 1, blank lines counted
    offset: int  # of its first byte, after decompression
    content: bytes

    def __str__(self) -> str:
        return f"{os.fspath(self.file)}, line {self.number}"

    def text(self) -> str:
        """The line as text, without a byte order mark at the start of a file."""
        try:
            text = self.content.decode()
            # Not "utf-8-sig", whose errors count bytes from after the mark.
            return text.removeprefix("\ufeff") if self.offset == 0 else text
        except UnicodeDecodeError as error:
            number = self.number + self.content.count(b"\n", 0, error.start)
            raise InvalidValue(
                f"{os.fspath(self.file)}, line {number} is not UTF-8: byte "
                f"{self.offset + error.start:,} of the file is 0x{self.content[error.start]:02x} "
                f"({error.reason}). Convert the file to UTF-8, for example with iconv"
            ) from None


class LineSource(files.FileSource):
    """Records from lines; the base of `TextFiles` and `JsonLines`."""

    handles = ("_cursor",)
    keep_blank = False  # whether a blank line is a record
    # The place where reading stopped: a file, the number of its next line, and an iterator from it.
    _cursor: tuple[int, int, Iterator[Line]] = -1, 0, iter(())

    _parse: Callable[[Line], dict[str, Any]]

    @functools.cached_property
    def _index(self) -> tuple[list[list[tuple[int, int]]], list[int]]:
        """Marks of each file, and the number of its records.

        A mark is the (offset, line number) of every 32nd line that is a record.
        """
        marks: list[list[tuple[int, int]]] = []
        sizes = []
        for path in self.files:
            marks.append([])
            sizes.append(0)
            for line in filter(self._is_record, _scan(path, 0, 1)):
                if sizes[-1] % STRIDE == 0:
                    marks[-1].append((line.offset, line.number))
                sizes[-1] += 1
        return marks, sizes

    def _is_record(self, line: Line) -> bool:
        return self.keep_blank or bool(line.content)

    def _sizes(self) -> list[int]:
        return self._index[1]

    def _read(self, part: int, numbers: Sequence[int]) -> list[dict[str, Any]]:
        with self._lock:
            return [self._parse(self._read_line(part, number)) for number in numbers]

    def _where(self, part: int, number: int) -> str:
        with self._lock:
            return str(self._read_line(part, number))

    def _read_line(self, file: int, number: int) -> Line:
        marks = self._index[0][file]
        latest, following, lines = self._cursor
        self._cursor = LineSource._cursor  # in case reading fails
        path, skip = self.files[file], number - following
        # A seek costs more than reading on in a compressed file, and over a few lines.
        near = skip < STRIDE or path.suffix in files.COMPRESSED
        if file != latest or skip < 0 or not near:
            rank, skip = divmod(number, STRIDE)
            lines = filter(self._is_record, _scan(path, *marks[rank]))
        line = next(itertools.islice(lines, skip, None), None)
        if line is None:
            raise InvalidValue(
                f"{os.fspath(path)} has fewer lines than when it was opened; open the source again"
            )
        self._cursor = file, number + 1, lines
        return line


class TextFiles(LineSource):
    """Records `{"text": …}` from UTF-8 files, plain, `.gz` or `.zst`.

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

    def _parse(self, line: Line) -> dict[str, Any]:
        return {"text": line.text()}

    def _sizes(self) -> list[int]:
        return [1] * len(self.files) if self.sample_by == "file" else super()._sizes()

    def _read_line(self, file: int, number: int) -> Line:
        if self.sample_by == "line":
            return super()._read_line(file, number)
        with files.open_file(self.files[file]) as content:
            return Line(self.files[file], 1, 0, content.read())

    def _where(self, part: int, number: int) -> str:
        by_file = self.sample_by == "file"
        return os.fspath(self.files[part]) if by_file else super()._where(part, number)


class JsonLines(LineSource):
    """Records from UTF-8 files, plain, `.gz` or `.zst`, that hold a JSON object per line.

    Args:
        paths: names or globs, one or several. Blank lines are skipped.
    """

    format, prefix = "JSON lines", "jsonl"

    def _parse(self, line: Line) -> dict[str, Any]:
        text = line.text()
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            raise InvalidValue(
                f"{line} is not valid JSON: {error.msg} at column {error.colno}. Each line must "
                "hold one whole JSON object; correct or remove that line"
            ) from None
        except (RecursionError, ValueError) as error:  # Python limits both
            raise InvalidValue(
                f"{line} cannot be read: its JSON is nested too deeply, or has a number of too "
                f"many digits ({error}). Correct or remove that line"
            ) from None
        if not isinstance(record, dict):
            raise InvalidValue(
                f"{line} holds a JSON {type(record).__name__}; each line must hold an object, such "
                'as {"text": "…"}'
            )
        return record


class ParallelText(PartedSource):
    """Records `{"inputs": …, "targets": …}`: line i of one text and line i of another.

    A blank line is an empty text, so that the lines after it stay aligned.

    Args:
        inputs: names or globs of UTF-8 files, plain, `.gz` or `.zst`.
        targets: as many files; each has as many lines as the file at its place in `inputs`.

    Raises:
        ValueError: the numbers of files differ, or, once lines are counted, those of their lines.
    """

    fields = "inputs", "targets"

    def __init__(self, inputs: files.Paths, targets: files.Paths):
        self.sides = tuple(TextFiles(paths, keep_blank=True) for paths in (inputs, targets))
        of_inputs, of_targets = (len(side.files) for side in self.sides)
        if of_inputs != of_targets:
            raise InvalidValue(
                f"there are {of_inputs:,} files of inputs and {of_targets:,} of targets; give "
                "equally many, in the same order"
            )

    @property
    def fingerprint(self) -> str:
        """See `Source`."""
        return "parallel-" + "-".join(side.fingerprint for side in self.sides)

    def _sizes(self) -> list[int]:
        inputs, targets = self.sides
        counts = zip(inputs._sizes(), targets._sizes(), strict=True)
        for number, (of_inputs, of_targets) in enumerate(counts):
            if of_inputs != of_targets:
                raise InvalidValue(
                    f"{os.fspath(inputs.files[number])} has {of_inputs:,} lines and "
                    f"{os.fspath(targets.files[number])} has {of_targets:,}, counting blank ones; "
                    "give parallel texts with equally many lines"
                )
        return [len(inputs)]

    def _read(self, part: int, numbers: Sequence[int]) -> list[dict[str, Any]]:
        texts = (read_texts(side, numbers, "text") for side in self.sides)
        return [dict(zip(self.fields, pair, strict=True)) for pair in zip(*texts, strict=True)]

    def _where(self, part: int, number: int) -> str:
        return " and ".join(where(side, number) for side in self.sides)

    def __str__(self) -> str:
        return " beside ".join(map(str, self.sides))


def _scan(path: epath.Path, offset: int, number: int) -> Iterator[Line]:
    """The lines of one file from a place on; lines of only white space have no content."""
    with files.open_file(path) as file:
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
            yield line.pop()  # popped, so that the generator does not keep a huge line
