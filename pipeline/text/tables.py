"""Tables: rows of columnar files, of which only the columns that are asked for are read."""

import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from etils import epath

from pipeline.errors import InvalidValue
from pipeline.fs.fork import Handles
from pipeline.text import files
from pipeline.text.notes import note, note_read
from pipeline.text.source import Piece
from pipeline.text.values import Half, Single, decode_bytes

# A row counts as at least this many bytes, since a short one may stand for a long text.
ROW = 64

NUMBERED = "have a number in {!r} whose name the file has, and a template gets the number"

# What numbers become whose digits a Python float would make up.
NARROW = {pa.float16(): Half, pa.float32(): Single}


class TableFile:
    """An open file.

    Args:
        schema: its columns.
        sizes: the rows and the bytes of each group.
        read: reads columns of a group: `read(group, first row in it, rows, columns)`.

    Attributes:
        names: its columns.
        types: the type of each.
        groups: the first row of each group, its rows, and its bytes.
        labels: for columns that have numbers that stand for names, these names, by the path to
            the numbers, such as `s[k]`, or `l[]` in a list.
    """

    def __init__(
        self,
        schema: pa.Schema,
        sizes: Sequence[tuple[int, int]],
        read: Callable[[int, int, int, list[str]], pa.Table],
    ):
        self.names, self.types, self.read = schema.names, schema.types, read
        firsts = itertools.accumulate((rows for rows, _ in sizes), initial=0)
        self.groups = [(first, *size) for first, size in zip(firsts, sizes, strict=False)]
        self.labels = _labels_of(schema)


def _labels_of(schema: pa.Schema) -> dict[str, Any]:
    """The names that a data set of Hugging Face has for the numbers of its columns."""
    try:
        described = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: dict(_find_labels(feature, name)) for name, feature in described.items()}
    except (KeyError, TypeError, AttributeError, ValueError):
        return {}


def _find_labels(feature: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The paths to numbers that stand for names in a feature of Hugging Face, and the names."""
    kind = feature.get("_type") if isinstance(feature, dict) else None
    if kind == "ClassLabel":
        yield path, feature["names"]
    elif isinstance(feature, list) or isinstance(kind, str):  # a list, by its old or new name
        for entry in feature[:1] if isinstance(feature, list) else [feature.get("feature")]:
            yield from _find_labels(entry, f"{path}[]")
    elif isinstance(feature, dict):
        for name, field in feature.items():
            yield from _find_labels(field, f"{path}[{name}]")


class TableFormat(Handles):
    """A format of files that hold rows in groups.

    A record is a mapping with an entry for each column. A column is read when a record is first
    asked for it, and from then on for many rows at once; others are never read or decoded. Group
    `i` of `n` counts as beginning at byte `size * i // n` of its file, so that no file is opened to
    cut shards. One file at a time is open.

    Args:
        name: see `files.Format`.
        prefix: see `files.Format`; the columns follow.
        open: opens a file.
        columns: the columns that records have; None: all.
    """

    unit = "row"
    handles = ("_latest",)
    _latest: tuple[Any, Any] = None, None  # the file that was opened last, and in which thread

    def __init__(
        self,
        name: str,
        prefix: str,
        open: Callable[[epath.Path], TableFile],
        columns: Sequence[str] | None,
    ):
        self.name, self._open = name, open
        self.columns = None if columns is None else list(columns)
        self.prefix = prefix if self.columns is None else f"{prefix}-{'+'.join(self.columns)}"
        self._asked: set[str] = set()
        self.restart()

    def is_whole(self, path: epath.Path) -> bool:
        """See `files.Format`."""
        return False

    def guard(self, path: epath.Path, function: Callable, *arguments: Any) -> Any:
        """See `files.guard`."""
        return files.guard(path, self.name, function, *arguments)

    def open_file(self, path: epath.Path) -> TableFile:
        """A file, which stays open until another one is opened."""
        key, (latest, file) = (path, threading.get_ident()), self._latest
        if latest == key:
            return file
        file = self.guard(path, self._open, path)
        if missing := [name for name in self.columns or () if name not in file.names]:
            raise InvalidValue(
                f"{os.fspath(path)} has no column {missing[0]!r} (its columns: "
                f"{', '.join(file.names)}); choose among them"
            )
        if twice := [name for name in self.columns or () if file.names.count(name) > 1]:
            raise InvalidValue(f"{os.fspath(path)} has several columns {twice[0]!r}; rename them")
        self._latest = key, file
        return file

    def read(
        self, path: epath.Path, begin: int, end: int, start: Any, size: int
    ) -> Iterator[Piece]:
        """See `files.Format`."""
        total, file = path.stat().length, self.open_file(path)
        names, count = self.columns or file.names, len(file.groups)
        first, row = start or (0, 0)
        # Those that begin in the span: `begin <= total * group // count < end`.
        in_span = range(max(-(-begin * count // total), first), -(-end * count // total))
        groups = [group for group in in_span if file.groups[group][1]]
        for group in groups:
            before, rows, size_of_group = file.groups[group]
            mean = max(size_of_group / rows, ROW)
            step = max(int(size / mean), 1)
            for at in range(row, rows, step):
                stop = min(at + step, rows)
                batch = _Batch(self, path, (group, at, stop - at), file.labels)
                records = [_Record(batch, names, number) for number in range(stop - at)]
                following = [group, stop] if stop < rows else [group + 1, 0]
                yield Piece(
                    os.fspath(path),
                    records,
                    range(before + at, before + stop),
                    int(mean * (stop - at)),
                    following if following[0] <= groups[-1] else None,
                )
            row = 0


class _Batch:
    """Some rows of a group, whose columns are read when they are asked for."""

    def __init__(
        self,
        source: TableFormat,
        path: epath.Path,
        where: tuple[int, int, int],
        labels: Mapping[str, Any],
    ):
        self._source, self._path, self._where, self.labels = source, path, where, labels
        self._table: pa.Table | None = None
        self._values: dict[str, list[Any]] = {}

    def values(self, name: str) -> list[Any]:
        """The value of a column in each row, or the error of one that cannot be read."""
        if name not in self._values:
            try:
                column = self._column(name)
                values = _values_of(column)
                is_binary = "binary" in str(column.type)
                self._values[name] = [*map(decode_bytes, values)] if is_binary else values
            except InvalidValue as error:
                self._values[name] = [error] * self._where[2]
        return self._values[name]

    def _column(self, name: str) -> pa.ChunkedArray:
        file, asked = self._source.open_file(self._path), self._source._asked
        columns = file.names
        if (count := columns.count(name)) > 1:
            raise InvalidValue(f"{count} columns have the name {name!r}; rename them")
        table = self._table
        if table is None or name not in table.column_names:
            asked.add(name)
            wanted = [
                column for column in columns if column in asked and columns.count(column) == 1
            ]
            table = self._table = self._source.guard(self._path, file.read, *self._where, wanted)
        return table.column(name)


class _Record(Mapping[str, Any]):
    """A row."""

    __slots__ = "_batch", "_names", "_row"

    def __init__(self, batch: _Batch, names: Sequence[str], row: int):
        self._batch, self._names, self._row = batch, names, row

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        note_read(name)
        value = self._batch.values(name)[self._row]
        if isinstance(value, InvalidValue):
            raise value
        if value is not None:
            for path, names in self._batch.labels.get(name, {}).items():
                note(NUMBERED.format(path), f"it has {value!r:.60} of {names!r:.60}")
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return repr(dict(self))


def _values_of(column: pa.ChunkedArray) -> list[Any]:
    """The value of each row, or the error of one that cannot be read."""
    try:
        # Arrow trusts the offsets of a file, and would read outside of it.
        column.validate(full=True)
        return _keep_widths(column.to_pylist(), column.type)
    except (pa.ArrowException, ValueError, OverflowError) as error:
        if len(column) == 1:
            return [InvalidValue(f"its column of {column.type} cannot be read: {error}")]
        return [value for row in range(len(column)) for value in _values_of(column.slice(row, 1))]


def _keep_widths(values: list[Any], of: pa.DataType) -> list[Any]:
    """Values of a type, in which numbers of 16 and 32 bits are no longer than these."""
    if isinstance(of, pa.BaseExtensionType):
        return _keep_widths(values, of.storage_type)
    if pa.types.is_dictionary(of):
        return _keep_widths(values, of.value_type)
    if kind := NARROW.get(of):
        return [None if value is None else kind(value) for value in values]
    if not any(str(narrow) in str(of) for narrow in NARROW):
        return values
    if pa.types.is_struct(of):
        for field in of:
            structs = [value for value in values if value is not None]
            entries = _keep_widths([struct[field.name] for struct in structs], field.type)
            for struct, entry in zip(structs, entries, strict=True):
                struct[field.name] = entry
    elif pa.types.is_map(of):
        kinds = of.key_type, of.item_type
        for pairs in filter(None, values):
            columns = map(_keep_widths, map(list, zip(*pairs, strict=True)), kinds)
            pairs[:] = zip(*columns, strict=True)
    elif hasattr(of, "value_type"):
        return [
            None if entries is None else _keep_widths(entries, of.value_type) for entries in values
        ]
    return values


class Tables(files.Files):
    """Records from files that hold rows in groups; the base of a class for each kind of them.

    Args:
        paths: names or globs, one or several.
    """

    format: TableFormat

    def groups(self) -> Iterator[tuple[str, pa.Table]]:
        """Each group of rows in order, with its place in words; none of them stays in memory."""
        for path in self.files:
            file = self.format.open_file(path)
            names = self.format.columns or file.names
            for number, (before, rows, _) in enumerate(file.groups):
                table = self.format.guard(path, file.read, number, 0, rows, names)
                # Arrow trusts the offsets of a file, and would read outside of it.
                self.format.guard(path, lambda table=table: table.validate(full=True))
                yield f"{os.fspath(path)}, from row {before} on,", table

    def names(self) -> set[str]:
        """See `Sharded`."""
        return {name for path in self.files for name in self.format.open_file(path).names}

    def types(self) -> dict[str, pa.DataType]:
        """The type of each column of the first file."""
        first = self.format.open_file(self.files[0])
        return dict(zip(first.names, first.types, strict=True))
