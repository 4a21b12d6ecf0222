"""Decoded: token files that cannot be mapped, written once as Arrow in the user's caches."""

import bz2
import json
import logging
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, TypeAlias

import numpy as np
import pyarrow as pa
from etils import epath

from pipeline.corpus.cache import local_copy, path_of
from pipeline.corpus.gather import gather
from pipeline.corpus.parts import read_content
from pipeline.corpus.token_columns import read_columns
from pipeline.corpus.token_files import TokenFiles, damaged
from pipeline.errors import InvalidValue, require_whole
from pipeline.fs.atomic import as_path, is_local, write_once
from pipeline.text.sources import ArrowFiles, files

logger = logging.getLogger(__name__)

# The values of some columns, one row after another, and the number of values of each row.
Columns: TypeAlias = dict[str, tuple[np.ndarray, np.ndarray]]

# The dtypes of arrays in MDS, by their codes.
MDS_DTYPES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32"}
MDS_DTYPES |= {33: "int32", 34: "float32", 64: "uint64", 65: "int64", 66: "float64"}

BLOCK = 1 << 24  # tokens of Levanter's that are read at once
LEDGER = "shard_ledger.json"


def _decode(
    found: Sequence[epath.Path], options: Sequence[Any], read: Callable[[], Iterator[Columns]]
) -> list[epath.Path]:
    """The Arrow file with the columns that `read` makes of files, a record batch for each item.

    It is found by the digest of the files, and by the options that decide the columns.
    """

    def write(file: IO[bytes]) -> None:
        logger.info("%s and others are decoded once, into the user's caches", os.fspath(found[0]))
        writer = None
        for columns in read():
            lists = {
                name: pa.LargeListArray.from_arrays(
                    pa.array(np.cumsum(np.append(0, counts)), pa.int64()), pa.array(values)
                )
                for name, (values, counts) in columns.items()
            }
            batch = pa.RecordBatch.from_pydict(lists)
            writer = writer or pa.ipc.new_stream(file, batch.schema)
            writer.write_batch(batch)
        if writer is None:
            raise InvalidValue(
                f"{os.fspath(found[0])} and others hold no rows; give files with at least one"
            )
        writer.close()

    path = path_of([files.digest(found), *options], "decoded.arrow")
    return [write_once(path, "decoding", write)]


def mds(
    folder: epath.PathLike,
    *,
    column: str = "tokens",
    dtype: Any = "int64",
    end: int | None = None,
    **columns: Any,
) -> TokenFiles:
    """The samples of a folder that MosaicML's Streaming wrote; of their columns, those of numbers.

    With `end`, the samples are one text, whose documents end with that id.
    """
    place, index = as_path(folder), as_path(folder) / "index.json"
    try:
        shards = json.loads(index.read_text())["shards"]
        names = [
            raw if not shard["zip_data"] or raw.exists() else place / shard["zip_data"]["basename"]
            for shard in shards
            for raw in [place / shard["raw_data"]["basename"]]
        ]
    except (FileNotFoundError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise damaged(
            index, f"it does not list the shards of an MDS data set ({error!r})"
        ) from error

    def read() -> Iterator[Columns]:
        rest: dict[str, np.ndarray] = {}
        for path, shard in zip(files.find(names), shards, strict=True):
            try:
                found = _read_shard(path, shard, column, np.dtype(dtype))
            except (KeyError, TypeError, IndexError, ValueError, OSError, pa.ArrowException) as e:
                raise damaged(path, e) from e
            if end is not None:
                found, rest = _cut(rest, found, column, end)
            yield found
        if any(map(len, rest.values())):  # after the last end
            yield {name: (values, np.array([len(values)])) for name, values in rest.items()}

    end = None if end is None else require_whole("end", end, 0)
    options = column, end, f"{np.dtype(dtype)}"
    return read_columns(ArrowFiles, _decode([index, *names], options, read), column, **columns)


def _cut(
    rest: dict[str, np.ndarray], columns: Columns, column: str, end: int
) -> tuple[Columns, dict[str, np.ndarray]]:
    """The documents that end in `rest` or in `columns`, and what is left after the last one."""
    _, counts = columns[column]
    for name, (_, others) in columns.items():
        if not np.array_equal(others, counts):
            raise InvalidValue(f"end={end} cannot cut {name!r}, whose sizes are not those of ids")
    joined = {
        name: np.concatenate([rest.get(name, values[:0]), values])
        for name, (values, _) in columns.items()
    }
    ends = np.flatnonzero(joined[column] == end) + 1
    last, sizes = int(ends.max(initial=0)), np.diff(ends, prepend=0)
    whole = {name: (values[:last], sizes) for name, values in joined.items()}
    return whole, {name: values[last:] for name, values in joined.items()}


def _read_shard(
    path: epath.Path, shard: Mapping[str, Any], column: str, dtype: np.dtype
) -> Columns:
    """The ids and other arrays of a shard; columns of text, images and so on are left out.

    It has a number of samples, where each begins, and the samples. A sample has the sizes of those
    of its columns that have no fixed size, then the columns, at any byte.
    """
    content, size, samples = _unpack(path, shard), shard["raw_data"]["bytes"], shard["samples"]
    memory, edges = np.frombuffer(content, np.uint8), np.frombuffer(content, "<u4", samples + 1, 4)
    if memory.size != size or edges[-1] != size:
        raise InvalidValue(f"it has {memory.size:,} bytes, not {size:,} for {samples:,} samples")
    about = (shard[f"column_{each}"] for each in ("names", "encodings", "sizes"))
    columns, found = [*zip(*about, strict=True)], {}
    first, last = edges[:-1].astype(np.int64), edges[1:].astype(np.int64)
    at = first + 4 * sum(fixed is None for _, _, fixed in columns)
    if (at > last).any():
        raise InvalidValue("a sample ends before its columns begin")
    for name, encoding, fixed in columns:
        sizes = np.full(samples, fixed or 4)
        if fixed is None:
            sizes, first = gather(memory, first, sizes).view("<u4").astype(np.int64), first + 4
        if (at + sizes > last).any():
            raise InvalidValue("a sample does not end where its columns do")
        if name == column or encoding.partition(":")[0] == "ndarray":
            found[name] = _read_values(memory, at, sizes, encoding, dtype)
        at = at + sizes
    if (at != last).any():
        raise InvalidValue("a sample does not end where its columns do")
    return found


def _unpack(path: epath.Path, shard: Mapping[str, Any]) -> Any:
    """The content of a shard."""
    content = read_content(local_copy(path))
    if not shard["zip_data"] or path.name != os.path.basename(shard["zip_data"]["basename"]):
        return content
    kind = shard["compression"].partition(":")[0]
    if kind == "bz2":
        return bz2.decompress(content)
    codec = {"br": "brotli", "gz": "gzip"}.get(kind, kind)
    return pa.decompress(content, shard["raw_data"]["bytes"], codec)


def _read_values(
    memory: np.ndarray, at: np.ndarray, sizes: np.ndarray, encoding: str, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of a column of MDS, flat, and how many each sample has.

    An array begins with the code of its dtype and its axes, unless the encoding names these. Axes
    are four times their number, plus two bits; then each, in as many bytes as those bits say.
    """
    form, kind, shape = (*encoding.split(":"), "", "")[:3]
    if form not in ("bytes", "ndarray"):
        raise InvalidValue(f"its ids are of the encoding {encoding!r}; give a column of arrays")
    skip = np.zeros_like(at)
    if form == "ndarray" and not kind and len(at):
        (code,) = np.unique(memory[at])  # all samples have arrays of one dtype
        kind, skip = MDS_DTYPES[code], skip + 1
    if form == "ndarray" and not shape:
        axes = memory[at + skip].astype(np.int64)
        skip = skip + 1 + (axes >> 2 << (axes & 3))
    numbers = np.dtype(kind or dtype)
    if (sizes < skip).any() or ((sizes - skip) % numbers.itemsize).any():
        raise InvalidValue(f"the size of an array is not one of {numbers}")
    return gather(memory, at + skip, sizes - skip).view(numbers), (sizes - skip) // numbers.itemsize


def levanter(folder: epath.PathLike, *, column: str = "input_ids", **columns: Any) -> TokenFiles:
    """The rows of a cache of Levanter's; of their columns, those with one axis."""
    place = as_path(folder)
    try:
        ledger = json.loads((place / LEDGER).read_text())
        rows, finished = int(ledger["total_num_rows"]), ledger["is_finished"]
    except (FileNotFoundError, KeyError, TypeError, ValueError) as error:
        raise damaged(
            place, f"it has no whole shard_ledger.json of Levanter's ({error!r})"
        ) from error
    if not finished or not is_local(place):
        raise InvalidValue(
            f"{os.fspath(place)} is {'remote' if finished else 'not finished'}; "
            f"{'copy it to this machine' if finished else 'let Levanter finish it'} first"
        )

    every = sorted(pathlib.Path(place).rglob("*"))
    shards = {each.parent.name: as_path(each.parent) for each in every if each.name == LEDGER}

    def read() -> Iterator[Columns]:
        try:
            if any(place.glob("*/offsets")):
                yield from _read_levanter(place, column, rows)
                return
            if sum(ledger["shard_rows"].values()) != rows:
                raise InvalidValue(f"its shards do not have the {rows:,} rows of its ledger")
            for name, count in ledger["shard_rows"].items():
                yield from _read_levanter(shards[name], column, count)
        except (ValueError, KeyError) as error:  # also tensorstore's
            raise damaged(place, str(error)[:200]) from error

    found = _decode([as_path(path) for path in every if path.is_file()], [column], read)
    return read_columns(ArrowFiles, found, column, **columns)


def _read_levanter(place: epath.Path, column: str, rows: int) -> Iterator[Columns]:
    """The columns that have one axis, block by block."""
    import tensorstore

    def open_array(path: epath.Path, strict: bool = True) -> Any:
        store = {"driver": "file", "path": os.fspath(path)}
        # A chunk that is missing reads as zeros. In a mask it may be one of zeros, which are not
        # stored; among ids, it is lost.
        spec = {"driver": "zarr3", "kvstore": store, "fill_missing_data_reads": not strict}
        return tensorstore.open(spec, read=True, open=True).result()

    arrays = {}
    for path in sorted(place.glob("*/offsets")):
        if not (path.parent / "shapes").exists():
            edges = open_array(path)[: rows + 1].read().result()
            if edges[0] != rows or (np.diff(edges[1:], prepend=0) < 0).any():
                raise InvalidValue(f"{os.fspath(path)} has {edges[0]:,} rows, the ledger {rows:,}")
            edges[0], name = 0, path.parent.name
            arrays[name] = open_array(path.parent / "data", name == column), edges
    if column not in arrays:
        raise InvalidValue(f"it has no column {column!r}, but {', '.join(arrays) or 'none'}")
    ids, at = arrays[column][1], 0
    while at < rows:
        stop = min(max(int(np.searchsorted(ids, ids[at] + BLOCK)), at + 1), rows)
        yield {
            name: (data[edges[at] : edges[stop]].read().result(), np.diff(edges[at : stop + 1]))
            for name, (data, edges) in arrays.items()
        }
        at = stop
