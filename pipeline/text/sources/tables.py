"""Tables: rows of columnar files, of which only the columns that are asked for are read."""

import functools
import itertools
import json
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
from etils import epath

from pipeline.errors import InvalidValue, counted
from pipeline.fs.atomic import as_path, is_local
from pipeline.fs.fork import Handles
from pipeline.text import files
from pipeline.text.content import LIMIT, RATIO
from pipeline.text.notes import note, note_read
from pipeline.text.source import Piece
from pipeline.text.values import Half, Single, decode_bytes

logger = logging.getLogger(__name__)

# A row counts as at least this many bytes, since a short one may stand for a long text.
ROW = 64

NUMBERED = "have a number in {!r} whose name the file has, and a template gets the number"

# What numbers become whose digits a Python float would make up.
NARROW = {pa.float16(): Half, pa.float32(): Single}


class _File(NamedTuple):
    """An open file.

    Attributes:
        names: its columns.
        types: the type of each.
        groups: the first row of each group, its rows, and its bytes.
        read: reads columns of a group: `read(group, first row in it, rows, columns)`.
        labels: for columns that have numbers that stand for names, these names, by the path to
            the numbers, such as `s[k]`, or `l[]` in a list.
    """

    names: list[str]
    types: list[pa.DataType]
    groups: list[tuple[int, int, int]]
    read: Callable[[int, int, int, list[str]], pa.Table]
    labels: Mapping[str, Mapping[str, Any]]


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


def _place_groups(sizes: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """The first row of each group, before its rows and bytes."""
    firsts = itertools.accumulate((rows for rows, _ in sizes), initial=0)
    return [(first, *size) for first, size in zip(firsts, sizes, strict=False)]


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
        open: Callable[[epath.Path], _File],
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

    def open_file(self, path: epath.Path) -> _File:
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
        if self._table is None or name not in self._table.column_names:
            asked.add(name)
            wanted = [
                column for column in columns if column in asked and columns.count(column) == 1
            ]
            self._table = self._source.guard(self._path, file.read, *self._where, wanted)
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
    """Records from files that hold rows in groups; the base of `ParquetFiles` and `ArrowFiles`.

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


class ParquetFiles(Tables):
    """Records from Parquet files, one for each row.

    A row group is read by one worker, in batches, so it may be of any size.

    Args:
        paths: names or globs, one or several.
        columns: the columns that records have; None: all.
    """

    extensions = (".parquet",)

    def __init__(self, paths: files.Paths, *, columns: Sequence[str] | None = None):
        super().__init__(TableFormat("Parquet", "parquetfiles", _open_parquet, columns), paths)


def _open_parquet(path: epath.Path) -> _File:
    from pyarrow import parquet

    file = parquet.ParquetFile(path.open("rb"))  # whatever its name is
    groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
    # What is read, the row that is next, and the batches from there on.
    reading: Any = None, 0, iter(())

    def read(group: int, first: int, count: int, names: list[str]) -> pa.Table:
        nonlocal reading
        of, at, batches = reading
        if (of, at) != ((group, names), first):
            of, at = (group, names), 0
            batches = file.iter_batches(count, row_groups=[group], columns=names)
        slices: list[pa.RecordBatch] = []
        while at < first + count:
            batch = next(batches)
            begin, end = max(first - at, 0), min(batch.num_rows, first + count - at)
            slices += [batch.slice(begin, end - begin)] if begin < end else []
            at += end
            if end < batch.num_rows:
                batches = itertools.chain([batch.slice(end)], batches)
        reading = of, at, batches
        return pa.Table.from_batches(slices)

    sizes = [(group.num_rows, group.total_byte_size) for group in groups]
    schema = file.schema_arrow
    return _File(schema.names, schema.types, _place_groups(sizes), read, _labels_of(schema))


class ArrowFiles(Tables):
    """Records from Arrow IPC files or streams, and Feather files.

    Local files are mapped into memory; only columns of compressed record batches are ever copied.

    Args:
        paths: names or globs, one or several; or the folder of a Hugging Face data set that was
            saved to disk.
        columns: the columns that records have; None: all.
    """

    extensions, in_place = (".arrow", ".feather"), "arrow"

    def __init__(self, paths: files.Paths, *, columns: Sequence[str] | None = None):
        format = TableFormat("Arrow", "arrowfiles", _open_arrow, columns)
        super().__init__(format, saved_files(paths))

    @staticmethod
    def recognises(names: files.Paths) -> bool:
        """Whether these are one folder that Hugging Face's `save_to_disk` wrote."""
        return is_saved(names)


# A writer that was closed puts it at the end of a stream; without it, a stream ends anywhere.
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def _open_arrow(path: epath.Path) -> _File:
    raw = _map(path) if is_local(path) else path.read_bytes()
    is_file = raw[:6] == b"ARROW1"  # else a stream, as Hugging Face writes it

    @functools.lru_cache(1)
    def open_columns(*fields: int) -> Callable[[int], pa.RecordBatch]:
        options = pa.ipc.IpcReadOptions(included_fields=list(fields))
        if is_file:
            return pa.ipc.open_file(raw, options=options).get_batch
        return _Stream(raw, options).get_batch

    @functools.lru_cache(1)  # a group is decompressed once
    def read_group(group: int, *fields: int) -> pa.RecordBatch:
        batch = open_columns(*fields)(group)
        if (held := batch.get_total_buffer_size()) > max(LIMIT, RATIO * len(raw)):
            raise InvalidValue(
                f"record batch {group} holds {held:,} bytes once it is decompressed, "
                f"more than {RATIO:,} times those of the file; if that is right, decompress it"
            )
        return batch

    def read(group: int, first: int, count: int, names: list[str]) -> pa.Table:
        fields = [field for field, name in enumerate(schema.names) if name in names]
        return pa.Table.from_batches([read_group(group, *fields).slice(first, count)])

    schema = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(raw).schema
    # To count rows, the narrowest column is enough.
    narrow = sorted(range(len(schema)), key=lambda field: _width(schema.field(field).type))[:1]
    rows = list(_count_rows(raw, is_file, pa.ipc.IpcReadOptions(included_fields=narrow)))
    total = sum(rows)
    if not is_file and raw[-len(END_OF_STREAM) :] != END_OF_STREAM:
        logger.warning(
            "%s ends without the mark that ends a stream of Arrow, after %s; if its writer did not "
            "finish, or it is cut short, the others are missing",
            os.fspath(path),
            counted(total, "row"),
        )
    sizes = [(count, len(raw) * count // max(total, 1)) for count in rows]
    return _File(schema.names, schema.types, _place_groups(sizes), read, _labels_of(schema))


def _count_rows(raw: Any, is_file: bool, options: pa.ipc.IpcReadOptions) -> Iterator[int]:
    """The rows of each record batch; one is in memory at a time."""
    if not is_file:
        yield from (batch.num_rows for batch in pa.ipc.open_stream(raw, options=options))
        return
    file = pa.ipc.open_file(raw, options=options)
    yield from (file.get_batch(number).num_rows for number in range(file.num_record_batches))


class _Stream:
    """The record batches of a stream, which are read in order; an earlier one, from its start."""

    def __init__(self, raw: Any, options: pa.ipc.IpcReadOptions):
        self._raw, self._options = raw, options
        self._next, self._batches = 0, self._begin()

    def _begin(self) -> Iterator[pa.RecordBatch]:
        yield from pa.ipc.open_stream(self._raw, options=self._options)

    def get_batch(self, number: int) -> pa.RecordBatch:
        """The record batch with a number."""
        if number < self._next:
            self._next, self._batches = 0, self._begin()
        for batch in self._batches:
            self._next += 1
            if self._next > number:
                return batch
        raise InvalidValue(f"the stream ends before record batch {number}")


def _map(path: epath.Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _width(of: pa.DataType) -> int:
    """The bits of a value; of text and lists, which have no fixed number, very many."""
    try:
        return of.bit_width
    except ValueError:
        return 1 << 30


def saved_files(paths: files.Paths, split: str | None = None) -> list[epath.Path]:
    """The Arrow files of a folder that Hugging Face's `save_to_disk` wrote, or of other paths.

    Its `state.json` lists them: others beside them are left from when it was saved before.
    """
    if (folder := _as_folder(paths)) is None:
        if split is not None:
            raise InvalidValue(f"split is {split!r}, but {paths} is no folder; omit split=")
        tables = files.find(paths)
        for folder in {path.parent for path in tables}:
            if (folder / "state.json").exists():
                listed = _read_saved(folder)
                for path in tables:
                    if path.parent == folder and path not in listed:
                        raise InvalidValue(
                            f"{os.fspath(path)} is not among the files that state.json lists: it "
                            "is left from another data set; give the folder instead of its files"
                        )
        return tables
    if (folder / "dataset_dict.json").exists():
        splits = _read_saved(folder)
        if folder / f"{split}" not in splits:
            raise InvalidValue(
                f"{os.fspath(folder)} has the splits {', '.join(path.name for path in splits)}; "
                f"give the folder of one, such as {os.fspath(splits[0])}"
            )
        folder /= f"{split}"
    tables = _read_saved(folder)
    if not tables:
        raise InvalidValue(f"{os.fspath(folder)} is empty; give a data set with at least one row")
    return files.find(tables)


def _read_saved(folder: epath.Path) -> list[epath.Path]:
    """The splits in a folder that was saved to disk, or its files."""
    index = folder / "dataset_dict.json"
    try:
        if index.exists():
            names = json.loads(index.read_text())["splits"]
        else:
            state = json.loads((index := folder / "state.json").read_text())
            names = [file["filename"] for file in state["_data_files"]]
            changes = [state[key] for key in state if key.startswith("_indices")]
            changes += [step["transforms"] for step in state.get("_inplace_history") or ()]
            changes += [_is_part(folder, file) for file in state["_data_files"]]
            if any(changes):
                raise InvalidValue(
                    f"{os.fspath(folder)} was saved by version 1 of datasets with all rows, and "
                    f"the indices of those that it keeps, or changes to make ({index.name}); load "
                    "it with that version, call flatten_indices(), and save the result"
                )
        for name in names:
            if name in ("", ".", "..") or {*name} & {"/", "\\", "\0"}:
                raise InvalidValue(
                    f"{os.fspath(index)} names {name!r:.80}, which is no file or folder beside it; "
                    "save the data set again, or correct that name"
                )
        return [folder / name for name in names]
    except (FileNotFoundError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise InvalidValue(
            f"{os.fspath(folder)} is not a data set that was saved to disk whole: {index.name} "
            f"cannot be read ({error!r}); save it again, or give a glob of files"
        ) from error


def _is_part(folder: epath.Path, file: Mapping[str, Any]) -> bool:
    """Whether a saved data set of version 1 has some rows of a file alone."""
    skip, take = file.get("skip"), file.get("take")
    if skip or take in (None, -1):
        return bool(skip)
    return take != sum(rows for _, rows, _ in _open_arrow(folder / file["filename"]).groups)


def is_saved(paths: files.Paths) -> bool:
    """Whether these are one folder that Hugging Face's `save_to_disk` wrote."""
    folder, signs = _as_folder(paths), ("state.json", "dataset_dict.json")
    return folder is not None and any((folder / name).exists() for name in signs)


def _as_folder(paths: files.Paths) -> epath.Path | None:
    """The folder that `paths` name, if they are one."""
    if isinstance(paths, list | tuple) and len(paths) == 1:
        (paths,) = paths
    if not isinstance(paths, str | os.PathLike) or not os.fspath(paths):
        return None
    return folder if (folder := as_path(paths)).is_dir() else None
