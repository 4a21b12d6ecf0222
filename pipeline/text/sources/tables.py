"""Tables: rows of columnar files by number, one group of rows in memory at a time."""

import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from etils import epath

from pipeline.errors import InvalidValue
from pipeline.fs.atomic import is_local
from pipeline.text.sources import files

Group: TypeAlias = "pa.RecordBatch | pa.Table"


class Tables(files.FileSource):
    """Records from files that hold rows in groups; the base of `ParquetFiles` and `ArrowFiles`.

    A record is a dict with an entry for each column. Rows of one group that are requested together
    are read together; each source keeps in memory the group that it read last.

    Args:
        paths: names or globs, one or several.
        columns: the columns to read; None: all. In Parquet, other columns cost nothing.
    """

    handles = ("_groups", "_first", "_latest")
    _latest: tuple[int, Any] = -1, None  # the group that was read last, after its number

    def __init__(self, paths: files.Paths, *, columns: Sequence[str] | None = None):
        super().__init__(paths)
        self.columns = None if columns is None else list(columns)
        if self.columns is not None:
            self.prefix += f"-{'+'.join(self.columns)}"

    # Of one file: its columns, the rows of each group, and a function that reads a group.
    _open: Callable[[epath.Path], tuple[list[str], list[int], Callable[[int], Group]]]

    @functools.cached_property
    def _groups(self) -> list[tuple[epath.Path, int, int, Callable[[], Group]]]:
        """For each group, its file, the rows before it in the file, its rows, and its reader."""
        groups: list[Any] = []
        for path in self.files:
            names, rows, read = self._guard(path, self._open, path)
            if missing := [name for name in self.columns or () if name not in names]:
                raise InvalidValue(
                    f"{os.fspath(path)} has no column {missing[0]!r} (its columns: "
                    f"{', '.join(names)}); choose among them with columns="
                )
            before = itertools.accumulate(rows, initial=0)
            for number, (count, first) in enumerate(zip(rows, before, strict=False)):
                groups.append((path, first, count, functools.partial(read, number)))
        return groups

    def _read_group(self, number: int) -> Group:
        path, _, _, read = self._groups[number]
        group = self._guard(path, read)
        # Arrow trusts the offsets of a file, and would read outside of it.
        self._guard(path, functools.partial(group.validate, full=True))
        return group

    def groups(self) -> Iterator[tuple[str, Group]]:
        """Each group of rows in order, with its place in words; none of them stays in memory."""
        for number, (path, before, _, _) in enumerate(self._groups):
            yield f"{os.fspath(path)}, from row {before} on,", self._read_group(number)

    def _sizes(self) -> list[int]:
        return [rows for _, _, rows, _ in self._groups]

    def _read(self, part: int, numbers: Sequence[int]) -> list[dict[str, Any]]:
        with self._lock:
            if self._latest[0] != part:
                self._latest = part, self._read_group(part)
            group = self._latest[1]
        return group.take(np.array(numbers, np.int64)).to_pylist()

    def _where(self, part: int, number: int) -> str:
        path, before, _, _ = self._groups[part]
        return f"{os.fspath(path)}, row {before + number}"


class ParquetFiles(Tables):
    """Records from Parquet files, a dict for each row; see `Tables` for the arguments.

    A row group is decoded as a whole when one of its rows is requested, so random access is
    cheapest with small row groups; `prepare` reads in order, so a worker decodes each once.
    """

    format, prefix = "Parquet", "parquetfiles"

    def _open(self, path: epath.Path) -> tuple[list[str], list[int], Callable[[int], Group]]:
        from pyarrow import parquet

        file = parquet.ParquetFile(path if is_local(path) else path.open("rb"), memory_map=True)
        groups = range(file.metadata.num_row_groups)
        rows = [file.metadata.row_group(group).num_rows for group in groups]
        names = file.schema_arrow.names
        return names, rows, lambda group: file.read_row_group(group, columns=self.columns)


class ArrowFiles(Tables):
    """Records from Arrow IPC files or streams, and Feather files; see `Tables` for the arguments.

    Local files are mapped into memory; only compressed record batches are ever copied. The files of
    a Hugging Face data set that was saved to disk are `DIRECTORY/data-*.arrow`.
    """

    format, prefix = "Arrow", "arrowfiles"

    def _open(self, path: epath.Path) -> tuple[list[str], list[int], Callable[[int], Group]]:
        local = is_local(path)
        raw = pa.memory_map(os.fspath(path)).read_buffer() if local else path.read_bytes()
        try:
            file = pa.ipc.open_file(raw)
            count, read = file.num_record_batches, file.get_batch
        except pa.ArrowInvalid:  # no footer: a stream, as Hugging Face writes it
            file = pa.ipc.open_stream(raw)
            batches = list(file)
            count, read = len(batches), batches.__getitem__
        names, rows = file.schema.names, [read(number).num_rows for number in range(count)]
        if self.columns is None:
            return names, rows, read
        return names, rows, lambda group: read(group).select(self.columns)
