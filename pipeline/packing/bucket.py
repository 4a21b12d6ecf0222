"""A bucket: one static batch shape that XLA compiles once."""

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """A static batch shape of `rows × length` positions. `rows` is global, over all hosts.

    >>> Bucket(rows=64, length=512).positions
    32768

    A bucket of pairs has two lengths, of the inputs' rows and of the targets':

    >>> Bucket(rows=64, length=(512, 128)).positions
    40960

    Raises:
        ValueError: `rows` or a length is not a whole number of at least 1.
    """

    rows: int
    length: Any  # int; of pairs tuple[int, int]

    def __post_init__(self):
        object.__setattr__(self, "rows", _whole("rows", self.rows))
        if isinstance(self.length, tuple | list) and len(self.length) == 2:
            pair = tuple(_whole("length", each) for each in self.length)
            object.__setattr__(self, "length", pair)
        else:
            object.__setattr__(self, "length", _whole("length", self.length))

    @property
    def shape(self) -> tuple[int, Any]:
        """`(rows, length)`, the shape of every field of a batch; of pairs, with two lengths."""
        return self.rows, self.length

    @property
    def as_json(self) -> list[Any]:
        """`shape` as lists, which JSON gives back as they were.

        >>> Bucket(rows=64, length=(512, 128)).as_json
        [64, [512, 128]]
        """
        return [self.rows, list(self.length) if isinstance(self.length, tuple) else self.length]

    @property
    def lengths(self) -> tuple[int, ...]:
        """The length; of pairs, those of the inputs and of the targets."""
        return self.length if isinstance(self.length, tuple) else (self.length,)

    @property
    def sides(self) -> tuple["Bucket", ...]:
        """The bucket itself; of pairs, one for the inputs and one for the targets.

        >>> Bucket(rows=64, length=(512, 128)).sides
        (Bucket(rows=64, length=512), Bucket(rows=64, length=128))
        """
        return tuple(Bucket(self.rows, length) for length in self.lengths)

    @property
    def positions(self) -> int:
        """Positions in one batch, real and padding, of both sides."""
        return self.rows * sum(self.lengths)

    def __str__(self) -> str:
        return f"{self.rows}x{'/'.join(map(str, self.lengths))}"


def _whole(name: str, seen: Any) -> int:
    try:
        value = operator.index(seen)
    except TypeError:
        value = 0
    if value < 1 or isinstance(seen, bool):
        raise ValueError(
            f"Bucket.{name} is {seen!r}; it must be a whole number of at least 1, as in "
            "Bucket(rows=64, length=512), or for pairs Bucket(rows=64, length=(512, 128))"
        )
    return value


def as_buckets(buckets: Iterable[Bucket]) -> tuple[Bucket, ...]:
    """`buckets` as a tuple, checked to be of one kind and to ascend by length.

    Raises:
        ValueError: there are none, one is no `Bucket`, some are of pairs and others not, or the
            lengths do not strictly ascend; of pairs by their sum, the last holding all others.
    """
    buckets = tuple(buckets) if not isinstance(buckets, Bucket) else (buckets,)
    if not buckets:
        raise ValueError("buckets is empty; give at least one, or let fit_buckets choose them")
    for bucket in buckets:
        if not isinstance(bucket, Bucket):
            raise ValueError(
                f"buckets holds {bucket!r}; every entry must be a pipeline.Bucket(rows=…, length=…)"
            )
    lengths = [bucket.length for bucket in buckets]
    if len({len(bucket.lengths) for bucket in buckets}) > 1:
        raise ValueError(
            f"bucket lengths are {lengths}; they must all be whole numbers, or for pairs all be "
            "(inputs, targets)"
        )
    if isinstance(lengths[0], tuple):
        _check_pairs(lengths)
    elif any(later <= earlier for earlier, later in itertools.pairwise(lengths)):
        raise ValueError(
            f"bucket lengths are {lengths}; they must ascend and differ, so sort the buckets by "
            "length and keep one for each"
        )
    return buckets


def _check_pairs(lengths: Sequence[tuple[int, int]]) -> None:
    order = [(sum(each), *each) for each in lengths]
    longest = tuple(map(max, zip(*lengths, strict=True)))
    if lengths[-1] != longest or any(b <= a for a, b in itertools.pairwise(order)):
        raise ValueError(
            f"bucket lengths are {list(lengths)}; of pairs they must differ and ascend by their "
            f"sum, and the last must hold all others, so end with one of {longest}"
        )
