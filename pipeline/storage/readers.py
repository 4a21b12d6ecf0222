"""Readers of the parts of a corpus: from memory maps, or by ranges of bytes."""

import os
import time
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
from etils import epath

from pipeline import objects
from pipeline.storage.cache import PartCache
from pipeline.storage.gather import gather, span
from pipeline.storage.manifest import damage, require_same_part
from pipeline.storage.parts import Part, PartFile, read_part


class Reader:
    """Pieces of examples from the parts of a corpus, in a directory."""

    def __init__(self, directory: epath.Path, parts: Sequence[Part]):
        self._directory, self._parts = directory, parts
        examples = np.array([part.examples for part in parts], np.int64)
        self._first = np.cumsum(examples) - examples
        self._sizes = np.array([part.tokens for part in parts], np.int64)
        self._weighted = parts[0].weights_at is not None

    def read(
        self, examples, starts, lengths, reach, counts, shifts: Mapping[str, int]
    ) -> dict[str, np.ndarray]:
        """See `Corpus.read`; `counts` are the tokens that each of the examples has."""
        part = np.searchsorted(self._first, examples, side="right") - 1
        begins, ends = self._edges(part, examples - self._first[part])
        wrong = (begins < 0) | (ends > self._sizes[part]) | (ends - begins != counts)
        for at in np.flatnonzero(wrong)[:1]:
            raise damage(
                self._directory / self._parts[part[at]].file,
                f"example {examples[at]:,} has the offsets {begins[at]} and {ends[at]} in a part "
                f"of {self._sizes[part[at]]:,} tokens, and by its length {counts[at]:,} tokens",
            )
        fields = self._gather("tokens", part, begins + starts, lengths, reach, shifts)
        if self._weighted:
            first = begins + starts + max(shifts.values())
            fields |= self._gather("weights", part, first, lengths, reach, {"loss_weights": 0})
        return fields

    def _edges(self, part: np.ndarray, number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where each example, by its number in its part, begins and ends among the tokens."""
        raise NotImplementedError

    def _gather(
        self, column: str, part, first, lengths, reach, shifts: Mapping[str, int]
    ) -> dict[str, np.ndarray]:
        """The pieces of a column from the place `first` of each part on; see `gather`."""
        raise NotImplementedError


class MappedReader(Reader):
    """Reads memory-mapped parts: one gather, however many parts the pieces touch."""

    def __init__(self, directory: epath.Path, parts: Sequence[Part]):
        super().__init__(directory, parts)
        self._files = [self._map(part) for part in parts]
        self._offsets, self._offsets_at = span([file.offsets for file in self._files])
        self._columns = {"tokens": span([file.tokens for file in self._files])}
        if self._weighted:
            weights = [file.weights for file in self._files if file.weights is not None]
            self._columns["weights"] = span(weights)

    def _map(self, part: Part) -> PartFile:
        path = self._directory / part.file
        try:
            file = read_part(path)
            require_same_part(part, file.part)
        except ValueError as error:
            raise damage(path, str(error)) from error
        return file

    def _edges(self, part, number):
        at = self._offsets_at[part] + number
        return self._offsets.take(at), self._offsets.take(at + 1)

    def _gather(self, column, part, first, lengths, reach, shifts):
        values, begin = self._columns[column]
        ends = (begin + self._sizes)[part]
        return gather(values, begin[part] + first, lengths, reach, shifts, ends)


class RangedReader(Reader):
    """Reads parts that cannot be mapped (object storage): ranges of bytes, in parallel.

    The header of a part and its offsets (8 bytes per example) are fetched when the part is first
    touched; the offsets are kept.
    """

    def __init__(self, directory: epath.Path, parts: Sequence[Part]):
        super().__init__(directory, parts)
        self._offsets: dict[int, np.ndarray] = {}

    def _edges(self, part, number):
        touched, which = np.unique(part, return_inverse=True)
        # Held by a name, they stay mapped until they have been read, whoever removes the files.
        arrays = self._offsets_of(touched.tolist()) or [np.zeros(0, np.int64)]
        offsets, places = span(arrays)
        at = places[which] + number
        return offsets.take(at), offsets.take(at + 1)

    def _offsets_of(self, parts: list[int]) -> list[np.ndarray]:
        """The offsets of some parts, by their numbers: int64 [examples + 1] of each."""
        self._load([number for number in parts if number not in self._offsets])
        return [self._offsets[number] for number in parts]

    def _gather(self, column, part, first, lengths, reach, shifts):
        counts = lengths + max(shifts.values())
        values = self._fetch_values(column, part, first, counts)
        return gather(values, np.cumsum(counts) - counts, lengths, reach, shifts)

    def _fetch_values(self, column: str, part, first, counts) -> np.ndarray:
        """`counts` values of a column from each place `first` of a part on, one after another."""
        dtype = np.float32 if column == "weights" else np.int32
        places = np.array([getattr(each, f"{column}_at") for each in self._parts], np.int64)
        begins = places[part] + 4 * first
        pieces = self._fetch(part, begins, begins + 4 * counts)
        return np.concatenate([np.zeros(0, dtype), *(np.frombuffer(e, dtype) for e in pieces)])

    def _load(self, numbers: Sequence[int]) -> None:
        """Fetches the offsets of some parts, and compares their headers with the manifest."""
        parts = [self._parts[number] for number in numbers]
        heads = [part.offsets_at + 8 * (part.examples + 1) for part in parts]
        lasts = [max(part.tokens_at, part.weights_at or 0) + 4 * part.tokens for part in parts]
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
            try:
                require_same_part(part, PartFile(part.file, pa.py_buffer(content)).part)
            except ValueError as error:
                raise damage(self._directory / part.file, str(error)) from error
            self._offsets[number] = np.frombuffer(head, np.int64, offset=part.offsets_at).copy()

    def _fetch(self, part: Sequence[int] | np.ndarray, begins, ends) -> list[memoryview]:
        """Bytes of parts, from each of `begins` to each of `ends`."""
        paths = [os.fspath(self._directory / each.file) for each in self._parts]
        return objects.get_ranges([paths[number] for number in part], begins, ends)


class CachedReader(RangedReader):
    """Reads the parts that a cache has from their maps, and the others by ranges."""

    def __init__(self, directory: epath.Path, parts: Sequence[Part], cache: PartCache):
        super().__init__(directory, parts)
        self._cache = cache

    def _offsets_of(self, parts):
        known = {number: file.offsets for number in parts if (file := self._cache.file(number))}
        away = [number for number in parts if number not in known]
        known |= dict(zip(away, super()._offsets_of(away), strict=True))
        return [known[number] for number in parts]

    def _gather(self, column, part, first, lengths, reach, shifts):
        touched, which = np.unique(part, return_inverse=True)
        files = [self._cache.file(each) for each in touched.tolist()]
        away = np.array([file is None for file in files], bool)[which]
        counts = (lengths + max(shifts.values()))[away]
        if column == "tokens":
            self._cache.count(hits=len(part) - len(counts), misses=len(counts))
        # What ranges give is one more array, in which pieces lie one after another.
        fetched = self._fetch_values(column, part[away], first[away], counts)
        arrays = [fetched if file is None else getattr(file, column) for file in files] or [fetched]
        values, places = span(arrays)
        begin = places[which] + first
        begin[away] = places[which][away] + np.cumsum(counts) - counts
        ends = places[which] + np.array([len(each) for each in arrays])[which]
        return gather(values, begin, lengths, reach, shifts, ends)

    def _fetch(self, part, begins, ends):
        if not len(part):
            return []
        begin = time.perf_counter()
        found = super()._fetch(part, begins, ends)
        waited = time.perf_counter() - begin
        self._cache.count(ranged=sum(map(len, found)), stalls=1, waited=waited)
        return found
