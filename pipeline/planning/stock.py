"""The stock: the lengths of a corpus as few sizes, which any set of buckets packs in milliseconds.

Examples are cut by the plan's own rule, sets are packed by its own packer, and batches are counted
as a plan counts them: so `overflow`, `align`, `max_segments` and the last batch, which may lack
rows, count by themselves.
"""

import dataclasses
import functools

import numpy as np

from pipeline.planning.bucket import Bucket
from pipeline.planning.lengths import weigh
from pipeline.planning.options import Options

# More than SIZES different lengths become CELLS sizes with about equal numbers of positions.
SIZES, CELLS = 1_000, 600

# Of more different vectors of lengths, about this many examples are packed, evenly spaced over the
# corpus. The different ones are counted among SOME times as many.
SAMPLE, SOME = 2_000, 4


@dataclasses.dataclass(frozen=True)
class Stock:
    """Sizes of pieces, and the number of pieces of each size."""

    options: Options  # how examples are cut and packed
    sizes: np.ndarray  # int64 [keys, sides], in units of `align` columns, as `Pieces.table`
    counts: np.ndarray  # int64 [keys], the pieces of each size
    longest: np.ndarray  # the positions of the longest piece on each side
    scale: float  # the number of examples, divided by the number of those that are packed
    _batches: dict[tuple[Bucket, ...], tuple[float, ...]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, lengths: np.ndarray, options: Options) -> "Stock | None":
        """The stock of lengths [n] or [n, sides]; None if no example remains."""
        scale, longest = 1.0, np.zeros(len(options.names), np.int64)
        if options.vectors:
            room = options.buckets[-1].lengths
            if options.overflow == "drop":
                lengths = lengths[(lengths <= room).all(axis=1)]
            whole = np.minimum(lengths[lengths.any(axis=1)], room)
            longest = round_up(whole.max(axis=0, initial=0), np.array(options.align))
            # Sorting a million vectors to count the different ones takes a second.
            some = whole[:: max(len(whole) // SAMPLE // SOME, 1)]
            if len(np.unique(some, axis=0)) > SAMPLE:
                lengths = whole[:: len(whole) // SAMPLE]
                scale = len(whole) / len(lengths)
        pieces = options.cut(lengths)
        sizes, counts = pieces.table, pieces.count()
        if not counts.any():
            return None
        if not options.vectors:
            longest = np.flatnonzero(counts)[-1:] * options.align[0]
            if np.count_nonzero(counts) > SIZES:
                counts = _merge(counts)
                sizes = sizes[: len(counts)]
        return cls(options, sizes, counts, longest, scale)

    @functools.cached_property
    def positions(self) -> float:
        """The cost of the positions of all examples, with those that `align` adds."""
        sizes, counts = self.examples
        return float(weigh(counts @ sizes, self.options.cost)) * self.scale

    @functools.cached_property
    def examples(self) -> tuple[np.ndarray, np.ndarray]:
        """The sizes with pieces, in positions: int64 [n, sides]; and the counts that are packed."""
        used = np.flatnonzero(self.counts)
        return self.sizes[used] * np.array(self.options.align), self.counts[used]

    def count_batches(self, buckets: tuple[Bucket, ...]) -> tuple[float, ...]:
        """The batches of each of some buckets in an epoch.

        Those of a sample are scaled, and not whole: which rows the last batch lacks, it cannot say.
        """
        if (cached := self._batches.get(buckets)) is not None:
            return cached
        several = self.scale > 1  # in a sample, more of the batches would lack rows
        single = tuple(dataclasses.replace(bucket, rows=1) for bucket in buckets)
        packer = self.options.packer(self.sizes, single if several else buckets, exactly=False)
        packed = packer.pack(self.counts)
        rows = [packed.rows(index) for index in range(len(buckets))]
        batches: tuple[float, ...] = tuple(
            number * self.scale / bucket.rows if several else -(-number // bucket.rows)
            for number, bucket in zip(rows, buckets, strict=True)
        )
        self._batches[buckets] = batches
        return batches


def round_up(value: np.ndarray, multiple: int | np.ndarray) -> np.ndarray:
    """The least multiples of `multiple` that are at least `value`."""
    return -(-value // multiple) * multiple


def _merge(counts: np.ndarray) -> np.ndarray:
    """The pieces of each size; many sizes become the mean sizes of cells."""
    sizes = np.flatnonzero(counts)
    positions = np.cumsum(sizes * counts[sizes])
    cell = (positions - 1) * CELLS // positions[-1]
    number = np.bincount(cell, counts[sizes])
    filled = number > 0
    mean = np.bincount(cell, sizes * counts[sizes])[filled] / number[filled]
    return np.bincount(np.rint(mean).astype(np.int64), number[filled]).astype(np.int64)
