"""Tables: rows of columnar files, one group of rows in memory at a time."""

import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import pyarrow as pa
from etils import epath

from pipeline.errors import InvalidValue
from pipeline.fs.atomic import is_local
from pipeline.text.sources import files
from pipeline.text.sources.source import Block, Blocks, Shard

Group: TypeAlias = "pa.RecordBatch | pa.Table"


class Tables(files.FileSource):
    """Records from files that hold rows in groups; the base of `ParquetFiles` and `ArrowFiles`.

    A record is a dict with an entry for each column. Group `i` of `n` counts as beginning at byte
    `size * i // n` of its file, so that no file is opened to cut shards. One file at a time is
    open, and one group of it in memory.

    Args:
        paths: names or globs, one or several.
        columns: the columns to read; None: all. In Parquet, other columns cost nothing.
    """

    def __init__(self, paths: files.Paths, *, columns: Sequence[str] | None = None):
        super().__init__(paths)
        self.columns = None if columns is None else list(columns)
        if self.columns is not None:
            self.prefix += f"-{'+'.join(self.columns)}"

    # Of one file: its columns, the rows of each group, and a function that reads a group.
    _open: Callable[[epath.Path], tuple[list[str], list[int], Callable[[int], Group]]]

    def _is_whole(self, path: epath.Path) -> bool:
        return False

    def _open_file(self, path: epath.Path) -> tuple[list[int], Callable[[int], Group]]:
        """The rows of each group of a file, and a function that reads a group."""
        names, rows, read = self._guard(path, self._open, path)
        if missing := [name for name in self.columns or () if name not in names]:
            raise InvalidValue(
                f"{os.fspath(path)} has no column {missing[0]!r} (its columns: "
                f"{', '.join(names)}); choose among them with columns="
            )

        def read_group(number: int) -> Group:
            group = self._guard(path, read, number)
            # Arrow trusts the offsets of a file, and would read outside of it.
            self._guard(path, functools.partial(group.validate, full=True))
            return group

        return rows, read_group

    def groups(self) -> Iterator[tuple[str, Group]]:
        """Each group of rows in order, with its place in words; none of them stays in memory."""
        for path in self.files:
            rows, read = self._open_file(path)
            for number, before in enumerate(itertools.accumulate(rows[:-1], initial=0)):
                if number < len(rows):
                    yield f"{os.fspath(path)}, from row {before} on,", read(number)

    def read(self, shard: Shard, start: Any = None) -> Iterator[Block]:
        """See `Sharded`."""
        span, first, row = start or (0, 0, 0)
        blocks = Blocks(shard, "row")
        for number in range(span, len(shard.spans)):
            file, begin, end = shard.spans[number]
            path, last = self.files[file], number == len(shard.spans) - 1
            size = path.stat().length
            rows, read = self._open_file(path)
            mine = [n for n in range(len(rows)) if begin <= size * n // len(rows) < end]
            for unit in mine:
                if unit < first or not rows[unit]:
                    continue
                group, before = read(unit), sum(rows[:unit])
                step = max(rows[unit] * shard.block // max(group.nbytes, 1), 1)
                while row < rows[unit]:
                    records = group.slice(row, step).to_pylist()
                    at = range(before + row, before + row + len(records))
                    blocks.add(os.fspath(path), records, at, group.nbytes * len(at) // rows[unit])
                    row += len(records)
                    following = [number, unit, row] if row < rows[unit] else [number, unit + 1, 0]
                    if not blocks.room and not (last and following[1] > mine[-1]):
                        yield blocks.take(following)
                row = 0
            first = row = 0
        yield blocks.take(None)

    def names(self) -> set[str]:
        """The names of the columns that any of the files has."""
        return {name for path in self.files for name in self._guard(path, self._open, path)[0]}


class ParquetFiles(Tables):
    """Records from Parquet files, a dict for each row; see `Tables` for the arguments.

    A row group is decoded as a whole, once, so a file of one row group is the work of one worker.
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
