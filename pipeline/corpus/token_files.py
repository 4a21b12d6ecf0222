"""Token files of other programs: the arrays that hold tokens, and where examples begin in them."""

import itertools
import json
import os
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
from etils import epath
from pyarrow import csv

from pipeline.corpus.cache import default_directory
from pipeline.corpus.parts import read_content
from pipeline.errors import InvalidValue, require_whole
from pipeline.fs.atomic import as_path, atomic_write, make_directory
from pipeline.text.sources import files

# The numbers of some lists, where each list begins in them, and the size of each.
Lists: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]

# An id is searched in blocks of this many tokens. Where it is in a longer file is stored.
BLOCK = 1 << 24

# llm.c's files begin with 256 int32: their kind, its version, and the count of tokens. By the first
# two: the dtype, and the id before each document.
LLM_C = {(20240520, 1): ("uint16", 50256), (20240801, 7): ("uint32", 128000)}
LLM_C_HEADER, LLM_C_EVALUATION = 1024, 20240522

# Megatron's codes of integers; its others are floats.
MEGATRON = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


class TokenFiles(NamedTuple):
    """The examples in files of another program.

    Attributes:
        files: those that hold them.
        tokens: the ids of the examples, in order.
        weights: as many weights for each; None: all tokens weigh 1.
    """

    files: list[epath.Path]
    tokens: list[Lists]
    weights: list[Lists] | None = None


def saved_files(paths: files.Paths, split: str | None) -> files.Paths:
    """The Arrow files of a folder that Hugging Face's `save_to_disk` wrote; other paths as given.

    Its `state.json` lists them: others beside them may be left from when it was saved before.
    """
    if not isinstance(paths, str | os.PathLike) or not (folder := as_path(paths)).is_dir():
        if split is not None:
            raise InvalidValue(f"split is {split!r}, but {paths} is no folder; omit split=")
        return paths
    try:
        if (index := folder / "dataset_dict.json").exists():
            splits = json.loads(index.read_text())["splits"]
            if split not in splits:
                raise InvalidValue(
                    f"{os.fspath(folder)} has the splits {', '.join(splits)}, not {split}; give "
                    f"split={splits[0]!r} or another of them"
                )
            folder /= split
        state = json.loads((index := folder / "state.json").read_text())
        names = [each["filename"] for each in state["_data_files"]]
    except (FileNotFoundError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise InvalidValue(
            f"{os.fspath(folder)} is not a data set that was saved to disk whole: {index.name} "
            f"cannot be read ({error!r}); save it again, or give a glob of files"
        ) from error
    if not names:
        raise InvalidValue(f"{os.fspath(folder)} is empty; give a data set with at least one row")
    return [folder / name for name in names]


def megatron(prefixes: files.Paths) -> TokenFiles:
    """The documents of Megatron's indexed data sets, `PREFIX.bin` with `PREFIX.idx`."""
    given = [prefixes] if isinstance(prefixes, str | os.PathLike) else prefixes
    stems = [os.fspath(each).removesuffix(".idx").removesuffix(".bin") for each in given]
    found, tokens = files.find([f"{stem}.idx" for stem in stems]), []
    data = files.find([f"{os.fspath(path)[:-4]}.bin" for path in found])
    for index, path in zip(found, data, strict=True):
        dtype, edges, documents = _read_index(index)
        values = _read(path, dtype)
        if len(values) != edges[-1]:
            raise InvalidValue(
                f"{os.fspath(path)} holds {len(values):,} tokens of {dtype}, but its .idx "
                f"describes {edges[-1]:,}; it is cut short or of another index; copy both again"
            )
        begins = edges[documents]
        tokens.append((values, begins[:-1], np.diff(begins)))
    return TokenFiles([*found, *data], tokens)


def _read_index(path: epath.Path) -> tuple[np.dtype, np.ndarray, np.ndarray]:
    """Of a Megatron index: the dtype, where sequences begin and end, and where documents do."""
    content = read_content(path)
    head = bytes(content[:34])
    if len(head) < 34 or head[:9] != b"MMIDIDX\0\0":
        raise InvalidValue(
            f"{os.fspath(path)} is no index of Megatron: it does not begin with MMIDIDX; give the "
            "prefix of a .bin and an .idx file"
        )
    version, code, sequences, documents = struct.unpack("<QBQQ", head[9:])
    size = 34 + 12 * sequences + 8 * documents
    if version != 1 or code not in MEGATRON or content.size not in (size, size + sequences):
        raise InvalidValue(
            f"{os.fspath(path)} has version {version}, dtype {code} and {content.size:,} bytes for "
            f"{sequences:,} sequences; it must have version 1, the code of an integer dtype (one "
            f"of {', '.join(map(str, MEGATRON))}) and {size:,} bytes; copy it again"
        )
    if any(bytes(content[size:])):
        raise InvalidValue(
            f"{os.fspath(path)} has sequences of other modes than text; only text can be read"
        )
    dtype = np.dtype(MEGATRON[code])
    edges = np.cumsum(np.append(0, np.frombuffer(content, "<i4", sequences, 34)))
    begins = np.frombuffer(content, "<i8", sequences, 34 + 4 * sequences)
    first = np.frombuffer(content, "<i8", documents, 34 + 12 * sequences)
    if (np.diff(edges) < 0).any() or (begins != dtype.itemsize * edges[:-1]).any():
        raise InvalidValue(
            f"{os.fspath(path)} is damaged: its sequences do not lie end to end; copy it again"
        )
    if not documents or first[0] or first[-1] != sequences or (np.diff(first) < 0).any():
        raise InvalidValue(
            f"{os.fspath(path)} is damaged: its documents do not ascend from 0 to its "
            f"{sequences:,} sequences; copy it again"
        )
    return dtype, edges, first


def datatrove(paths: files.Paths, weights: str | tuple[()] | None) -> TokenFiles:
    """The documents of datatrove's `.ds` files, or of a folder of them."""
    if isinstance(paths, str | os.PathLike) and as_path(paths).is_dir():
        paths = f"{os.fspath(paths)}/*.ds"
    found = files.find(paths)
    indices, losses, about = (
        [path.with_name(path.name + end) for path in found]
        for end in (".index", ".loss", ".metadata")
    )
    if weights is None and (masks := [path for path in losses if path.exists()]):
        raise InvalidValue(
            f"{os.fspath(masks[0])} says on which tokens to train; give weights='loss', or "
            "weights=() to train on all"
        )
    ends = [_read(path, np.dtype("<i8")) for path in files.find(indices)]
    totals = [int(each[-1]) if len(each) else 0 for each in ends]
    sizes = [path.stat().length for path in found]
    kinds = [np.dtype(each) for each in ("uint16", "uint32")]
    fitting = [d for d in kinds if sizes == [d.itemsize * total for total in totals]]
    for path, given, total in zip(about, ends, totals, strict=True):
        told = path.read_text().splitlines()[1:2] if path.exists() else [f"{total}"]
        if (np.diff(given, prepend=0) < 0).any() or told != [f"{total}"]:
            raise InvalidValue(
                f"{os.fspath(path)} or the .index beside it is damaged: its documents do not end "
                f"at {total:,} tokens; copy the files again"
            )
    if not fitting:
        raise InvalidValue(
            f"{os.fspath(found[0])} and those after it have {', '.join(map(str, sizes))} bytes for "
            f"{', '.join(map(str, totals))} tokens by their .index, which are not 2 or 4 for each; "
            "a file is cut short, or of another index; copy the files again"
        )
    counts = [np.diff(each, prepend=0) for each in ends]
    borders = [(each - n, n) for each, n in zip(ends, counts, strict=True)]
    tokens = [(_read(path, fitting[0]), *at) for path, at in zip(found, borders, strict=True)]
    if not weights:
        return TokenFiles([*found, *indices], tokens)
    masks = _read_masks(files.find(losses), totals)
    lists = [(mask, *at) for mask, at in zip(masks, borders, strict=True)]
    return TokenFiles([*found, *indices, *losses], tokens, lists)


def _read_masks(paths: Sequence[epath.Path], totals: Sequence[int]) -> list[np.ndarray]:
    """The bytes of files of masks, one for each token of a file."""
    held = [_read(path, np.dtype(bool)) for path in paths]
    if [*map(len, held)] != totals:
        raise InvalidValue(
            f"the files of weights have {', '.join(map(str, map(len, held)))} bytes for "
            f"{', '.join(map(str, totals))} tokens; give a file with a byte for each token, 1 to "
            "train on it, for each file of tokens"
        )
    return held


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
    found = [path for path in files.find(paths) if not path.name.endswith(".csv.gz")]
    masks = [path for path in found if path.name.startswith("labels_mask")]
    found = [path for path in found if path not in masks]
    beside = [path.with_name(path.name.replace("token_ids", "labels_mask", 1)) for path in found]
    masks += [mask for path, mask in zip(found, beside, strict=True) if mask != path]
    if weights is None and any(mask.exists() for mask in masks):
        raise InvalidValue(
            f"{os.fspath(masks[0])} says on which tokens to train; give weights="
            f"{os.fspath(masks[0].parent / 'labels_mask*')!r}, or weights=() to train on all"
        )
    opened = [_open_flat(path, dtype, require_whole("skip", skip, 0)) for path in found]
    arrays = [values for values, _ in opened]
    of_weights = files.find(weights) if weights else []
    held = _read_masks(of_weights, [*map(len, arrays)]) if weights else []
    sides = [arrays, held] if held else [arrays]
    tables = [path.with_name(path.name.removesuffix(path.suffix) + ".csv.gz") for path in found]
    listed = [table for table in tables if table.exists()]
    if listed:
        borders = [_read_table(table, len(a)) for table, a in zip(tables, arrays, strict=True)]
        lists = [[(a, *at) for a, at in zip(some, borders, strict=True)] for some in sides]
    else:
        marks = {mark for _, mark in opened}
        begin = marks.pop() if end is None and begin is None and len(marks) == 1 else begin
        edges = _find_edges(found, arrays, end, begin)
        lists = [_divide(some, edges) for some in sides]
    return TokenFiles([*found, *of_weights, *listed], *lists)


def _open_flat(path: epath.Path, dtype: Any, skip: int) -> tuple[np.ndarray, int | None]:
    """The ids of a file, and the id that begins a document if its header says so."""
    content, mark = read_content(path), None
    head, name = bytes(content[:12]), os.fspath(path)
    if head.startswith(b"\x93NUMPY"):
        raise InvalidValue(f"{name} is an .npy array with a header; read it with InPlace.npy")
    kind = struct.unpack("<3i", head) if len(head) == 12 else (0, 0, 0)
    if kind[0] == LLM_C_EVALUATION:
        raise InvalidValue(
            f"{name} is an evaluation file of llm.c, which holds questions, not text"
        )
    if kind[:2] in LLM_C and not skip:
        (known, mark), skip = LLM_C[kind[:2]], LLM_C_HEADER
        dtype = known if dtype is None else dtype
        due = LLM_C_HEADER + kind[2] * np.dtype(known).itemsize
        if np.dtype(dtype) != known or content.size != due:
            raise InvalidValue(
                f"{name} has {content.size:,} bytes and dtype={dtype}; by its header it has "
                f"{due:,} and {known}; it is cut short, or remove dtype="
            )
    if dtype is None:
        raise InvalidValue(
            f"{name} does not say how its ids are stored; give dtype=, such as 'uint16' if the "
            "vocabulary has up to 65,536 ids, else 'uint32'"
        )
    return _read(path, _integer(dtype), skip), mark


def _integer(dtype: Any) -> np.dtype:
    try:
        found = np.dtype(dtype)
    except TypeError as error:
        raise InvalidValue(f"dtype is {dtype!r}; {error}") from error
    if found.kind not in "iu":
        raise InvalidValue(f"dtype is {dtype}; ids are integers, such as 'uint16' or 'int32'")
    return found


def _read(path: epath.Path, dtype: np.dtype, skip: int = 0) -> np.ndarray:
    """The numbers of a file after `skip` bytes; mapped if it is local."""
    content = read_content(path)
    if content.size < skip or (content.size - skip) % dtype.itemsize:
        raise InvalidValue(
            f"{os.fspath(path)} has {content.size:,} bytes, which are not {skip:,} and a whole "
            f"number of {dtype}; it is cut short, or dtype= or skip= is wrong"
        )
    return np.frombuffer(content, dtype, offset=skip)


def _read_table(path: epath.Path, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Where documents begin, and their sizes, from a table `start,end,…` without a header."""
    if not path.exists():
        raise InvalidValue(f"there is no {os.fspath(path)}, though other files have one; add it")
    with files.open_file(path) as file:
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
        raise InvalidValue(
            f"{os.fspath(path)} does not list the start and the end of documents: {error}"
        ) from error
    if (begins < 0).any() or (ends < begins).any() or (ends > tokens).any():
        raise InvalidValue(
            f"{os.fspath(path)} lists documents outside of the {tokens:,} tokens beside it; it is "
            "of another file, or that one is cut short; copy both again"
        )
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
        first + find_id(path, values, mark)
        for first, path, values in zip(firsts, found, arrays, strict=False)
    ]
    cuts = np.concatenate(places) + (begin is None)
    if not len(cuts):
        raise InvalidValue(
            f"the id {mark} is in none of the {firsts[-1]:,} tokens from {os.fspath(found[0])} on; "
            "check the id that separates documents, and dtype="
        )
    return np.unique(np.concatenate([[0], cuts, firsts[-1:]]))


def find_id(path: epath.Path, values: np.ndarray, mark: int) -> np.ndarray:
    """Where an id is in the tokens of a file: int64.

    For a long file, they are stored in the directory of the user's caches.
    """
    if mark > np.iinfo(values.dtype).max:
        raise InvalidValue(f"the id {mark} cannot be in {os.fspath(path)}, of {values.dtype}")

    def search() -> np.ndarray:
        blocks = range(0, len(values), BLOCK)
        some = [at + np.flatnonzero(values[at : at + BLOCK] == mark) for at in blocks]
        return np.concatenate([np.zeros(0, np.int64), *some])

    if len(values) <= BLOCK:
        return search()
    name = f"{files.digest([path])}-{values.dtype}-{len(values)}-{mark}.npy"
    return read_cached("borders", name, search)


def read_cached(folder: str, name: str, make: Any) -> np.ndarray:
    """An array in a file in the directory of the user's caches, mapped; `make` gives it once."""
    place = make_directory(epath.Path(default_directory()) / folder) / name
    if not place.exists():
        with atomic_write(place, shared=True) as file:
            np.save(file, make())
    return np.load(os.fspath(place), mmap_mode="r")


def _divide(arrays: Sequence[np.ndarray], edges: np.ndarray) -> list[Lists]:
    """The documents between edges in arrays that lie end to end; those in several are copied."""
    firsts, lists = np.cumsum([0, *map(len, arrays)]), []
    begins, counts = edges[:-1], np.diff(edges)
    for number, (first, last) in enumerate(itertools.pairwise(firsts.tolist())):
        values = arrays[number]
        here = slice(*np.searchsorted(begins, (first, last)))
        inside = slice(here.start, np.searchsorted(edges, last, "right") - 1)
        lists.append((values, begins[inside] - first, counts[inside]))
        for at in range(max(inside.stop, here.start), here.stop):  # at most one
            stop = np.searchsorted(firsts, edges[at + 1])
            pieces = [values[begins[at] - first :], *arrays[number + 1 : stop]]
            joined = np.concatenate(pieces)[: counts[at]]
            lists.append((joined, np.zeros(1, np.int64), counts[at : at + 1]))
    return lists
