"""The stock: the lengths of a corpus as few sizes, which any set of buckets packs in milliseconds.

Sets are packed by `cascade.pack`, and batches counted as a plan counts them: so `overflow`,
`align`, `max_segments` and the last batch, which may lack rows, count by themselves.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from pipeline.planning.bucket import Bucket
from pipeline.planning.cascade import Packing, pack
from pipeline.planning.lengths import histogram
from pipeline.planning.pieces import Overflow, Pieces
from pipeline.planning.tails import count_batches

# More than SIZES different lengths become CELLS sizes with about equal numbers of positions.
SIZES, CELLS = 1_000, 600

# Of vectors of lengths, about this many are packed, evenly spaced over the corpus.
SAMPLE = 2_000


@dataclasses.dataclass(frozen=True)
class Stock:
    """Sizes of pieces, and the number of pieces of each size.

    Attributes:
        sizes: int64 [keys, sides], in units of `align` columns, as `Pieces.table`.
        counts: int64 [keys], the pieces of each size.
        longest: for each side, the least length of the last bucket of a set.
        scale: the number of examples, divided by the number of those that are packed.
        align, packing, max_segments: as for `Plan`; "optimal" is packed by best fit.
    """

    sizes: np.ndarray
    counts: np.ndarray
    longest: tuple[int, ...]
    scale: float
    align: int
    packing: Packing
    max_segments: int | None
    _batches: dict[tuple[Bucket, ...], tuple[float, ...]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        lengths: np.ndarray,
        *,
        limit: Sequence[int] | None,
        multiple: int,
        overflow: Overflow | None = None,
        align: int = 1,
        packing: Packing = "best_fit",
        max_segments: int | None = None,
    ) -> "Stock | None":
        """The stock of lengths [n] or [n, sides]; None if no example remains.

        `limit` has the greatest length of each side, to which `overflow` applies once it is rounded
        up to a multiple of `multiple`. By default, overlong examples are split; vectors truncated.
        """
        scale, vectors = 1.0, lengths.ndim > 1
        if vectors:
            sizes = lengths.astype(np.int64)
            counts = np.ones(len(sizes), np.int64)
        else:
            sizes, counts = histogram(lengths)
            sizes, counts = sizes[sizes > 0, None], counts[sizes > 0]
        sizes, counts = sizes[sizes.any(axis=1)], counts[sizes.any(axis=1)]
        if limit is not None and len(sizes):
            room = round_up(np.array(limit, np.int64), multiple)
            sizes, counts = _cut(sizes, counts, room, overflow)
        if not len(sizes):
            return None
        longest = tuple(round_up(np.maximum(sizes.max(axis=0), 1), multiple).tolist())
        if vectors:
            sample = sizes[:: max(len(sizes) // SAMPLE, 1)]
            scale = len(sizes) / len(sample)
            pieces = Pieces(sample, longest, "truncate", align=align)
            table, packed = pieces.table, pieces.count()
        else:
            units, counts = _merge(round_up(sizes[:, 0], align) // align, counts)
            packed = np.bincount(units, counts).astype(np.int64)
            table = np.arange(len(packed))[:, None]
        return cls(table, packed, longest, scale, align, packing, max_segments)

    @functools.cached_property
    def most_segments(self) -> int | None:
        """The most segments in a row."""
        return 1 if self.packing == "none" else self.max_segments

    @functools.cached_property
    def positions(self) -> np.ndarray:
        """The positions of all examples on each side, with those that `align` adds."""
        return (self.counts @ self.sizes) * self.align * self.scale

    @functools.cached_property
    def examples(self) -> tuple[np.ndarray, np.ndarray]:
        """The sizes with pieces, in positions: int64 [n, sides]; and their counts."""
        there = np.flatnonzero(self.counts)
        return self.sizes[there] * self.align, self.counts[there] * self.scale

    def count_batches(self, buckets: tuple[Bucket, ...]) -> tuple[float, ...]:
        """The batches of each of some buckets in an epoch.

        Those of a sample are scaled, and not whole: which rows the last batch lacks, it cannot say.
        """
        if (known := self._batches.get(buckets)) is not None:
            return known
        several = self.scale > 1  # in a sample, more of the batches would lack rows
        packed = pack(
            self.counts,
            [Bucket(1 if several else each.rows, self._in_units(each.lengths)) for each in buckets],
            sizes=self.sizes,
            max_segments=self.most_segments,
            fill=self.packing == "fill",
        )
        rows = [packed.rows(index) for index in range(len(buckets))]
        found: tuple[float, ...] = tuple(
            each * self.scale / bucket.rows if several else count_batches(each, (bucket,))[0]
            for each, bucket in zip(rows, buckets, strict=True)
        )
        self._batches[buckets] = found
        return found

    def _in_units(self, lengths: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(length // self.align for length in lengths)


def round_up(value: np.ndarray, multiple: int) -> np.ndarray:
    """The least multiples of `multiple` that are at least `value`."""
    return -(-value // multiple) * multiple


def _cut(
    sizes: np.ndarray, counts: np.ndarray, room: np.ndarray, overflow: Overflow | None
) -> tuple[np.ndarray, np.ndarray]:
    """Sizes [n, sides] and their counts, after `overflow` of those beyond `room`.

    >>> sizes, counts = np.array([[1], [5]]), np.array([1, 2])
    >>> [each.tolist() for each in _cut(sizes, counts, np.array([2]), "split")]  # 5 = 2 + 2 + 1
    [[[1], [1], [2]], [1, 2, 4]]
    """
    fits = (sizes <= room).all(axis=1)
    if overflow == "drop":
        return sizes[fits], counts[fits]
    if sizes.shape[1] > 1 or overflow not in ("split", None):
        return np.minimum(sizes, room), counts
    times, rest = np.divmod(sizes[~fits, 0], room[0])
    of_rest = counts[~fits] * (rest > 0)
    whole = counts[~fits] @ times
    sizes = np.concatenate([sizes[fits], rest[:, None], room[None]])
    counts = np.concatenate([counts[fits], of_rest, [whole]])
    return sizes[counts > 0], counts[counts > 0]


def _merge(sizes: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sizes [n] and their counts; many sizes become the mean sizes of cells."""
    if len(np.unique(sizes)) <= SIZES:
        return sizes, counts
    order = np.argsort(sizes)
    sizes, counts = sizes[order], counts[order]
    positions = np.cumsum(sizes * counts)
    cell = (positions - 1) * CELLS // positions[-1]
    number = np.bincount(cell, counts)
    there = number > 0
    mean = np.bincount(cell, sizes * counts)[there] / number[there]
    return np.rint(mean).astype(np.int64), number[there].astype(np.int64)
