"""A bucket: one static batch shape that XLA compiles once."""

import dataclasses
import itertools
import operator
from collections.abc import Iterable
from typing import Any

from pipeline.errors import InvalidValue, suggest_keywords


@suggest_keywords
@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """A static batch shape of `rows × length` positions.

    >>> Bucket(rows=64, length=512).positions
    32768

    For pairs, a bucket has a length for the rows of inputs and one for the rows of targets:

    >>> Bucket(rows=64, length=(512, 128)).positions
    40960

    In a plan, a bucket with the same length as the bucket before it and fewer rows is a tail: only
    the last batches of an epoch use it, so that few of their rows are empty. With
    `Bucket(32, 4096)` and its tail `Bucket(8, 4096)`, 45 rows are a batch of 32 rows and two of 8.

    Attributes:
        rows: rows of the global batch, over all hosts.
        length: positions in a row, an integer; for pairs `(inputs, targets)`.

    Raises:
        ValueError: `rows` or a length is not a whole number of at least 1.
    """

    rows: int
    length: Any  # int; for pairs tuple[int, int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", _require_size("rows", self.rows))
        length: Any = self.length
        if isinstance(length, tuple | list) and len(length) == 1:
            length = length[0]
        if isinstance(length, tuple | list) and len(length) == 2:
            length = tuple(_require_size("length", each) for each in length)
        else:
            length = _require_size("length", length)
        object.__setattr__(self, "length", length)

    @property
    def shape(self) -> tuple[int, Any]:
        """`(rows, length)`: the shape of every field of a batch; for pairs with two lengths."""
        return self.rows, self.length

    @property
    def as_json(self) -> list[Any]:
        """`shape` as lists, which JSON returns unchanged."""
        return [self.rows, list(self.length) if isinstance(self.length, tuple) else self.length]

    @property
    def lengths(self) -> tuple[int, ...]:
        """The length as a tuple of one; for pairs, the lengths of inputs and of targets."""
        return self.length if isinstance(self.length, tuple) else (self.length,)

    @property
    def sides(self) -> tuple["Bucket", ...]:
        """The bucket itself; for pairs, one bucket for the inputs and one for the targets."""
        if len(self.lengths) == 1:
            return (self,)
        return tuple(Bucket(self.rows, length) for length in self.lengths)

    @property
    def positions(self) -> int:
        """Positions in one batch, padding included; for pairs, on both sides."""
        return self.rows * sum(self.lengths)

    @property
    def order(self) -> tuple[int, ...]:
        """The sort key of the buckets of a plan: by length, and among equal lengths tails last."""
        return (sum(self.lengths), *self.lengths, -self.rows)

    def __str__(self) -> str:
        return f"{self.rows}x{'/'.join(map(str, self.lengths))}"


def _require_size(name: str, value: Any) -> int:
    try:
        size = operator.index(value)
    except TypeError:
        size = 0
    if not 1 <= size < 1 << 31 or isinstance(value, bool):  # positions are int32
        raise InvalidValue(
            f"Bucket.{name} is {value!r}; it must be a whole number of at least 1, below 2**31, "
            "as in Bucket(rows=64, length=512), or for pairs Bucket(rows=64, length=(512, 128))"
        )
    return size


def as_buckets(buckets: Iterable[Bucket]) -> tuple[Bucket, ...]:
    """`buckets` as a tuple, after checking that they ascend by length.

    Buckets of pairs ascend by the sum of both lengths, and the last is the longest on both sides.
    Among buckets of equal length, those after the first are its tails; they descend by rows.
    """
    found = tuple(buckets) if isinstance(buckets, Iterable) else (buckets,)
    if not all(isinstance(each, Bucket) for each in found):
        raise InvalidValue(
            f"buckets is {buckets!r}; it must be a list, and every entry must be a "
            "pipeline.Bucket(rows=…, length=…)"
        )
    if not found:
        raise InvalidValue("buckets is empty; give at least one, or let fit_buckets choose them")
    lengths = [bucket.length for bucket in found]
    if len({len(bucket.lengths) for bucket in found}) > 1:
        raise InvalidValue(
            f"bucket lengths are {lengths}; they must all be whole numbers, or for pairs all be "
            "(inputs, targets)"
        )
    order = [bucket.order for bucket in found]
    ascending = all(earlier < later for earlier, later in itertools.pairwise(order))
    longest = tuple(map(max, zip(*(bucket.lengths for bucket in found), strict=True)))
    if not ascending or found[-1].lengths != longest:
        pairs = (
            "; those of pairs ascend by their sum, and the last must hold all others, so end with "
            f"one of {longest}"
        ) * (len(longest) > 1)
        shapes = ", ".join(map(str, found))
        raise InvalidValue(
            f"buckets are {shapes}; they must ascend by length, and those of equal length must "
            f"descend by rows (all but the first of these are tails){pairs}"
        )
    return found
