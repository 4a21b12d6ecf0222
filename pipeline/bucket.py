"""A bucket: one static batch shape that XLA compiles once."""

import dataclasses
import itertools
import operator
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """A static batch shape of `rows × length` positions. `rows` is global, over all hosts.

    >>> Bucket(rows=64, length=512).positions
    32768

    Raises:
        ValueError: `rows` or `length` is not a whole number of at least 1.
    """

    rows: int
    length: int

    def __post_init__(self):
        for name in ("rows", "length"):
            seen = getattr(self, name)
            try:
                value = operator.index(seen)
            except TypeError:
                value = 0
            if value < 1 or isinstance(seen, bool):
                raise ValueError(
                    f"Bucket.{name} is {seen!r}; it must be a whole number of at least 1, as in "
                    "Bucket(rows=64, length=512)"
                )
            object.__setattr__(self, name, value)

    @property
    def shape(self) -> tuple[int, int]:
        """`(rows, length)`, the shape of every field of a batch."""
        return self.rows, self.length

    @property
    def positions(self) -> int:
        """Positions in one batch, real and padding."""
        return self.rows * self.length

    def __str__(self) -> str:
        return f"{self.rows}x{self.length}"


def as_buckets(buckets: Iterable[Bucket]) -> tuple[Bucket, ...]:
    """`buckets` as a tuple, checked to ascend by length.

    Raises:
        ValueError: there are none, one is no `Bucket`, or the lengths do not strictly ascend.
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
    if any(later <= earlier for earlier, later in itertools.pairwise(lengths)):
        raise ValueError(
            f"bucket lengths are {lengths}; they must ascend and differ, so sort the buckets by "
            "length and keep one for each"
        )
    return buckets
