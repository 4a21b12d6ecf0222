"""The reader of the parts of a corpus: from memory maps, or by ranges of bytes."""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from etils import epath

from pipeline.corpus.cache import PartCache
from pipeline.corpus.gather import Fields, gather, join_memory
from pipeline.corpus.manifest import damage, open_part
from pipeline.corpus.parts import Maps, Part
from pipeline.corpus.tasks import Task
from pipeline.fs import objects


class Reader:
    """Pieces of examples from parts that are mapped: all of them, those in a cache, or none.

    Of other parts (object storage), ranges of bytes are fetched in parallel; the header of a part
    and its offsets (8 bytes per example) when the part is first touched. The offsets are kept.
    """

    def __init__(
        self, directory: epath.Path, parts: Sequence[Part], mapped: bool, cache: PartCache | None
    ):
        self._directory, self._parts, self._cache = directory, parts, cache
        examples = np.array([part.examples for part in parts], np.int64)
        self._first = np.cumsum(examples) - examples
        self._sizes = np.array([part.tokens for part in parts], np.int64)
        self._weighted = parts[0].weights_at is not None
        self._offsets: dict[int, np.ndarray] = {}
        files = enumerate(parts) if mapped and cache is None else ()
        self._maps = Maps(
            {number: open_part(directory, part) for number, part in files}, len(parts)
        )

    def read(
        self, examples: Any, starts: Any, lengths: Any, reach: Any, counts: Any, task: Task
    ) -> Fields:
        """See `Corpus.read`; `counts` are the tokens that each of the examples has."""
        part = np.searchsorted(self._first, examples, side="right") - 1
        maps = self._maps if self._cache is None else self._cache.maps(part)
        begins, ends = self._edges(maps, part, examples - self._first[part])
        wrong = (begins < 0) | (ends > self._sizes[part]) | (ends - begins != counts)
        for at in np.flatnonzero(wrong)[:1]:
            raise damage(
                self._directory / self._parts[part[at]].file,
                f"example {examples[at]:,} has the offsets {begins[at]} and {ends[at]} in a part "
                f"of {self._sizes[part[at]]:,} tokens, and by its length {counts[at]:,} tokens",
            )
        first = begins + starts
        fields = self._gather(maps, "tokens", part, first, lengths, reach, task.shifts)
        if self._weighted:
            first, plain = first + task.lookahead, {"loss_weights": 0}
            fields |= self._gather(maps, "weights", part, first, lengths, reach, plain)
        return fields

    def _edges(
        self, maps: Maps, part: np.ndarray, number: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Where each example, by its number in its part, begins and ends among the tokens."""
        offsets, places = maps.columns["offsets"]
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

    def _gather(
        self,
        maps: Maps,
        column: str,
        part: Any,
        first: Any,
        lengths: Any,
        reach: Any,
        shifts: Mapping[str, int],
    ) -> Fields:
        """The pieces of a column from the place `first` of each part on; see `gather`."""
        values, places = maps.columns[column]
        begins, ends = places[part] + first, places[part] + self._sizes[part]
        if (away := ~maps.has[part]).any():
            # What ranges give is one more array, in which pieces lie one after another.
            counts = lengths[away] + max(shifts.values())
            fetched = self._fetch_values(column, part[away], first[away], counts)
            values, (base, there) = join_memory([values, fetched])
            begins, ends = begins + base, ends + base
            begins[away] = there + np.cumsum(counts) - counts
            ends[away] = there + len(fetched)
        return gather(values, begins, lengths, reach, shifts, ends)

    def _fetch_values(self, column: str, part: Any, first: Any, counts: Any) -> np.ndarray:
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
            open_part(self._directory, part, pa.py_buffer(content))
            self._offsets[number] = np.frombuffer(head, np.int64, offset=part.offsets_at).copy()

    def _fetch(self, part: Sequence[int] | np.ndarray, begins: Any, ends: Any) -> list[memoryview]:
        """Bytes of parts, from each of `begins` to each of `ends`."""
        paths = [os.fspath(self._directory / each.file) for each in self._parts]
        begin = time.perf_counter()
        found = objects.get_ranges([paths[number] for number in part], begins, ends)
        if self._cache is not None:
            waited = time.perf_counter() - begin
            self._cache.count(ranged=sum(map(len, found)), stalls=1, waited=waited)
        return found
