"""A bucket: one static batch shape that XLA compiles once."""

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipeline.errors import InvalidValue, suggest_keywords

# The names of the sides of a pair; those of other examples are given.
PAIR = "inputs", "targets"


@suggest_keywords
@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """A static batch shape of `rows × length` positions.

    >>> Bucket(rows=64, length=512).positions
    32768

    If examples have several sides, a row has a length for each: for pairs `(inputs, targets)`, and
    for others by name. A plan packs a row until one of its sides is full.

    >>> Bucket(rows=64, length=(512, 128)).lengths
    (512, 128)
    >>> Bucket(16, {"inputs": 4096, "patches": 8192, "images": 16}).lengths
    (4096, 8192, 16)

    Attributes:
        rows: rows of the global batch, over all hosts.
        length: positions in a row: an integer; for pairs `(inputs, targets)`; for other sides a
            dict of lengths by name, of which the lengths remain here, in their order.
        names: the names of the sides; `("inputs",)` and `("inputs", "targets")` unless given.

    Raises:
        ValueError: `rows` or a length is not a whole number of at least 1.
    """

    rows: int
    length: Any  # int; with several sides tuple[int, ...]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", _require_size("rows", self.rows))
        length, names = self.length, tuple(self.names)
        if isinstance(length, Mapping):
            names, length = tuple(map(str, length)), tuple(length.values())
        several = length if isinstance(length, tuple | list) and length else (length,)
        names = names or PAIR[: len(several)]
        if len(names) != len(several):
            raise InvalidValue(
                f"Bucket.length is {length!r}; lengths of more than two sides have names, as in "
                'Bucket(rows=16, length={"inputs": 4096, "patches": 8192, "images": 16})'
            )
        several = tuple(_require_size("length", size) for size in several)
        object.__setattr__(self, "length", several[0] if len(several) == 1 else several)
        object.__setattr__(self, "names", names)

    @property
    def _spelled(self) -> Any:
        """The length as it is given: by name, unless the names are the usual ones."""
        usual = self.names == PAIR[: len(self.names)]
        return self.length if usual else dict(zip(self.names, self.lengths, strict=True))

    @property
    def shape(self) -> tuple[int, Any]:
        """`(rows, length)`: the shape of every field of a batch; with several lengths by side."""
        return self.rows, self.length

    @property
    def as_json(self) -> list[Any]:
        """`rows` and `length`, as lists and dicts, which JSON returns unchanged."""
        length = self._spelled
        return [self.rows, list(length) if isinstance(length, tuple) else length]

    @property
    def lengths(self) -> tuple[int, ...]:
        """The length of each side, of one side too."""
        return self.length if isinstance(self.length, tuple) else (self.length,)

    @property
    def sides(self) -> tuple["Bucket", ...]:
        """One bucket for each side."""
        return tuple(Bucket(self.rows, length) for length in self.lengths)

    @property
    def positions(self) -> int:
        """Positions in one batch of text or pairs, padding included; for pairs, on both sides."""
        return self.rows * sum(self.lengths)

    @property
    def sort_key(self) -> tuple[int, ...]:
        """The sort key of buckets: by length, then those with more rows first."""
        return (sum(self.lengths), *self.lengths, -self.rows)

    def __repr__(self) -> str:
        return f"Bucket(rows={self.rows}, length={self._spelled})"

    def __str__(self) -> str:
        return f"{self.rows}x{'/'.join(map(str, self.lengths))}"

    @classmethod
    def parse(cls, text: str, names: Sequence[str] = ()) -> "Bucket":
        """The bucket whose `str` is `text`, with the names of its sides.

        >>> Bucket.parse("64x512/128") == Bucket(rows=64, length=(512, 128))
        True
        """
        rows, _, several = text.partition("x")
        lengths = tuple(map(int, several.split("/")))
        return cls(int(rows), lengths[0] if len(lengths) == 1 else lengths, tuple(names))


class Fitted(tuple[Bucket, ...]):
    """Buckets that `fit_buckets` chose; a plan of them has the model that they were chosen for.

    Attributes:
        model: the options `attention` and `width` of the plan, unless it is given others.
    """

    model: Mapping[str, Any]

    @classmethod
    def of(cls, buckets: Iterable[Bucket], model: Mapping[str, Any]) -> "Fitted":
        """Some buckets for a model."""
        fitted = cls(buckets)
        fitted.model = model
        return fitted


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

    Buckets of several sides ascend by the sum of their lengths, and the last is the longest on all.
    """
    checked = as_shapes(buckets)
    keys = [bucket.sort_key[:-1] for bucket in checked]
    ascending = all(shorter < longer for shorter, longer in itertools.pairwise(keys))
    longest = tuple(map(max, zip(*(bucket.lengths for bucket in checked), strict=True)))
    if not ascending or checked[-1].lengths != longest:
        sides = (
            "; those of several sides ascend by their sum, and the last must hold all others, so "
            f"end with one of {longest}"
        ) * (len(longest) > 1)
        again = (
            "; only pipeline.pack takes several of one length, the smaller ones for its last rows"
        ) * (len({*keys}) < len(keys))
        raise InvalidValue(
            f"buckets are {', '.join(map(str, checked))}; they must ascend by length{sides}{again}"
        )
    return checked


def as_shapes(buckets: Iterable[Bucket]) -> tuple[Bucket, ...]:
    """`buckets` as a tuple of at least one, all with the same sides."""
    given: Any = buckets
    if not isinstance(given, Iterable) or getattr(given, "ndim", 1) == 0:
        given = [given]
    checked: tuple[Bucket, ...] = tuple(given)
    if not all(isinstance(bucket, Bucket) for bucket in checked):
        raise InvalidValue(
            f"buckets is {buckets!r}; it must be a list, and every entry must be a "
            "pipeline.Bucket(rows=…, length=…)"
        )
    if not checked:
        raise InvalidValue("buckets is empty; give at least one, or let fit_buckets choose them")
    if len({bucket.names for bucket in checked}) > 1:
        raise InvalidValue(
            f"buckets are {', '.join(map(repr, checked))}; they must all have the same sides"
        )
    return checked
