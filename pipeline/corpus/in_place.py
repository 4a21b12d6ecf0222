"""Tokens of other programs, in place: columns of Arrow and Parquet files, and flat arrays."""

import functools
import os
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from etils import epath

from pipeline.corpus.gather import Fields, gather, join_memory
from pipeline.corpus.interface import SingleCorpus
from pipeline.corpus.tasks import CAUSAL, Task
from pipeline.errors import InvalidValue
from pipeline.text.sources import ArrowFiles, ParquetFiles, files

# Values of some lists, where each list begins in them, and how many it holds.
Lists: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]


class InPlace(SingleCorpus):
    """Tokens that another program stored, read in place; made by `arrow`, `parquet` or `npy`.

    Memory holds where each example begins (8 bytes) and its length (4). Ids must be from 0 and
    below 2**31, which `verify` checks by reading everything.
    """

    def __init__(
        self, lists: Sequence[Lists], *, fingerprint: str, make: functools.partial["InPlace"]
    ):
        self._make, self.task = make, make.keywords["task"]
        self._held, begins, counts = zip(*lists, strict=True)
        self.lengths = self.task.lengths(np.concatenate(counts))
        self.lengths.flags.writeable = False
        self.vocab_size = make.keywords["vocab_size"]
        self.identity = {"tokens": fingerprint, "tokenizer": "none", "task": self.task.name}
        self._tokens, places = join_memory(self._held)
        self._ends = places + [len(each) for each in self._held]
        self._first = np.cumsum([0, *map(len, counts)])
        self._begins = np.concatenate(
            [at + begin for at, begin in zip(places, begins, strict=True)]
        )

    @classmethod
    def arrow(
        cls,
        paths: files.Paths,
        column: str = "input_ids",
        *,
        task: Task = CAUSAL,
        vocab_size: int | None = None,
    ) -> "InPlace":
        """Lists of ids in Arrow IPC or Feather files, mapped into memory.

        Args:
            paths: names or globs, as for `sources.ArrowFiles`; those of a Hugging Face data set
                that was saved to disk are `DIRECTORY/data-*.arrow`.
            column: whose entries are lists of integers.
            task: decides the fields and the lengths; see `pipeline.corpus.tasks`.
            vocab_size: ids are below this; None: unknown.
        """
        make = functools.partial(cls.arrow, paths, column, task=task, vocab_size=vocab_size)
        return cls._of_columns(ArrowFiles(paths, columns=[column]), make)

    @classmethod
    def parquet(
        cls,
        paths: files.Paths,
        column: str = "input_ids",
        *,
        task: Task = CAUSAL,
        vocab_size: int | None = None,
    ) -> "InPlace":
        """Lists of ids in Parquet files, decoded into memory as a whole: 4 bytes for an int32.

        Parquet cannot be read at random; what does not fit into memory is better prepared, or
        converted to Arrow. Arguments are those of `arrow`.
        """
        make = functools.partial(cls.parquet, paths, column, task=task, vocab_size=vocab_size)
        return cls._of_columns(ParquetFiles(paths, columns=[column]), make)

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
                f"{os.fspath(found[1])} are no offsets of {len(flat):,} tokens: they must ascend "
                "from 0 or more to that number or less, one more of them than there are examples"
            )
        make = functools.partial(cls.npy, tokens, offsets, task=task, vocab_size=vocab_size)
        lists = flat, edges[:-1].astype(np.int64), counts
        return cls([lists], fingerprint=f"npy-{files.digest(found)}", make=make)

    @classmethod
    def _of_columns(
        cls, source: ArrowFiles | ParquetFiles, make: functools.partial["InPlace"]
    ) -> "InPlace":
        column = make.args[1]
        lists = [
            _lists(place, piece)
            for place, table in source.groups()
            for piece in pa.chunked_array(table.column(column)).chunks
        ]
        if not lists:
            raise InvalidValue(f"{source} is empty")
        if len(kinds := {flat.dtype for flat, _, _ in lists}) > 1:
            raise InvalidValue(
                f"the column {column!r} of {source} holds {', '.join(map(str, kinds))}; its type "
                "must be the same in all files"
            )
        return cls(lists, fingerprint=source.fingerprint, make=make)

    def _read(
        self, examples: Any, starts: Any, lengths: Any, reach: Any, epoch: Any, names: Sequence[str]
    ) -> Fields:
        ends = self._ends[np.searchsorted(self._first, examples, side="right") - 1]
        first = self._begins[examples] + starts
        fields = gather(self._tokens, first, lengths, reach, self.task.shifts, ends)
        return {name: ids.astype(np.int32, copy=False) for name, ids in fields.items()}

    def verify(self) -> None:
        """Reads everything, and refuses ids that are negative or not below the vocabulary size."""
        limit = 1 << 31 if self.vocab_size is None else self.vocab_size
        counts = np.where(self.lengths > 0, self.lengths + self.task.lookahead, 0)
        for example in np.flatnonzero(counts):
            begin = self._begins[example]
            ids = self._tokens[begin : begin + counts[example]]
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


def _lists(place: str, column: pa.Array) -> Lists:
    kind = column.type
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not lists or not pa.types.is_integer(kind.value_type):
        raise InvalidValue(f"{place} holds {kind}; tokens are lists of integers")
    if column.null_count or column.values.null_count:
        raise InvalidValue(f"{place} has missing entries; leave them out, or fill them in")
    edges = column.offsets.to_numpy().astype(np.int64)
    return column.values.to_numpy(), edges[:-1], np.diff(edges)
