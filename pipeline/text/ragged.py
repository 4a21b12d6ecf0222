"""Ragged arrays: tokenised examples on their way to disk, divided where parts end."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.errors import InvalidValue

# A part ends with the example that takes it to either limit: 64 MiB of tokens, or 8 MiB of
# offsets. Nothing else decides it, so every number of workers makes the same parts.
TOKENS_PER_PART = 1 << 24
EXAMPLES_PER_PART = 1 << 20

# `chunk_arrays` makes chunks of about this many tokens.
CHUNK = 1 << 20


@dataclass(frozen=True)
class Ragged:
    """Consecutive examples: flat int32 tokens, the count of each, and UTF-8 bytes of their text.

    `text_bytes` is None where no text is known (a corpus made of arrays), and counts what is learnt
    alone where tokens have weights; `weights`, float32 and flat as the tokens are, is None where
    each token weighs the same.
    """

    flat: np.ndarray
    counts: np.ndarray
    text_bytes: np.ndarray | None
    weights: np.ndarray | None = None

    @property
    def digest(self) -> str:
        """SHA-256 of the counts, the tokens and the weights."""
        low, high = self.counts.min(initial=0), self.counts.max(initial=0)
        if low < 0 or high >> 32:
            raise InvalidValue(
                f"an example has {low if low < 0 else high:,} tokens; a count is from 0 and below "
                "2**32"
            )
        sha = hashlib.sha256(np.ascontiguousarray(self.counts, "<u4").data)
        sha.update(np.ascontiguousarray(self.flat, "<i4").data)
        if self.weights is not None:
            sha.update(np.ascontiguousarray(self.weights, "<f4").data)
        return sha.hexdigest()

    def slice(self, first: int, last: int) -> "Ragged":
        """The examples from `first` up to `last`, as views."""
        begin, end = (int(self.counts[:at].sum()) for at in (first, last))
        flat = self.flat[begin:end]
        weights = None if self.weights is None else self.weights[begin:end]
        if not len(flat):  # empty views would keep all tokens in memory
            flat, weights = flat.copy(), None if weights is None else weights.copy()
        texts = None if self.text_bytes is None else self.text_bytes[first:last]
        return Ragged(flat, self.counts[first:last], texts, weights)

    @classmethod
    def concatenate(cls, chunks: Sequence["Ragged"]) -> "Ragged":
        """All examples of several; all of these have `text_bytes`, or none, and so `weights`."""
        if len(chunks) == 1:
            return chunks[0]
        fields = zip(*(vars(chunk).values() for chunk in chunks), strict=True)
        whole: Any = (None if each[0] is None else np.concatenate(each) for each in fields)
        return cls(*whole)


def divide(counts: Iterable[np.ndarray]) -> Iterator[list[tuple[int, int, int]]]:
    """The pieces of each part: the number of a chunk, its first example, the one after its last.

    >>> list(divide([np.array([TOKENS_PER_PART, 7, 5])]))
    [[(0, 0, 1)], [(0, 1, 3)]]

    Args:
        counts: the tokens of each example, chunk by chunk.
    """
    pieces: list[tuple[int, int, int]] = []
    examples = tokens = 0
    for number, chunk in enumerate(counts):
        first, ends = 0, np.cumsum(chunk, dtype=np.int64)
        while first < len(chunk):
            before = int(ends[first - 1]) if first else 0
            full = int(np.searchsorted(ends, before + TOKENS_PER_PART - tokens)) + 1
            last = min(full, first + EXAMPLES_PER_PART - examples, len(chunk))
            pieces.append((number, first, last))
            examples, tokens = examples + last - first, tokens + int(ends[last - 1]) - before
            if tokens >= TOKENS_PER_PART or examples == EXAMPLES_PER_PART:
                yield pieces
                pieces, examples, tokens = [], 0, 0
            first = last
    if pieces:
        yield pieces


def assemble_parts(chunks: Iterable[Ragged]) -> Iterator[Ragged]:
    """The same examples, divided again: one `Ragged` for each part."""
    held: dict[int, Ragged] = {}

    def hold() -> Iterator[np.ndarray]:
        for number, chunk in enumerate(chunks):
            held[number] = chunk
            yield chunk.counts

    for pieces in divide(hold()):
        yield Ragged.concatenate([held[number].slice(*ends) for number, *ends in pieces])
        for number in [number for number in held if number < pieces[-1][0]]:
            del held[number]


def chunk_arrays(
    examples: Iterable[Any], vocab_size: int | None, weights: Iterable[Any] | None = None
) -> Iterator[Ragged]:
    """The examples in chunks, each example checked."""
    held: list[np.ndarray] = []
    weighed: list[np.ndarray] = []
    tokens, given = 0, None if weights is None else iter(weights)
    for number, example in enumerate(examples):
        held.append(_validate(example, number, vocab_size))
        if given is not None:
            weighed.append(_validate_weights(next(given, None), number, len(held[-1])))
        tokens += len(held[-1])
        if tokens >= CHUNK or len(held) >= CHUNK:
            yield _chunk(held, weighed)
            held, weighed, tokens = [], [], 0
    if held:
        yield _chunk(held, weighed)


def _chunk(arrays: list[np.ndarray], weights: list[np.ndarray]) -> Ragged:
    counts = np.fromiter(map(len, arrays), np.int64, len(arrays))
    flat = np.concatenate(arrays, dtype=np.int32, casting="unsafe")
    return Ragged(flat, counts, None, np.concatenate(weights) if weights else None)


def _validate_weights(weights: Any, number: int, tokens: int) -> np.ndarray:
    if weights is None:
        raise InvalidValue(
            f"example {number} has no weights; give weights for every example, or none at all"
        )
    with np.errstate(over="ignore"):  # infinity is refused below
        array = _as_array(weights, f"the weights of example {number}", np.float32)
    if array.shape != (tokens,):
        raise InvalidValue(
            f"the weights of example {number} have shape {array.shape}; give one number for "
            f"each of its {tokens} tokens"
        )
    if not (np.isfinite(array).all() and (array >= 0).all()):
        raise InvalidValue(
            f"the weights of example {number} hold {array[~(array >= 0) | ~np.isfinite(array)][0]};"
            " a weight is a finite number from 0 up"
        )
    return array


def _validate(example: Any, number: int, vocab_size: int | None) -> np.ndarray:
    array = _as_array(example, f"example {number}")
    if array.size == 0 and array.ndim == 1:
        return array.astype(np.int32)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise InvalidValue(
            f"example {number} has shape {array.shape} and dtype {array.dtype}; an example is a "
            "1-D array of integer token ids"
        )
    low, high = int(array.min()), int(array.max())
    limit = 1 << 31 if vocab_size is None else vocab_size
    if low < 0 or high >= limit:
        allowed = "0 to 2**31 - 1" if vocab_size is None else f"0 to {limit - 1} (vocab_size)"
        raise InvalidValue(
            f"example {number} holds the token id {low if low < 0 else high}; ids are {allowed}"
        )
    return array


def _as_array(given: Any, what: str, dtype: Any = None) -> np.ndarray:
    try:
        return np.asarray(given, dtype)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidValue(
            f"{what} cannot be an array: {error}; give a 1-D array or list of numbers"
        ) from error
