"""Tables: rows of columnar files by number, one group of rows in memory at a time."""

import functools
import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from etils import epath

from pipeline.sources import files


class Tables:
    """Records from files that hold rows in groups; the base of `ParquetFiles` and `ArrowFiles`.

    A record is a dict with an entry for each column. Rows of one group that are asked for together
    are read together; of each source, the group that was read last stays in memory.

    Args:
        paths: names or globs, one or several.
        columns: the columns to read; None for all. In Parquet the others cost nothing.

    Raises:
        FileNotFoundError: a file does not exist, or a glob matches none.
        ValueError: a file is damaged, or has no such column; names it.
    """

    format: str

    def __init__(self, paths: files.Paths, *, columns: Sequence[str] | None = None):
        self.files = files.find(paths)
        self.columns = None if columns is None else list(columns)

    def _open(self, path: epath.Path) -> Any:
        """What `_rows` and `_read` take, of one file."""
        raise NotImplementedError

    def _rows(self, opened: Any) -> list[int]:
        """How many rows each group of a file has."""
        raise NotImplementedError

    def _read(self, opened: Any, group: int) -> pa.RecordBatch | pa.Table:
        """One group of a file, with all columns that are wanted."""
        raise NotImplementedError

    @functools.cached_property
    def _opened(self) -> list[Any]:
        return [self._guarded(path, self._open, path) for path in self.files]

    @functools.cached_property
    def _groups(self) -> list[tuple[int, int, int]]:
        """Of each group: its file, its number there, and how many rows of the file precede it."""
        return [
            (number, group, before)
            for number, opened in enumerate(self._opened)
            for group, before in enumerate([0, *itertools.accumulate(self._rows(opened))][:-1])
        ]

    @functools.cached_property
    def _first(self) -> list[int]:
        """The number of the first row of each group, and of all rows."""
        rows = itertools.chain.from_iterable(map(self._rows, self._opened))
        return [0, *itertools.accumulate(rows)]

    @functools.cached_property
    def _held(self) -> dict[int, pa.RecordBatch | pa.Table]:
        return {}

    @functools.cached_property
    def _lock(self) -> threading.Lock:
        return threading.Lock()

    def _group(self, number: int) -> pa.RecordBatch | pa.Table:
        with self._lock:
            if number not in self._held:
                file, group, _ = self._groups[number]
                table = self._guarded(self.files[file], self._read, self._opened[file], group)
                self._held.clear()
                self._held[number] = table
            return self._held[number]

    def _guarded(self, path: epath.Path, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except LookupError as error:
            raise ValueError(f"{os.fspath(path)} {error.args[0]}") from None
        except (pa.ArrowException, OSError) as error:
            raise ValueError(
                f"{os.fspath(path)} cannot be read as {self.format}: {error}. It is damaged or of "
                "another format; fetch it again, or check its name"
            ) from error

    def groups(self) -> Iterator[tuple[str, pa.RecordBatch | pa.Table]]:
        """Each group of rows in order, with its place in words; none of them is kept."""
        for file, group, before in self._groups:
            path = self.files[file]
            table = self._guarded(path, self._read, self._opened[file], group)
            yield f"{os.fspath(path)}, from row {before} on,", table

    @functools.cached_property
    def fingerprint(self) -> str:
        """See `Source`; from names, sizes and content samples of the files."""
        kind = type(self).__name__.lower()
        columns = "" if self.columns is None else f"-{'+'.join(self.columns)}"
        return f"{kind}{columns}-{files.digest(self.files)}"

    def __len__(self) -> int:
        return self._first[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """The records with these numbers; a group is read once for all of its rows."""
        places = [files.locate(self._first, index) for index in indices]
        found: list[dict[str, Any]] = [{}] * len(places)
        order = sorted(range(len(places)), key=places.__getitem__)
        for number, mine in itertools.groupby(order, key=lambda at: places[at][0]):
            at = list(mine)
            rows = np.array([places[each][1] for each in at], np.int64)
            for each, record in zip(at, self._group(number).take(rows).to_pylist(), strict=True):
                found[each] = record
        return found

    def where(self, index: int) -> str:
        """The file of a record, and its row there, from 0."""
        number, within = files.locate(self._first, index)
        file, _, before = self._groups[number]
        return f"{os.fspath(self.files[file])}, row {before + within}"

    def __getstate__(self) -> dict:
        cached = ("_opened", "_groups", "_first", "_held", "_lock")
        return {key: value for key, value in self.__dict__.items() if key not in cached}

    def __str__(self) -> str:
        return f"{self.format} of {files.described(self.files)}"


def require_columns(wanted: Sequence[str] | None, there: Sequence[str]) -> None:
    """Refuses columns that a file does not have, with a LookupError that `Tables` completes."""
    if missing := [name for name in wanted or () if name not in there]:
        raise LookupError(
            f"has no column {missing[0]!r} (its columns: {', '.join(there)}); name some of them "
            "with columns="
        )
