"""The Arrow files of a corpus: cut, written, and read piece by piece."""

import dataclasses
import hashlib
import json
import mmap
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
from etils import epath

from pipeline.atomic import is_local, written

# A part is closed by the example that takes it to either limit: 64 MiB of tokens, or 8 MiB of
# offsets. The cut depends on nothing else, so every number of workers makes the same parts.
TOKENS_PER_PART = 1 << 24
EXAMPLES_PER_PART = 1 << 20

# Ranges of a remote part closer than this are read as one: 64 KiB cost less than a request.
NEIGHBOURS = 1 << 16
CONNECTIONS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One Arrow file: a record batch with a column `tokens`, large_list<int32>, a list per example.

    `offsets_at` and `tokens_at` are where its two buffers start in the file, so that a piece can
    be read without parsing anything. `sha256` is of those buffers, not of the file: it stays the
    same when another Arrow version lays the file out differently.
    """

    file: str
    examples: int
    tokens: int
    bytes: int
    offsets_at: int
    tokens_at: int
    sha256: str


def content_digest(flat: np.ndarray, counts: np.ndarray) -> str:
    """SHA-256 of the counts and the tokens of a part."""
    sha = hashlib.sha256(np.ascontiguousarray(counts, "<u4"))
    sha.update(np.ascontiguousarray(flat, "<i4"))
    return sha.hexdigest()


def write_part(
    path: epath.Path, flat: np.ndarray, counts: np.ndarray, metadata: Mapping[str, object]
) -> Part:
    """Writes one part, whole or not at all, with `metadata` as JSON in its Arrow schema."""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    column = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(flat, pa.int32()))
    schema = pa.schema(
        [pa.field("tokens", column.type)], metadata={"lockstep": json.dumps(metadata)}
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch([column], schema=schema))
    whole = sink.getvalue()
    with written(path) as file:
        file.write(whole)
    return _described(path.name, whole)[0]


def read_part(path: epath.Path) -> tuple[Part, np.ndarray, dict]:
    """A part from its own file: its description, the counts of its examples, its metadata.

    Raises:
        ValueError: the file is not a whole part.
    """
    try:
        whole = pa.memory_map(os.fspath(path)).read_buffer() if is_local(path) else None
        return _described(path.name, whole or pa.py_buffer(path.read_bytes()))
    except (pa.ArrowInvalid, KeyError, IndexError, AttributeError) as error:
        raise ValueError(f"{os.fspath(path)} is not a whole part of a corpus: {error}") from error


def _described(name: str, whole: pa.Buffer) -> tuple[Part, np.ndarray, dict]:
    """Parses the bytes of a part without copying them."""
    reader = pa.ipc.open_file(whole)
    column = reader.get_batch(0).column("tokens")
    _, offsets, _, tokens = column.buffers()
    counts = np.diff(np.frombuffer(offsets, np.int64, len(column) + 1))
    flat = np.frombuffer(tokens, np.int32, len(column.values))
    part = Part(
        file=name,
        examples=len(column),
        tokens=len(flat),
        bytes=whole.size,
        offsets_at=offsets.address - whole.address,
        tokens_at=tokens.address - whole.address,
        sha256=content_digest(flat, counts),
    )
    return part, counts, json.loads(reader.schema.metadata[b"lockstep"])


def cut(
    chunks: Iterator[tuple[np.ndarray, np.ndarray, int]],
) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Joins and cuts (flat tokens, counts, text bytes) chunks into those of parts."""
    raise NotImplementedError


def flat_positions(first: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Where each token of the pieces lies: int64, [sum of lengths]; no length may be 0.

    A cumulative sum of ones with a jump at each piece's start is ten times faster than
    `arange + repeat`.

    >>> flat_positions(np.array([10, 3]), np.array([3, 2])).tolist()
    [10, 11, 12, 3, 4]
    """
    if not len(lengths):
        return np.zeros(0, np.int64)
    ends = np.cumsum(lengths)
    steps = np.ones(ends[-1], np.int64)
    steps[0] = first[0]
    steps[ends[:-1]] = first[1:] - first[:-1] - lengths[:-1] + 1
    return np.cumsum(steps, out=steps)
