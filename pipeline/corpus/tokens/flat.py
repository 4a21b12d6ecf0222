"""Flat: files that hold ids and nothing else, as nanoGPT, llm.c and OLMo write."""

import logging
import os
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from etils import epath
from pyarrow import csv

from pipeline.corpus.mask_files import leave_out_masks
from pipeline.corpus.token_files import (
    TokenFiles,
    damaged,
    divide,
    keep_array,
    map_content,
    read_numbers,
    require_size,
    signs,
)
from pipeline.errors import InvalidValue, require_whole
from pipeline.text import files
from pipeline.text.content import describe_binary, open_text, read_head

logger = logging.getLogger(__name__)

# Tokens that are searched for an id at once. Where it is in a longer file is stored.
SEARCHED = 1 << 24

# llm.c's files begin with 256 int32: their kind, its version, and the count of tokens. By the first
# two: the dtype, and the id before each document.
LLM_C = {(20240520, 1): ("uint16", 50256), (20240801, 7): ("uint32", 128000)}
LLM_C_HEADER, LLM_C_EVALUATION = 1024, 20240522


def _is_llm_c(head: bytes) -> bool:
    """Whether a file of text of llm.c begins so."""
    return len(head) >= 8 and struct.unpack("<2i", head[:8]) in LLM_C


def _table_of(path: epath.Path) -> epath.Path:
    """The table of documents beside a file of OLMo or Dolma, if there is one."""
    return path.with_name(path.name.removesuffix(path.suffix) + ".csv.gz")


def _recognise(path: epath.Path) -> bool:
    return path.suffix in (".bin", ".npy") and path.is_file()


def _suggest(path: epath.Path) -> tuple[list[str], dict[str, Any]]:
    first = files.find(path)[0]
    if _is_llm_c(read_head(first)):
        return [], {}
    return [], {"dtype": "uint16"} | ({} if _table_of(first).exists() else {"end": 50256})


@signs(_recognise, _suggest, by_name=True)
def flat(
    paths: files.Paths,
    *,
    dtype: Any = None,
    end: int | tuple[()] | None = None,
    begin: int | None = None,
    skip: int = 0,
    weights: files.Paths | None = None,
) -> TokenFiles:
    """The documents of files that hold ids alone, as nanoGPT, llm.c and OLMo write.

    The order of the files is that of the tokens. A document that goes on in the next file is one
    example, which is copied. A file `NAME.csv.gz` beside `NAME.npy`, with lines `start,end,…`, says
    where documents are; else `end` or `begin` does.

    Options:
        dtype: that of the ids, such as 'uint16' (of llm.c: by the header).
        end: the id that ends each document (of nanoGPT: 50256); (): each file is one document.
        begin: the id that begins each document (of llm.c: by the header).
        skip: the bytes before the ids of each file.
        weights: files with a byte for each token, 1 to train on it, such as 'labels_mask*'; ():
            train on all tokens, though there are such files.
    """
    token_files = files.leave_out_repeats(files.find(paths))
    token_files = [path for path in token_files if not path.name.endswith(".csv.gz")]
    token_files = leave_out_masks(token_files, weights)
    opened = [_open_flat(path, dtype, require_whole("skip", skip, 0)) for path in token_files]
    arrays, marks = [values for values, _ in opened], {mark for _, mark in opened}
    tables = [*map(_table_of, token_files)]
    listed = [table for table in tables if table.exists()]
    if listed and not (end is begin is None):
        logger.warning("%s says where documents are; begin and end are not used", listed[0])
    for path, (_, mark) in zip(token_files, opened, strict=True):
        if mark is not None and (end not in (None, ()) or begin not in (None, mark)):
            raise InvalidValue(
                f"end is {end} and begin is {begin}, but the header of {os.fspath(path)} says that "
                f"{mark} begins each document; omit both"
            )
    if listed:
        triples = zip(tables, token_files, arrays, strict=True)
        borders = [_read_table(table, path, len(values)) for table, path, values in triples]
        for table, values, (_, sizes) in zip(tables, arrays, borders, strict=True):
            if sizes.sum() != len(values):
                text = "%s lists documents of %s tokens, and the file beside it has %s"
                logger.warning(text, table, f"{sizes.sum():,}", f"{len(values):,}")
    else:
        if end is None and begin is None and len(marks) == 1:
            (begin,) = marks
        edges = _find_edges(token_files, arrays, end, begin)
        if begin is not None and len(arrays[0]) and arrays[0][0] != begin:
            logger.warning(
                "%s begins inside a document, with the id %s and not begin=%s; if that id ends "
                "documents, give end=%s",
                os.fspath(token_files[0]),
                arrays[0][0],
                begin,
                begin,
            )
        borders = [(edges[:-1], np.diff(edges))]
    layout = [f"{arrays[0].dtype}", end, begin, skip]
    return divide([*token_files, *listed], arrays, weights, borders, layout)


def _open_flat(path: epath.Path, dtype: Any, skip: int) -> tuple[np.ndarray, int | None]:
    """The ids of a file, and the id that begins a document if its header says so."""
    content, mark, name = map_content(path), None, os.fspath(path)
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
        id_dtype = np.dtype(dtype or object)
    except TypeError:
        id_dtype = np.dtype(object)
    kind = struct.unpack("<3i", head) if len(head) == 12 else (0, 0, 0)
    if kind[0] == LLM_C_EVALUATION:
        raise InvalidValue(f"{name} is an evaluation file of llm.c; give its files of text")
    if _is_llm_c(head) and not skip:
        (header_dtype, mark), skip = LLM_C[kind[:2]], LLM_C_HEADER
        due = LLM_C_HEADER + kind[2] * np.dtype(header_dtype).itemsize
        if content.size != due or (dtype is not None and id_dtype != header_dtype):
            raise damaged(path, f"by its header, it has {due:,} bytes, and ids of {header_dtype}")
        id_dtype = np.dtype(header_dtype)
    if id_dtype.kind not in "iu":
        raise InvalidValue(
            f"dtype is {dtype!r} for {name}; give that of its ids, such as 'uint16' if the "
            "vocabulary has up to 65,536, else 'uint32'"
        )
    values = read_numbers(path, id_dtype, skip)
    # Of a text with ids below 500,000, the upper halves of wider integers are below 8.
    low, high = values[:4096:2], values[1:4096:2]
    if len(high) >= 32 and high.max() < 8 and low.max() > 255:
        logger.warning(
            "every second id of %s is below 8, as if its ids were wider than %s; give the dtype "
            "that they were written with",
            name,
            id_dtype,
        )
    return values, mark


def _read_table(path: epath.Path, data: epath.Path, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Where documents begin, and their sizes, from a table `start,end,…` without a header.

    The file `data` has the tokens.
    """
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
    if (begins < 0).any() or (ends < begins).any():
        raise damaged(path, "it lists documents that begin before 0, or end before they begin")
    if (due := int(ends.max(initial=0))) > tokens:
        require_size(data, tokens, path, due)
    return begins, ends - begins


def _find_edges(
    token_files: Sequence[epath.Path],
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
    positions = [
        first + _find_id(path, values, mark)
        for first, path, values in zip(firsts, token_files, arrays, strict=False)
    ]
    cuts = np.concatenate(positions) + (begin is None)
    if not len(cuts):
        raise InvalidValue(
            f"the id {mark} is in none of the {firsts[-1]:,} tokens from "
            f"{os.fspath(token_files[0])} on; check the id that separates documents, and dtype="
        )
    return np.unique(np.concatenate([[0], cuts, firsts[-1:]]))


def _find_id(path: epath.Path, values: np.ndarray, mark: int) -> np.ndarray:
    """Where an id is in the tokens of a file; of a long one, the user's caches keep the places."""
    if mark > np.iinfo(values.dtype).max:
        raise InvalidValue(f"the id {mark} cannot be in {os.fspath(path)}, of {values.dtype}")

    def search() -> np.ndarray:
        blocks = range(0, len(values), SEARCHED)
        positions = [at + np.flatnonzero(values[at : at + SEARCHED] == mark) for at in blocks]
        return np.concatenate([np.zeros(0, np.int64), *positions])

    if len(values) <= SEARCHED:
        return search()
    return keep_array([files.digest([path]), f"{values.dtype}", len(values), mark], search)
