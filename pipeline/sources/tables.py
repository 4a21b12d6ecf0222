"""Tables: rows of columnar files by number, one group of rows in memory at a time."""

import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from etils import epath

from pipeline.sources import files

Group: TypeAlias = "pa.RecordBatch | pa.Table"


class Tables(files.FileSource):
    """Records from files that hold rows in groups; the base of `ParquetFiles` and `ArrowFiles`.

    A record is a dict with an entry for each column. Rows of one group that are requested together
    are read together; each source keeps in memory the group that it read last.

    Args:
        paths: names or globs, one or several.
        columns: the columns to read; None for all. In Parquet the others cost nothing.

    Raises:
        FileNotFoundError: a file does not exist, or a glob matches none.
        ValueError: from reading, when a file is damaged, or has no such column; names it.
    """

    handles = ("_tables", "_groups", "_first", "_latest")

    def __init__(self, paths: files.Paths, *, columns: Sequence[str] | None = None):
        super().__init__(paths)
        self.columns = None if columns is None else list(columns)
        if self.columns is not None:
            self.prefix = f"{self.prefix}-{'+'.join(self.columns)}"

    def _open(self, path: epath.Path) -> tuple[list[str], list[int], Callable[[int], Group]]:
        """Of one file: its columns, the rows of each group, and a function that reads a group."""
        raise NotImplementedError

    @functools.cached_property
    def _tables(self) -> list[tuple[list[int], Callable[[int], Group]]]:
        """Of each file, the rows of each group and the function that reads one."""
        tables = []
        for path in self.files:
            names, rows, read = self._guard(path, self._open, path)
            if missing := [name for name in self.columns or () if name not in names]:
                raise ValueError(
                    f"{os.fspath(path)} has no column {missing[0]!r} (its columns: "
                    f"{', '.join(names)}); name some of them with columns="
                )
            tables.append((rows, read))
        return tables

    @functools.cached_property
    def _groups(self) -> list[tuple[int, int, int]]:
        """Of each group: its file, its number there, and how many rows of the file precede it."""
        return [
            (number, group, before)
            for number, (rows, _) in enumerate(self._tables)
            for group, before in enumerate([0, *itertools.accumulate(rows)][:-1])
        ]

    @functools.cached_property
    def _first(self) -> list[int]:
        """The number of the first row of each group, and of all rows."""
        return [0, *itertools.accumulate(n for rows, _ in self._tables for n in rows)]

    @functools.cached_property
    def _latest(self) -> dict[int, Group]:
        """The group that was read last, by its number."""
        return {}

    def _guard(self, path: epath.Path, function: Callable, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise ValueError(
                f"{os.fspath(path)} cannot be read as {self.format}: {error}. It is damaged or of "
                "another format; fetch it again, or check its name"
            ) from error

    def _read(self, number: int) -> Group:
        file, group, _ = self._groups[number]
        read = self._guard(self.files[file], self._tables[file][1], group)
        # Arrow trusts the offsets of a file, and would read outside of it.
        self._guard(self.files[file], functools.partial(read.validate, full=True))
        return read

    def groups(self) -> Iterator[tuple[str, Group]]:
        """Each group of rows in order, with its place in words; none of them stays in memory."""
        for number, (file, _, before) in enumerate(self._groups):
            yield f"{os.fspath(self.files[file])}, from row {before} on,", self._read(number)

    def __len__(self) -> int:
        return self._first[-1]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """The records with these numbers; a group is read once for all of its rows."""
        places = [files.locate(self._first, index) for index in indices]
        records: list[dict[str, Any]] = [{}] * len(places)
        order = sorted(range(len(places)), key=places.__getitem__)
        for number, members in itertools.groupby(order, key=lambda at: places[at][0]):
            at = list(members)
            with self._lock:
                if number not in self._latest:
                    group = self._read(number)
                    self._latest.clear()
                    self._latest[number] = group
                group = self._latest[number]
            rows = np.array([places[each][1] for each in at], np.int64)
            for each, record in zip(at, group.take(rows).to_pylist(), strict=True):
                records[each] = record
        return records

    def where(self, index: int) -> str:
        """The file of a record, and its row there, from 0."""
        number, within = files.locate(self._first, index)
        file, _, before = self._groups[number]
        return f"{os.fspath(self.files[file])}, row {before + within}"
