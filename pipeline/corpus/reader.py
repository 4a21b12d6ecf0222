"""The reader of the parts of a corpus: from memory maps, or by ranges of bytes."""

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from etils import epath

from pipeline.corpus.cache import PartCache
from pipeline.corpus.gather import Fields, gather, join_memory
from pipeline.corpus.manifest import damage, open_part
from pipeline.corpus.parts import Maps, Part, PartFile
from pipeline.corpus.tasks import Task
from pipeline.fs import objects
from pipeline.text.features import LOSS_WEIGHTS, WEIGHTS, Feature


class Reader:
    """Pieces of examples from parts that are mapped: all of them, those in a cache, or none.

    Of other parts (object storage), ranges of bytes are fetched in parallel; the header of a part
    and its offsets (8 bytes per example) when the part is first touched. The offsets are kept.

    Attributes:
        features: those that the parts have, by name; without the weights.
    """

    def __init__(
        self,
        directory: epath.Path,
        parts: Sequence[Part],
        features: Mapping[str, Feature],
        mapped: bool,
        cache: PartCache | None,
        opened: "Reader | None" = None,
    ):
        """Makes a reader; of parts that another one has `opened`, it takes what that has read."""
        self._directory, self._parts, self._cache = directory, parts, cache
        self.features = features
        examples = np.array([part.examples for part in parts], np.int64)
        self._first = np.cumsum(examples) - examples
        self._sizes = np.array([part.tokens for part in parts], np.int64)
        # Of each column: its dtypes, the one that each part has, and its place and size there.
        self._columns = {name: _Column.of(name, parts) for name in parts[0].columns}
        self._offsets: dict[int, np.ndarray] = {}
        files: dict[int, PartFile] = {}
        there = {} if opened is None else {p.file: n for n, p in enumerate(opened._parts)}
        for number, part in enumerate(parts):
            before = there.get(part.file)
            if opened is not None and before in opened._offsets:
                self._offsets[number] = opened._offsets[before]
            if mapped and cache is None:
                known = None if opened is None or before is None else opened._maps.files[before]
                files[number] = known or open_part(directory, part)
        self._maps: Maps = Maps(files, parts)

    def locate(
        self, examples: Any, starts: Any, lengths: Any, reach: Any, counts: np.ndarray
    ) -> "Located":
        """Where pieces of examples are; `counts` are the tokens that each of the examples has."""
        part, maps = self._map(examples)
        begins, ends = self._edges(maps, part, examples - self._first[part])
        wrong = (begins < 0) | (ends > self._sizes[part]) | (ends - begins != counts)
        for at in np.flatnonzero(wrong)[:1]:
            raise damage(
                self._directory / self._parts[int(part[at])].file,
                f"example {examples[at]:,} has the offsets {begins[at]} and {ends[at]} in a part "
                f"of {self._sizes[part[at]]:,} tokens, and by its length {counts[at]:,} tokens",
            )
        return Located(maps, part, begins + starts, lengths, reach)

    def follow(self, at: "Located", examples: np.ndarray) -> "Located":
        """Pieces of `examples` that the reader of another file of each part has located."""
        return at._replace(maps=self._map(examples)[1])

    def read(self, at: "Located", task: Task, names: Iterable[str]) -> Fields:
        """The pieces that `locate` found: tokens and weights, if these are here, and features."""
        fields: Fields = {}
        if "tokens" in self._columns:
            fields = self._gather("tokens", "int32", at, task.shifts)
        read = {"loss_weights": (WEIGHTS, LOSS_WEIGHTS)} if WEIGHTS in self._columns else {}
        read |= {name: (name, self.features[name]) for name in names}
        for field, (name, feature) in read.items():
            here = at._replace(first=at.first + task.shift_of(feature))
            fields[field] = self._read_feature(name, feature, here)
        return fields

    def read_examples(self, examples: np.ndarray, names: Iterable[str]) -> Fields:
        """The values of some features of examples: `[n, *shape]`."""
        (part, maps), ones = self._map(examples), np.ones_like(examples)
        at = Located(maps, part, examples - self._first[part], ones, ones)
        return {name: self._read_feature(name, self.features[name], at) for name in names}

    def count_tokens(self) -> Iterator[np.ndarray]:
        """The tokens of each example, part by part: int64."""
        for first, part in zip(self._first.tolist(), self._parts, strict=True):
            examples = np.arange(first, first + part.examples)
            number, maps = self._map(examples)
            begins, ends = self._edges(maps, number, examples - first)
            yield ends - begins

    def _map(self, examples: np.ndarray) -> tuple[np.ndarray, Maps]:
        """The part of each example, and what is mapped of these."""
        part = np.searchsorted(self._first, examples, side="right") - 1
        return part, self._maps if self._cache is None else self._cache.maps(part)

    def _read_feature(self, name: str, feature: Feature, at: "Located") -> np.ndarray:
        """The values of pieces, where `at.first` counts values: `[sum(reach), *shape]`."""
        column = self._columns[name]
        at = Located(*at[:2], *(each * feature.size for each in at[2:]))
        kinds = column.kind[at.part]
        if len(kinds) and kinds.min() != kinds.max():
            # Weights that are bits in some parts and floats in others.
            found, of_value = np.zeros(int(at.reach.sum()), feature.dtype), kinds.repeat(at.reach)
            for kind, dtype in enumerate(column.dtypes):
                mine = Located(at.maps, *(each[kinds == kind] for each in at[1:]))
                found[of_value == kind] = self._read_values(name, dtype, mine)
        else:
            found = self._read_values(name, column.dtypes[int(kinds.max(initial=0))], at)
        return feature.restore(found)

    def _read_values(self, name: str, dtype: str, at: "Located") -> np.ndarray:
        """Values of a column, one piece after another; of bits, each as a byte."""
        if dtype != "bool":
            return self._gather(name, dtype, at, {name: 0})[name]
        skip = at.first & 7
        held, room = ((skip + each + 7) >> 3 for each in (at.lengths, at.reach))
        units = at._replace(first=at.first >> 3, lengths=held, reach=room)
        bits = np.unpackbits(self._gather(name, dtype, units, {name: 0})[name], bitorder="little")
        begins = 8 * (np.cumsum(room) - room) + skip
        return gather(bits, begins, at.reach, at.reach, {name: 0})[name]

    def _edges(
        self, maps: Maps, part: np.ndarray, number: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Where each example, by its number in its part, begins and ends among the tokens."""
        offsets, places = maps.columns["offsets", "int64"]
        if (away := ~maps.has[part]).any():
            numbers = np.unique(part[away])
            if missing := [each for each in numbers.tolist() if each not in self._offsets]:
                self._load(missing)
            fetched = (self._offsets[each] for each in numbers.tolist())
            offsets, there = join_memory([offsets, *fetched])
            places = places + there[0]
            places[numbers] = there[1:]
        at = places[part] + number
        return offsets.take(at), offsets.take(at + 1)

    def _gather(self, name: str, dtype: str, at: "Located", shifts: Mapping[str, int]) -> Fields:
        """The pieces of a column, where `at.first` counts its units; see `gather`."""
        (maps, part, first, lengths, reach), column = at, self._columns[name]
        values, places = maps.columns[name, dtype]
        begins, ends = places[part] + first, places[part] + column.units[part]
        if (away := ~maps.has[part]).any():
            # What ranges give is one more array, in which pieces lie one after another.
            counts = lengths[away] + max(shifts.values())
            fetched = self._fetch_values(column, values.dtype, part[away], first[away], counts)
            values, (base, there) = join_memory([values, fetched])
            begins, ends = begins + base, ends + base
            begins[away] = there + np.cumsum(counts) - counts
            ends[away] = there + len(fetched)
        return gather(values, begins, lengths, reach, shifts, ends)

    def _fetch_values(
        self, column: "_Column", dtype: np.dtype, part: Any, first: Any, counts: Any
    ) -> np.ndarray:
        """`counts` units of a column from each place `first` of a part on, one after another."""
        begins = column.places[part] + dtype.itemsize * first
        pieces = self._fetch(part, begins, begins + dtype.itemsize * counts)
        return np.concatenate([np.zeros(0, dtype), *(np.frombuffer(e, dtype) for e in pieces)])

    def _load(self, numbers: Sequence[int]) -> None:
        """Fetches the offsets of some parts, and compares their headers with the manifest."""
        parts = [self._parts[number] for number in numbers]
        heads = [part.columns["offsets"].end for part in parts]
        lasts = [max(place.end for place in part.columns.values()) for part in parts]
        found = self._fetch(
            [*numbers, *numbers],
            [0] * len(parts) + lasts,
            [*heads, *(part.bytes for part in parts)],
        )
        for number, part, last, head, footer in zip(
            numbers, parts, lasts, found, found[len(parts) :], strict=False
        ):
            # The file with zeros for its tokens, which parsing does not touch, nor the system
            # allocate.
            content = np.zeros(part.bytes, np.uint8)
            content[: len(head)] = np.frombuffer(head, np.uint8)
            content[last:] = np.frombuffer(footer, np.uint8)
            open_part(self._directory, part, pa.py_buffer(content))
            offsets = np.frombuffer(head, np.int64, offset=part.columns["offsets"].at).copy()
            # Another thread may have joined the memory of those that it has fetched meanwhile.
            self._offsets.setdefault(number, offsets)

    def _fetch(self, part: Sequence[int] | np.ndarray, begins: Any, ends: Any) -> list[memoryview]:
        """Bytes of parts, from each of `begins` to each of `ends`."""
        paths = [os.fspath(self._directory / each.file) for each in self._parts]
        begin = time.perf_counter()
        found = objects.get_ranges([paths[number] for number in part], begins, ends)
        if self._cache is not None:
            waited = time.perf_counter() - begin
            self._cache.count(ranged=sum(map(len, found)), stalls=1, waited=waited)
        return found


class Located(NamedTuple):
    """Where pieces of examples are; each field but the first is int64 [pieces]."""

    maps: Maps  # what is mapped of the parts
    part: np.ndarray
    first: np.ndarray  # the first token, in the part
    lengths: np.ndarray
    reach: np.ndarray  # the places that it takes in the result


class _Column(NamedTuple):
    """Where a column is in each part.

    Attributes:
        dtypes: that of its values, or the two that weights have.
        kind: which of them each part has: int64 [parts].
        places: the byte where it begins: int64 [parts].
        units: how many numbers, or bytes of bits, it has: int64 [parts].
    """

    dtypes: list[str]
    kind: np.ndarray
    places: np.ndarray
    units: np.ndarray

    @classmethod
    def of(cls, name: str, parts: Sequence[Part]) -> "_Column":
        """The column `name` of some parts."""
        every = [part.columns[name] for part in parts]
        dtypes = sorted({place.dtype for place in every})
        kind = np.array([dtypes.index(place.dtype) for place in every])
        places, units = np.array([(place.at, place.units) for place in every], np.int64).T
        return cls(dtypes, kind, places, units)
