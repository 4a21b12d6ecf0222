"""Parts: the Arrow files that hold the tokens of a corpus."""

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from etils import epath

from pipeline.corpus.gather import join_memory
from pipeline.corpus.tasks import Task
from pipeline.errors import InvalidValue
from pipeline.fs.atomic import atomic_write, is_local
from pipeline.planning.identity import fingerprint_of
from pipeline.text.features import LOSS_WEIGHTS, WEIGHTS, Column
from pipeline.text.ragged import Ragged

# The key of the metadata, by which a file is known as a part. Arrow stores it twice.
MARK = b"lockstep"

# What Arrow writes does not depend on the defaults of its version, nor on its environment.
WRITE = pa.ipc.IpcWriteOptions(
    metadata_version=pa.ipc.MetadataVersion.V5,
    allow_64bit=False,
    use_legacy_format=False,
    compression=None,
    emit_dictionary_deltas=False,
    unify_dictionaries=False,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One Arrow file: a record batch with a column `tokens`, large_list<int32>, a list per example.

    Where tokens have weights, a column `weights`, large_list<float>, has the same offsets.

    Attributes:
        file: its name.
        examples: how many lists it holds.
        tokens: how many tokens these have together.
        bytes: the size of the file.
        offsets_at: the byte of the file where the int64 offsets of the lists begin.
        tokens_at: the byte where the int32 tokens begin.
        sha256: of offsets, tokens and weights, not of the file: it stays the same when another
            version of Arrow lays the file out differently.
        weights_at: the byte where the float32 weights begin; None where there are none.
    """

    file: str
    examples: int
    tokens: int
    bytes: int
    offsets_at: int
    tokens_at: int
    sha256: str
    weights_at: int | None = None

    def __post_init__(self) -> None:
        places = {"offsets_at": (8, self.examples + 1), "tokens_at": (4, self.tokens)}
        if self.weights_at is not None:
            places["weights_at"] = (4, self.tokens)
        for name in ("examples", "tokens", "bytes", *places):
            if name in places and not places[name][1]:
                # Arrow puts an empty buffer anywhere.
                object.__setattr__(self, name, 0)
            number = getattr(self, name)
            if type(number) is not int or number < 0:
                raise InvalidValue(
                    f"{name} of {self.file} is {number!r}; it is an integer from 0 up"
                )
        for name, (item, count) in places.items():
            begin = getattr(self, name)
            if begin % item or begin + item * count > self.bytes:
                raise InvalidValue(
                    f"{name} of {self.file} is {begin:,}; it is a multiple of {item} from where "
                    f"{count:,} × {item} bytes fit into the {self.bytes:,} of the file"
                )


class PartFile:
    """The Arrow file of a part, parsed without a copy; its tokens are not looked at.

    Attributes:
        offsets: where each example begins, and the last one ends: int64 [examples + 1].
        tokens: of all examples, int32.
        weights: of all tokens, float32; None where there are none.
        part: what the header of the file says of it.
        metadata: what its writer recorded: `origin`, `sha256`, `learnt`, `text_bytes`, and a
            `digest` of these.
    """

    def __init__(self, name: str, content: pa.Buffer):
        try:
            self._parse(name, content)
        except Exception as error:  # of Arrow, of JSON, or of types that are not as expected
            raise InvalidValue(f"{name} is not a whole part of a corpus: {error}") from error

    def _parse(self, name: str, content: pa.Buffer) -> None:
        reader = pa.ipc.open_file(content)
        self.offsets, self.tokens, self.weights = read_lists(reader.get_batch(0))
        self.metadata: dict = json.loads(reader.schema.metadata[MARK])
        if self.metadata.pop("digest") != json_digest(self.metadata):
            raise InvalidValue("the digest of its metadata differs")
        arrays = {"offsets": self.offsets, "tokens": self.tokens, "weights": self.weights}
        self.part = Part(
            file=name,
            examples=len(self.offsets) - 1,
            tokens=len(self.tokens),
            bytes=content.size,
            sha256=self.metadata["sha256"],
            **{
                f"{column}_at": array.ctypes.data - content.address
                for column, array in arrays.items()
                if array is not None
            },
        )

    def verify(self) -> Ragged:
        """The examples, as views of the file, which are refused if their digest differs."""
        examples = as_ragged(self.part.file, self.offsets, self.tokens, self.weights)
        if examples.digest != self.part.sha256:
            raise InvalidValue("its digest differs")
        return examples


def as_ragged(
    name: str, offsets: np.ndarray, tokens: np.ndarray, weights: np.ndarray | None
) -> Ragged:
    """Lists of the file `name` as `Ragged`, without a copy; refuses offsets that do not ascend."""
    counts = np.diff(offsets)
    if offsets[0] or offsets[-1] != len(tokens) or counts.min(initial=0) < 0:
        raise InvalidValue(
            f"the offsets of {name} do not ascend from 0 to its {len(tokens):,} tokens"
        )
    columns = {} if weights is None else {WEIGHTS: Column(LOSS_WEIGHTS, weights)}
    return Ragged(tokens, counts, None, columns)


def read_lists(batch: pa.RecordBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Offsets, tokens and weights (None where there are none) of a batch, without a copy."""
    column = _lists(batch, "tokens", pa.int32())
    _, offsets, _, tokens = column.buffers()
    flat = np.frombuffer(tokens, np.int32, len(column.values))
    weights = None
    if "weights" in batch.schema.names:
        values = _lists(batch, "weights", pa.float32()).buffers()[3]
        weights = np.frombuffer(values, np.float32, len(flat))
    return np.frombuffer(offsets, np.int64, len(column) + 1), flat, weights


def _lists(batch: pa.RecordBatch, name: str, item: pa.DataType) -> pa.LargeListArray:
    column = batch.column(name)
    if not pa.types.is_large_list(column.type) or column.type.value_type != item:
        raise InvalidValue(f"its column {name} is {column.type}, not large_list of {item}")
    return column


def write_lists(examples: Ragged) -> dict[str, pa.Array]:
    """The columns of some examples: tokens, and weights where there are some."""
    offsets = np.zeros(len(examples.counts) + 1, np.int64)
    np.cumsum(examples.counts, out=offsets[1:])
    values = {"tokens": pa.array(examples.flat, pa.int32())}
    if examples.weights is not None:
        values["weights"] = pa.array(examples.weights, pa.float32())
    return {
        name: pa.LargeListArray.from_arrays(pa.array(offsets), column)
        for name, column in values.items()
    }


def write_part(
    path: epath.Path, examples: Ragged, origin: Mapping[str, Any], task: Task
) -> PartFile:
    """Writes one part, whole or not at all, of examples that were made from `origin`."""
    metadata = {
        "origin": dict(origin),
        "sha256": examples.digest,
        "text_bytes": None if examples.text_bytes is None else int(examples.text_bytes.sum()),
        "learnt": task.count_learnt(examples.counts, examples.weights),
    }
    metadata["digest"] = json_digest(metadata)
    columns = write_lists(examples)
    schema = pa.schema(
        [pa.field(name, column.type) for name, column in columns.items()],
        metadata={MARK: json.dumps(metadata)},
    )
    batch = pa.record_batch(list(columns.values()), schema=schema)
    memory = None if is_local(path) else pa.BufferOutputStream()
    with atomic_write(path, shared=True) as file:
        with pa.ipc.new_file(memory or file, schema, options=WRITE) as writer:
            writer.write_batch(batch)
        if memory is not None:
            file.write(memory.getvalue())
    return read_part(path) if memory is None else PartFile(path.name, memory.getvalue())


def read_content(path: epath.Path) -> pa.Buffer:
    """The bytes of a file, mapped where it is local."""
    try:
        if not is_local(path):
            return pa.py_buffer(path.read_bytes())
        # Arrow's maps outlive their files; Python's each hold one open, and 1,024 is a limit.
        with pa.memory_map(os.fspath(path)) as file:
            return file.read_buffer()
    except (OSError, pa.ArrowException) as error:
        raise InvalidValue(f"{os.fspath(path)} cannot be read: {error}") from error


def read_part(path: epath.Path) -> PartFile:
    """The file of a part, mapped where it is local; a `ValueError` if it is not whole."""
    return PartFile(path.name, read_content(path))


def json_digest(document: Any) -> str:
    """A short hash of a JSON document, whatever the order of its keys."""
    return fingerprint_of(document)[:12]


COLUMNS = {"offsets": np.int64, "tokens": np.int32, "weights": np.float32}


class Maps:
    """Some parts of a corpus of `count`, by number, mapped as long as this object lives.

    Attributes:
        has: whether each part of the corpus is one of them: bool [parts].
        columns: for each name of `COLUMNS` one array over the memory of all its parts, made by
            `join_memory`, and the place in it where each part begins: int64 [parts].
    """

    def __init__(self, files: Mapping[int, PartFile], count: int):
        self._files = files
        numbers = np.array([*files], np.int64)
        self.has = np.zeros(count, bool)
        self.has[numbers] = True
        self.columns = {}
        for name, dtype in COLUMNS.items():
            arrays = [getattr(file, name) for file in files.values()]
            arrays = [np.zeros(0, dtype) if array is None else array for array in arrays]
            values, begins = join_memory([np.zeros(0, dtype), *arrays])
            places = np.zeros(count, np.int64)
            places[numbers] = begins[1:]
            self.columns[name] = values, places
