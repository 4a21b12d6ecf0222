"""Ragged arrays: tokenised examples on their way to disk, divided where parts end."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

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
        """SHA-256 of the counts, the tokens and the weights.

        Raises:
            ValueError: a count is not from 0 and below 2**32.
        """
        low, high = self.counts.min(initial=0), self.counts.max(initial=0)
        if low < 0 or high >> 32:
            raise ValueError(
                f"an example has {low if low < 0 else high:,} tokens; a count is from 0 and below "
                "2**32"
            )
        sha = hashlib.sha256(np.ascontiguousarray(self.counts, "<u4").data)
        sha.update(np.ascontiguousarray(self.flat, "<i4").data)
        if self.weights is not None:
            sha.update(np.ascontiguousarray(self.weights, "<f4").data)
        return sha.hexdigest()

    def split(self, examples: int) -> tuple["Ragged", "Ragged"]:
        """The first `examples` and the rest, as views."""
        at = int(self.counts[:examples].sum())
        return self._slice(slice(examples), slice(at)), self._slice(
            slice(examples, None), slice(at, None)
        )

    def _slice(self, examples: slice, tokens: slice) -> "Ragged":
        flat = self.flat[tokens]
        weights = None if self.weights is None else self.weights[tokens]
        if not len(flat):  # empty views would keep all tokens in memory
            flat, weights = flat.copy(), None if weights is None else weights.copy()
        texts = None if self.text_bytes is None else self.text_bytes[examples]
        return Ragged(flat, self.counts[examples], texts, weights)

    @classmethod
    def concatenate(cls, chunks: Sequence["Ragged"]) -> "Ragged":
        """All examples of several; all of these have `text_bytes`, or none, and so `weights`."""
        if len(chunks) == 1:
            return chunks[0]
        texts = [chunk.text_bytes for chunk in chunks if chunk.text_bytes is not None]
        weights = [chunk.weights for chunk in chunks if chunk.weights is not None]
        return cls(
            np.concatenate([chunk.flat for chunk in chunks]),
            np.concatenate([chunk.counts for chunk in chunks]),
            np.concatenate(texts) if texts else None,
            np.concatenate(weights) if weights else None,
        )


def assemble_parts(chunks: Iterable[Ragged]) -> Iterator[Ragged]:
    """The same examples, divided anew: one `Ragged` for each part."""
    held: list[Ragged] = []
    examples = tokens = 0
    for chunk in chunks:
        while len(chunk.counts):
            ends = np.cumsum(chunk.counts)
            full = int(np.searchsorted(ends, TOKENS_PER_PART - tokens)) + 1
            take = min(full, EXAMPLES_PER_PART - examples)
            closes = take <= len(ends)
            head, chunk = chunk.split(min(take, len(ends)))
            held.append(head)
            examples, tokens = examples + len(head.counts), tokens + len(head.flat)
            del head
            if closes:
                part = [Ragged.concatenate(held)]
                held, examples, tokens = [], 0, 0
                yield part.pop()  # this generator keeps nothing of it
    if held:
        yield Ragged.concatenate(held)


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
        raise ValueError(
            f"example {number} has no weights; give weights for every example, or none at all"
        )
    with np.errstate(over="ignore"):  # infinity is refused below
        array = _as_array(weights, f"the weights of example {number}", np.float32)
    if array.shape != (tokens,):
        raise ValueError(
            f"the weights of example {number} have shape {array.shape}; they are one number for "
            f"each of its {tokens} tokens"
        )
    if not (np.isfinite(array).all() and (array >= 0).all()):
        raise ValueError(
            f"the weights of example {number} hold {array[~(array >= 0) | ~np.isfinite(array)][0]};"
            " a weight is a finite number from 0 up"
        )
    return array


def _validate(example: Any, number: int, vocab_size: int | None) -> np.ndarray:
    array = _as_array(example, f"example {number}")
    if array.size == 0 and array.ndim == 1:
        return array.astype(np.int32)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"example {number} has shape {array.shape} and dtype {array.dtype}; an example is a "
            "1-D array of integer token ids"
        )
    low, high = int(array.min()), int(array.max())
    limit = 1 << 31 if vocab_size is None else vocab_size
    if low < 0 or high >= limit:
        allowed = "0 to 2**31 - 1" if vocab_size is None else f"0 to {limit - 1} (vocab_size)"
        raise ValueError(
            f"example {number} holds the token id {low if low < 0 else high}; ids are {allowed}"
        )
    return array


def _as_array(given: Any, what: str, dtype: Any = None) -> np.ndarray:
    try:
        return np.asarray(given, dtype)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(
            f"{what} cannot be an array: {error}; it is a 1-D array or list of numbers"
        ) from error
