"""Arrow: the rows of files and streams as records; and data sets that Hugging Face has saved so."""

import functools
import json
import logging
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from etils import epath

from pipeline.errors import InvalidValue, counted
from pipeline.fs.atomic import as_path, is_local
from pipeline.text import files
from pipeline.text.content import LIMIT, RATIO
from pipeline.text.tables import TableFile, TableFormat, Tables

logger = logging.getLogger(__name__)


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


def _open_arrow(path: epath.Path) -> TableFile:
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
    return TableFile(schema, sizes, read)


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
