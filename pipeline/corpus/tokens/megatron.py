"""Megatron: the documents of its indexed data sets, `PREFIX.bin` with `PREFIX.idx`."""

import os
import struct

import numpy as np
from etils import epath

from pipeline.corpus.mask_files import leave_out_masks
from pipeline.corpus.token_files import (
    TokenFiles,
    between,
    damaged,
    divide,
    map_content,
    read_numbers,
    signs,
)
from pipeline.errors import InvalidValue
from pipeline.fs.atomic import as_path
from pipeline.text import files

# Megatron's codes of integers; its others are floats.
MEGATRON = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


def _index_of(prefix: epath.PathLike) -> str:
    """The name of the index of a Megatron data set, by its prefix, or by one of its files."""
    stem, ending = os.path.splitext(os.fspath(prefix))
    return f"{stem if ending in ('.bin', '.idx') else os.fspath(prefix)}.idx"


@signs(lambda path: not path.is_dir() and as_path(_index_of(path)).exists())
def megatron(prefixes: files.Paths, *, weights: files.Paths | None = None) -> TokenFiles:
    """The documents of Megatron's indexed data sets.

    The prefix `data/my_text_document` stands for the files `data/my_text_document.bin` and
    `.idx`. Several sequences of a document (of `…_sentence`) are one example.

    Options:
        weights: files with a byte for each token, 1 to train on it; (): train on all tokens,
            though there are files of masks or labels beside them.
    """
    names = [prefixes] if isinstance(prefixes, str | os.PathLike) else prefixes
    index_paths = files.find([_index_of(name) for name in names])
    # Indices that are one file may belong to different tokens, in documents of the same sizes.
    data = files.leave_out_repeats(files.find([path.with_suffix(".bin") for path in index_paths]))
    data = leave_out_masks(data, weights)
    indices, arrays, borders = [path.with_suffix(".idx") for path in data], [], []
    for index, path in zip(indices, data, strict=True):
        dtype, edges = _read_index(index)
        arrays.append(read_numbers(path, dtype))
        borders.append(between(index, edges, len(arrays[-1]), of=path))
    return divide([*indices, *data], arrays, weights, borders)


def _read_index(path: epath.Path) -> tuple[np.dtype, np.ndarray]:
    """Of a Megatron index: the dtype, and where documents begin and the last one ends."""
    content = map_content(path)
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
    between(path, first, sequences, "sequences")
    return dtype, edges[first]
