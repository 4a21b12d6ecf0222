"""Tables: rows of columnar files, of which only the columns that are asked for are read."""

import abc
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from etils import epath

from pipeline.errors import InvalidValue
from pipeline.fs.atomic import is_local
from pipeline.text.sources import files
from pipeline.text.sources.source import Block, Blocks, Shard

# A row counts as at least this many bytes, since a short one may stand for a long text.
ROW = 64


class Tables(files.FileSource):
    """Records from files that hold rows in groups; the base of `ParquetFiles` and `ArrowFiles`.

    A record is a mapping with an entry for each column. A column is read when a record is first
    asked for it, and from then on for many rows at once; others are never read or decoded. Group
    `i` of `n` counts as beginning at byte `size * i // n` of its file, so that no file is opened to
    cut shards. One file at a time is open.

    Args:
        paths: names or globs, one or several.
        columns: the columns that records have; None: all.
    """

    _open: type["_Groups"]

    handles = ("_latest",)
    _latest: tuple[Any, Any] = None, None  # the file that was opened last

    def __init__(self, paths: files.Paths, *, columns: Sequence[str] | None = None):
        super().__init__(paths)
        self.columns = None if columns is None else list(columns)
        self._asked: set[str] = set()
        if self.columns is not None:
            self.prefix += f"-{'+'.join(self.columns)}"

    def _is_whole(self, path: epath.Path) -> bool:
        return False

    def _open_file(self, path: epath.Path) -> "_Groups":
        if self._latest[0] == path:
            return self._latest[1]
        found = self._guard(path, self._open, path)
        if missing := [name for name in self.columns or () if name not in found.names]:
            raise InvalidValue(
                f"{os.fspath(path)} has no column {missing[0]!r} (its columns: "
                f"{', '.join(found.names)}); choose among them with columns="
            )
        self._latest = path, found
        return found

    def groups(self) -> Iterator[tuple[str, pa.Table]]:
        """Each group of rows in order, with its place in words; none of them stays in memory."""
        for path in self.files:
            found = self._open_file(path)
            names = self.columns or found.names
            for number, before in enumerate(itertools.accumulate(found.rows[:-1], initial=0)):
                if number < len(found.rows):
                    where = number, 0, found.rows[number]
                    table = self._guard(path, found.read, *where, names)
                    # Arrow trusts the offsets of a file, and would read outside of it.
                    self._guard(path, lambda table=table: table.validate(full=True))
                    yield f"{os.fspath(path)}, from row {before} on,", table

    def read(self, shard: Shard, start: Any = None) -> Iterator[Block]:
        """See `Sharded`."""
        span, first, row = start or (0, 0, 0)
        blocks = Blocks(shard, "row")
        for number in range(span, len(shard.spans)):
            file, begin, end = shard.spans[number]
            path, last = self.files[file], number == len(shard.spans) - 1
            size = path.stat().length
            found = self._open_file(path)
            rows, names = found.rows, self.columns or found.names
            mine = [n for n in range(len(rows)) if begin <= size * n // len(rows) < end]
            for unit in mine:
                if unit < first or not rows[unit]:
                    continue
                mean = max(found.bytes_of(unit) / rows[unit], ROW)
                step, before = max(int(shard.block / mean), 1), sum(rows[:unit])
                while row < rows[unit]:
                    count = min(step, rows[unit] - row)
                    batch = _Batch(self, path, (unit, row, count))
                    records = [_Record(batch, names, at) for at in range(count)]
                    at = range(before + row, before + row + count)
                    blocks.add(os.fspath(path), records, at, int(mean * count))
                    row += count
                    following = [number, unit, row] if row < rows[unit] else [number, unit + 1, 0]
                    if not blocks.room and not (last and following[1] > mine[-1]):
                        yield blocks.take(following)
                row = 0
            first = row = 0
        yield blocks.take(None)


class _Batch:
    """Some rows of a group, whose columns are read when they are asked for."""

    def __init__(self, source: Tables, path: epath.Path, where: tuple[int, int, int]):
        self._source, self._path, self._where = source, path, where
        self._table: pa.Table | None = None
        self._values: dict[str, list[Any]] = {}

    def values(self, name: str) -> list[Any]:
        """The value of a column in each row, or the error of one that cannot be read."""
        if name not in self._values:
            try:
                self._values[name] = _values_of(self._column(name))
            except InvalidValue as error:
                self._values[name] = [error] * self._where[2]
        return self._values[name]

    def _column(self, name: str) -> pa.ChunkedArray:
        asked, groups = self._source._asked, self._source._open_file(self._path)
        names = groups.names
        if names.count(name) > 1:
            raise InvalidValue(f"{names.count(name)} columns have the name {name!r}; rename them")
        if self._table is None or name not in self._table.column_names:
            asked.add(name)
            wanted = [each for each in names if each in asked and names.count(each) == 1]
            self._table = self._source._guard(self._path, groups.read, *self._where, wanted)
        return self._table.column(name)


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
        value = self._batch.values(name)[self._row]
        if isinstance(value, InvalidValue):
            raise value
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"a row with the columns {', '.join(self._names)}"


def _values_of(column: pa.ChunkedArray) -> list[Any]:
    """The value of each row, or the error of one that cannot be read."""
    try:
        # Arrow trusts the offsets of a file, and would read outside of it.
        column.validate(full=True)
        return column.to_pylist()
    except (pa.ArrowException, ValueError, OverflowError) as error:
        if len(column) == 1:
            return [InvalidValue(f"its column of {column.type} cannot be read: {error}")]
        return [value for row in range(len(column)) for value in _values_of(column.slice(row, 1))]


class _Groups(abc.ABC):
    """The groups of an open file.

    Attributes:
        names: of the columns.
        rows: the number of rows of each group.
    """

    names: list[str]
    rows: list[int]

    @abc.abstractmethod
    def __init__(self, path: epath.Path): ...

    @abc.abstractmethod
    def bytes_of(self, group: int) -> int:
        """About the bytes of a group, however few columns are read of it."""

    @abc.abstractmethod
    def read(self, group: int, first: int, count: int, names: Sequence[str]) -> pa.Table:
        """Some columns of `count` rows of a group, from `first` on."""


class _ParquetGroups(_Groups):
    def __init__(self, path: epath.Path):
        from pyarrow import parquet

        self._file = parquet.ParquetFile(path if is_local(path) else path.open("rb"))
        self._groups = list(map(self._file.metadata.row_group, range(self._file.num_row_groups)))
        self.names = self._file.schema_arrow.names
        self.rows = [group.num_rows for group in self._groups]
        # What is read, up to which row, and the batches that follow.
        self._following: tuple[Any, int, Iterator[pa.RecordBatch]] = None, 0, iter(())

    def bytes_of(self, group: int) -> int:
        return self._groups[group].total_byte_size

    def read(self, group: int, first: int, count: int, names: Sequence[str]) -> pa.Table:
        of, at, batches = self._following
        if (of, at) != ((group, names), first):
            of, at = (group, list(names)), 0
            batches = self._file.iter_batches(count, row_groups=[group], columns=of[1])
        found: list[pa.RecordBatch] = []
        while at < first + count:
            batch = next(batches)
            skipped, taken = max(first - at, 0), min(batch.num_rows, first + count - at)
            found += [batch.slice(skipped, taken - skipped)] if skipped < taken else []
            at += taken
            if taken < batch.num_rows:
                batches = itertools.chain([batch.slice(taken)], batches)
        self._following = of, at, batches
        return pa.Table.from_batches(found)


class ParquetFiles(Tables):
    """Records from Parquet files, one for each row; see `Tables` for the arguments.

    A row group is read by one worker, in batches, so it may be of any size.
    """

    format, prefix, _open = "Parquet", "parquetfiles", _ParquetGroups


class _ArrowGroups(_Groups):
    def __init__(self, path: epath.Path):
        local = is_local(path)
        self._raw = pa.memory_map(os.fspath(path)).read_buffer() if local else path.read_bytes()
        self._opened: tuple[list[int], int, Any] = [-1], 0, None
        self._latest: tuple[Any, Any] = None, None  # a group is decompressed once
        try:
            schema = pa.ipc.open_file(self._raw).schema
        except pa.ArrowInvalid:  # no footer: a stream, as Hugging Face writes it
            schema = pa.ipc.open_stream(self._raw).schema
        self.names = schema.names
        # To count rows, the narrowest column is enough.
        fields = sorted(range(len(schema)), key=lambda field: _width(schema.field(field).type))
        groups, read = self._open(fields[:1])
        self.rows = [read(group).num_rows for group in range(groups)]

    def _open(self, fields: list[int]) -> tuple[int, Callable[[int], pa.RecordBatch]]:
        """The number of groups, and a function that reads some columns of one."""
        if self._opened[0] != fields:
            options = pa.ipc.IpcReadOptions(included_fields=fields)
            try:
                file = pa.ipc.open_file(self._raw, options=options)
                self._opened = fields, file.num_record_batches, file.get_batch
            except pa.ArrowInvalid:
                batches = list(pa.ipc.open_stream(self._raw, options=options))
                self._opened = fields, len(batches), batches.__getitem__
        return self._opened[1:]

    def bytes_of(self, group: int) -> int:
        return len(self._raw) * self.rows[group] // sum(self.rows)

    def read(self, group: int, first: int, count: int, names: Sequence[str]) -> pa.Table:
        fields = [field for field, name in enumerate(self.names) if name in names]
        if self._latest[0] != (group, fields):
            self._latest = (group, fields), self._open(fields)[1](group)
        return pa.Table.from_batches([self._latest[1].slice(first, count)])


def _width(of: pa.DataType) -> int:
    """The bits of a value; of text and lists, which have no fixed number, very many."""
    try:
        return of.bit_width
    except ValueError:
        return 1 << 30


class ArrowFiles(Tables):
    """Records from Arrow IPC files or streams, and Feather files; see `Tables` for the arguments.

    Local files are mapped into memory; only columns of compressed record batches are ever copied.
    The files of a Hugging Face data set that was saved to disk are `DIRECTORY/data-*.arrow`.
    """

    format, prefix, _open = "Arrow", "arrowfiles", _ArrowGroups
