"""Parts: the Arrow files that hold the tokens of a corpus."""

import dataclasses
import functools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast, get_type_hints, overload

import numpy as np
import pyarrow as pa
from etils import epath

from pipeline.corpus.stored.gather import address_of
from pipeline.corpus.stored.memory import Segments, find_segments
from pipeline.corpus.tasks import Task
from pipeline.errors import InvalidValue
from pipeline.fs.atomic import atomic_write, is_local
from pipeline.planning import lengths as lengths_module
from pipeline.planning.identity import fingerprint_of
from pipeline.text.features import OF_TOKENS, TOKENS, WEIGHTS, Column, Feature
from pipeline.text.ragged import Ragged, find_lead

# The metadata key that marks a file as a part. Arrow stores it twice.
MARK = b"lockstep"

# The metadata that describe a part; a file of features alone has the first three.
HEADER = "examples", "tokens", "sha256", "learnt", "silent", "text_bytes", "lengths_digest"

# The fields of a part that are numbers.
SIZES = "examples", "tokens", "bytes", "offsets", "learnt", "silent"

# Ids of vocabularies up to this size are stored in two bytes: half of the file, and read faster.
SMALL = 1 << 16

# These fix the output of Arrow, whatever the defaults of its version and its environment.
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
    """One Arrow file: a record batch with a column `tokens`, a list of ids per example.

    Ids are uint16 if the vocabulary has at most 65,536, else int32. If tokens have weights, a
    column `weights` has lists of the same sizes, of float32. Each feature has a column of its name:
    lists of the same sizes if it is of tokens, else one value for each example. Values with a shape
    are fixed-size lists, and booleans are bytes. A file of arrays, or of features that were added
    later, has no tokens.

    Attributes:
        file: its name.
        examples: the number of examples.
        tokens: the number of tokens, or of arrays, of all examples.
        bytes: the size of the file.
        sha256: of the content, not of the file: it stays the same when another version of Arrow
            lays the file out differently.
        offsets: the byte of the file where the offsets begin: int64 [examples + 1], where each
            example begins among the tokens, and where the last one ends; 0 if it has no lists.
        weighted: whether tokens have weights.
        learnt: positions that carry loss, whose weight is not 0.
        silent: the number of examples that have positions to train on, and no loss on any.
        text_bytes: UTF-8 bytes of the text that is learnt; None if no text is known.
        lengths_digest: the digest of the lengths of its examples, by
            `pipeline.planning.lengths.digest`; "" if it has added features.
    """

    file: str
    examples: int
    tokens: int
    bytes: int
    sha256: str
    offsets: int = 0
    weighted: bool = False
    learnt: int = 0
    silent: int = 0
    text_bytes: int | None = None
    lengths_digest: str = ""


# The types of the fields of `Part` in a table; all but the bytes of text are known of every part.
TYPES = {str: pa.string(), int: pa.int64(), bool: pa.bool_(), int | None: pa.int64()}


class PartTable(Sequence[Part]):
    """The parts of a corpus, in order, in an Arrow table: there may be hundreds of thousands."""

    SCHEMA = pa.schema([
        pa.field(field.name, TYPES[kind], nullable=field.name == "text_bytes")
        for field, kind in zip(
            dataclasses.fields(Part), get_type_hints(Part).values(), strict=True
        )
    ])  # fmt: skip

    def __init__(self, parts: Iterable[Part] | pa.Table):
        if not isinstance(parts, pa.Table):
            rows = [vars(part) for part in parts]
            columns = {name: [row[name] for row in rows] for name in self.SCHEMA.names}
            parts = pa.table(columns, schema=self.SCHEMA)
        self._table: Any = parts

    @classmethod
    def read(cls, content: pa.Buffer) -> "PartTable":
        """The table that `write` gave; refuses other content."""
        table = pa.ipc.open_file(content).read_all()
        if table.schema != cls.SCHEMA or any(
            table[field.name].null_count for field in cls.SCHEMA if not field.nullable
        ):
            raise InvalidValue("it is not a table of parts")
        parts = cls(table)
        for name in SIZES:
            if (parts.numbers(name) < 0).any():
                raise InvalidValue(f"{name} of a part are negative")
        return parts

    def write(self) -> pa.Buffer:
        """The content of an Arrow file with the table."""
        memory = pa.BufferOutputStream()
        with pa.ipc.new_file(memory, self.SCHEMA, options=WRITE) as writer:
            writer.write_table(self._table)
        return memory.getvalue()

    def numbers(self, name: str) -> np.ndarray:
        """A field of all parts, one of `SIZES` or `weighted`: int64 or bool [parts]."""
        return self._table[name].to_numpy()

    def total(self, name: str) -> Any:
        """The sum of a field of numbers; None if that of no part is known, as of bytes of text."""
        column = self._table[name].drop_null()
        return int(column.to_numpy().sum()) if len(column) else None

    def strings(self, name: str) -> list[str]:
        """A field of all parts that is a string."""
        return self._table[name].to_pylist()

    def __len__(self) -> int:
        return self._table.num_rows

    @overload
    def __getitem__(self, number: int) -> Part: ...

    @overload
    def __getitem__(self, number: slice) -> list[Part]: ...

    def __getitem__(self, number: int | slice) -> Part | list[Part]:
        if isinstance(number, slice):
            return [self[at] for at in range(len(self))[number]]
        (row,) = self._table.slice(range(len(self))[number], 1).to_pylist()
        return Part(**row)

    def __iter__(self) -> Iterator[Part]:
        for batch in self._table.to_batches(max_chunksize=1 << 12):
            yield from (Part(**row) for row in batch.to_pylist())


class PartFile:
    """The Arrow file of a part, parsed without a copy; its values are not checked.

    Attributes:
        columns: by name, what each column holds, and its values, flat, as they are stored.
        offsets: where examples begin in lists; None if there are none.
        features: the features that have a column, by name; weights are not among them.
        part: the description in the header of the file.
        metadata: the entries in the header: `HEADER`, `origin`, `features`, and a `digest` of
            these.
    """

    offsets: np.ndarray | None = None

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
        self.features = {n: Feature(**schema) for n, schema in self.metadata["features"].items()}
        kinds = {**OF_TOKENS, **self.features}.items()
        self.columns = {
            name: Column(feature, _map_column(name, batch.column(name), feature))
            for name, feature in kinds
            if name in batch.schema.names
        }
        lead = find_lead({name: feature for name, feature in kinds if name in self.columns})
        if lead is not None:
            self.offsets = _as_numbers(batch.column(lead), np.int64, batch.num_rows + 1)
        header = {name: self.metadata[name] for name in HEADER if name in self.metadata}
        header |= {"file": name, "bytes": content.size, "weighted": WEIGHTS in self.columns}
        if self.offsets is not None:
            header["offsets"] = address_of(self.offsets) - content.address
        self.part = Part(**header)
        flat = [*(values for _, values in self.columns.values()), self.offsets]
        if not all(array is None or array.flags.aligned for array in flat):
            raise InvalidValue("a column does not begin at a multiple of the size of its numbers")
        if batch.num_rows != self.part.examples:
            raise InvalidValue(f"it has {batch.num_rows:,} examples, not {self.part.examples:,}")
        for name, (feature, values) in self.columns.items():
            count = len(values)
            due = feature.size * (self.part.examples if feature.per_example else self.part.tokens)
            if count != due:
                raise InvalidValue(f"it has {count:,} numbers of {name}, not {due:,}")

    @property
    def segments(self) -> Mapping[str, Segments]:
        """Where the examples are in memory, by column."""
        return self._segments

    @functools.cached_property
    def _segments(self) -> Mapping[str, Segments]:
        return find_segments(self.columns, self.offsets)

    @property
    def counts(self) -> np.ndarray:
        """The tokens or arrays of each example: int64 [examples]; refuses offsets that descend.

        They are computed each time: a part that is open holds nothing for each example.
        """
        part, offsets = self.part, cast(np.ndarray, self.offsets)
        counts = np.diff(offsets)
        if offsets[0] or offsets[-1] != part.tokens or counts.min(initial=0) < 0:
            raise InvalidValue(
                f"the offsets of {part.file} do not ascend from 0 to its {part.tokens:,} tokens"
            )
        return counts

    def read(self) -> Ragged:
        """The examples, as views of the file; those without lists have no counts."""
        counts = np.zeros(0, np.int64) if self.offsets is None else self.counts
        columns = {
            name: Column(feature, feature.restore(values))
            for name, (feature, values) in self.columns.items()
        }
        return Ragged(counts, columns)

    def verify(self) -> None:
        """Reads the examples, and refuses them if their digest differs."""
        if self.read().digest != self.part.sha256:
            raise InvalidValue("its digest differs")


def _map_column(name: str, column: Any, feature: Feature) -> np.ndarray:
    """The values of a column, flat, as they are stored."""
    values = column
    if not feature.per_example:
        if not pa.types.is_large_list(column.type):
            raise InvalidValue(f"its column {name} is {column.type}, not large_list")
        values = column.values
    size = 1
    if pa.types.is_fixed_size_list(values.type):
        size, values = values.type.list_size, values.values
    dtype = {"float": "float32", "halffloat": "float16"}.get(f"{values.type}", f"{values.type}")
    allowed = [feature.as_stored(feature.filled(0)).dtype.name]
    allowed += ["uint16"] if name == TOKENS else []
    if dtype not in allowed or size != feature.size:
        raise InvalidValue(
            f"its column {name} has values of {column.type}, not {' or '.join(allowed)}"
        )
    return _as_numbers(values, dtype, len(values))


def _as_numbers(array: pa.Array, dtype: Any, count: int) -> np.ndarray:
    """The first numbers of the second buffer of an array: its values, or the offsets of lists."""
    memory = array.buffers()[1]
    return np.frombuffer(b"" if memory is None else memory, dtype, count)


def _write_columns(examples: Ragged, vocab_size: int | None) -> dict[str, pa.Array]:
    """The Arrow columns of examples: tokens, weights if there are any, and features."""
    columns = {}
    for name, (feature, values) in examples.columns.items():
        flat = feature.as_stored(values).reshape(-1)
        if name == TOKENS and vocab_size is not None and vocab_size <= SMALL:
            flat = flat.astype(np.uint16)
        array = pa.array(flat)
        if feature.shape:
            array = pa.FixedSizeListArray.from_arrays(array, feature.size)
        if not feature.per_example:
            offsets = pa.array(np.cumsum(np.append(0, examples.counts)), pa.int64())
            array = pa.LargeListArray.from_arrays(offsets, array)
        columns[name] = array
    return columns


def range_of_offsets(part: Part) -> tuple[int, int]:
    """The bytes of a part's file that `read_counts_of` reads: the first, and the one after them."""
    return part.offsets, part.offsets + 8 * (part.examples + 1)


def read_counts_of(content: Any) -> np.ndarray:
    """The tokens of each example of a part, from those bytes of its file: uint32 [examples]."""
    return np.diff(np.frombuffer(content, np.int64)).astype(np.uint32)


def write_part(
    path: epath.Path,
    examples: Ragged,
    *,
    task: Task | None = None,
    origin: Mapping[str, Any] | None = None,
    vocab_size: int | None = None,
    once: bool = False,
) -> PartFile:
    """Writes a part atomically; see `atomic_write` for `once`.

    Features that were added have no task. All ids are below `vocab_size`, if that is known.
    """
    metadata: dict[str, Any] = {}
    if task is not None:
        of_examples = examples.counts, examples.weights
        metadata = {
            "origin": dict(origin or {}),
            "text_bytes": None if examples.text_bytes is None else int(examples.text_bytes.sum()),
            "learnt": task.count_learnt(*of_examples),
            "silent": len(task.find_silent(*of_examples, examples.columns)),
            "lengths_digest": lengths_module.digest(task.lengths(examples.counts)),
        }
    columns, features = _write_columns(examples, vocab_size), examples.features
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
    with atomic_write(path, once=once) as file:
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
        with pa.memory_map(os.fsencode(path)) as file:
            return file.read_buffer()
    except (OSError, pa.ArrowException) as error:
        raise InvalidValue(f"{os.fspath(path)} cannot be read: {error}") from error


def read_part(path: epath.Path) -> PartFile:
    """The file of a part, mapped if it is local; raises a `ValueError` if it is damaged."""
    return PartFile(path.name, read_content(path))


def json_digest(document: Any) -> str:
    """A short hash of a JSON document, whatever the order of its keys."""
    return fingerprint_of(document)[:12]
