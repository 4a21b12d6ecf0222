"""Readers of the parts of a corpus: from memory maps, or by ranges of bytes."""

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
from etils import epath

from pipeline.fork import restart_in_children
from pipeline.storage.gather import gather, span
from pipeline.storage.manifest import damage, require_same_part
from pipeline.storage.parts import Part, PartFile, read_part

# Ranges of a part closer than this many bytes are read as one: they cost less than a request.
NEIGHBOURS = 1 << 16
CONNECTIONS = 16


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
        self.restart()
        restart_in_children(self)

    def restart(self) -> None:
        """Starts its threads anew; see `pipeline.fork`."""
        self._threads = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="corpus-ranges")
        self._lock = threading.Lock()

    def _edges(self, part, number):
        begins, ends = np.empty(len(part), np.int64), np.empty(len(part), np.int64)
        touched = np.unique(part)
        for each, offsets in zip(touched, self._threads.map(self._load, touched), strict=True):
            here = part == each
            begins[here], ends[here] = offsets[number[here]], offsets[number[here] + 1]
        return begins, ends

    def _gather(self, column, part, first, lengths, reach, shifts):
        dtype = np.float32 if column == "weights" else np.int32
        if not len(part):
            return {field: np.zeros(0, dtype) for field in shifts}
        places = np.array([getattr(each, f"{column}_at") for each in self._parts], np.int64)
        counts = lengths + max(shifts.values())
        values, first = self._fetch_pieces(part, places[part] + 4 * first, counts)
        return gather(values.view(dtype), first, lengths, reach, shifts)

    def _fetch_pieces(
        self, part: np.ndarray, begin: np.ndarray, counts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """`counts` times four bytes from each place of a part, and where each begins in them."""
        # Byte ranges in order of file and place, joined with their neighbours.
        end = begin + 4 * counts
        order = np.lexsort((begin, part))
        files, begin, end = part[order], begin[order], end[order]
        # Pieces may lie inside one another: a range reaches as far as any piece before it.
        far = np.maximum.accumulate(end + files * (1 << 48)) - files * (1 << 48)
        new = np.ones(len(order), bool)
        new[1:] = (files[1:] != files[:-1]) | (begin[1:] > far[:-1] + NEIGHBOURS)
        heads = np.flatnonzero(new)
        tails = np.append(heads[1:], len(order)) - 1
        fetched = self._threads.map(self._fetch, files[heads], begin[heads], far[tails])
        flat = np.concatenate(list(fetched))

        sizes = (far[tails] - begin[heads]) // 4
        bases = np.cumsum(sizes) - sizes
        which = np.cumsum(new) - 1
        first = np.empty(len(order), np.int64)
        first[order] = bases[which] + (begin - begin[heads][which]) // 4
        return flat, first

    def _load(self, number: int) -> np.ndarray:
        """The offsets of a part, after its header was compared with the manifest."""
        if (known := self._offsets.get(number)) is None:
            part = self._parts[number]
            head = self._bytes(part, 0, part.offsets_at + 8 * (part.examples + 1))
            last = max(part.tokens_at, part.weights_at or 0) + 4 * part.tokens
            footer = self._bytes(part, last, part.bytes)
            # The file with zeros for its tokens, which parsing does not touch, nor the system
            # allocate.
            content = np.zeros(part.bytes, np.uint8)
            content[: len(head)] = np.frombuffer(head, np.uint8)
            content[last:] = np.frombuffer(footer, np.uint8)
            try:
                require_same_part(part, PartFile(part.file, pa.py_buffer(content)).part)
            except ValueError as error:
                raise damage(self._directory / part.file, str(error)) from error
            with self._lock:
                known = self._offsets.setdefault(
                    number, np.frombuffer(head, np.int64, offset=part.offsets_at)
                )
        return known

    def _fetch(self, number: int, begin: int, end: int) -> np.ndarray:
        return np.frombuffer(self._bytes(self._parts[number], begin, end), np.int32)

    def _bytes(self, part: Part, begin: int, end: int) -> bytes:
        path = self._directory / part.file
        with path.open("rb") as file:
            file.seek(int(begin))
            raw = file.read(int(end - begin))
        if len(raw) != end - begin:
            raise OSError(f"{os.fspath(path)} ends before byte {end}: the corpus is damaged")
        return raw
