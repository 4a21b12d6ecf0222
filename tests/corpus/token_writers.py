"""Writers of the token files of other programs, each after the layout that its readers expect."""

import gzip
import itertools
import struct
from pathlib import Path

import numpy as np

CODES = {"uint8": 1, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def write_megatron(prefix, documents, dtype="int32"):
    """Documents, each a list of sequences, as `IndexedDatasetBuilder` of Megatron writes them."""
    sequences = [np.asarray(sequence, dtype) for document in documents for sequence in document]
    lengths = np.array([len(sequence) for sequence in sequences], np.int32)
    first = np.cumsum([0, *map(len, documents)])
    begins = np.cumsum([0, *lengths[:-1]]) * np.dtype(dtype).itemsize
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, CODES[dtype], len(lengths), len(first))
    arrays = lengths, begins[: len(lengths)].astype(np.int64), first.astype(np.int64)
    Path(f"{prefix}.idx").write_bytes(head + b"".join(array.tobytes() for array in arrays))
    Path(f"{prefix}.bin").write_bytes(b"".join(sequence.tobytes() for sequence in sequences))


def write_flat(path, documents, dtype="uint16"):
    """Documents as Dolma writes them: ids alone, and a table of where each document is."""
    Path(path).write_bytes(
        b"".join(np.asarray(document, dtype).tobytes() for document in documents)
    )
    ends = np.cumsum([0, *map(len, documents)]).tolist()
    rows = [f'{a},{b},"id, {a}",source,{n}\n' for n, (a, b) in enumerate(itertools.pairwise(ends))]
    with gzip.open(Path(path).with_suffix(".csv.gz"), "wt") as file:
        file.writelines(rows)


def write_llm_c(path, tokens, kind=20240520, version=1, dtype="uint16"):
    """Tokens in a shard of llm.c: 256 int32, then the ids."""
    head = np.zeros(256, np.int32)
    head[:3] = kind, version, len(tokens)
    Path(path).write_bytes(head.tobytes() + np.asarray(tokens, dtype).tobytes())
