"""Readers of the parts of a corpus: from memory maps, or by ranges of bytes."""

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
from etils import epath

from pipeline.storage.gather import gather
from pipeline.storage.manifest import damage, require_same_part
from pipeline.storage.parts import Part, PartFile, read_part

# Ranges of a part closer than this many bytes are read as one: they cost less than a request.
NEIGHBOURS = 1 << 16
CONNECTIONS = 16


class _Reader:
    """The parts of a corpus, and the checks of what is read from them."""

    def __init__(self, directory: epath.Path, parts: Sequence[Part]):
        self._directory, self._parts = directory, parts
        examples = np.array([part.examples for part in parts], np.int64)
        self._first = np.cumsum(examples) - examples
        self._tokens_in = np.array([part.tokens for part in parts], np.int64)

    def _require_offsets(
        self, part: np.ndarray, examples: np.ndarray, begins: np.ndarray, counts: np.ndarray, ends
    ) -> None:
        """Refuses offsets that are not within a part, or not of as many tokens as `counts` says."""
        wrong = (begins < 0) | (ends > self._tokens_in[part]) | (ends - begins != counts)
        for at in np.flatnonzero(wrong)[:1]:
            raise damage(
                self._directory / self._parts[part[at]].file,
                f"example {examples[at]:,} has the offsets {begins[at]} and {ends[at]} in a part "
                f"of {self._tokens_in[part[at]]:,} tokens, and by its length {counts[at]:,} tokens",
            )


class MappedReader(_Reader):
    """Reads memory-mapped parts: one gather, however many parts the pieces touch."""

    def __init__(self, directory: epath.Path, parts: Sequence[Part]):
        super().__init__(directory, parts)
        self._maps = [self._map(part) for part in parts]
        # All maps lie in one address space, so a single array that starts at the lowest of them
        # and reaches the end of the highest covers every part; what lies between is never read.
        addresses = np.array([each.ctypes.data for each in self._maps], np.int64)
        lowest = self._maps[int(addresses.argmin())]
        gaps = addresses - addresses.min()
        span = int((gaps + [len(each) for each in self._maps]).max())

        def over_all(dtype):
            item = np.dtype(dtype).itemsize
            start = lowest[:item].view(dtype)
            return np.lib.stride_tricks.as_strided(
                start, shape=(span // item,), strides=(item,), writeable=False
            )

        self._offsets, self._tokens = over_all(np.int64), over_all(np.int32)
        self._offsets_at = (gaps + [part.offsets_at for part in parts]) // 8
        self._tokens_at = (gaps + [part.tokens_at for part in parts]) // 4
        self._ends = (gaps + [part.bytes for part in parts]) // 4
        #: From a token to its weight, in each part; None where tokens have no weights.
        self._to_weights: np.ndarray | None = None
        weights_at = [part.weights_at for part in parts if part.weights_at is not None]
        if weights_at:
            self._to_weights = (gaps + weights_at) // 4 - self._tokens_at

    def _map(self, part: Part) -> np.ndarray:
        path = self._directory / part.file
        try:
            file = read_part(path)
            require_same_part(part, file.part)
        except ValueError as error:
            raise damage(path, str(error)) from error
        return file.content

    def read(
        self, examples, starts, lengths, reach, counts, shifts: Mapping[str, int]
    ) -> dict[str, np.ndarray]:
        """See `Corpus.read`; `counts` are the tokens that each of the examples has."""
        part = np.searchsorted(self._first, examples, side="right") - 1
        at = self._offsets_at[part] + (examples - self._first[part])
        begins = self._offsets.take(at)
        self._require_offsets(part, examples, begins, counts, self._offsets.take(at + 1))
        first = self._tokens_at[part] + begins + starts
        # No other map need follow this one.
        end = self._ends[part]
        fields = gather(self._tokens, first, lengths, reach, shifts, end)
        if self._to_weights is not None:
            # Four bytes each, as tokens are, so they are moved as if they were tokens.
            first = first + self._to_weights[part] + max(shifts.values())
            moved = gather(self._tokens, first, lengths, reach, {"loss_weights": 0}, end)
            fields["loss_weights"] = moved["loss_weights"].view(np.float32)
        return fields


class RangedReader(_Reader):
    """Reads parts that cannot be mapped (object storage): ranges of bytes, in parallel.

    The header of a part and its offsets (8 bytes per example) are fetched when the part is first
    touched; the offsets are kept.
    """

    def __init__(self, directory: epath.Path, parts: Sequence[Part]):
        super().__init__(directory, parts)
        self._offsets: dict[int, np.ndarray] = {}
        self._threads = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="corpus-ranges")
        self._lock = threading.Lock()

    def read(
        self, examples, starts, lengths, reach, counts, shifts: Mapping[str, int]
    ) -> dict[str, np.ndarray]:
        """See `Corpus.read`; `counts` are the tokens that each of the examples has."""
        lookahead = max(shifts.values())
        part = np.searchsorted(self._first, examples, side="right") - 1
        begins, ends = self._edges(part, examples)
        self._require_offsets(part, examples, begins, counts, ends)
        weighted = self._parts[0].weights_at is not None
        if not len(examples):
            fields = {field: np.zeros(0, np.int32) for field in shifts}
            return fields | ({"loss_weights": np.zeros(0, np.float32)} if weighted else {})
        at = begins + starts
        places = np.array([each.tokens_at for each in self._parts], np.int64)
        tokens, first = self._fetch_pieces(part, places[part] + 4 * at, lengths + lookahead)
        fields = gather(tokens, first, lengths, reach, shifts)
        if weighted:
            places = np.array([each.weights_at for each in self._parts], np.int64)
            begin = places[part] + 4 * (at + lookahead)
            weights, first = self._fetch_pieces(part, begin, lengths)
            moved = gather(weights, first, lengths, reach, {"loss_weights": 0})
            fields["loss_weights"] = moved["loss_weights"].view(np.float32)
        return fields

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

    def _edges(self, part: np.ndarray, examples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where each example begins and ends among the tokens of its part."""
        begins, ends = np.empty(len(examples), np.int64), np.empty(len(examples), np.int64)
        touched = np.unique(part)
        for number, offsets in zip(touched, self._threads.map(self._load, touched), strict=True):
            here = part == number
            at = examples[here] - self._first[number]
            begins[here], ends[here] = offsets[at], offsets[at + 1]
        return begins, ends

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
