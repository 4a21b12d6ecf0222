"""Windows: pieces divided into windows, each packed separately."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from pipeline.planning.layout import OrderRows, lay_out, ranges
from pipeline.planning.options import Options
from pipeline.planning.order import Purpose, permutation, random_bits, sort_by_group
from pipeline.planning.patterns import Packed, count_segments
from pipeline.planning.pieces import Pieces

# The most pieces in a run; and the fewest runs, or parts of files, in a window, so that it
# mixes pieces from all of the corpus.
RUN, RUNS, FILE_PARTS = 4096, 512, 4

# Keys are summed for about this many pieces at a time.
AT_ONCE = 1 << 18

# The packed histograms that are kept; others are packed again when they are needed.
KEPT = 8


class Measures(NamedTuple):
    """What a plan knows of a packed histogram before it has rows."""

    rows: np.ndarray  # int64 [buckets]
    real: np.ndarray  # float64 [buckets, sides], the real positions in these rows
    most: np.ndarray  # int64 [2, buckets], the most segments and continuations in one
    cuts: int  # the pieces that are cut to fill rows


@dataclasses.dataclass(frozen=True)
class Measure:
    """Measures packed histograms of the keys of some pieces."""

    most_continuations: np.ndarray  # int64 [keys], of a piece of each key
    mean_positions: np.ndarray | None  # float64 [keys, sides]; None: the fill of rows tells them
    sides: int

    @classmethod
    def of(cls, pieces: Pieces) -> "Measure":
        """That of these pieces."""
        mean = None if pieces.keys_are_sizes else pieces.mean_positions
        return cls(pieces.most_continuations, mean, pieces.table.shape[1])

    def __call__(self, packed: Packed) -> Measures:
        """The measures of a packed histogram."""
        buckets = len(packed.patterns)
        rows, most = np.zeros(buckets, np.int64), np.zeros((2, buckets), np.int64)
        real = np.zeros((buckets, self.sides))
        for index, patterns in enumerate(packed.patterns):
            positions: Any = sum([pattern.fill * pattern.rows for pattern in patterns])
            if self.mean_positions is not None:
                positions = count_segments(patterns, len(packed.counts)) @ self.mean_positions
            rows[index], real[index] = packed.rows(index), positions
            most[:, index] = packed.most_in_row(index, self.most_continuations)
        return Measures(rows, real, most, packed.num_cuts)


class PackedWindows(Protocol):
    """Windows of pieces, whose rows are known; `Windows` describes the attributes."""

    pieces: Pieces
    counts: np.ndarray
    rows: np.ndarray
    real: np.ndarray
    sizes: list[int]
    most_pieces: int
    most_segments: list[int]
    most_continuations: list[int]
    cuts: np.ndarray
    files: list[np.ndarray] | None

    def __len__(self) -> int:
        """The number of windows."""
        ...

    def pieces_in(self, window: int) -> np.ndarray:
        """The numbers of the pieces of a window that are in a row: int64."""
        ...

    def packings(self, window: int) -> Iterable[Packed]:
        """The packed histograms of which a window consists."""
        ...

    def lay_out(
        self, window: int, bits: np.ndarray | None, order_rows: OrderRows
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """The rows of each bucket in a window, as `layout.lay_out`.

        `bits`, a random uint64 for each piece, order those with one key; None: they ascend.
        """
        ...


class Windows:
    """Pieces divided into windows of about `options.window` pieces, each packed separately.

    More pieces than one window holds are cut into runs: consecutive pieces, or files or large
    parts of files if those can be fetched one by one. Runs are sorted by the mean key of
    their pieces and divided into strata of as many runs as there are windows. Each window gets a
    random run of each stratum, so all windows have about the same lengths. Without a key of
    random bits, runs stay in order.

    Batches of a bucket continue from window to window, so only the last one could lack rows: rows
    that fill no batch move to longer buckets, up to the longest.

    Attributes:
        pieces: the pieces.
        counts: int64 [keys], the pieces of each key.
        rows: int64 [buckets, windows], the rows of each window.
        real: float64 [buckets, windows, sides], the real positions in these rows, as the mean of
            the pieces of each key.
        sizes: the pieces in each window.
        most_pieces: the most pieces in a window.
        most_segments: the most segments in a row of each bucket; at least 1.
        most_continuations: the most continuations of groups in a row of each bucket.
        cuts: int64 [windows], the pieces that are cut to fill rows.
        files: for each window, the numbers of its files; None if windows are not made of files.
    """

    def __init__(
        self,
        pieces: Pieces,
        options: Options,
        *,
        key: int | None,
        used: Sequence[int] | None = None,
        files: tuple[np.ndarray, np.ndarray] | None = None,
    ):
        """`used` is as for `Options.packer`.

        `files` has the number of each file, and how many pieces or examples are in it.
        """
        self.pieces, self._measure, buckets = pieces, Measure.of(pieces), options.buckets
        self._packer = options.packer(pieces.table, used=used)
        self._edges, window_of_run, file_of_run = self._divide(options, files, key)
        ends = np.bincount(window_of_run).cumsum()
        runs = np.split(window_of_run.argsort(kind="stable"), ends[:-1])
        self._runs = [of_window for of_window in runs if len(of_window)]
        self.files: list[np.ndarray] | None = None
        if file_of_run is not None and len(self) > 1:
            self.files = [np.unique(file_of_run[of_window]) for of_window in self._runs]
        sizes = np.diff(self._edges)
        self.sizes = [int(sizes[runs].sum()) for runs in self._runs]
        self.most_pieces = max(self.sizes)
        self.counts = np.zeros(len(pieces.table), np.int64)
        self.rows = np.zeros((len(buckets), len(self)), np.int64)
        self.real = np.zeros((*self.rows.shape, pieces.table.shape[1]))
        most_in_row = np.zeros((2, len(buckets)), np.int64)  # segments and continuations
        self.cuts = np.zeros(len(self), np.int64)
        self._surplus = np.zeros((len(self), len(buckets)), np.int64)
        self._packed: dict[int, Packed] = {}

        def note(window: int, measures: Measures) -> None:
            self.rows[:, window], self.real[:, window] = measures.rows, measures.real
            self.cuts[window] = measures.cuts
            np.maximum(most_in_row, measures.most, out=most_in_row)

        for window, measures in enumerate(self._measure_all()):
            note(window, measures)
        # Of a single window, `pack` finds the surplus.
        for index, bucket in enumerate(buckets[:-1] if len(self) > 1 else ()):
            missing = int(self.rows[index].sum()) % bucket.rows
            for window in reversed(range(len(self))):
                if moved := min(missing, int(self.rows[index, window])):
                    self._surplus[window, index], missing = moved, missing - moved
                    self._packed.pop(window, None)
                    note(window, self._measure(self.packed(window)))
        self.most_segments: list[int]
        self.most_continuations: list[int]
        self.most_segments, self.most_continuations = most_in_row.tolist()

    def __len__(self) -> int:
        """The number of windows."""
        return len(self._runs)

    def _divide(
        self, options: Options, files: tuple[np.ndarray, np.ndarray] | None, key: int | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """The first piece of each run, and their end; the window of each run; and its file."""
        count = len(self.pieces)
        if count <= options.window:
            return np.array([0, count]), np.zeros(1, np.int64), None
        edges, file_of_run, number = cut_runs(self.pieces, options.window, files)
        return edges, self._deal_runs(edges, number, key), file_of_run

    def _measure_all(self) -> Iterator[Measures]:
        """The measures of each window, without surplus; sums up `counts`."""
        for window in range(len(self)):
            counts = self._count(window)
            self.counts += counts
            yield self._measure(self.packed(window, counts))

    def _deal_runs(self, edges: np.ndarray, number: int, key: int | None) -> np.ndarray:
        """The window of each run, from 0 to `number - 1`: int64 [runs]."""
        runs = len(edges) - 1
        if key is None or number == 1:  # the window in which its middle is
            return (edges[1:] + edges[:-1]) * number // (2 * max(int(edges[-1]), 1))
        sums = np.empty(runs, np.int64)
        chunks = np.unique(edges.searchsorted(np.arange(0, edges[-1], AT_ONCE)))
        for begin, end in itertools.pairwise([*chunks.tolist(), runs]):
            keys = self.pieces.keys(int(edges[begin]), int(edges[end]))
            within = edges[begin:end] - edges[begin]
            sums[begin:end] = np.add.reduceat(keys, within, dtype=np.int64)
        strata = -(-runs // number)
        bits = random_bits(key, Purpose.WINDOWS, strata * number).reshape(strata, number)
        windows = np.empty(runs, np.int64)
        windows[np.argsort(sums / np.diff(edges), kind="stable")] = np.concatenate(
            [permutation(of_stratum) for of_stratum in bits]
        )[:runs]
        return windows

    def keys(self, window: int) -> np.ndarray:
        """The keys of the pieces of a window."""
        runs = self._runs[window]
        bounds = zip(self._edges[runs].tolist(), self._edges[runs + 1].tolist(), strict=True)
        keys = [self.pieces.keys(begin, end) for begin, end in bounds]
        return keys[0] if len(keys) == 1 else np.concatenate(keys)

    def numbers(self, window: int) -> np.ndarray:
        """The numbers of the pieces of a window: int64."""
        begin, end = self._edges[self._runs[window]], self._edges[self._runs[window] + 1]
        return ranges(begin, end - begin)

    def pieces_in(self, window: int) -> np.ndarray:
        """The numbers of the pieces of a window that are in a row: int64."""
        return self.numbers(window)[self.keys(window) > 0]

    def _count(self, window: int) -> np.ndarray:
        return np.bincount(self.keys(window), minlength=len(self.pieces.table))

    def packings(self, window: int) -> Iterable[Packed]:
        """See `PackedWindows`."""
        return [self.packed(window)]

    def lay_out(
        self, window: int, bits: np.ndarray | None, order_rows: OrderRows
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """See `PackedWindows`."""
        keys = self.keys(window)
        pieces = sort_by_group(keys, bits)
        pieces = pieces[np.count_nonzero(keys == 0) :]  # pieces of key 0 are in no batch
        if len(self) > 1:
            pieces = self.numbers(window)[pieces]
        if len(self.pieces) < 1 << 32:
            pieces = pieces.astype(np.uint32)
        return lay_out(self.packed(window), pieces, order_rows)

    def packed(self, window: int, counts: np.ndarray | None = None) -> Packed:
        """The packed histogram of a window; `counts` is the histogram, if known."""
        if (packed := self._packed.get(window)) is None:
            counts = self._count(window) if counts is None else counts.copy()
            counts[0] = 0
            surplus = self._surplus[window].tolist() if len(self) > 1 else None
            packed = self._packer.pack(counts, surplus)
            if len(self._packed) < KEPT:
                self._packed[window] = packed
        return packed


def cut_runs(
    pieces: Pieces, window: int, files: tuple[np.ndarray, np.ndarray] | None
) -> tuple[np.ndarray, np.ndarray | None, int]:
    """The first piece of each run, and their end; the file of each; and the number of windows."""
    count = len(pieces)
    if files is None:
        size = max(min(RUN, window // RUNS), 1)
        edges = np.append(np.arange(0, count, size), count)
        return edges, None, -(-(len(edges) - 1) // (window // size))
    numbers, examples = files
    bounds = pieces.first_pieces(np.cumsum(np.append(0, examples)))
    sizes = np.diff(bounds)
    parts = -(-sizes // max(window // FILE_PARTS, 1))
    file = np.repeat(np.arange(len(sizes)), parts)
    part = ranges(0 * parts, parts)
    edges = np.append(bounds[file] + part * sizes[file] // parts[file], count)
    return edges, numbers[file], -(-count // window)
