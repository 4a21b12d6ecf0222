"""Parts: the Arrow files that hold the tokens of a corpus."""

import dataclasses
import json
import os
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
from etils import epath

from pipeline.atomic import atomic_write, is_local
from pipeline.ragged import Ragged


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One Arrow file: a record batch with a column `tokens`, large_list<int32>, a list per example.

    `offsets_at` and `tokens_at` are where its two buffers start in the file, so that a piece can
    be read without parsing anything. `sha256` is of those buffers, not of the file: it stays the
    same when another Arrow version lays the file out differently. Where tokens have weights, a
    column `weights`, large_list<float>, has the same offsets, and starts at `weights_at`.
    """

    file: str
    examples: int
    tokens: int
    bytes: int
    offsets_at: int
    tokens_at: int
    sha256: str
    weights_at: int | None = None


def write_part(path: epath.Path, chunk: Ragged, metadata: Mapping[str, object]) -> Part:
    """Writes one part, whole or not at all, with `metadata` as JSON in its Arrow schema."""
    offsets = np.zeros(len(chunk.counts) + 1, np.int64)
    np.cumsum(chunk.counts, out=offsets[1:])
    values = {"tokens": pa.array(chunk.flat, pa.int32())}
    if chunk.weights is not None:
        values["weights"] = pa.array(chunk.weights, pa.float32())
    columns = {
        name: pa.LargeListArray.from_arrays(pa.array(offsets), column)
        for name, column in values.items()
    }
    schema = pa.schema(
        [pa.field(name, column.type) for name, column in columns.items()],
        metadata={"lockstep": json.dumps(metadata)},
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch(list(columns.values()), schema=schema))
    whole = sink.getvalue()
    with atomic_write(path) as file:
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
    except (pa.ArrowException, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{os.fspath(path)} is not a whole part of a corpus: {error}") from error


def _described(name: str, whole: pa.Buffer) -> tuple[Part, np.ndarray, dict]:
    """Parses the bytes of a part without copying them."""
    reader = pa.ipc.open_file(whole)
    batch = reader.get_batch(0)
    column = batch.column("tokens")
    _, offsets, _, tokens = column.buffers()
    counts = np.diff(np.frombuffer(offsets, np.int64, len(column) + 1))
    flat = np.frombuffer(tokens, np.int32, len(column.values))
    weights = weights_at = None
    if "weights" in reader.schema.names:
        buffer = batch.column("weights").buffers()[3]
        weights = np.frombuffer(buffer, np.float32, len(flat))
        weights_at = buffer.address - whole.address
    part = Part(
        file=name,
        examples=len(column),
        tokens=len(flat),
        bytes=whole.size,
        offsets_at=offsets.address - whole.address,
        tokens_at=tokens.address - whole.address,
        sha256=Ragged(flat, counts, None, weights).digest,
        weights_at=weights_at,
    )
    return part, counts, json.loads(reader.schema.metadata[b"lockstep"])
