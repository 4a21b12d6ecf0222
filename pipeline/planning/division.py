"""Divisions: a division says which pieces of a corpus are planned together, in windows.

A corpus no larger than a window is one window (`Undivided`). A larger one is divided once:

- `FileDivision`: each window has whole files, chosen at random. Batches then need few files at a
  time, which are known ahead. For corpora of many files.
- `SizeDivision`: the pieces of each size are spread evenly over all windows. For other lengths.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from pipeline.planning import lengths as lengths_lib
from pipeline.planning.order import Purpose, permutation, random_bits
from pipeline.planning.partition import Partition
from pipeline.planning.patterns import Packed
from pipeline.planning.pieces import Pieces

# The files of a window are at least so many, so that it mixes examples of all parts of a corpus.
FILES = 4

# Packs a histogram into rows, as `pipeline.planning.cascade.pack`, of whose other arguments it
# takes only `whole` and `surplus`.
Pack: TypeAlias = Callable[..., Packed]


@dataclasses.dataclass(frozen=True)
class WindowKind:
    """A number of windows with the same histogram and the same rows."""

    pack: dataclasses.InitVar[Pack]
    number: int
    counts: np.ndarray
    whole: bool = False  # as for `pack`
    surplus: tuple[int, ...] | None = None  # as for `pack`
    # int64 [sizes], the rank of the first piece of each size in the first window, for
    # `SizeDivision`. Each window takes the next ranks.
    first: np.ndarray | None = None
    # Of each bucket, as `Packed` has them.
    rows: np.ndarray = dataclasses.field(init=False)
    real: np.ndarray = dataclasses.field(init=False)
    most_segments: np.ndarray = dataclasses.field(init=False)

    def __post_init__(self, pack: Pack) -> None:
        packed = self.packed(pack)
        for name in ("rows", "real", "most_segments"):
            of_bucket = getattr(packed, name)
            values = np.array([of_bucket(index) for index in range(len(packed.buckets))])
            object.__setattr__(self, name, values)

    def packed(self, pack: Pack) -> Packed:
        """The packed histogram of each window."""
        return pack(self.counts, whole=self.whole, surplus=self.surplus)


class Undivided:
    """One window.

    Attributes, as those of every division:
        counts: int64 [longest + 1], the pieces of each size.
        files: for each window, the numbers of its files; None if windows are not made of files.
    """

    files: list[np.ndarray] | None = None

    def __init__(self, pieces: Pieces):
        self._pieces = pieces
        sizes, found = lengths_lib.histogram(pieces.sizes())
        self.counts = np.zeros(int(sizes.max(initial=0)) + 1, np.int64)
        self.counts[sizes] = found

    def kinds(self, pack: Pack) -> Iterator[WindowKind]:
        """The kinds of windows, in order of the windows' numbers."""
        yield WindowKind(pack, 1, _without_empty(self.counts))

    def members(
        self, window: int, first: np.ndarray | None, share: np.ndarray
    ) -> tuple[np.ndarray | None, np.ndarray]:
        """The pieces of a window and their sizes; None for all pieces in order.

        `share` has its pieces of each size, int64 [sizes]; and `first`, if it has ranks, the rank
        of its first piece of each size.
        """
        return None, self._pieces.sizes()


class SizeDivision:
    """Windows with evenly divided histograms.

    For batches, windows share one histogram, one search for patterns, and have whole batches only.
    The rest (remainders of sizes, and the last batch of each window) is divided in the same way,
    until it fits into one window. For rows, the histograms differ by up to one piece of each size.
    Without a seed, pieces are in windows in their order.
    """

    files: list[np.ndarray] | None = None

    def __init__(self, pieces: Pieces, window: int, seed: int | None, by_row: bool):
        self._partition, self._window = Partition(pieces, window, seed), window
        self.counts = self._partition.counts
        number = -(-int(self.counts[1:].sum()) // window)
        self._number, self._by_row = number, by_row and number > 1

    def kinds(self, pack: Pack) -> Iterator[WindowKind]:
        """See `Undivided`."""
        return self._divide_rows(pack) if self._by_row else self._divide_batches(pack)

    def _divide_batches(self, pack: Pack) -> Iterator[WindowKind]:
        counts, number = _without_empty(self.counts), self._number
        first = np.zeros_like(counts)
        while True:
            packed = pack(counts // number, whole=number > 1)
            while number > 1 and not packed.counts.any():
                # A window has no piece of any size, or no whole batch: use fewer windows.
                number //= 2
                packed = pack(counts // number, whole=number > 1)
            if packed.counts.any():
                yield WindowKind(pack, number, counts // number, number > 1, first=first)
            first = first + number * packed.counts
            counts = counts - number * packed.counts
            if number == 1:
                return
            number = max(-(-int(counts.sum()) // self._window), 1)

    def _divide_rows(self, pack: Pack) -> Iterator[WindowKind]:
        counts, number = _without_empty(self.counts), self._number
        # Fibonacci hashing of the size decides which windows have one more piece of it.
        phase = np.arange(len(counts), dtype=np.uint64) * np.uint64(0x9E3779B1) % np.uint64(1 << 32)
        phase = (phase * np.uint64(number) >> np.uint64(32)).astype(np.int64)
        edges = ((window * counts + phase) // number for window in range(number + 1))
        for begin, end in pairwise(edges):
            if (share := end - begin).any():
                yield WindowKind(pack, 1, share, first=begin)

    def members(
        self, window: int, first: np.ndarray | None, share: np.ndarray
    ) -> tuple[np.ndarray | None, np.ndarray]:
        """See `Undivided`."""
        assert first is not None, "windows of sizes have ranks"
        return self._partition.members(first, share)


class FileDivision:
    """Windows of whole files, of about `window` pieces each.

    Files are sorted by the mean size of their pieces, and each window gets one of every few that
    follow each other: so all windows have much the same lengths, and which files they have is
    random. Each window has its own histogram and its own search for patterns. Batches go on from a
    window to the next, so only the last batch of each bucket in an epoch could lack rows. `surplus`
    moves the rows of these to longer buckets, up to the longest. Without a seed, files are in
    windows in their order.
    """

    def __init__(
        self,
        pieces: Pieces,
        files: np.ndarray,
        window: int,
        seed: int | None,
        rows_per_batch: Sequence[int],
    ):
        self._pieces, self._rows_per_batch = pieces, rows_per_batch
        self._edges = np.cumsum([0, *files])
        total, size = int(self._edges[-1]), pieces.longest + 1
        number = -(-total // window)
        # In their order, a file is in the window in which its middle would be, if all were equal.
        place = (self._edges[1:] + self._edges[:-1]) * number // (2 * total)
        if seed is not None:
            place = self._deal(number, seed)
        self.files: list[np.ndarray] | None = []
        self._histograms: list[np.ndarray] = []
        self.counts = np.zeros(size, np.int64)
        for numbers in (np.flatnonzero(place == window) for window in range(number)):
            counts = np.zeros(size, np.int64)
            for begin, end in self._examples(numbers):
                counts += np.bincount(pieces.of_examples(begin, end)[1], minlength=size)
            self.counts += counts
            if (counts := _without_empty(counts)).any():
                self.files.append(numbers)
                self._histograms.append(counts)

    def _deal(self, number: int, seed: int) -> np.ndarray:
        """The window of each file: int64 [files]."""
        files = np.arange(len(self._edges) - 1)
        sizes = (self._pieces.of_examples(*each)[1] for each in self._examples(files))
        means = [of_file.sum() / max(len(of_file), 1) for of_file in sizes]
        strata = -(-len(files) // number)
        bits = random_bits(seed, Purpose.PARTITION, strata * number).reshape(strata, number)
        place = np.empty_like(files)
        place[np.argsort(means, kind="stable")] = np.concatenate(
            [permutation(of_stratum) for of_stratum in bits]
        )[: len(files)]
        return place

    def _examples(self, files: np.ndarray) -> Iterator[tuple[int, int]]:
        """The first example of each of some files, and one past the last."""
        yield from zip(self._edges[files].tolist(), self._edges[files + 1].tolist(), strict=True)

    def kinds(self, pack: Pack) -> Iterator[WindowKind]:
        """See `Undivided`."""
        none = (0,) * len(self._rows_per_batch)
        kinds = [WindowKind(pack, 1, counts, surplus=none) for counts in self._histograms]
        for bucket, rows_per_batch in enumerate(self._rows_per_batch[:-1]):
            missing = sum(int(kind.rows[bucket]) for kind in kinds) % rows_per_batch
            for window in reversed(range(len(kinds))):
                if moved := min(missing, int(kinds[window].rows[bucket])):
                    surplus = list(kinds[window].surplus or none)
                    surplus[bucket], missing = moved, missing - moved
                    counts = self._histograms[window]
                    kinds[window] = WindowKind(pack, 1, counts, surplus=tuple(surplus))
        yield from kinds

    def members(
        self, window: int, first: np.ndarray | None, share: np.ndarray
    ) -> tuple[np.ndarray | None, np.ndarray]:
        """See `Undivided`."""
        assert self.files is not None, "windows of files have files"
        found = [self._pieces.of_examples(*each) for each in self._examples(self.files[window])]
        pieces, sizes = (np.concatenate(each) for each in zip(*found, strict=True))
        return pieces, sizes


Division: TypeAlias = Undivided | SizeDivision | FileDivision


def divide(
    pieces: Pieces,
    window: int,
    seed: int | None,
    *,
    by_row: bool,
    files: np.ndarray | None,
    rows_per_batch: Sequence[int],
) -> Division:
    """The division of some pieces into windows of up to `window` pieces; see the classes."""
    if len(pieces) <= window:
        return Undivided(pieces)
    if files is not None and FILES * int(files.max()) <= window:
        return FileDivision(pieces, files, window, seed, rows_per_batch)
    return SizeDivision(pieces, window, seed, by_row)


def _without_empty(counts: np.ndarray) -> np.ndarray:
    counts = counts.copy()
    counts[0] = 0
    return counts
