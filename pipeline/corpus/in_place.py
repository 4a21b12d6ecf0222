"""Tokens of other programs, in place: columns of Arrow and Parquet files, and flat arrays."""

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from etils import epath

from pipeline.corpus.gather import Fields, gather, gather_feature, join_memory
from pipeline.corpus.interface import SingleCorpus
from pipeline.corpus.tasks import CAUSAL, Task
from pipeline.errors import InvalidValue
from pipeline.text.features import Feature, check_features
from pipeline.text.sources import ArrowFiles, ParquetFiles, files

# Values of some lists, where each list begins in them, and how many it holds.
Lists: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]


class _Values:
    """Lists of several files, each with the values of an example, where they are in memory."""

    def __init__(self, lists: Sequence[Lists]):
        self._held, begins, counts = zip(*lists, strict=True)
        self.counts = np.concatenate(counts)
        self.flat, places = join_memory(self._held)
        self._ends = places + [len(each) for each in self._held]
        self._first = np.cumsum([0, *map(len, counts)])
        self.begins = np.concatenate([at + each for at, each in zip(places, begins, strict=True)])

    def locate(self, examples: Any) -> tuple[np.ndarray, np.ndarray]:
        """Where the values of each example begin, and where those of its file end."""
        ends = self._ends[np.searchsorted(self._first, examples, side="right") - 1]
        return self.begins[examples], ends


class InPlace(SingleCorpus):
    """Tokens that another program stored, read in place; made by `arrow`, `parquet` or `npy`.

    Memory holds where each example begins (8 bytes) and its length (4). Ids must be from 0 and
    below 2**31, which `verify` checks by reading everything.
    """

    def __init__(
        self,
        lists: Sequence[Lists],
        *,
        fingerprint: str,
        make: functools.partial["InPlace"],
        features: Mapping[str, tuple[Feature, Sequence[Lists]]] | None = None,
    ):
        self._make, self.task = make, make.keywords["task"]
        self._tokens = _Values(lists)
        self.lengths = self.task.lengths(self._tokens.counts)
        self.lengths.flags.writeable = False
        self.vocab_size = make.keywords["vocab_size"]
        self.identity = {"tokens": fingerprint, "tokenizer": "none", "task": self.task.name}
        self._columns = {name: _Values(lists) for name, (_, lists) in (features or {}).items()}
        self.features = {name: feature for name, (feature, _) in (features or {}).items()}
        for name, feature in self.task.check(self.features).items():
            counts = 1 if feature.per_example else self._tokens.counts
            wrong = np.flatnonzero(self._columns[name].counts != counts * feature.size)
            if len(wrong):
                count = self._columns[name].counts[wrong[0]]
                raise InvalidValue(
                    f"{name} of example {wrong[0]:,} of {self!r} has {count:,} numbers, and "
                    f"{self._tokens.counts[wrong[0]]:,} tokens; it is {feature}"
                )

    @classmethod
    def arrow(
        cls,
        paths: files.Paths,
        column: str = "input_ids",
        *,
        features: Mapping[str, Feature] | None = None,
        task: Task = CAUSAL,
        vocab_size: int | None = None,
    ) -> "InPlace":
        """Lists of ids in Arrow IPC or Feather files, mapped into memory.

        Args:
            paths: names or globs, as for `sources.ArrowFiles`; those of a Hugging Face data set
                that was saved to disk are `DIRECTORY/data-*.arrow`.
            column: whose entries are lists of integers.
            features: the columns to have as features, by name; of tokens, lists of as many values.
            task: decides the fields and the lengths; see `pipeline.corpus.tasks`.
            vocab_size: ids are below this; None: unknown.
        """
        known = check_features(features)
        options: dict[str, Any] = {"features": known, "task": task, "vocab_size": vocab_size}
        make = functools.partial(cls.arrow, paths, column, **options)
        return cls._of_columns(ArrowFiles(paths, columns=[column, *known]), make)

    @classmethod
    def parquet(
        cls,
        paths: files.Paths,
        column: str = "input_ids",
        *,
        features: Mapping[str, Feature] | None = None,
        task: Task = CAUSAL,
        vocab_size: int | None = None,
    ) -> "InPlace":
        """Lists of ids in Parquet files, decoded into memory as a whole: 4 bytes for an int32.

        Parquet cannot be read at random; what does not fit into memory is better prepared, or
        converted to Arrow. Arguments are those of `arrow`.
        """
        known = check_features(features)
        options: dict[str, Any] = {"features": known, "task": task, "vocab_size": vocab_size}
        make = functools.partial(cls.parquet, paths, column, **options)
        return cls._of_columns(ParquetFiles(paths, columns=[column, *known]), make)

    @classmethod
    def npy(
        cls,
        tokens: epath.PathLike,
        offsets: epath.PathLike,
        *,
        task: Task = CAUSAL,
        vocab_size: int | None = None,
    ) -> "InPlace":
        """A flat `.npy` array of ids, mapped, with the offsets of examples in another.

        Args:
            tokens: a file with an integer array [tokens].
            offsets: a file with integers [examples + 1]: example `i` is
                `tokens[offsets[i]:offsets[i + 1]]`.
            task: as for `arrow`.
            vocab_size: as for `arrow`.
        """
        found = files.find([tokens, offsets])
        flat, edges = (_array(path) for path in found)
        counts = np.diff(edges.astype(np.int64))
        if len(edges) < 2 or counts.min() < 0 or edges[0] < 0 or edges[-1] > len(flat):
            raise InvalidValue(
                f"{os.fspath(found[1])} does not hold offsets into {len(flat):,} tokens; write "
                "one more than there are examples, ascending, from 0 to that number"
            )
        make = functools.partial(cls.npy, tokens, offsets, task=task, vocab_size=vocab_size)
        lists = flat, edges[:-1].astype(np.int64), counts
        return cls([lists], fingerprint=f"npy-{files.digest(found)}", make=make)

    @classmethod
    def _of_columns(
        cls, source: ArrowFiles | ParquetFiles, make: functools.partial["InPlace"]
    ) -> "InPlace":
        column, wanted = make.args[1], make.keywords["features"]
        lists: dict[str, list[Lists]] = {name: [] for name in (column, *wanted)}
        for place, table in source.groups():
            for name, found in lists.items():
                feature = wanted.get(name)
                for piece in pa.chunked_array(table.column(name)).chunks:
                    found.append(_lists(f"{place} {name}", piece, feature))
        if not lists[column]:
            raise InvalidValue(f"{source} is empty")
        for name, found in lists.items():
            if len(kinds := {flat.dtype for flat, _, _ in found}) > 1:
                raise InvalidValue(
                    f"the column {name!r} of {source} holds {', '.join(map(str, kinds))}; its type "
                    "must be the same in all files"
                )
        features = {
            name: (feature.infer(lists[name][0][0][:0], name), lists[name])
            for name, feature in wanted.items()
        }
        return cls(lists[column], fingerprint=source.fingerprint, make=make, features=features)

    def _read(
        self, examples: Any, starts: Any, lengths: Any, reach: Any, epoch: Any, names: Sequence[str]
    ) -> Fields:
        begins, ends = self._tokens.locate(examples)
        shifts = self.task.shifts
        fields = gather(self._tokens.flat, begins + starts, lengths, reach, shifts, ends)
        fields = {name: ids.astype(np.int32, copy=False) for name, ids in fields.items()}
        for name in names:
            start = starts + self.task.shift_of(self.features[name])
            fields[name] = self._read_feature(name, examples, start, lengths, reach)
        return fields

    def _read_examples(self, examples: np.ndarray, names: Sequence[str]) -> Fields:
        ones = np.ones_like(examples)
        return {name: self._read_feature(name, examples, 0, ones, ones) for name in names}

    def _read_feature(
        self, name: str, examples: Any, start: Any, lengths: Any, reach: Any
    ) -> np.ndarray:
        """The values of tokens from `start` of each example on, checked as others are."""
        feature, values = self.features[name], self._columns[name]
        begins, ends = values.locate(examples)
        first = begins + start * feature.size
        found = gather_feature(values.flat, first, lengths, reach, feature.shape, ends)
        return feature.cast(found, f"{name} of {self!r}")

    def verify(self) -> None:
        """Reads everything, and refuses ids that are negative or not below the vocabulary size."""
        limit = 1 << 31 if self.vocab_size is None else self.vocab_size
        counts = np.where(self.lengths > 0, self.lengths + self.task.lookahead, 0)
        for example in np.flatnonzero(counts):
            begin = self._tokens.begins[example]
            ids = self._tokens.flat[begin : begin + counts[example]]
            if ids.min() < 0 or ids.max() >= limit:
                wrong = ids[(ids < 0) | (ids >= limit)][0]
                raise InvalidValue(
                    f"example {example:,} of {self!r} holds the id {wrong}; ids are from 0 and "
                    f"below {limit:,}"
                )

    def __reduce__(self) -> tuple[Any, ...]:
        return self._make, ()

    def __repr__(self) -> str:
        return f"InPlace.{self._make.func.__name__}({', '.join(map(repr, self._make.args))})"


def _array(path: epath.Path) -> np.ndarray:
    try:
        array = np.asarray(np.load(os.fspath(path), mmap_mode="r"))
    except ValueError as error:
        raise InvalidValue(f"{os.fspath(path)} is no .npy array: {error}") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidValue(
            f"{os.fspath(path)} holds an array of shape {array.shape} and dtype {array.dtype}; it "
            "must be one-dimensional and of integers"
        )
    return array


def _lists(place: str, column: pa.Array, feature: Feature | None) -> Lists:
    """The values of an Arrow column: lists of ids, or what a feature says."""
    if column.null_count:
        raise InvalidValue(f"{place} has missing entries; leave them out, or fill them in")
    edges, values = np.arange(len(column) + 1), column
    if feature is None or not feature.per_example:
        if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
            raise InvalidValue(f"{place} holds {column.type}; it must hold lists of numbers")
        edges, values = column.offsets.to_numpy().astype(np.int64), column.values
    size = 1 if feature is None else feature.size
    if pa.types.is_fixed_size_list(values.type):
        if values.type.list_size != size:
            raise InvalidValue(f"{place} holds {column.type}, and the feature is {feature}")
        values, edges = values.flatten(), edges * size
    elif size > 1:
        raise InvalidValue(
            f"{place} holds {column.type}, and the feature is {feature}; store values of a shape "
            "as fixed-size lists"
        )
    if feature is None and not pa.types.is_integer(values.type):
        raise InvalidValue(f"{place} holds {column.type}; tokens are lists of integers")
    if values.null_count:
        raise InvalidValue(f"{place} has missing entries; leave them out, or fill them in")
    return values.to_numpy(zero_copy_only=False), edges[:-1], np.diff(edges)
