"""Ragged arrays: tokenised examples on their way to disk, divided where parts end."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.errors import InvalidValue
from pipeline.text.features import (
    NOWHERE,
    OF_TOKENS,
    TOKEN_IDS,
    TOKENS,
    WEIGHTS,
    Column,
    Feature,
    as_array,
    concatenate,
    split_columns,
    zip_columns,
)

# A part ends with the example that takes it to either limit: 32 or 64 MiB of tokens or arrays, or 8
# MiB of offsets. Nothing else decides it, so any number of workers makes the same parts.
TOKENS_PER_PART = 1 << 24
EXAMPLES_PER_PART = 1 << 20

# Ids are below this.
IDS = 1 << 31

# The number of examples of arrays that are converted at once; and of checked ones that are joined,
# since small arrays take more memory than their content. Neither number changes a result.
CHECKED, JOINED = 1 << 12, 1 << 8


@dataclass(frozen=True)
class Ragged:
    """Consecutive examples: the number of tokens of each, and the columns of all.

    Attributes:
        counts: the number of tokens of each example.
        columns: by name, the tokens of the examples, their weights, if they have any, and their
            features. For arrays, and for features that are added to a corpus, there are no tokens.
        text_bytes: UTF-8 bytes of the text of each example, only of text that carries loss if
            tokens have weights; None if no text is known (a corpus made from arrays).
    """

    counts: np.ndarray
    columns: Mapping[str, Column]
    text_bytes: np.ndarray | None = None

    @classmethod
    def of(cls, flat: np.ndarray, counts: np.ndarray, **options: Any) -> "Ragged":
        """Examples of flat tokens, without weights or features."""
        return cls(counts, {TOKENS: Column(TOKEN_IDS, flat)}, **options)

    @property
    def features(self) -> dict[str, Feature]:
        """The features of all columns but the tokens, by name."""
        return {name: column.feature for name, column in self.columns.items() if name != TOKENS}

    @property
    def flat(self) -> np.ndarray:
        """The tokens of all examples, int32."""
        return self.columns[TOKENS].values

    @property
    def weights(self) -> np.ndarray | None:
        """The weight of each token, float32; None if all weigh the same."""
        column = self.columns.get(WEIGHTS)
        return None if column is None else column.values

    @property
    def size(self) -> int:
        """What it adds to a part: tokens, or arrays in units of four bytes."""
        return int(self.counts.sum()) * width_of(self._schema) // 4

    @property
    def _schema(self) -> dict[str, Feature]:
        """The features of all columns, by name."""
        return {name: column.feature for name, column in self.columns.items()}

    @property
    def digest(self) -> str:
        """SHA-256 of the counts, tokens, weights and features, as far as there are any."""
        low, high = self.counts.min(initial=0), self.counts.max(initial=0)
        if low < 0 or high >> 32:
            raise InvalidValue(
                f"an example has {low if low < 0 else high:,} tokens; a count is from 0 to "
                "2**32 - 1"
            )
        sha = hashlib.sha256()
        if find_lead(self._schema):
            sha.update(np.ascontiguousarray(self.counts, "<u4").data)
        for name in sorted(self.columns, key=lambda name: (name != TOKENS, name != WEIGHTS, name)):
            feature, values = self.columns[name]
            if name not in OF_TOKENS:
                sha.update(json.dumps([name, feature.as_json]).encode())
            stored = feature.as_stored(values)
            sha.update(np.ascontiguousarray(stored, stored.dtype.newbyteorder("<")).data)
        return sha.hexdigest()

    @classmethod
    def concatenate(cls, chunks: Sequence["Ragged"]) -> "Ragged":
        """The examples of chunks with the same columns; all or none of them have `text_bytes`."""
        first, *others = chunks
        if not others:
            return first
        texts = [chunk.text_bytes for chunk in chunks if chunk.text_bytes is not None]
        columns = {
            name: Column(feature, np.concatenate([chunk.columns[name].values for chunk in chunks]))
            for name, (feature, _) in first.columns.items()
        }
        counts = np.concatenate([chunk.counts for chunk in chunks])
        return cls(counts, columns, np.concatenate(texts) if texts else None)


def width_of(columns: Mapping[str, Feature]) -> int:
    """The bytes of a position that count for the size of a part, at least 4; 4 of tokens."""
    if TOKENS in columns:
        return 4
    moving = [feature for feature in columns.values() if not feature.per_example]
    return max(sum(feature.size * feature.dtype.itemsize for feature in moving), 4)


def find_lead(columns: Mapping[str, Feature]) -> str | None:
    """The column whose values tell where examples begin: the tokens, or the first of arrays."""
    moving = (name for name, feature in columns.items() if not feature.per_example)
    return TOKENS if TOKENS in columns else next(moving, None)


def divide_arrays(
    columns: Any,
    sides: Mapping[str, Mapping[str, Feature]],
    vocab_size: int | None,
    lookahead: int = 0,
) -> Iterator[tuple[str, Ragged]]:
    """Examples from arrays, side by side and part by part, each entry checked.

    Args:
        columns: as for `Corpus.from_arrays`.
        sides: the features of each side by name; if there are tokens, those of the first.
        vocab_size: if given, ids must be below it.
        lookahead: the number of tokens that an example has beyond its length.
    """
    columns, all_features = split_columns(columns, _join_sides(sides))
    weighted = {WEIGHTS: all_features[WEIGHTS]} if WEIGHTS in all_features else {}
    tokens = next(iter(sides)) if TOKENS in columns else None
    # An iterator may reuse the memory of an entry for the next one.
    lasting = all(isinstance(column, list | tuple | np.ndarray) for column in columns.values())
    at_once = CHECKED if lasting else 1
    buffers: dict[str, Buffer] = {}
    has_pointers = any(feature.to for feature in all_features.values())
    measured = len(sides) > 1 or tokens is None or has_pointers
    for number, example in zip_columns(columns):
        if not buffers:
            buffers = {
                side: Buffer({**features, **weighted}, vocab_size, at_once)
                if side == tokens
                else Buffer.of_arrays(features, example)
                for side, features in sides.items()
            }
        sizes = {}
        if measured and tokens is not None:
            count = as_array(example[TOKENS], f"example {number}").size
            sizes[tokens] = max(count - lookahead, 0)
        if measured:
            measure(example, sides, sizes, f" of example {number}")
        for side, buffer in buffers.items():
            names = (TOKENS, *buffer.features) if side == tokens else sides[side]
            entries = {name: example[name] for name in names}
            buffer.add(entries, number, None if side == tokens else sizes[side])
            if buffer.full:
                yield side, buffer.take()
    for side, buffer in buffers.items():
        if len(buffer):
            yield side, buffer.take()


def _join_sides(sides: Mapping[str, Mapping[str, Feature]]) -> dict[str, Feature]:
    return {name: feature for features in sides.values() for name, feature in features.items()}


def measure(
    example: dict[str, Any],
    sides: Mapping[str, Mapping[str, Feature]],
    sizes: dict[str, int],
    what: str = "",
) -> None:
    """Refuses arrays and pointers of an example that do not fit its sides; makes them arrays.

    Args:
        example: its entry for each feature of the sides; of those of tokens, pointers suffice.
        sides: the features of each side.
        sizes: the positions of each side of tokens; those of the others are added.
        what: names the example in errors, after the name of a feature.
    """
    of_tokens = {*sizes}
    for side, features in sides.items():
        for name, feature in features.items() if side not in of_tokens else ():
            if feature.per_example:
                continue
            example[name] = array = as_array(example[name], f"{name}{what}")
            size = len(array) if array.ndim else 0
            if sizes.setdefault(side, size) != size:
                lead = find_lead(features)
                raise InvalidValue(
                    f"{name}{what} has {size:,} values, and {lead} {sizes[side]:,}; "
                    f"both are of the side {side!r}"
                )
    for name, feature in _join_sides(sides).items():
        if feature.to is not None:
            positions, size = as_array(example[name], f"{name}{what}"), sizes[feature.to]
            if positions.size and (outside := (positions < NOWHERE) | (positions >= size)).any():
                raise InvalidValue(
                    f"{name}{what} points to position {positions[outside][0]} of {feature.to}, "
                    f"which has {size:,}; give positions from 0, or {NOWHERE} for none"
                )


class Buffer:
    """Examples that are checked as they arrive, and held until they are taken together.

    Args:
        features: by name, with `LOSS_WEIGHTS` as `WEIGHTS` if tokens have weights.
        vocab_size: if given, ids must be below it.
        at_once: the number of examples that are checked together; until then, their entries must
            not change.

    Attributes:
        features: as given; a feature without a dtype gets that of the first example.
    """

    def __init__(self, features: Mapping[str, Feature], vocab_size: int | None, at_once: int = 1):
        self.features, self._vocab_size, self._at_once = dict(features), vocab_size, at_once
        self._width = 4
        self._clear()

    @classmethod
    def of_arrays(cls, features: Mapping[str, Feature], example: Mapping[str, Any]) -> "Buffer":
        """The buffer of a side of arrays, the first of which tell their dtypes."""
        buffer = cls({name: f.infer(example[name], name) for name, f in features.items()}, None)
        buffer._width = width_of(buffer.features)
        return buffer

    def _clear(self) -> None:
        self._rows: list[tuple[int, int, Mapping[str, Any]]] = []
        self._checked: list[Ragged] = []
        self._joined: list[Ragged] = []
        self._examples = self._tokens = 0

    def __len__(self) -> int:
        return self._examples

    @property
    def full(self) -> bool:
        """Whether a part ends with the last example."""
        most = TOKENS_PER_PART * 4 // self._width
        return self._tokens >= most or self._examples >= EXAMPLES_PER_PART

    def add(self, example: Mapping[str, Any], number: int, tokens: int | None = None) -> None:
        """Adds an example, an entry for each name; errors are those of `Corpus.from_arrays`.

        `tokens` is the number of its tokens if these are stored already, or of its arrays.
        """
        if tokens is None:
            ids = as_array(example[TOKENS], f"example {number}")
            example, tokens = {**example, TOKENS: ids}, ids.size
        self._rows.append((number, tokens, example))
        if len(self._rows) == self._at_once:
            self._check()
        if len(self._checked) >= JOINED:
            self._joined.append(Ragged.concatenate(self._checked))
            self._checked = []
        self._examples += 1
        self._tokens += tokens

    def _check(self) -> None:
        rows, self._rows = self._rows, []
        try:
            self._checked.append(self._join(rows))
        except (ValueError, TypeError):  # also NumPy's, if no dtype holds all entries
            if len(rows) == 1:
                raise
            # One by one, the error names its example; entries of several dtypes are no error.
            self._checked += [self._join([row]) for row in rows]

    def _join(self, rows: Sequence[tuple[int, int, Mapping[str, Any]]]) -> Ragged:
        """Joins examples: the number, token count and entries of each. Errors name the first."""
        what = f"example {rows[0][0]}"
        _, counts, entries = zip(*rows, strict=True)
        columns = {}
        if TOKENS in entries[0]:
            tokens = [entry[TOKENS] for entry in entries]
            flat = validate_tokens(tokens, what, self._vocab_size)
            columns[TOKENS] = Column(TOKEN_IDS, flat.astype(np.int32, copy=False))
        for name, feature in self.features.items():
            values = [entry[name] for entry in entries]
            of_what = f"the weights of {what}" if name == WEIGHTS else f"{name} of {what}"
            feature = feature.infer(values[0], of_what)
            columns[name] = Column(feature, feature.convert(values, of_what, counts))
            if name == WEIGHTS:
                require_weights(columns[name].values, of_what)
        joined = Ragged(np.array(counts, np.int64), columns)
        self.features = joined.features
        return joined

    def take(self) -> Ragged:
        """All examples in the buffer, at least one; empties it."""
        if self._rows:
            self._check()
        checked = [*self._joined, *self._checked]
        self._clear()
        return Ragged.concatenate(checked)


def require_weights(array: np.ndarray, what: str) -> np.ndarray:
    """The weights; refuses those below 0 or not finite, which `what` names in errors."""
    if not (np.isfinite(array).all() and (array >= 0).all()):
        raise InvalidValue(
            f"{what} cannot hold {array[~(array >= 0) | ~np.isfinite(array)][0]}; a weight must be "
            "finite and at least 0"
        )
    return array


def validate_tokens(arrays: Sequence[np.ndarray], what: str, vocab_size: int | None) -> np.ndarray:
    """The token ids of examples, one after another; refuses others. `what` names them in errors."""
    for array in arrays:
        if array.ndim == 0 and isinstance(record := array.item(), Mapping):
            name = next((name for name in ("tokens", "input_ids", *record) if name in record), "")
            raise InvalidValue(
                f"{what} is a record with the fields {', '.join(map(str, record))}; give a dict of "
                f"columns, as in {{'tokens': [record[{name!r}] for record in …]}}; for records of "
                "text, use pipeline.prepare(sources.Records(…), …)"
            )
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise InvalidValue(
                f"{what} has shape {array.shape} and dtype {array.dtype}; an example must be a "
                "1-D array of integer token ids"
            )
    flat = concatenate(arrays)
    if not len(flat):
        return flat.astype(np.int32)
    low, high = int(flat.min()), int(flat.max())
    limit = min(vocab_size or IDS, IDS)
    if low < 0 or high >= limit:
        allowed = "0 to 2**31 - 1" if limit == IDS else f"0 to {limit - 1} (vocab_size)"
        raise InvalidValue(
            f"{what} holds the token id {low if low < 0 else high}; ids are {allowed}"
        )
    return flat
