"""Tokens of other programs, in place: columns of Arrow and Parquet files, and flat arrays."""

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from etils import epath

from pipeline.corpus.gather import address_of
from pipeline.corpus.interface import SingleCorpus
from pipeline.corpus.parts import Segments
from pipeline.corpus.reader import InMemory, Reader
from pipeline.corpus.tasks import CAUSAL, Task
from pipeline.errors import InvalidValue
from pipeline.text.features import TOKEN_IDS, TOKENS, Feature, check_features
from pipeline.text.sources import ArrowFiles, ParquetFiles, files

# The numbers of some lists, where each list begins in them, and the size of each.
Lists: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]


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
        self._lists, columns = lists, {TOKENS: (TOKEN_IDS, lists), **(features or {})}
        tokens = np.concatenate([counts for _, _, counts in lists])
        self.lengths = self.task.lengths(tokens)
        self.lengths.flags.writeable = False
        segments = {name: _segments(of_column) for name, (_, of_column) in columns.items()}
        self.reader = Reader(
            self.task,
            self.lengths,
            np.array([len(tokens)]),
            {name: feature for name, (feature, _) in columns.items()},
            [InMemory(segments, columns)],
            owner=f"{self!r}",
        )
        self.vocab_size = make.keywords["vocab_size"]
        self.identity = {"tokens": fingerprint, "tokenizer": "none", "task": self.task.name}
        self.features = {name: feature for name, (feature, _) in (features or {}).items()}
        for name, feature in self.task.check(self.features).items():
            found = np.concatenate([counts for _, _, counts in columns[name][1]])
            due = (1 if feature.per_example else tokens) * feature.size
            for wrong in np.flatnonzero(found != due)[:1]:
                raise InvalidValue(
                    f"{name} of example {wrong:,} of {self!r} has {found[wrong]:,} numbers for "
                    f"{tokens[wrong]:,} tokens; correct it to match {feature}"
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
            column: the column of ids, whose entries are lists of integers.
            features: columns to read as features, by name; for tokens, lists with a value for each.
            task: decides the fields and the lengths; see `pipeline.corpus.tasks`.
            vocab_size: ids are below this; None: unknown.
        """
        options: dict[str, Any] = {"features": features, "task": task, "vocab_size": vocab_size}
        return cls._of_columns(ArrowFiles, functools.partial(cls.arrow, paths, column, **options))

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
        """Lists of ids in Parquet files, all decoded into memory: 4 bytes for an int32.

        Parquet has no random access; prepare what does not fit into memory, or convert it to
        Arrow. Arguments are those of `arrow`.
        """
        options: dict[str, Any] = {"features": features, "task": task, "vocab_size": vocab_size}
        make = functools.partial(cls.parquet, paths, column, **options)
        return cls._of_columns(ParquetFiles, make)

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
        cls, kind: type[ArrowFiles | ParquetFiles], make: functools.partial["InPlace"]
    ) -> "InPlace":
        (paths, column), wanted = make.args, check_features(make.keywords["features"])
        source = kind(paths, columns=[column, *wanted])
        lists: dict[str, list[Lists]] = {name: [] for name in (column, *wanted)}
        for place, table in source.groups():
            for name, found in lists.items():
                feature = wanted.get(name)
                for piece in pa.chunked_array(table.column(name)).chunks:
                    found.append(_lists(f"{place} {name}", piece, feature))
        if not lists[column]:
            raise InvalidValue(f"{source} is empty; give files with at least one row")
        for name, found in lists.items():
            if len(kinds := {flat.dtype for flat, _, _ in found}) > 1:
                raise InvalidValue(
                    f"the column {name!r} of {source} holds {', '.join(map(str, kinds))}; give it "
                    "the same type in all files"
                )
        features = {
            name: (feature.infer(lists[name][0][0][:0], name), lists[name])
            for name, feature in wanted.items()
        }
        return cls(lists[column], fingerprint=source.fingerprint, make=make, features=features)

    def verify(self) -> None:
        """Reads everything, and refuses ids that are negative or not below the vocabulary size."""
        limit, example = 1 << 31 if self.vocab_size is None else self.vocab_size, 0
        for flat, begins, counts in self._lists:
            for begin, count in zip(begins.tolist(), counts.tolist(), strict=True):
                ids = flat[begin : begin + count]
                if count and (ids.min() < 0 or ids.max() >= limit):
                    wrong = ids[(ids < 0) | (ids >= limit)][0]
                    raise InvalidValue(
                        f"example {example:,} of {self!r} holds the id {wrong}; ids must be from 0 "
                        f"and below {limit:,}"
                    )
                example += 1

    def __reduce__(self) -> tuple[Any, ...]:
        return self._make, ()

    def __repr__(self) -> str:
        return f"InPlace.{self._make.func.__name__}({', '.join(map(repr, self._make.args))})"


def _segments(lists: Sequence[Lists]) -> Segments:
    """Where the lists of a column are, which have one dtype: each at an address of its own."""
    begins = [address_of(flat) + flat.itemsize * begin for flat, begin, _ in lists]
    return Segments(lists[0][0].dtype, 0, np.concatenate(begins), 1)


def _array(path: epath.Path) -> np.ndarray:
    try:
        array = np.asarray(np.load(os.fspath(path), mmap_mode="r"))
    except ValueError as error:
        raise InvalidValue(f"{os.fspath(path)} is not an .npy array: {error}") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidValue(
            f"{os.fspath(path)} holds an array of shape {array.shape} and dtype {array.dtype}; it "
            "must be one-dimensional and of integers"
        )
    return array


def _lists(place: str, column: pa.Array, feature: Feature | None) -> Lists:
    """The values of an Arrow column: lists of ids, or the values of a feature."""
    if column.null_count:
        raise InvalidValue(f"{place} has missing entries; leave them out, or fill them in")
    edges, values = np.arange(len(column) + 1), column
    if feature is None or not feature.per_example:
        if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
            raise InvalidValue(f"{place} holds {column.type}; it must hold lists of numbers")
        edges, values = column.offsets.to_numpy().astype(np.int64), column.values
    size = 1 if feature is None else feature.size
    if pa.types.is_fixed_size_list(values.type):
        if values.null_count:  # `flatten` would leave them out, and move all later values
            raise InvalidValue(f"{place} has missing entries; leave them out, or fill them in")
        if values.type.list_size != size:
            raise InvalidValue(f"{place} holds {column.type}, but the feature is {feature}")
        values, edges = values.flatten(), edges * size
    elif size > 1:
        raise InvalidValue(
            f"{place} holds {column.type}, but the feature is {feature}; store values with a shape "
            "as fixed-size lists"
        )
    if feature is None and not pa.types.is_integer(values.type):
        raise InvalidValue(f"{place} holds {column.type}; tokens must be lists of integers")
    if values.null_count:
        raise InvalidValue(f"{place} has missing entries; leave them out, or fill them in")
    return values.to_numpy(zero_copy_only=False), edges[:-1], np.diff(edges)
