"""CSV: files of rows with the names of their cells in the first one, as records."""

import contextlib
import csv
import dataclasses
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from etils import epath

from pipeline.errors import InvalidType, InvalidValue
from pipeline.text import files
from pipeline.text.content import LONGEST, NULS, decode, fail_rest, open_text, skip
from pipeline.text.source import Doubted, Piece

ADVICE = (
    "put cells with a delimiter, a quote or a line break in quotes, and double quotes in them; or "
    "name the file's own delimiter=, quotechar=, escapechar= or skipinitialspace="
)

RETURN = (
    "it has a carriage return outside of quotes, without a line feed after it; if these are the "
    "ends of its lines, change them, for example with tr '\\r' '\\n'; else put the cell in quotes"
)

ROWS = "have lines that are each a row if quotes are text; if so, give quotechar=''"

JOINED = (
    "files that were joined have such rows where each began: remove it, or give the files one by "
    "one"
)


@dataclass(frozen=True)
class Dialect:
    """How the cells of a row are told apart; see `Csv`."""

    delimiter: str = ","
    quotechar: str | None = '"'
    escapechar: str | None = None
    doublequote: bool = True
    skipinitialspace: bool = False

    def read(self, lines: Iterator[str]) -> Iterator[list[str]]:
        """The cells of each row.

        Raises:
            TypeError, ValueError: the dialect has other values than the standard library takes, or
                one character for two purposes.
        """
        signs = [self.delimiter, self.quotechar, self.escapechar, "\r", "\n"]
        signs = [sign for sign in signs if sign is not None]
        if len({*signs}) < len(signs):
            raise InvalidValue("a delimiter, a quote, an escape and a line end must differ")
        quoting: Any = csv.QUOTE_MINIMAL if self.quotechar else csv.QUOTE_NONE
        return csv.reader(lines, strict=True, quoting=quoting, **dataclasses.asdict(self))


class _Lines(Iterator[str]):
    """The lines of a file from a byte on, with their ends.

    Attributes:
        at: the byte after the last one that was read.
        wrong: what the lines that were read since this was None have, which no record may have.
        row: the lines that were read since it was cleared, of one row; none: the next begins one.
    """

    def __init__(self, content: IO[bytes]):
        self._content, self.at = content, 0
        self.wrong: InvalidValue | None = None
        self.row: list[str] = []

    def __next__(self) -> str:
        line = self._content.readline(LONGEST)
        if not line:
            raise StopIteration
        if len(line) == LONGEST:
            raise InvalidValue(f"it has a line of more than {LONGEST:,} bytes; divide it")
        begin, self.at = self.at, self.at + len(line)
        if b"\0" in line:
            self.wrong = InvalidValue(NULS)
            line = line.replace(b"\0", b"")
        try:
            text = decode(line, begin)
        except InvalidValue as error:
            self.wrong = error
            text = line.decode(errors="replace")  # where the row ends is known all the same
        if begin and not self.row and text.startswith("\ufeff"):
            self.wrong = self.wrong or InvalidValue(f"it begins with a byte order mark; {JOINED}")
        self.row.append(text.lstrip("\ufeff") if begin == 0 else text)
        return self.row[-1]

    def skip(self, at: int) -> None:
        """Goes to a byte after those that were read."""
        skip(self._content, at, self.at)
        self.at = at


@dataclass(frozen=True)
class Rows:
    """The format; a quoted cell may have line breaks, so a file is read from its start.

    Attributes:
        dialect: how cells are told apart.
    """

    dialect: Dialect
    name = "CSV"
    unit = "byte"

    @property
    def prefix(self) -> str:
        """See `files.Format`."""
        other = dataclasses.asdict(self.dialect).items() - dataclasses.asdict(Dialect()).items()
        return "-".join(["csv", *(f"{name}={value!r}" for name, value in sorted(other))])

    def is_whole(self, path: epath.Path) -> bool:
        """See `files.Format`."""
        return True

    def read(
        self, path: epath.Path, begin: int, end: int, start: Any, size: int
    ) -> Iterator[Piece]:
        """See `files.Format`."""
        # A process-wide limit, by default of 131,072 characters in a cell.
        csv.field_size_limit(max(csv.field_size_limit(), LONGEST))
        name, records, offsets = os.fspath(path), list[Any](), list[int]()
        first = at = start or 0
        try:
            with contextlib.ExitStack() as stack:
                lines = _Lines(stack.enter_context(open_text(path)))
                names = _read_names(self.dialect, lines)
                if start is not None:
                    lines.skip(start)
                first = at = lines.at
                for cells, wrong in _read_rows(self.dialect, lines):
                    if cells:
                        record = wrong or _as_record(names, cells)
                        is_doubted = len(lines.row) > 1 and _are_rows(self.dialect, cells)
                        if is_doubted and isinstance(record, dict):
                            record = Doubted(record, ROWS)
                        records.append(record)
                        offsets.append(at)
                    at = lines.at
                    if at - first >= size:
                        yield Piece(name, records, offsets, at - first, at)
                        records, offsets, first = [], [], at
        except InvalidValue as error:
            records, offsets = [*records, fail_rest(error)], [*offsets, at]
        yield Piece(name, records, offsets, at - first, None)


def _read_names(dialect: Dialect, lines: _Lines) -> list[str]:
    """The names in the first row that is not blank; none of an empty file.

    Raises:
        ValueError: it is no row of names, or a name is there twice.
    """
    rows = _read_rows(dialect, lines)
    names, wrong = next((row for row in rows if row[0]), ([], None))
    if wrong:
        raise wrong
    if names and names[0].lower().startswith("sep="):
        raise InvalidValue(
            f"its first line, {dialect.delimiter.join(names)!r}, tells spreadsheets the delimiter; "
            "remove that line, and give its sign as delimiter="
        )
    others = [sign for sign in ",;\t|" if len(names) == 1 and sign in names[0]]
    if others:
        raise InvalidValue(
            f"its first row is one name, {names[0]!r}; give delimiter={others[0]!r} if that is "
            "between cells, or else a name without it"
        )
    if twice := [name for name in names if names.count(name) > 1]:
        raise InvalidValue(
            f"its first row names {twice[0]!r} twice; it must have a name for each column: give "
            "each its own"
        )
    return names


def _read_rows(dialect: Dialect, lines: _Lines) -> Iterator[tuple[list[str], InvalidValue | None]]:
    """The cells of each row, and what is wrong with its text; none of a blank line."""
    rows, spaced = dialect.read(lines), f" {dialect.quotechar}"
    may_be_spaced = dialect.quotechar is not None and not dialect.skipinitialspace
    while True:
        lines.wrong, lines.row = None, []
        try:
            cells = next(rows, None)
        except csv.Error as error:  # where the next row begins is not known any more
            why = RETURN if "new-line" in f"{error}" else f"{error}; {ADVICE}"
            raise InvalidValue(f"from here on it is no CSV: {why}") from None
        if cells is None:
            return
        if may_be_spaced and spaced in lines.row[0]:
            lines.wrong = lines.wrong or _find_spaced(dialect, cells, lines.row[0])
        yield cells, lines.wrong


def _find_spaced(dialect: Dialect, cells: list[str], line: str) -> InvalidValue | None:
    """The error of a row with a space before the quotes of a cell, since they are text so."""
    quote = re.escape(dialect.quotechar or "")
    quoted = f" +{quote}(?:[^{quote}]|{quote}{quote})+{quote} *"
    for cell in cells:
        is_spaced = cell[:1] == " " and re.fullmatch(quoted, cell)
        # In quotes, such a cell has each of its own quotes twice, or after an escape.
        if is_spaced and (f"{dialect.delimiter}{cell}" in line or line.startswith(cell)):
            return InvalidValue(
                f"it has a space before a quote, {cell!r:.60}, so that its quotes are text; give "
                "skipinitialspace=True to leave the space out, or quotechar='' if quotes are text"
            )
    return None


def _are_rows(dialect: Dialect, cells: list[str]) -> bool:
    """Whether each line of a row with several has all cells, with text, if quotes are text.

    Those of prose and code seldom have, since a space or nothing is beside their delimiters.
    """
    delimiter = dialect.delimiter
    lines = (line.split(delimiter) for line in delimiter.join(cells).split("\n"))
    return len(cells) > 1 and all(
        len(line) == len(cells) and all(cell[:1].strip() for cell in line) for line in lines
    )


def _as_record(names: list[str], cells: list[str]) -> Any:
    """A row as a dict, or its error."""
    if cells == names and len(names) > 1:
        return InvalidValue(f"it repeats the names of the first row; {JOINED}")
    if len(cells) == len(names):
        return dict(zip(names, cells, strict=True))
    return InvalidValue(
        f"it has {len(cells):,} cells, and the first row names {len(names):,} "
        f"({', '.join(names)}); {ADVICE}"
    )


class Csv(files.Files):
    """Records from CSV files in UTF-8, plain or packed, a text for each name in the first row.

    Each row must have a cell for each name. Cells are not changed: numbers are as they are written,
    and one without characters is an empty text. A byte order mark and blank lines are left out. A
    file is read by one worker, several files by several.

    Args:
        paths: names or globs, one or several.
        delimiter: the character between cells; a tab may be a backslash and a t, as in a shell.
        quotechar: the character around cells that have others of these; None or "": quotes are
            text.
        escapechar: the character that makes the next one text; None: there is none.
        doublequote: whether a quote in a quoted cell is doubled.
        skipinitialspace: whether spaces after a delimiter are left out.

    Raises:
        ValueError: an option has another value than the `csv` of the standard library takes.
    """

    extensions = (".csv",)

    def __init__(
        self,
        paths: files.Paths,
        *,
        delimiter: str = ",",
        quotechar: str | None = '"',
        escapechar: str | None = None,
        doublequote: bool = True,
        skipinitialspace: bool = False,
    ):
        delimiter = "\t" if delimiter == r"\t" else delimiter
        dialect = Dialect(
            delimiter, quotechar or None, escapechar or None, doublequote, skipinitialspace
        )
        try:
            dialect.read(iter(()))
        except (TypeError, ValueError) as error:
            kind = InvalidType if isinstance(error, TypeError) else InvalidValue
            raise kind(f"the dialect of CSV is {dialect}, but {error}; correct it") from None
        super().__init__(Rows(dialect), paths)
