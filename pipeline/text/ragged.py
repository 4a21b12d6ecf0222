"""Ragged arrays: tokenised examples on their way to disk, divided where parts end."""

import collections
import hashlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.errors import InvalidValue
from pipeline.text.features import (
    LOSS_WEIGHTS,
    TOKENS,
    WEIGHTS,
    Column,
    Feature,
    as_array,
    digest_columns,
    split_columns,
    zip_columns,
)

# A part ends with the example that takes it to either limit: 64 MiB of tokens, or 8 MiB of
# offsets. Nothing else decides it, so every number of workers makes the same parts.
TOKENS_PER_PART = 1 << 24
EXAMPLES_PER_PART = 1 << 20


@dataclass(frozen=True)
class Ragged:
    """Consecutive examples: flat int32 tokens, the count of each, and what they carry beside.

    Attributes:
        flat: the tokens of all examples, int32.
        counts: the tokens of each example.
        text_bytes: UTF-8 bytes of the text of each, of what is learnt alone where tokens have
            weights; None where no text is known (a corpus made of arrays).
        columns: by name, the features of the examples; with "weights", if tokens have weights.
    """

    flat: np.ndarray
    counts: np.ndarray
    text_bytes: np.ndarray | None = None
    columns: Mapping[str, Column] = field(default_factory=dict)

    @property
    def weights(self) -> np.ndarray | None:
        """The weight of each token, float32; None where each weighs the same."""
        column = self.columns.get(WEIGHTS)
        return None if column is None else column.values

    @property
    def digest(self) -> str:
        """SHA-256 of the counts, the tokens, the weights and the features."""
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
        digest_columns(sha, self.columns)
        return sha.hexdigest()

    @property
    def features_digest(self) -> str:
        """SHA-256 of the features alone."""
        sha = hashlib.sha256()
        digest_columns(sha, self.columns)
        return sha.hexdigest()

    def slice(self, first: int, last: int) -> "Ragged":
        """The examples from `first` up to `last`, as views."""
        begin, end = (int(self.counts[:at].sum()) for at in (first, last))
        columns = {
            name: column.slice(first, last, begin, end) for name, column in self.columns.items()
        }
        texts = None if self.text_bytes is None else self.text_bytes[first:last]
        return Ragged(self.flat[begin:end], self.counts[first:last], texts, columns)

    @classmethod
    def concatenate(cls, chunks: Sequence["Ragged"]) -> "Ragged":
        """All examples of several; all of these have `text_bytes`, or none, and so `columns`."""
        first, *others = chunks
        if not others:
            return first
        texts = None
        if first.text_bytes is not None:
            every: list[Any] = [chunk.text_bytes for chunk in chunks]
            texts = np.concatenate(every)
        columns = {
            name: Column(feature, np.concatenate([chunk.columns[name].values for chunk in chunks]))
            for name, (feature, _) in first.columns.items()
        }
        flat = np.concatenate([chunk.flat for chunk in chunks])
        return cls(flat, np.concatenate([chunk.counts for chunk in chunks]), texts, columns)


def is_full(examples: int, tokens: int) -> bool:
    """Whether a part of so many examples and tokens ends."""
    return tokens >= TOKENS_PER_PART or examples >= EXAMPLES_PER_PART


def divide(counts: Iterable[np.ndarray]) -> Generator[list[tuple[int, int, int]]]:
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
            if is_full(examples, tokens):
                yield pieces
                pieces, examples, tokens = [], 0, 0
            first = last
    if pieces:
        yield pieces


def divide_arrays(
    columns: Any, features: Mapping[str, Feature] | None, vocab_size: int | None
) -> Iterator[Ragged]:
    """Examples of arrays, part by part, each entry checked; arguments as `Corpus.from_arrays`."""
    tokens, weights, given = split_columns(columns, features)
    columns = {TOKENS: tokens, **{name: column for name, (_, column) in given.items()}}
    known = {name: feature for name, (feature, _) in given.items()}
    if weights is not None:
        columns[WEIGHTS], known[WEIGHTS] = weights, LOSS_WEIGHTS
    buffer = Buffer(known, vocab_size)
    for number, example in zip_columns(columns):
        buffer.add(example, number)
        if buffer.full:
            yield buffer.take()
    if len(buffer):
        yield buffer.take()


class Buffer:
    """Examples that are checked and held one by one, until they are taken together.

    Attributes:
        features: what examples carry beside their tokens, by name, with `LOSS_WEIGHTS` where tokens
            have weights. Those without a dtype get that of the first example.
    """

    def __init__(self, features: Mapping[str, Feature], vocab_size: int | None):
        self.features, self._vocab_size = dict(features), vocab_size
        self._clear()

    def _clear(self) -> None:
        self._counts, self._tokens = list[int](), 0
        self._held = collections.defaultdict[str, list[np.ndarray]](list)

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def full(self) -> bool:
        """Whether a part ends with the last example."""
        return is_full(len(self), self._tokens)

    def add(self, example: Mapping[str, Any], number: int, tokens: int | None = None) -> None:
        """Holds an example, an entry for each name; refused as `Corpus.from_arrays` says.

        `tokens` is the number of its tokens where these are stored already.
        """
        arrays, known = dict[str, np.ndarray](), dict(self.features)
        if tokens is None:
            ids = validate_tokens(example[TOKENS], f"example {number}", self._vocab_size)
            arrays[TOKENS], tokens = ids.astype(np.int32), len(ids)
        for name, feature in self.features.items():
            what = f"{name} of example {number}"
            if name == WEIGHTS:
                array = _validate_weights(example[name], number, tokens)
            else:
                feature = known[name] = feature.infer(example[name], what)
                array = feature.convert(example[name], what, tokens)
            arrays[name] = np.array(array)  # who gave it may use its memory again
        self.features = known
        for name, array in arrays.items():
            self._held[name].append(array)
        self._counts.append(tokens)
        self._tokens += tokens

    def take(self) -> Ragged:
        """The examples that were held; then none are."""
        held, counts = self._held, np.array(self._counts, np.int64)
        flat = np.concatenate([np.zeros(0, np.int32), *held[TOKENS]])
        columns = {
            name: Column(feature, feature.join(held[name]))
            for name, feature in self.features.items()
        }
        self._clear()
        return Ragged(flat, counts, None, columns)


def _validate_weights(weights: Any, number: int, tokens: int) -> np.ndarray:
    what = f"the weights of example {number}"
    return require_weights(LOSS_WEIGHTS.convert(weights, what, tokens), what)


def require_weights(array: np.ndarray, what: str) -> np.ndarray:
    """Weights as they are; refuses those below 0 or not finite, which `what` names in errors."""
    if not (np.isfinite(array).all() and (array >= 0).all()):
        raise InvalidValue(
            f"{what} hold {array[~(array >= 0) | ~np.isfinite(array)][0]}; a weight is a finite "
            "number from 0 up"
        )
    return array


def validate_tokens(example: Any, what: str, vocab_size: int | None) -> np.ndarray:
    """Token ids as an array; refuses others, which `what` names in errors."""
    array = as_array(example, what)
    if array.size == 0 and array.ndim == 1:
        return array.astype(np.int32)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise InvalidValue(
            f"{what} has shape {array.shape} and dtype {array.dtype}; an example is a "
            "1-D array of integer token ids"
        )
    low, high = int(array.min()), int(array.max())
    limit = 1 << 31 if vocab_size is None else vocab_size
    if low < 0 or high >= limit:
        allowed = "0 to 2**31 - 1" if vocab_size is None else f"0 to {limit - 1} (vocab_size)"
        raise InvalidValue(
            f"{what} holds the token id {low if low < 0 else high}; ids are {allowed}"
        )
    return array
