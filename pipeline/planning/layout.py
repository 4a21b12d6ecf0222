"""Layouts: pieces divided into windows that are packed separately, and their rows."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pipeline.planning.bucket import Bucket
from pipeline.planning.order import Purpose, permutation, random_bits
from pipeline.planning.patterns import Packed
from pipeline.planning.pieces import Pieces
from pipeline.planning.tails import count_surplus

# The most pieces in a block; and the fewest blocks, or parts of files, in a window, so that it
# mixes pieces from all of the corpus.
BLOCK, BLOCKS, FILE_PARTS = 4096, 512, 4

# Sizes are summed for about this many pieces at a time.
AT_ONCE = 1 << 18

# The packed histograms that a layout keeps; others are packed again when they are needed.
KEPT = 8


class Layout:
    """Pieces divided into windows of about `window` pieces, each packed separately.

    `pack(counts, surplus=…)` packs the histogram of a window, as `cascade.pack`, into rows of
    `groups`, which has the buckets of each length.

    If there are more pieces than one window holds, they are cut into blocks: runs of consecutive
    pieces or, if the corpus has files that can be fetched one by one, files or large parts of
    files. Blocks are sorted by the mean size of their pieces and divided into strata of as many
    blocks as there are windows. Each window gets a random block of each stratum, so all windows
    have about the same lengths. Without a key of random bits, blocks stay in order.

    Batches of a length continue from window to window, so only the last one could lack rows: rows
    that fill no batch move to longer buckets, up to the longest.

    Attributes:
        pieces: the pieces.
        counts: int64 [longest + 1], the pieces of each size.
        rows, real: int64 [lengths, windows], the rows of each window, and real positions in them.
        rows_before: int64 [lengths], the rows before the first window, in the same chapter.
        most_pieces: the most pieces in a window.
        most_segments: the most segments in a row of each length; at least 1.
        most_continuations: the most continuations of groups in a row of each length.
        cuts: int64 [windows], the pieces that are cut to fill rows.
        files: for each window, the numbers of its files; None if windows are not made of files.
    """

    def __init__(
        self,
        pieces: Pieces,
        pack: Callable[..., Packed],
        groups: Sequence[Sequence[Bucket]],
        *,
        key: int | None,
        window: int,
        files: np.ndarray | None = None,
        chapter: tuple[np.ndarray, bool] | None = None,
    ):
        """`chapter`, for a window of one: the rows before it, and whether the chapter ends."""
        self.pieces, self._pack = pieces, pack
        none: tuple[int, ...] = (0,) * len(groups)
        self.rows_before, ends = chapter or (np.zeros(len(groups), np.int64), True)
        window = len(pieces) if chapter else window
        self._edges, file_of_block, number = _cut_blocks(pieces, window, files)
        place = self._deal_blocks(number, key)
        blocks = np.split(place.argsort(kind="stable"), np.bincount(place).cumsum()[:-1])
        self._blocks = [of_window for of_window in blocks if len(of_window)]
        self.files = None
        if file_of_block is not None and len(self) > 1:
            self.files = [np.unique(file_of_block[of_window]) for of_window in self._blocks]
        sizes = np.diff(self._edges)
        self.most_pieces = max(int(sizes[each].sum()) for each in self._blocks)
        self.counts = np.zeros(pieces.longest + 1, np.int64)
        measured = np.zeros((4, len(groups), len(self)), np.int64)
        self.rows, self.real, segments, continuations = measured
        self.cuts = np.zeros(len(self), np.int64)
        # For a single window, `pack` finds the surplus.
        single = chapter is None and len(self) == 1
        self._surplus: list[tuple[int, ...] | None] = [None if single else none] * len(self)
        self._packed: dict[int, Packed] = {}

        def measure(window: int, packed: Packed) -> None:
            self.cuts[window] = packed.num_cuts
            for length in range(len(groups)):
                measured[:, length, window] = packed.measure(length, pieces.most_continuations)

        for window in range(len(self)):
            counts = self._count(window)
            self.counts += counts
            measure(window, self.packed(window, counts))
        for length, group in enumerate(groups[:-1] if ends and not single else ()):
            every = int(self.rows_before[length] + self.rows[length].sum())
            missing = count_surplus(every, group)
            for window in reversed(range(len(self))):
                if moved := min(missing, int(self.rows[length, window])):
                    surplus = list(self._surplus[window] or none)
                    surplus[length], missing = moved, missing - moved
                    self._surplus[window] = tuple(surplus)
                    self._packed.pop(window, None)
                    measure(window, self.packed(window))
        self.most_segments = segments.max(axis=1).tolist()
        self.most_continuations = continuations.max(axis=1).tolist()

    def __len__(self) -> int:
        """The number of windows."""
        return len(self._blocks)

    def _deal_blocks(self, number: int, key: int | None) -> np.ndarray:
        """The window of each block, from 0 to `number - 1`: int64 [blocks]."""
        edges = self._edges
        blocks = len(edges) - 1
        if key is None or number == 1:  # the window in which its middle is
            return (edges[1:] + edges[:-1]) * number // (2 * max(int(edges[-1]), 1))
        sums = np.empty(blocks, np.int64)
        chunks = np.unique(edges.searchsorted(np.arange(0, edges[-1], AT_ONCE)))
        for begin, end in itertools.pairwise([*chunks.tolist(), blocks]):
            sizes = self.pieces.sizes(int(edges[begin]), int(edges[end]))
            within = edges[begin:end] - edges[begin]
            sums[begin:end] = np.add.reduceat(sizes, within, dtype=np.int64)
        strata = -(-blocks // number)
        bits = random_bits(key, Purpose.WINDOWS, strata * number).reshape(strata, number)
        place = np.empty(blocks, np.int64)
        place[np.argsort(sums / np.diff(edges), kind="stable")] = np.concatenate(
            [permutation(of_stratum) for of_stratum in bits]
        )[:blocks]
        return place

    def sizes(self, window: int) -> np.ndarray:
        """The sizes of the pieces of a window."""
        blocks = self._blocks[window]
        bounds = zip(self._edges[blocks].tolist(), self._edges[blocks + 1].tolist(), strict=True)
        found = [self.pieces.sizes(begin, end) for begin, end in bounds]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def numbers(self, window: int) -> np.ndarray:
        """The numbers of the pieces of a window: int64."""
        begin, end = self._edges[self._blocks[window]], self._edges[self._blocks[window] + 1]
        return ranges(begin, end - begin)

    def _count(self, window: int) -> np.ndarray:
        return np.bincount(self.sizes(window), minlength=self.pieces.longest + 1)

    def packed(self, window: int, counts: np.ndarray | None = None) -> Packed:
        """The packed histogram of a window; `counts` is the histogram, if known."""
        if (found := self._packed.get(window)) is None:
            counts = self._count(window) if counts is None else counts.copy()
            counts[0] = 0
            found = self._pack(counts, surplus=self._surplus[window])
            if len(self._packed) < KEPT:
                self._packed[window] = found
        return found


def ranges(first: np.ndarray, sizes: np.ndarray, dtype: type = np.int64) -> np.ndarray:
    """The ranges of `sizes[i]` numbers from `first[i]` on, one after another.

    >>> ranges(np.array([5, 0, 9]), np.array([2, 3, 0])).tolist()
    [5, 6, 0, 1, 2]
    """
    numbers = (first - sizes.cumsum() + sizes).astype(dtype).repeat(sizes)
    numbers += np.arange(len(numbers), dtype=dtype)
    return numbers


def count_before(row: np.ndarray, count: np.ndarray) -> np.ndarray:
    """The sum of the counts before each one in its row: int64, shaped as `count`; rows ascend.

    >>> count_before(np.array([0, 0, 0, 4, 4]), np.array([2, 3, 1, 5, 1])).tolist()
    [0, 2, 5, 0, 5]
    """
    begins = np.ones(len(row), bool)  # whether each one is the first of its row
    np.not_equal(row[1:], row[:-1], out=begins[1:])
    before = count.cumsum(axis=0) - count
    return before - before[begins][begins.cumsum() - 1]


def _cut_blocks(
    pieces: Pieces, window: int, files: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None, int]:
    """The first piece of each block, and their end; the file of each; and the number of windows."""
    count = len(pieces)
    if count <= window:
        return np.array([0, count]), None, 1
    if files is None:
        size = max(min(BLOCK, window // BLOCKS), 1)
        edges = np.append(np.arange(0, count, size), count)
        return edges, None, -(-(len(edges) - 1) // (window // size))
    bounds = pieces.first_pieces(np.cumsum(np.append(0, files)))
    sizes = np.diff(bounds)
    parts = -(-sizes // max(window // FILE_PARTS, 1))
    file = np.repeat(np.arange(len(files)), parts)
    part = ranges(0 * parts, parts)
    edges = np.append(bounds[file] + part * sizes[file] // parts[file], count)
    return edges, file, -(-count // window)


class Slots:
    """The slots of one length of a packed histogram, as arrays: rows → patterns → slots.

    A slot is a place for one piece in a row. Row `r` is copy `r − row_start[p]` of its pattern `p`;
    patterns ascend by their number of segments. The pieces of a window are sorted by size. The slot
    of the first copy takes piece number `piece` in that order, the slot of the next copy the next
    piece. With packing="fill", a slot may take a part of its piece, from position `begin` on. Both
    parts of a piece have a slot; the last pieces of each size are those that are cut.

    Attributes:
        pattern: int32 [rows], the pattern of each row.
        cost: for each pattern, the cost of attention in a row.
    """

    def __init__(
        self,
        rows: np.ndarray,
        segments: np.ndarray,
        piece: np.ndarray,
        size: np.ndarray,
        begin: np.ndarray | None,
        pieces: Pieces,
    ):
        """`rows` and `segments` are for each pattern; `piece`, `size`, `begin`, for each slot."""
        self._segments, self._piece, self._size, self._begin = segments, piece, size, begin
        self._row_start, self._slot_start = (np.cumsum(n) - n for n in (rows, segments))
        self._rows = rows
        self.pattern = np.arange(len(rows), dtype=np.int32).repeat(rows)
        self.cost = size
        if len(size):
            self.cost = np.add.reduceat(pieces.costs(size), self._slot_start)

    def segments(self) -> np.ndarray:
        """The number of segments of each row, ascending: int32 [rows]."""
        return self._segments.astype(np.int32)[self.pattern]

    def first_piece(self) -> np.ndarray:
        """The piece in the first slot of every row."""
        return ranges(self._piece[self._slot_start], self._rows)

    def of_rows(
        self, rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        """The number of slots of each of `rows`; the piece, size and begin of each slot."""
        pattern = self.pattern[rows]
        times = self._segments[pattern]
        slot = ranges(self._slot_start[pattern], times)
        copy = (rows - self._row_start[pattern]).repeat(times)
        begin = None if self._begin is None else self._begin[slot]
        return times, self._piece[slot] + copy, self._size[slot], begin


def make_slots(packed: Packed, pieces: Pieces) -> list[Slots]:
    """The slots of each length."""
    every = [pattern for patterns in packed.patterns for pattern in patterns]
    flat = itertools.chain.from_iterable(pattern.pieces for pattern in every)
    size, times = np.fromiter(itertools.chain.from_iterable(flat), np.int64).reshape(-1, 2).T
    entries = np.array([len(pattern.pieces) for pattern in every], np.int64)
    rows = np.array([pattern.rows for pattern in every], np.int64)
    segments = np.array([pattern.segments for pattern in every], np.int64)
    of_entry = rows.repeat(entries)
    # An entry takes `times * rows` pieces of its size, in the order of the entries.
    order, used = size.argsort(kind="stable"), times * of_entry
    first = np.empty(len(size), np.int64)
    first[order] = used[order].cumsum() - used[order]
    begin = None
    if len(packed.cuts):
        begin, size, first = _cut_entries(packed, size, used, first)
        begin = begin.repeat(times)
    piece = first.repeat(times) + ranges(0 * times, times) * of_entry.repeat(times)
    size = size.repeat(times).astype(np.int32)
    slot = segments.cumsum() - segments  # the first slot of each pattern
    ends = np.cumsum([len(patterns) for patterns in packed.patterns])
    found = []
    for low, high in itertools.pairwise([0, *ends.tolist()]):
        by_segments = low + segments[low:high].argsort(kind="stable")
        slots = ranges(slot[by_segments], segments[by_segments])
        cut_at = None if begin is None else begin[slots]
        of_length = rows[by_segments], segments[by_segments], piece[slots], size[slots], cut_at
        found.append(Slots(*of_length, pieces))
    return found


def _cut_entries(
    packed: Packed, size: np.ndarray, used: np.ndarray, first: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The begin, the size and the first piece of each entry, where some pieces are cut.

    In `size` and `first`, both parts of a piece count as pieces of sizes of their own; see `Cuts`.
    """
    sizes, table = len(packed.counts), packed.cuts
    number = np.bincount(size, used, sizes + 2 * len(table)).astype(np.int64)
    begins, lengths, whole = np.zeros((3, len(number)), np.int64)
    whole[:sizes] = lengths[:sizes] = np.arange(sizes)
    whole[sizes::2] = whole[sizes + 1 :: 2] = table[:, 0]
    begins[sizes + 1 :: 2] = lengths[sizes::2] = table[:, 1]
    lengths[sizes + 1 :: 2] = table[:, 0] - table[:, 1]
    # A piece that is cut counts once, with its first part. Second parts take the same pieces, in
    # the same order.
    counted = number.copy()
    counted[sizes + 1 :: 2] = 0
    order, base = whole.argsort(kind="stable"), np.empty(len(number), np.int64)
    base[order] = counted[order].cumsum() - counted[order]
    base[sizes + 1 :: 2] = base[sizes::2]
    base -= number.cumsum() - number
    return begins[size], lengths[size], first + base[size]


class WindowRows:
    """The rows of a length in a window, in the order in which batches take them.

    `order` has the numbers of the rows in `slots`; `pieces` has the numbers in `every` of the
    window's pieces, sorted by size. With `flat`, for plans that take any number of rows at a time,
    all slots are looked up at once.
    """

    def __init__(
        self, slots: Slots, order: np.ndarray, pieces: np.ndarray, every: Pieces, *, flat: bool
    ):
        self._slots, self._order, self._pieces = slots, order, pieces
        self.costs = slots.cost[slots.pattern[order]]  # int64 [rows]
        self._flat: tuple[Any, ...] | None = None
        if flat:
            times, *parts = self.take(0, len(order))
            self._flat = np.append(0, times.cumsum()), times, *parts
        if every.trees is not None and len(order):
            times, pieces, sizes, _ = self.take(0, len(order))
            costs = every.costs_of(pieces, sizes)
            self.costs = np.add.reduceat(costs, times.cumsum() - times)

    def take(
        self, begin: int, end: int, order: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        """The numbers of segments of the rows `begin` to `end`; their pieces, sizes and begins.

        A segment begins at a position of its piece; None: all begin at 0, as nothing is cut.
        `order` selects from these rows, which are numbered from 0; None takes all in order.
        """
        if self._flat is None:
            rows = self._order[begin:end]
            rows = rows if order is None else rows[order]
            times, pieces, sizes, begins = self._slots.of_rows(rows)
            return times, self._pieces[pieces], sizes, begins
        starts, times, pieces, sizes, begins = self._flat
        if order is None:
            which: Any = slice(starts[begin], starts[end])
            times = times[begin:end]
        else:
            times = times[begin:end][order]
            which = ranges(starts[begin + order], times)
        return times, pieces[which], sizes[which], None if begins is None else begins[which]
