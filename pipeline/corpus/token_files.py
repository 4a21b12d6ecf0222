"""Token files of other programs: the arrays that hold tokens, and where examples begin in them."""

import logging
import os
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
from etils import epath
from pyarrow import csv

from pipeline.corpus.cache import local_copy, path_of
from pipeline.corpus.parts import read_content
from pipeline.errors import InvalidValue, require_whole
from pipeline.fs.atomic import write_once
from pipeline.text.features import TOKENS, WEIGHTS
from pipeline.text.sources import files
from pipeline.text.sources.content import describe_binary, open_text

logger = logging.getLogger(__name__)

# The numbers of some lists, where each list begins in them, and the size of each.
Lists: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]

# An id is searched in blocks of this many tokens. Where it is in a longer file is stored.
BLOCK = 1 << 24

# llm.c's files begin with 256 int32: their kind, its version, and the count of tokens. By the first
# two: the dtype, and the id before each document.
LLM_C = {(20240520, 1): ("uint16", 50256), (20240801, 7): ("uint32", 128000)}
LLM_C_HEADER, LLM_C_EVALUATION = 1024, 20240522

NPY = b"\x93NUMPY"  # the first bytes of an array that NumPy saved

# Megatron's codes of integers; its others are floats.
MEGATRON = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


class TokenFiles(NamedTuple):
    """The examples in files of another program.

    Attributes:
        files: those that hold them.
        groups: some examples each, in order: their `TOKENS`, `WEIGHTS` if these are not all 1, and
            features, by name.
        layout: the options that decide how the files are read, as JSON.
    """

    files: list[epath.Path]
    groups: list[dict[str, Lists]]
    layout: Any = None


def damaged(path: epath.Path, seen: object) -> InvalidValue:
    """The error for a file that its program cannot have finished as it is."""
    return InvalidValue(
        f"{os.fspath(path)} is damaged, cut short, or not what its name says: {seen}; copy it again"
    )


def npy(paths: files.Paths) -> TokenFiles:
    """The examples in a flat `.npy` array, between the offsets in another."""
    found = files.find(paths)
    if len(found) != 2:
        raise InvalidValue(f"{paths} are {len(found)} files; give that of tokens, and of offsets")
    tokens, edges = (_load(path) for path in found)
    return _divide(found, [tokens], (), [_between(found[1], edges, len(tokens))])


def _between(
    path: epath.Path, edges: np.ndarray, count: int, what: str = "tokens"
) -> tuple[np.ndarray, np.ndarray]:
    """Where each of the things between edges begins, and its size; refuses edges out of order."""
    edges = edges.astype(np.int64)
    if not len(edges) or (edges[0], edges[-1]) != (0, count) or (np.diff(edges) < 0).any():
        raise damaged(
            path,
            f"it does not hold offsets into {count:,} {what}: one more than there are examples, "
            "ascending from 0 to that number, as np.append(0, np.cumsum(lengths))",
        )
    return edges[:-1], np.diff(edges)


def _load(path: epath.Path) -> np.ndarray:
    try:
        array = np.asarray(np.load(os.fspath(local_copy(path)), mmap_mode="r"))
    except (ValueError, EOFError) as error:
        raise InvalidValue(f"{os.fspath(path)} is not an .npy array: {error}") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidValue(
            f"{os.fspath(path)} holds an array of shape {array.shape} and dtype {array.dtype}; it "
            "must be one-dimensional and of integers"
        )
    return array


def megatron(prefixes: files.Paths) -> TokenFiles:
    """The documents of Megatron's indexed data sets, `PREFIX.bin` with `PREFIX.idx`."""
    given = [prefixes] if isinstance(prefixes, str | os.PathLike) else prefixes
    found = files.find([index_of(each) for each in given])
    # Indices that are one file may belong to different tokens, in documents of the same sizes.
    data = files.leave_out_repeats(files.find([path.with_suffix(".bin") for path in found]))
    indices, arrays, borders = [path.with_suffix(".idx") for path in data], [], []
    for index, path in zip(indices, data, strict=True):
        dtype, edges = _read_index(index)
        arrays.append(_read(path, dtype))
        borders.append(_between(index, edges, len(arrays[-1])))
    return _divide([*indices, *data], arrays, (), borders)


def index_of(prefix: epath.PathLike) -> str:
    """The name of the index of a Megatron data set, by its prefix, or by one of its files."""
    stem, ending = os.path.splitext(os.fspath(prefix))
    return f"{stem if ending in ('.bin', '.idx') else os.fspath(prefix)}.idx"


def _read_index(path: epath.Path) -> tuple[np.dtype, np.ndarray]:
    """Of a Megatron index: the dtype, and where documents begin and the last one ends."""
    content = read_content(local_copy(path))
    head = bytes(content[:34])
    if len(head) < 34 or head[:9] != b"MMIDIDX\0\0":
        raise damaged(path, "it does not begin as an index of Megatron does")
    version, code, sequences, documents = struct.unpack("<QBQQ", head[9:])
    size = 34 + 12 * sequences + 8 * documents
    if version != 1 or code not in MEGATRON or content.size not in (size, size + sequences):
        raise damaged(
            path,
            f"it has version {version}, dtype {code} and {content.size:,} bytes, which must be 1, "
            f"one of {', '.join(map(str, MEGATRON))} (integers) and {size:,}",
        )
    if any(bytes(content[size:])):
        raise InvalidValue(f"{os.fspath(path)} has other modes than text; give a data set of text")
    dtype = np.dtype(MEGATRON[code])
    edges = np.cumsum(np.append(0, np.frombuffer(content, "<i4", sequences, 34)))
    begins = np.frombuffer(content, "<i8", sequences, 34 + 4 * sequences)
    if (begins != dtype.itemsize * edges[:-1]).any():
        raise damaged(path, "its sequences do not lie end to end")
    first = np.frombuffer(content, "<i8", documents, 34 + 12 * sequences)
    _between(path, first, sequences, "sequences")
    return dtype, edges[first]


def flat(
    paths: files.Paths,
    *,
    dtype: Any = None,
    end: int | tuple[()] | None = None,
    begin: int | None = None,
    skip: int = 0,
    weights: files.Paths | None = None,
) -> TokenFiles:
    """The documents of files that hold nothing but ids; see `InPlace.flat`."""
    found = files.leave_out_repeats(files.find(paths))
    found = [path for path in found if not path.name.endswith(".csv.gz")]
    masks = [path for path in found if path.name.startswith("labels_mask")]
    found = [path for path in found if path not in masks]
    beside = [path.with_name(path.name.replace("token_ids", "labels_mask", 1)) for path in found]
    masks += [mask for path, mask in zip(found, beside, strict=True) if mask != path]
    if weights is None and (there := [path for path in masks if path.exists()]):
        raise InvalidValue(
            f"{os.fspath(there[0])} says on which tokens to train; give weights='labels_mask*', or "
            "weights=() to train on all"
        )
    if not found:
        raise InvalidValue(f"{paths} are masks; give the files of tokens, token_ids*")
    opened = [_open_flat(path, dtype, require_whole("skip", skip, 0)) for path in found]
    arrays, marks = [values for values, _ in opened], {mark for _, mark in opened}
    tables = [*map(table_of, found)]
    listed = [table for table in tables if table.exists()]
    if listed and not (end is begin is None):
        logger.warning("%s says where documents are; begin and end are not used", listed[0])
    for path, (_, mark) in zip(found, opened, strict=True):
        if mark is not None and (end not in (None, ()) or begin not in (None, mark)):
            raise InvalidValue(
                f"end is {end} and begin is {begin}, but the header of {os.fspath(path)} says that "
                f"{mark} begins each document; omit both"
            )
    if listed:
        borders = [_read_table(table, len(a)) for table, a in zip(tables, arrays, strict=True)]
        for table, values, (_, sizes) in zip(tables, arrays, borders, strict=True):
            if sizes.sum() != len(values):
                text = "%s lists documents of %s tokens, and the file beside it has %s"
                logger.warning(text, table, f"{sizes.sum():,}", f"{len(values):,}")
    else:
        if end is None and begin is None and len(marks) == 1:
            (begin,) = marks
        edges = _find_edges(found, arrays, end, begin)
        if begin is not None and len(arrays[0]) and arrays[0][0] != begin:
            logger.warning(
                "%s begins inside a document, with the id %s and not begin=%s; if that id ends "
                "documents, give end=%s",
                os.fspath(found[0]),
                arrays[0][0],
                begin,
                begin,
            )
        borders = [(edges[:-1], np.diff(edges))]
    layout = [f"{arrays[0].dtype}", end, begin, skip]
    return _divide([*found, *listed], arrays, weights or (), borders, layout)


def table_of(path: epath.Path) -> epath.Path:
    """The table of documents beside a file of OLMo or Dolma, if there is one."""
    return path.with_name(path.name.removesuffix(path.suffix) + ".csv.gz")


def is_llm_c(head: bytes) -> bool:
    """Whether a file of text of llm.c begins so."""
    return len(head) >= 8 and struct.unpack("<2i", head[:8]) in LLM_C


def _open_flat(path: epath.Path, dtype: Any, skip: int) -> tuple[np.ndarray, int | None]:
    """The ids of a file, and the id that begins a document if its header says so."""
    content, mark, name = read_content(local_copy(path)), None, os.fspath(path)
    if what := describe_binary(bytes(content[:64])):
        raise InvalidValue(f"{name} holds more than ids. {what}")
    head = bytes(content[:12])
    count = int.from_bytes(head[:4], "little")
    if bytes(content[4 + 4 * count : 8 + 4 * count]) == content.size.to_bytes(8, "little")[:4]:
        raise InvalidValue(
            f"{name} begins with the places of {count:,} items, as shards of other programs do; "
            "give files of ids alone, or the examples that its reader returns to Corpus.from_arrays"
        )
    try:
        found = np.dtype(dtype or object)
    except TypeError:
        found = np.dtype(object)
    kind = struct.unpack("<3i", head) if len(head) == 12 else (0, 0, 0)
    if kind[0] == LLM_C_EVALUATION:
        raise InvalidValue(f"{name} is an evaluation file of llm.c; give its files of text")
    if is_llm_c(head) and not skip:
        (known, mark), skip = LLM_C[kind[:2]], LLM_C_HEADER
        due = LLM_C_HEADER + kind[2] * np.dtype(known).itemsize
        if content.size != due or (dtype is not None and found != known):
            raise damaged(path, f"by its header, it has {due:,} bytes, and ids of {known}")
        found = np.dtype(known)
    if found.kind not in "iu":
        raise InvalidValue(
            f"dtype is {dtype!r} for {name}; give that of its ids, such as 'uint16' if the "
            "vocabulary has up to 65,536, else 'uint32'"
        )
    values = _read(path, found, skip)
    # Of a text with ids below 500,000, the upper halves of wider integers are below 8.
    low, high = values[:4096:2], values[1:4096:2]
    if len(high) >= 32 and high.max() < 8 and low.max() > 255:
        logger.warning(
            "every second id of %s is below 8, as if its ids were wider than %s; give the dtype "
            "that they were written with",
            name,
            found,
        )
    return values, mark


def _read(path: epath.Path, dtype: np.dtype, skip: int = 0) -> np.ndarray:
    """The numbers of a file after `skip` bytes, mapped."""
    content = read_content(local_copy(path))
    if content.size < skip or (content.size - skip) % dtype.itemsize:
        raise damaged(path, f"its {content.size:,} bytes are not {skip:,} and some {dtype}")
    return np.frombuffer(content, dtype, offset=skip)


def _read_table(path: epath.Path, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Where documents begin, and their sizes, from a table `start,end,…` without a header."""
    if not path.exists():
        raise InvalidValue(f"there is no {os.fspath(path)}, though other files have one; add it")
    with open_text(path) as file:
        content = file.read()
    if not content.strip():
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    try:
        table = csv.read_csv(
            pa.BufferReader(content),
            csv.ReadOptions(autogenerate_column_names=True),
            csv.ParseOptions(newlines_in_values=True),
            csv.ConvertOptions(
                include_columns=["f0", "f1"], column_types={"f0": pa.int64(), "f1": pa.int64()}
            ),
        )
        begins, ends = (table[name].to_numpy() for name in ("f0", "f1"))
    except (pa.ArrowException, KeyError) as error:
        raise damaged(path, f"it lists no start and end of documents ({error})") from error
    if (begins < 0).any() or (ends < begins).any() or (ends > tokens).any():
        raise damaged(path, f"it lists documents outside of the {tokens:,} tokens beside it")
    return begins, ends - begins


def _find_edges(
    found: Sequence[epath.Path],
    arrays: Sequence[np.ndarray],
    end: int | tuple[()] | None,
    begin: int | None,
) -> np.ndarray:
    """Where documents begin in all tokens, one file after another, and where the last one ends.

    A document goes on in the next file if its end, or the begin of another, is not between them.
    """
    firsts = np.cumsum([0, *map(len, arrays)])
    if end == ():
        return np.unique(firsts)
    if (end is None) == (begin is None):
        raise InvalidValue(
            f"end is {end} and begin is {begin}; give one of them, the id that ends or begins each "
            "document (GPT-2's is 50256), or end=() if each file is one document"
        )
    mark = require_whole("end", end, 0) if begin is None else require_whole("begin", begin, 0)
    places = [
        first + _find_id(path, values, mark)
        for first, path, values in zip(firsts, found, arrays, strict=False)
    ]
    cuts = np.concatenate(places) + (begin is None)
    if not len(cuts):
        raise InvalidValue(
            f"the id {mark} is in none of the {firsts[-1]:,} tokens from {os.fspath(found[0])} on; "
            "check the id that separates documents, and dtype="
        )
    return np.unique(np.concatenate([[0], cuts, firsts[-1:]]))


def _find_id(path: epath.Path, values: np.ndarray, mark: int) -> np.ndarray:
    """Where an id is in the tokens of a file; of a long one, the user's caches keep the places."""
    if mark > np.iinfo(values.dtype).max:
        raise InvalidValue(f"the id {mark} cannot be in {os.fspath(path)}, of {values.dtype}")

    def search() -> np.ndarray:
        blocks = range(0, len(values), BLOCK)
        some = [at + np.flatnonzero(values[at : at + BLOCK] == mark) for at in blocks]
        return np.concatenate([np.zeros(0, np.int64), *some])

    if len(values) <= BLOCK:
        return search()
    place = path_of([files.digest([path]), f"{values.dtype}", len(values), mark], "places.npy")
    return np.load(write_once(place, "searching", lambda file: np.save(file, search())))


def _divide(
    found: Sequence[epath.Path],
    arrays: Sequence[np.ndarray],
    masks: files.Paths,
    borders: Sequence[tuple[np.ndarray, np.ndarray]],
    layout: Any = None,
) -> TokenFiles:
    """The examples in arrays that lie end to end; those in several arrays are copied.

    `masks` are as many files with a byte for each token, or none. `borders` are where examples
    begin, and their sizes, of each array, or once of all.
    """
    columns, paths = {TOKENS: arrays}, files.find(masks) if masks else []
    if paths:
        columns[WEIGHTS] = [_read(path, np.dtype(bool)) for path in paths]
    sizes = [", ".join(f"{len(each)}" for each in some) for some in columns.values()]
    if len({*sizes}) > 1:
        raise InvalidValue(
            f"the files of weights have {sizes[1]} bytes for {sizes[0]} tokens; give a file with a "
            "byte for each token, 1 to train on it, for each file of tokens"
        )
    firsts, groups = np.cumsum([0, *map(len, arrays)]), []
    begins = np.concatenate([at + n for (at, _), n in zip(borders, firsts, strict=False)])
    counts = np.concatenate([each for _, each in borders])
    ends = begins + counts
    # The array in which each example begins. Those of a group begin in one, and end in it or later.
    array = np.minimum(np.searchsorted(firsts, begins, "right"), len(arrays)) - 1
    changes = np.flatnonzero(np.diff(2 * array + (ends > firsts[array + 1]))) + 1
    for group in np.split(np.arange(len(begins)), changes) if len(begins) else ():
        first, low, high = int(array[group[0]]), begins[group].min(), ends[group].max()
        which = slice(first, max(int(np.searchsorted(firsts, high)), first + 1))
        lists = {}
        for name, some in columns.items():
            pieces = [
                values[max(low - at, 0) : high - at]
                for values, at in zip(some[which], firsts[which], strict=True)
            ]
            values = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
            lists[name] = values, begins[group] - low, counts[group]
        groups.append(lists)
    return TokenFiles([*found, *paths], groups, layout)
