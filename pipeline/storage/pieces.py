"""Pieces of examples, read from the parts of a corpus: from memory maps, or by ranges of bytes."""

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
from etils import epath

from pipeline.storage import buffers
from pipeline.storage.parts import Part

# Ranges of a part closer than this many bytes are read as one: they cost less than a request.
NEIGHBOURS = 1 << 16
CONNECTIONS = 16


def gathered(
    tokens: np.ndarray,
    first: np.ndarray,
    lengths: np.ndarray,
    reach: np.ndarray,
    shifts: Mapping[str, int],
    ends: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """The pieces one after another, for each field.

    A field that is shifted by one is the field before it, moved by one place, but for the last
    token of each piece. What lies after a piece is read with it, as far as it reaches, but not
    beyond `ends`, where for each piece the memory ends that may be read; None: with `tokens`.
    """
    last = np.cumsum(reach) - reach + lengths - 1
    if ends is None:
        ends = np.full(len(first), len(tokens))
    plain = _slices(tokens, first, reach, ends)
    found = {}
    for field, shift in shifts.items():
        if shift == 1 and len(plain):
            found[field] = buffers.empty(len(plain), plain.dtype)
            found[field][:-1] = plain[1:]
            found[field][last] = tokens.take(first + lengths, mode="wrap")
        else:
            found[field] = _slices(tokens, first + shift, reach, ends) if shift else plain
    return found


def _slices(
    tokens: np.ndarray, first: np.ndarray, sizes: np.ndarray, ends: np.ndarray
) -> np.ndarray:
    """`sizes` tokens from each of `first`, one after another; zeros in place of those past `ends`.

    Arrow copies them as strings of bytes, each whole: 3 to 5 times as fast as a gather by token.
    The strings alternate with what lies between them, which is never taken. Between a piece and
    one that lies before it that is less than nothing, so the array is only good for this use.
    """
    within = np.minimum(sizes, ends - first)
    edges = np.zeros(2 * len(first) + 2, np.int64)
    edges[1:-1:2], edges[2:-1:2] = first, first + within
    # Arrow makes room by the mean length of all strings, from the first and the last edge.
    edges[-1] = min(2 * int(within.sum()), len(tokens))
    memory = pa.foreign_buffer(tokens.ctypes.data, tokens.nbytes, tokens)
    offsets = pa.py_buffer(edges * tokens.itemsize)
    strings = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(edges) - 1, [None, offsets, memory]
    )
    taken = strings.take(pa.array(np.arange(1, len(edges) - 1, 2)))
    found = np.frombuffer(taken.buffers()[2], tokens.dtype)
    if len(found) < sizes.sum():
        found = np.insert(found, np.repeat(np.cumsum(within), sizes - within), 0)
    return found


def as_pieces(
    examples: Any, starts: Any, lengths: Any, reach: Any, count: int
) -> tuple[np.ndarray, ...]:
    """What `Corpus.read` takes as int64 arrays, without the pieces of length 0.

    Raises:
        IndexError: there is no such example among `count`.
    """
    reach = lengths if reach is None else reach
    arrays = tuple(np.asarray(each, np.int64) for each in (examples, starts, lengths, reach))
    examples, _, lengths, _ = arrays
    if len(examples) and not (examples.min() >= 0 and examples.max() < count):
        wrong = examples[(examples < 0) | (examples >= count)][0]
        raise IndexError(f"example {wrong} of {count:,}; they are numbered from 0")
    some = lengths != 0
    return arrays if some.all() else tuple(each[some] for each in arrays)


def require_within(
    room: np.ndarray, examples: np.ndarray, starts: np.ndarray, lengths: np.ndarray
) -> None:
    """Raises an IndexError naming the first piece that is not within its example's `room`."""
    wrong = np.flatnonzero((starts < 0) | (lengths < 0) | (starts + lengths > room))
    if len(wrong):
        at = int(wrong[0])
        raise IndexError(
            f"piece {at} asks for positions {starts[at]} to {starts[at] + lengths[at]} of "
            f"example {examples[at]}, which has length {max(int(room[at]), 0)}"
        )


class MappedPieces:
    """Pieces from memory-mapped parts: one gather, however many parts they touch."""

    def __init__(self, directory: epath.Path, parts: Sequence[Part]):
        self._maps = []
        for part in parts:
            # Arrow's maps outlive their files; Python's each hold one open, and 1,024 is a limit.
            with pa.memory_map(os.fspath(directory / part.file)) as file:
                self._maps.append(np.frombuffer(file.read_buffer(), np.uint8))
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
        self._ends = (gaps + [len(each) for each in self._maps]) // 4
        #: From a token to its weight, in each part; None where tokens have no weights.
        self._to_weights: np.ndarray | None = None
        if weights := [part.weights_at - part.tokens_at for part in parts if part.weights_at]:
            self._to_weights = np.array(weights, np.int64) // 4
        self._first = _first_examples(parts)

    def read(
        self, examples, starts, lengths, reach, shifts: Mapping[str, int]
    ) -> dict[str, np.ndarray]:
        """See `Corpus.read`."""
        part = np.searchsorted(self._first, examples, side="right") - 1
        at = self._offsets_at[part] + (examples - self._first[part])
        begins = self._offsets.take(at)
        counts = self._offsets.take(at + 1) - begins
        require_within(counts - max(shifts.values()), examples, starts, lengths)
        first = self._tokens_at[part] + begins + starts
        # What the next map does not follow, nobody may read.
        ends = self._ends[part]
        found = gathered(self._tokens, first, lengths, reach, shifts, ends)
        if self._to_weights is not None:
            # Four bytes each, as tokens are, so they are moved as if they were tokens.
            first = first + self._to_weights[part] + max(shifts.values())
            moved = gathered(self._tokens, first, lengths, reach, {"loss_weights": 0}, ends)
            found["loss_weights"] = moved["loss_weights"].view(np.float32)
        return found


class RangedPieces:
    """Pieces from parts that cannot be mapped (object storage): ranges of bytes, in parallel.

    The offsets of a part (8 bytes per example) are fetched when it is first touched, and kept.
    """

    def __init__(self, directory: epath.Path, parts: Sequence[Part]):
        self._directory, self._parts = directory, parts
        self._first = _first_examples(parts)
        self._offsets: dict[int, np.ndarray] = {}
        self._threads = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="corpus-ranges")
        self._lock = threading.Lock()

    def read(
        self, examples, starts, lengths, reach, shifts: Mapping[str, int]
    ) -> dict[str, np.ndarray]:
        """See `Corpus.read`."""
        lookahead = max(shifts.values())
        part = np.searchsorted(self._first, examples, side="right") - 1
        begins, counts = self._spans(part, examples)
        require_within(counts - lookahead, examples, starts, lengths)
        weighted = self._parts[0].weights_at is not None
        if not len(examples):
            found = {field: np.zeros(0, np.int32) for field in shifts}
            return found | ({"loss_weights": np.zeros(0, np.float32)} if weighted else {})
        at = begins + starts
        places = np.array([each.tokens_at for each in self._parts], np.int64)
        tokens, first = self._fetched(part, places[part] + 4 * at, lengths + lookahead)
        found = gathered(tokens, first, lengths, reach, shifts)
        if weighted:
            places = np.array([each.weights_at for each in self._parts], np.int64)
            weights, first = self._fetched(part, places[part] + 4 * (at + lookahead), lengths)
            moved = gathered(weights, first, lengths, reach, {"loss_weights": 0})
            found["loss_weights"] = moved["loss_weights"].view(np.float32)
        return found

    def _fetched(
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

    def _spans(self, part: np.ndarray, examples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        begins, counts = np.empty(len(examples), np.int64), np.empty(len(examples), np.int64)
        touched = np.unique(part)
        for number, offsets in zip(touched, self._threads.map(self._load, touched), strict=True):
            here = part == number
            at = examples[here] - self._first[number]
            begins[here], counts[here] = offsets[at], offsets[at + 1] - offsets[at]
        return begins, counts

    def _load(self, number: int) -> np.ndarray:
        if (known := self._offsets.get(number)) is None:
            part = self._parts[number]
            size = 8 * (part.examples + 1)
            raw = self._bytes(part, part.offsets_at, part.offsets_at + size)
            with self._lock:
                known = self._offsets.setdefault(number, np.frombuffer(raw, np.int64))
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


def _first_examples(parts: Sequence[Part]) -> np.ndarray:
    """The number of the first example of each part: int64, [parts]."""
    examples = np.array([part.examples for part in parts], np.int64)
    return np.cumsum(examples) - examples
