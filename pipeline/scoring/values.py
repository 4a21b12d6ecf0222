"""Values: a step's results, and the part of them that belongs to each segment of a batch."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.corpus.interface import AnyCorpus
from pipeline.errors import InvalidValue, counted, require_one_of
from pipeline.planning.bucket import Bucket
from pipeline.planning.layout import count_before, ranges
from pipeline.planning.plan import Plan
from pipeline.planning.planned import PlannedBatch

# Kinds of records with one for each segment.
SINGLE = ("segment", "row")

CONTINUATION = "continuation"

# Ways to make one record of those of an example.
REDUCE = ("sum", "mean")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Value:
    """One of the values that a step returns."""

    per: str  # the kind of its records: "position" or a side, one of `SINGLE`, or `CONTINUATION`
    shape: tuple[int, ...]  # of a record
    dtype: np.dtype  # of the table; float32 for floating point of at most 32 bits
    reduce: str | None  # "sum" or "mean" over the records of an example; None keeps them
    continuations: np.ndarray | None  # of each example, int64 [examples], if each has a record
    side: int  # the number of the side of the positions; of other records, of that with loss

    def __str__(self) -> str:
        return f"{self.reduce or 'every'} {self.dtype}{[*self.shape] or ''} per {self.per}"

    @property
    def ragged(self) -> bool:
        """Whether an example has a list of records, not one."""
        return self.reduce is None and self.per not in SINGLE

    def count(self, segments: np.ndarray) -> np.ndarray:
        """The number of records of each segment, if not `SINGLE`: int64 [segments]."""
        if self.continuations is not None:
            return self.continuations[segments[:, 1]]
        return segments[:, 3 + self.side]

    @property
    def sum_dtype(self) -> np.dtype:
        """The type of sums of records; `dtype` if `reduce` is None."""
        if self.reduce is None:
            return self.dtype
        return np.dtype(np.float64 if np.issubdtype(self.dtype, np.floating) else np.int64)

    def cut(self, array: np.ndarray, planned: PlannedBatch) -> np.ndarray:
        """The records of each segment of a batch, or their sum over each segment.

        `array`, of the whole batch, is `[rows, length, *shape]`, `[rows, segments, *shape]`,
        `[rows, continuations, *shape]` or `[rows, *shape]`. The result is `[records, *shape]` for a
        ragged value, otherwise `[segments, *shape]`.
        """
        segments, row = planned.segments, planned.segments[:, 0]
        if self.per in SINGLE:
            records = array[row] if self.per == "row" else array[row, planned.numbers]
            records, size = records.astype(self.sum_dtype), segments[:, 3 + self.side]
            return records * _outer(size, records) if self.reduce == "mean" else records
        size = self.count(segments)
        before = np.cumsum(size) - size
        if self.per == CONTINUATION:
            columns = count_before(row, size)
        else:
            columns = planned.columns.reshape(len(row), segments.shape[1] - 3)[:, self.side]
        begin = row * array.shape[1] + columns
        records = array.reshape(-1, *self.shape)[ranges(begin, size)].astype(self.sum_dtype)
        if self.reduce is None:
            return records
        sums = np.zeros((len(size), *self.shape), self.sum_dtype)
        if len(records):
            sums[size > 0] = np.add.reduceat(records, before[size > 0])
        return sums


class Records:
    """The records of one value for all examples, collected from those of segments.

    `positions`, int64 [examples, sides], counts the positions of each example in the batches; an
    example without any has no records. `make` makes an array of zeros from a shape and a dtype.
    """

    def __init__(self, value: Value, positions: np.ndarray, make: Callable = np.zeros):
        self.value = value
        # The number of records of each example, or the divisor of its mean.
        if value.continuations is not None:
            self.counts = value.continuations * positions.any(axis=1)
        else:
            self.counts = positions[:, value.side]
        self._begins = np.cumsum(self.counts) - self.counts
        count = int(self.counts.sum()) if value.ragged else len(positions)
        self._array = make((count, *value.shape), value.sum_dtype)

    def add(self, segments: np.ndarray, records: np.ndarray) -> None:
        """Takes what `cut` returned for some segments of a plan."""
        example, start = segments[:, 1], segments[:, 2]
        if self.value.ragged:  # in a split example, a segment has positions from `start` on
            places = ranges(self._begins[example] + start, self.value.count(segments))
            self._array[places] = records
        elif self.value.reduce is None:
            self._array[example] = records
        else:
            np.add.at(self._array, example, records)

    def read(self, first: int, last: int) -> np.ndarray:
        """The records of examples `first` to `last - 1`: all, or one for each example."""
        counts, dtype = self.counts[first:last], self.value.dtype
        if self.value.ragged:
            begin = int(self._begins[first])
            return self._array[begin : begin + int(counts.sum())]
        records = self._array[first:last]
        if self.value.reduce == "mean":
            records = records / np.maximum(_outer(counts, records), 1)
        return records.astype(dtype) if np.issubdtype(dtype, np.floating) else records


def _outer(numbers: np.ndarray, records: np.ndarray) -> np.ndarray:
    """`numbers` `[n]`, reshaped to multiply records `[n, *shape]`."""
    return numbers.reshape(-1, *[1] * (records.ndim - 1))


def find_values(
    outputs: Mapping[Bucket, Any],
    per: str | Mapping[str, str],
    reduce: str | None,
    plan: Plan,
    corpus: AnyCorpus,
) -> dict[str, Value]:
    """The values of a step by name, from the shapes of its `outputs` for each bucket.

    `per` is the kind of all records, or a dict of kinds by name.
    """
    if reduce is not None:
        require_one_of("reduce", reduce, REDUCE)
    for values in outputs.values():
        if not (isinstance(values, dict) and values) or not all(
            isinstance(name, str) and hasattr(value, "dtype") for name, value in values.items()
        ):
            kinds = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", values)
            raise InvalidValue(
                f"the step returns {kinds!r:.200}; it must return one flat dict with a name for "
                'each array, such as {"nll": losses}'
            )
    found = {}
    for name, kind in kinds_of(next(iter(outputs.values())), per).items():
        continuations = continuations_of(name, kind, corpus.trees)
        most = plan.most_segments() if continuations is None else plan.most_continuations()
        arrays = [(bucket, values[name], most[bucket]) for bucket, values in outputs.items()]
        found[name] = make_value(name, kind, arrays, reduce, corpus)
        single = kind in SINGLE and reduce is None
        long = single and plan.max_position >= max(plan.buckets[-1].lengths)
        if long or (single and plan.cuts):
            remedy = "a larger max_length, or overflow='truncate'" if long else "or another packing"
            raise InvalidValue(
                f"{name} has one record a {kind}, and some examples are split into several "
                f"segments; give reduce='mean' (weighted by positions) or 'sum', {remedy}"
            )
    return found


def kinds_of(names: Iterable[str], per: str | Mapping[str, str]) -> dict[str, str]:
    """The kind of the records of each value that a step returns, by name; `per` as for `score`."""
    kinds = dict(per) if isinstance(per, Mapping) else dict.fromkeys(names, per)
    if kinds.keys() != {*names}:
        raise InvalidValue(
            f"per has {', '.join(kinds)}, and the step returns {', '.join(names)}; give per= for "
            "each of these"
        )
    return {name: kinds[name] for name in names}


def continuations_of(name: str, per: str, trees: np.ndarray | None) -> np.ndarray | None:
    """The number of continuations of each example, if each has a record; else None."""
    if per != CONTINUATION:
        return None
    if trees is None:
        raise InvalidValue(
            f"per of {name} is {per!r}, and the corpus has no groups; give per='segment'"
        )
    return trees[:, 1]


def shape_of_records(name: str, array: Any, per: str, bucket: Bucket, most: int) -> tuple[int, ...]:
    """The shape of a record in an array of a batch, after checking its other axes.

    `most` is the largest number of segments, or of continuations, in a row.
    """
    positions = positions_of(bucket)
    require_one_of(f"per of {name}", per, (*positions, "segment", CONTINUATION, "row"))
    side = positions.index(per) if per in positions else None
    if per == "row" and most > 1:
        raise InvalidValue(
            f"{name} has one record a row, and rows hold up to {most} examples; give "
            "max_segments=1 or packing='none', or return a record for each segment"
        )
    what = CONTINUATION if per == CONTINUATION else "segment" if side is None else "position"
    needed = most if side is None else bucket.lengths[side]
    room = 1 if per == "row" else [*array.shape, 0, 0][1]
    if array.shape[:1] != (bucket.rows,) or room < needed or (side is not None and room > needed):
        raise InvalidValue(
            f"{name} has shape {array.shape}, and per={per!r} needs {counted(needed, what)} in "
            f"each row of bucket {bucket}; return that, or give the right per=, or limit the "
            "segments of a row with max_segments="
        )
    return array.shape[1 if per == "row" else 2 :]


def positions_of(bucket: Bucket) -> tuple[str, ...]:
    """The kinds of records with one for each position, in the order of the sides."""
    return bucket.names if len(bucket.lengths) > 1 else ("position",)


def make_value(
    name: str,
    per: str,
    arrays: Sequence[tuple[Bucket, Any, int]],
    reduce: str | None,
    corpus: AnyCorpus,
) -> Value:
    """A value from some of its arrays, or from their shapes and dtypes.

    Each has a bucket, and the largest number of segments, or of continuations, in a row.
    """
    shapes = {shape_of_records(name, array, per, bucket, most) for bucket, array, most in arrays}
    if len(shapes) > 1 or 0 in next(iter(shapes)):
        raise InvalidValue(
            f"{name} has records of shapes {shapes}; give all buckets the same one, without 0"
        )
    bucket, first, _ = arrays[0]
    dtype = first.dtype
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 4:
        dtype = np.dtype(np.float32)
    if getattr(dtype, "kind", "V") not in "biuf":  # a key of JAX has none
        raise InvalidValue(
            f"{name} is {dtype}; records are booleans or real numbers of 8 bits and more, so "
            "return such, and the parts of a complex number as values of their own"
        )
    positions = positions_of(bucket)
    return Value(
        per=per,
        shape=shapes.pop(),
        dtype=dtype,
        reduce=reduce,
        continuations=continuations_of(name, per, corpus.trees),
        side=_column_of(per, positions, corpus),
    )


def _column_of(per: str, positions: Sequence[str], corpus: AnyCorpus) -> int:
    """The column of lengths that counts the positions of an example: that of `per`, or the loss."""
    if per in positions:
        return positions.index(per)
    return 0 if corpus.loss is None else corpus.side_names.index(corpus.loss)
