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
from pipeline.text.sources import files

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

    handles = ("_groups", "_first", "_latest")

    def __init__(self, paths: files.Paths, *, columns: Sequence[str] | None = None):
        super().__init__(paths)
        self.columns = None if columns is None else list(columns)
        if self.columns is not None:
            self.prefix = f"{self.prefix}-{'+'.join(self.columns)}"

    def _open(self, path: epath.Path) -> tuple[list[str], list[int], Callable[[int], Group]]:
        """Of one file: its columns, the rows of each group, and a function that reads a group."""
        raise NotImplementedError

    @functools.cached_property
    def _groups(self) -> list[tuple[epath.Path, int, int, Callable[[], Group]]]:
        """Of each group: its file, the rows of the file before it, its rows, and how to read it."""
        groups: list[tuple[epath.Path, int, int, Callable[[], Group]]] = []
        for path in self.files:
            names, rows, read = self._guard(path, self._open, path)
            if missing := [name for name in self.columns or () if name not in names]:
                raise InvalidValue(
                    f"{os.fspath(path)} has no column {missing[0]!r} (its columns: "
                    f"{', '.join(names)}); name some of them with columns="
                )
            before = itertools.accumulate(rows, initial=0)
            for number, (count, first) in enumerate(zip(rows, before, strict=False)):
                groups.append((path, first, count, functools.partial(read, number)))
        return groups

    @functools.cached_property
    def _latest(self) -> dict[int, Group]:
        """The group that was read last, by its number."""
        return {}

    def _guard(self, path: epath.Path, function: Callable, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise InvalidValue(
                f"{os.fspath(path)} cannot be read as {self.format}: {error}. It is damaged or of "
                "another format; fetch it again, or check its name"
            ) from error

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

    @property
    def _sizes(self) -> list[int]:
        return [rows for _, _, rows, _ in self._groups]

    def _read(self, part: int, numbers: Sequence[int]) -> list[dict[str, Any]]:
        with self._lock:
            if part not in self._latest:
                group = self._read_group(part)
                self._latest.clear()
                self._latest[part] = group
            group = self._latest[part]
        return group.take(np.array(numbers, np.int64)).to_pylist()

    def _where(self, part: int, number: int) -> str:
        path, before, _, _ = self._groups[part]
        return f"{os.fspath(path)}, row {before + number}"
