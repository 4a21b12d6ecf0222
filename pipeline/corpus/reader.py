"""The reader of the parts of a corpus: from memory maps, or by ranges of bytes."""

import dataclasses
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from etils import epath

from pipeline.corpus.cache import PartCache
from pipeline.corpus.columns import Columns, Entries
from pipeline.corpus.gather import gather, join_memory
from pipeline.corpus.manifest import damage, open_part
from pipeline.corpus.parts import Maps, Part
from pipeline.corpus.tasks import Task
from pipeline.fs import objects
from pipeline.text.features import OF_TOKENS, Feature


class PartFiles:
    """The files of parts in a directory: all mapped, or those in a cache, or none.

    Parts that are not mapped (object storage) are read by ranges of bytes, in parallel. The header
    and the offsets (8 bytes per example) of a part with tokens are fetched when it is first used;
    offsets are kept.
    """

    def __init__(
        self,
        directory: epath.Path,
        parts: Sequence[Part],
        features: Mapping[str, Feature],
        mapped: bool,
        cache: PartCache | None = None,
        opened: "PartFiles | None" = None,
    ):
        """Opens the parts, except those that `opened` has already."""
        self.directory, self.parts, self.features, self._cache = directory, parts, features, cache
        before = {} if opened is None else opened._maps.files
        there = {file.part.file: file for file in before.values()}
        files = {
            number: there.get(part.file) or open_part(directory, part)
            for number, part in enumerate(parts)
            if mapped and cache is None
        }
        self._maps: Maps = Maps(files, parts)
        # The offsets fetched so far, by the names of parts.
        known = {} if opened is None else opened._offsets
        self._offsets: dict[str, np.ndarray] = {
            part.file: known[part.file] for part in parts if part.file in known
        }

    def maps(self, part: np.ndarray) -> Maps:
        """The mapped parts, with those of `part` that are in the cache."""
        return self._maps if self._cache is None else self._cache.maps(part)

    def fetch(self, part: Sequence[int] | np.ndarray, begins: Any, ends: Any) -> list[memoryview]:
        """Bytes of parts, from each of `begins` to each of `ends`."""
        paths = [os.fspath(self.directory / each.file) for each in self.parts]
        begin = time.perf_counter()
        found = objects.get_ranges([paths[number] for number in part], begins, ends)
        if self._cache is not None:
            waited = time.perf_counter() - begin
            self._cache.count(ranged=sum(map(len, found)), stalls=1, waited=waited)
        return found

    def fetch_offsets(self, numbers: Sequence[int]) -> list[np.ndarray]:
        """The offsets of some parts, whose headers are compared with the manifest."""
        every = [self.parts[number] for number in numbers]
        new = [n for n, part in zip(numbers, every, strict=True) if part.file not in self._offsets]
        parts = [self.parts[number] for number in new]
        heads = [part.columns["offsets"].end for part in parts]
        lasts = [max(place.end for place in part.columns.values()) for part in parts]
        begins, ends = [0] * len(parts) + lasts, [*heads, *(part.bytes for part in parts)]
        found = self.fetch([*new, *new], begins, ends) if new else []
        footers = found[len(parts) :]
        for part, last, head, footer in zip(parts, lasts, found, footers, strict=False):
            # The file with zeros for its tokens, which parsing does not touch, so that the system
            # does not allocate them.
            content = np.zeros(part.bytes, np.uint8)
            content[: len(head)] = np.frombuffer(head, np.uint8)
            content[last:] = np.frombuffer(footer, np.uint8)
            open_part(self.directory, part, pa.py_buffer(content))
            at = part.columns["offsets"].at
            offsets = np.frombuffer(head, np.int64, offset=at).copy()
            # Another thread may have fetched the same, and use that memory.
            self._offsets.setdefault(part.file, offsets)
        return [self._offsets[part.file] for part in every]


class Reader(Columns):
    """The columns of a corpus in parts: of its tokens, and of features that were added.

    Args:
        task: decides the fields.
        lengths: positions of each example.
        stores: the parts of the tokens, then of added features; all divide examples alike.
    """

    def __init__(self, task: Task, lengths: np.ndarray, stores: Sequence[PartFiles]):
        self.task, self._lengths, self.store = task, lengths, stores[0]
        parts = self.store.parts
        examples = np.array([part.examples for part in parts], np.int64)
        self._first = np.cumsum(examples) - examples
        self._sizes = np.array([part.tokens for part in parts], np.int64)
        self._columns = {
            name: _Column.of(store, name, feature)
            for store in stores
            for name, feature in {**OF_TOKENS, **store.features}.items()
            if name in store.parts[0].columns
        }
        self.features = {name: column.feature for name, column in self._columns.items()}

    def locate(self, examples: np.ndarray, *, by_token: bool) -> "_Located":
        """See `Columns`."""
        part = np.searchsorted(self._first, examples, side="right") - 1
        at = _Located(part, examples - self._first[part])
        if not by_token:
            return at
        at.begin, ends = self._edges(at)
        counts = np.asarray(self._lengths[examples], np.int64) + self.task.lookahead
        wrong = (at.begin < 0) | (ends > self._sizes[part]) | (ends - at.begin != counts)
        for piece in np.flatnonzero(wrong)[:1]:
            raise damage(
                self.store.directory / self.store.parts[int(part[piece])].file,
                f"example {examples[piece]:,} has the offsets {at.begin[piece]} and {ends[piece]} "
                f"in a part of {self._sizes[part[piece]]:,} tokens, and by its length "
                f"{counts[piece]:,} tokens",
            )
        return at

    def entries(self, name: str, at: "_Located", starts: Any, counts: np.ndarray) -> Entries:
        """See `Columns`."""
        column = self._columns[name]
        begin = at.number if column.feature.per_example else at.begin
        first, counts = ((begin + starts) * column.feature.size, counts * column.feature.size)
        maps, kinds = at.maps(column.store), column.kind[at.part]
        if not len(kinds) or kinds.min() == kinds.max():
            dtype = column.dtypes[int(kinds.max(initial=0))]
            return column.find(dtype, maps, at.part, first, counts)
        # Weights are bits in some parts and floats in others.
        found = [
            column.find(dtype, maps, *(each[kinds == kind] for each in (at.part, first, counts)))
            for kind, dtype in enumerate(column.dtypes)
        ]
        stored = [each.values.astype(column.feature.dtype, copy=False) for each in found]
        values, places = join_memory(stored)
        ends = np.empty_like(first)
        for kind, each in enumerate(found):
            first[kinds == kind] = each.first + places[kind]
            ends[kinds == kind] = each.ends + places[kind]
        return Entries(values, first, ends, (found, stored))

    def count_tokens(self) -> Iterator[np.ndarray]:
        """The number of tokens of each example, part by part: int64."""
        for part, of in enumerate(self.store.parts):
            numbers = np.arange(of.examples)
            begins, ends = self._edges(_Located(np.full_like(numbers, part), numbers))
            yield ends - begins

    def _edges(self, at: "_Located") -> tuple[np.ndarray, np.ndarray]:
        """Where each example begins and ends among the tokens of its part."""
        maps = at.maps(self.store)
        offsets, places = maps.columns["offsets", "int64"]
        if (away := ~maps.has[at.part]).any():
            numbers = np.unique(at.part[away])
            offsets, there = join_memory([offsets, *self.store.fetch_offsets(numbers.tolist())])
            places = places + there[0]
            places[numbers] = there[1:]
        first = places[at.part] + at.number
        return offsets.take(first), offsets.take(first + 1)


@dataclasses.dataclass
class _Located:
    """Where examples are: their parts, and their numbers and first tokens there; int64."""

    part: np.ndarray
    number: np.ndarray
    begin: np.ndarray = dataclasses.field(init=False)
    _maps: dict[PartFiles, Maps] = dataclasses.field(default_factory=dict)

    def maps(self, store: PartFiles) -> Maps:
        """The mapped parts of a store, the same for all columns."""
        if store not in self._maps:
            self._maps[store] = store.maps(self.part)
        return self._maps[store]


class _Column(NamedTuple):
    """Where a column is in each part.

    Attributes:
        store: the parts.
        name: the name of the column.
        feature: the schema of its values.
        dtypes: the dtype of its values, or the two that weights may have.
        kind: which of them each part has: int64 [parts].
        places: the byte where it begins: int64 [parts].
        units: the number of its numbers, or of its bytes of bits: int64 [parts].
    """

    store: PartFiles
    name: str
    feature: Feature
    dtypes: list[str]
    kind: np.ndarray
    places: np.ndarray
    units: np.ndarray

    @classmethod
    def of(cls, store: PartFiles, name: str, feature: Feature) -> "_Column":
        """The column `name` of the parts of a store."""
        every = [part.columns[name] for part in store.parts]
        dtypes = sorted({place.dtype for place in every})
        kind = np.array([dtypes.index(place.dtype) for place in every])
        places, units = np.array([(place.at, place.units) for place in every], np.int64).T
        return cls(store, name, feature, dtypes, kind, places, units)

    def find(
        self, dtype: str, maps: Maps, part: np.ndarray, first: np.ndarray, counts: np.ndarray
    ) -> Entries:
        """The numbers in parts that store them as `dtype`; bits are copied, as a byte each."""
        is_bits = dtype == "bool"
        skip, per_unit = (first & 7, 8) if is_bits else (0, 1)
        first, counts = first // per_unit, (skip + counts + per_unit - 1) // per_unit
        (values, places), held = maps.columns[self.name, dtype], None
        begins, ends = places[part] + first, places[part] + self.units[part]
        if (away := ~maps.has[part]).any():
            # Fetched ranges form one more array, in which pieces lie one after another.
            at = self.places[part[away]] + values.itemsize * first[away]
            pieces = self.store.fetch(part[away], at, at + values.itemsize * counts[away])
            found = [np.frombuffer(each, values.dtype) for each in pieces]
            held = fetched = np.concatenate([np.zeros(0, values.dtype), *found])
            values, (base, there) = join_memory([values, fetched])
            begins, ends = begins + base, ends + base
            begins[away] = there + np.cumsum(counts[away]) - counts[away]
            ends[away] = there + len(fetched)
        if not is_bits:
            return Entries(values, begins, ends, held)
        bits = np.unpackbits(gather(values, begins, counts, ends), bitorder="little")
        ends = 8 * np.cumsum(counts)
        return Entries(bits, ends - 8 * counts + skip, ends, None)
