"""Parts: the Arrow files that hold the tokens of a corpus."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from etils import epath

from pipeline.corpus.gather import join_memory
from pipeline.corpus.tasks import Task
from pipeline.errors import InvalidValue
from pipeline.fs.atomic import atomic_write, is_local
from pipeline.planning import lengths as lengths_module
from pipeline.planning.identity import fingerprint_of
from pipeline.text.features import OF_TOKENS, TOKENS, WEIGHTS, Column, Feature
from pipeline.text.ragged import Ragged

# The metadata key that marks a file as a part. Arrow stores it twice.
MARK = b"lockstep"

# The metadata that describe a part; a file of features alone has the first three.
HEADER = "examples", "tokens", "sha256", "learnt", "text_bytes", "lengths_digest"

# These fix the output of Arrow, whatever the defaults of its version and its environment.
WRITE = pa.ipc.IpcWriteOptions(
    metadata_version=pa.ipc.MetadataVersion.V5,
    allow_64bit=False,
    use_legacy_format=False,
    compression=None,
    emit_dictionary_deltas=False,
    unify_dictionaries=False,
)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the values of a column are in the file of a part, one after another.

    Attributes:
        at: the byte where they begin.
        dtype: its name; "bool" are bits, eight in a byte, the lowest first.
        count: the number of values.
    """

    at: int
    dtype: str
    count: int

    @property
    def stored(self) -> np.dtype:
        """The dtype of the stored numbers; for bits, that of their bytes."""
        return np.dtype(np.uint8 if self.dtype == "bool" else self.dtype)

    @property
    def units(self) -> int:
        """The number of stored numbers; for bits, of their bytes."""
        return -(-self.count // 8) if self.dtype == "bool" else self.count

    @property
    def end(self) -> int:
        """The byte after the last."""
        return self.at + self.units * self.stored.itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One Arrow file: a record batch with a column `tokens`, large_list<int32>, a list per example.

    If tokens have weights, a column `weights` has lists of the same sizes, of floats, or of
    booleans if all weights are 0 and 1. Each feature has a column of its name: lists of the same
    sizes if it is of tokens, else one value for each example. Values with a shape are fixed-size
    lists. A file of features that were added later has no tokens.

    Attributes:
        file: its name.
        examples: the number of examples.
        tokens: the number of tokens of all examples.
        bytes: the size of the file.
        sha256: of the content, not of the file: it stays the same when another version of Arrow
            lays the file out differently.
        columns: where the values of each column are; "offsets", int64, say where each example
            begins among the tokens, and where the last one ends.
        learnt: positions that carry loss, whose weight is not 0.
        text_bytes: UTF-8 bytes of the text that is learnt; None if no text is known.
        lengths_digest: the digest of the lengths of its examples, by
            `pipeline.planning.lengths.digest`; "" if it has no tokens.
    """

    file: str
    examples: int
    tokens: int
    bytes: int
    sha256: str
    columns: Mapping[str, Place]
    learnt: int = 0
    text_bytes: int | None = None
    lengths_digest: str = ""

    def __post_init__(self) -> None:
        columns = {
            name: place if isinstance(place, Place) else Place(**place)
            for name, place in self.columns.items()
        }
        # Arrow may put an empty buffer anywhere.
        columns = {n: p if p.count else dataclasses.replace(p, at=0) for n, p in columns.items()}
        object.__setattr__(self, "columns", columns)
        sizes = {name: getattr(self, name) for name in ("examples", "tokens", "bytes", "learnt")}
        sizes |= {} if self.text_bytes is None else {"text_bytes": self.text_bytes}
        sizes |= {f"the place of {name}": place.at for name, place in columns.items()}
        sizes |= {f"the number of {name}": place.count for name, place in columns.items()}
        for name, number in sizes.items():
            if type(number) is not int or number < 0:
                raise InvalidValue(
                    f"{name} in {self.file} is {number!r}; it must be an integer from 0 up"
                )
        counts = {"offsets": self.examples + 1, "tokens": self.tokens, WEIGHTS: self.tokens}
        for name, place in columns.items():
            if name in counts and place.count != counts[name]:
                raise InvalidValue(
                    f"the number of {name} in {self.file} is {place.count:,}, not {counts[name]:,}"
                )
            item = place.stored.itemsize
            if place.at % item or place.end > self.bytes:
                raise InvalidValue(
                    f"the place of {name} in {self.file} is {place.at:,}; it must be a multiple of "
                    f"{item}, with {place.units:,} × {item} bytes after it within the "
                    f"{self.bytes:,} of the file"
                )


class PartFile:
    """The Arrow file of a part, parsed without a copy; its values are not checked.

    Attributes:
        columns: the values of each column of the part, flat, as they are stored.
        features: the features that have a column, by name; weights are not among them.
        part: the description in the header of the file.
        metadata: the entries in the header: `HEADER`, `origin`, `features`, and a `digest` of
            these.
    """

    def __init__(self, name: str, content: pa.Buffer):
        try:
            self._parse(name, content)
        except Exception as error:  # from Arrow, from JSON, or from unexpected types
            raise InvalidValue(f"{name} is not a whole part of a corpus: {error}") from error

    def _parse(self, name: str, content: pa.Buffer) -> None:
        reader = pa.ipc.open_file(content)
        batch = reader.get_batch(0)
        self.metadata: dict = json.loads(reader.schema.metadata[MARK])
        if self.metadata.pop("digest") != json_digest(self.metadata):
            raise InvalidValue("the digest of its metadata differs")
        self.features = {n: Feature(**each) for n, each in self.metadata["features"].items()}
        self.columns, places = _map_columns(batch, self.features, content.address)
        header = {name: self.metadata[name] for name in HEADER if name in self.metadata}
        self.part = Part(file=name, bytes=content.size, columns=places, **header)

    @property
    def counts(self) -> np.ndarray:
        """The tokens of each example: int64 [examples]."""
        return np.diff(self.columns["offsets"])

    def read(self) -> Ragged:
        """The examples, as views of the file; those of features alone have no tokens or counts."""
        return _as_ragged(self.part.file, self.columns, self.part.columns, self.features)

    def verify(self) -> Ragged:
        """The examples, as `read`; refuses them if their digest differs."""
        examples = self.read()
        if examples.digest != self.part.sha256:
            raise InvalidValue("its digest differs")
        return examples


def _map_columns(
    batch: pa.RecordBatch, features: Mapping[str, Feature], begin: int = 0
) -> tuple[dict[str, np.ndarray], dict[str, Place]]:
    """The values of each column as they are stored, and their places from the address `begin`."""
    columns: dict[str, np.ndarray] = {}
    places: dict[str, Place] = {}

    def add(name: str, dtype: str, count: int, memory: pa.Buffer | None) -> None:
        buffer = pa.py_buffer(b"") if memory is None else memory
        place = places[name] = Place(buffer.address - begin if count else 0, dtype, count)
        columns[name] = np.frombuffer(buffer, place.stored, place.units)

    for name, feature in {**OF_TOKENS, **features}.items():
        if name not in batch.schema.names:
            continue
        values = column = batch.column(name)
        if not feature.per_example:
            if not pa.types.is_large_list(column.type):
                raise InvalidValue(f"its column {name} is {column.type}, not large_list")
            values = column.values
        if name == TOKENS:
            add("offsets", "int64", len(column) + 1, column.buffers()[1])
        size = 1
        if pa.types.is_fixed_size_list(values.type):
            size, values = values.type.list_size, values.values
        dtype = {"float": "float32", "halffloat": "float16"}.get(f"{values.type}", f"{values.type}")
        allowed = [feature.dtype.name, *(["bool"] if name == WEIGHTS else [])]
        if dtype not in allowed or size != feature.size:
            raise InvalidValue(
                f"its column {name} has values of {column.type}, not {' or '.join(allowed)}"
            )
        add(name, dtype, len(values), values.buffers()[1])
    return columns, places


def _as_ragged(
    file: str,
    columns: Mapping[str, np.ndarray],
    places: Mapping[str, Place],
    features: Mapping[str, Feature],
) -> Ragged:
    """Columns of `file` as `Ragged`, copying bits alone; refuses offsets that descend."""
    offsets = columns.get("offsets", np.zeros(1, np.int64))
    counts, tokens = np.diff(offsets), columns.get(TOKENS, ())
    if offsets[0] or offsets[-1] != len(tokens) or counts.min(initial=0) < 0:
        raise InvalidValue(
            f"the offsets of {file} do not ascend from 0 to its {len(tokens):,} tokens"
        )
    found = {}
    for name, feature in {**OF_TOKENS, **features}.items():
        if name in columns:
            values = columns[name]
            if places[name].dtype == "bool":
                values = np.unpackbits(values, count=places[name].count, bitorder="little")
            found[name] = Column(feature, feature.restore(values))
    return Ragged(counts, found)


def read_batch(file: str, batch: pa.RecordBatch, features: Mapping[str, Feature]) -> Ragged:
    """The examples of a record batch that `write_columns` made, uncopied; errors name `file`."""
    return _as_ragged(file, *_map_columns(batch, features), features)


def write_columns(examples: Ragged) -> dict[str, pa.Array]:
    """The Arrow columns of examples: tokens, weights if there are any, and features."""
    columns = {}
    for name, (feature, values) in examples.columns.items():
        flat = values.reshape(-1)
        if name == WEIGHTS and ((flat == 0) | (flat == 1)).all():
            flat = flat.astype(bool)
        array = pa.array(flat)
        if feature.shape:
            array = pa.FixedSizeListArray.from_arrays(array, feature.size)
        if not feature.per_example:
            offsets = pa.array(np.cumsum(np.append(0, examples.counts)), pa.int64())
            array = pa.LargeListArray.from_arrays(offsets, array)
        columns[name] = array
    return columns


def write_part(
    path: epath.Path, examples: Ragged, origin: Mapping[str, Any], task: Task, *, once: bool = False
) -> PartFile:
    """Writes a part atomically; see `atomic_write` for `once`."""
    return write_features(
        path,
        examples,
        once=once,
        origin=dict(origin),
        text_bytes=None if examples.text_bytes is None else int(examples.text_bytes.sum()),
        learnt=task.count_learnt(examples.counts, examples.weights),
        lengths_digest=lengths_module.digest(task.lengths(examples.counts)),
    )


def write_features(
    path: epath.Path, examples: Ragged, *, once: bool = False, **metadata: Any
) -> PartFile:
    """Writes the columns of a part atomically, with `metadata` in its header."""
    columns, features = write_columns(examples), examples.features
    features.pop(WEIGHTS, None)
    metadata |= {
        "sha256": examples.digest,
        "examples": len(examples.counts),
        "tokens": int(examples.counts.sum()),
        "features": {name: feature.as_json for name, feature in features.items()},
    }
    metadata["digest"] = json_digest(metadata)
    schema = pa.schema(
        [pa.field(name, column.type) for name, column in columns.items()],
        metadata={MARK: json.dumps(metadata)},
    )
    batch = pa.record_batch(list(columns.values()), schema=schema)
    memory = None if is_local(path) else pa.BufferOutputStream()
    with atomic_write(path, shared=True, once=once) as file:
        with pa.ipc.new_file(memory or file, schema, options=WRITE) as writer:
            writer.write_batch(batch)
        if memory is not None:
            file.write(memory.getvalue())
    return read_part(path) if memory is None else PartFile(path.name, memory.getvalue())


def read_content(path: epath.Path) -> pa.Buffer:
    """The bytes of a file, mapped if it is local."""
    try:
        if not is_local(path):
            return pa.py_buffer(path.read_bytes())
        # Arrow's maps need no open file; each of Python's does, and 1,024 is a common limit.
        with pa.memory_map(os.fspath(path)) as file:
            return file.read_buffer()
    except (OSError, pa.ArrowException) as error:
        raise InvalidValue(f"{os.fspath(path)} cannot be read: {error}") from error


def read_part(path: epath.Path) -> PartFile:
    """The file of a part, mapped if it is local; raises a `ValueError` if it is damaged."""
    return PartFile(path.name, read_content(path))


def json_digest(document: Any) -> str:
    """A short hash of a JSON document, whatever the order of its keys."""
    return fingerprint_of(document)[:12]


class Maps:
    """Some parts of a corpus, by number, mapped as long as this object lives.

    Attributes:
        files: the mapped parts, by number.
        has: whether each part of the corpus is mapped: bool [parts].
        columns: by name and dtype of a column, one array over its memory in all mapped parts, made
            by `join_memory`, and where each part begins in it: int64 [parts].
    """

    def __init__(self, files: Mapping[int, PartFile], parts: Sequence[Part]):
        self.files = files
        self.has = np.zeros(len(parts), bool)
        self.has[[*files]] = True
        self.columns = {}
        kinds = {(name, place.dtype) for part in parts for name, place in part.columns.items()}
        for name, dtype in kinds:
            stored = Place(0, dtype, 0).stored
            of = {
                number: file.columns[name]
                for number, file in files.items()
                if file.part.columns[name].dtype == dtype
            }
            values, begins = join_memory([np.zeros(0, stored), *of.values()])
            places = np.zeros(len(parts), np.int64)
            places[[*of]] = begins[1:]
            self.columns[name, dtype] = values, places
