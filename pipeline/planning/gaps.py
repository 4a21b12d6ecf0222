"""Rows without gaps: packing="fill" cuts documents where none fits.

A *chain* is a sequence of rows: a document that begins at the end of one continues at the beginning
of the next. A row of whole documents is a chain of one row; a chain of `k` rows cuts `k − 1`
documents. So the more chains, the fewer cuts. (LeCun, Mautor, Quessette and Weisser, 2015, call
this bin packing with fragmentable items.)
"""

import bisect
import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from pipeline.errors import InvalidValue
from pipeline.planning.best_fit import best_fit
from pipeline.planning.patterns import Pattern, count_rows, count_segments

# A piece has at least this many positions, or an eighth of a short row. A model has hardly any
# context for the first positions of a piece, and every piece is one more segment.
LEAST_PIECE = 32

# Gaps may add up to one row in this many, not counting the last row: filling them would cut many
# documents for a ten-thousandth of the positions.
ROWS_PER_SPARE = 10_000

# About this many rows are filled at a time, and then copied.
ROWS_AT_ONCE = 128


def check_fill(*, vectors: bool = False, align: int = 1, groups: bool = False) -> None:
    """Raises an error if examples cannot be cut to fill rows."""
    reasons = {
        "a part of an example would lose its other sides, so with several": vectors,
        "a group cut in two would lose its prefix, so for groups": groups,
        f"align={align} leaves gaps, so with align": align > 1,
    }
    if why := next((reason for reason, holds in reasons.items() if holds), ""):
        raise InvalidValue(
            f"packing is 'fill', which cuts examples to fill rows; {why} give packing='best_fit'"
        )


class Cuts:
    """The ways in which documents are cut; each has two numbers that act as sizes of its pieces.

    >>> cuts = Cuts(10)  # sizes 0 … 9 are those of whole documents
    >>> cuts.pieces(9, 5), cuts.pieces(8, 2), cuts.pieces(9, 5)
    ((10, 11), (12, 13), (10, 11))
    >>> cuts.table.tolist()
    [[9, 5], [8, 2]]
    """

    def __init__(self, sizes: int):
        self.sizes = sizes
        self._ways: dict[tuple[int, int], int] = {}

    def pieces(self, size: int, first: int) -> tuple[int, int]:
        """The size numbers of both pieces of a document that is cut after `first` positions."""
        number = self._ways.setdefault((size, first), len(self._ways))
        return self.sizes + 2 * number, self.sizes + 2 * number + 1

    def positions(self, piece: int) -> int:
        """The positions of a first piece, by its size number."""
        return [*self._ways][(piece - self.sizes) // 2][1]

    @property
    def table(self) -> np.ndarray:
        """The size of the document of each way, and of its first piece: int64 [ways, 2]."""
        return np.array(list(self._ways), np.int64).reshape(-1, 2)

    def count_documents(self, patterns: Iterable[Pattern]) -> np.ndarray:
        """The documents of each size in the rows of some patterns: int64 [sizes].

        A document that is cut counts where it begins.
        """
        counts = count_segments(patterns, self.sizes + 2 * len(self._ways))
        documents, table = counts[: self.sizes].copy(), self.table
        np.add.at(documents, table[:, 0], counts[self.sizes :: 2])
        return documents


class Remaining:
    """The segments of a histogram that have no row yet: `counts` by size, and their sums."""

    def __init__(self, histogram: np.ndarray):
        self._sizes = np.flatnonzero(histogram).tolist()  # ascending
        self.counts = dict(zip(self._sizes, histogram[self._sizes].tolist(), strict=True))
        self.positions = int(histogram @ np.arange(len(histogram)))
        self.segments = int(histogram.sum())

    def longest(self, room: int) -> int:
        """The size of the longest segment that fits into `room`; 0 if there is none."""
        index = bisect.bisect_right(self._sizes, room)
        return self._sizes[index - 1] if index else 0

    def take(self, size: int, times: int = 1) -> None:
        """Takes some segments of a size."""
        self.positions -= size * times
        self.segments -= times
        self.counts[size] -= times
        if not self.counts[size]:
            del self.counts[size], self._sizes[bisect.bisect_left(self._sizes, size)]


# Equal chains: one pattern for each row of the chain; its `rows` is the number of chains.
Chain = Sequence[Pattern]


def count_cuts(chains: Iterable[Chain]) -> int:
    """The number of documents that some chains cut."""
    return sum(count_rows(chain) - chain[0].rows for chain in chains)


def _repeat(chain: Chain, times: int) -> Chain:
    """`times` chains like these."""
    return [pattern._replace(rows=times) for pattern in chain]


def fill_rows(
    counts: np.ndarray, length: int, cuts: Cuts, max_segments: int | None = None
) -> list[Chain]:
    """Chains of rows of `length` with all documents of a histogram.

    >>> counts = np.bincount([6, 6, 6])
    >>> [chain] = fill_rows(counts, 9, cuts := Cuts(7))
    >>> [row.pieces for row in chain], cuts.table.tolist()
    ([((6, 1), (7, 1)), ((8, 1), (6, 1))], [[6, 3]])

    Best fit packs whole documents. The fullest rows stay, as long as that needs no more rows; the
    documents of the others are packed into chains, whose cuts are added to `cuts`. If these save
    fewer positions for each cut than a piece must have, the rows of best fit are returned.
    """
    sizes, tokens = np.arange(len(counts)), int(counts @ np.arange(len(counts)))
    patterns = best_fit(counts.copy(), length, sizes > 0, max_segments)
    patterns.sort(key=lambda pattern: -pattern.fill)
    fewest = -(-tokens // length)
    spare = (fewest + fewest // ROWS_PER_SPARE) * length - tokens  # positions
    chains = list[Chain]()
    for pattern in patterns:
        gap = length - pattern.fill
        if not (rows := min(pattern.rows, spare // gap) if gap else pattern.rows):
            break
        chains.append([pattern._replace(rows=rows)])
        spare -= rows * gap
    left = counts - count_segments(itertools.chain.from_iterable(chains), len(counts))
    copies = 1 << (int(left @ sizes) // (length * ROWS_AT_ONCE)).bit_length()
    while left.any():
        laid = _lay(left // copies, length, cuts, max_segments, copies)
        chains += [_repeat(chain, copies) for chain in laid]
        left -= copies * cuts.count_documents(itertools.chain.from_iterable(laid))
        copies //= 2
    saved = count_rows(patterns) - sum(map(count_rows, chains))
    if saved > 0 and saved * length >= least_piece(length) * count_cuts(chains):
        return chains
    return [[pattern] for pattern in patterns]


def least_piece(length: int) -> int:
    """The fewest positions of a piece in rows of `length`; a cut must save as many on average."""
    return min(LEAST_PIECE, max(length // 8, 1))


def remove_rows(chains: Sequence[Chain], rows: int, cuts: Cuts) -> tuple[list[Chain], np.ndarray]:
    """The chains without `rows` of their rows, and the documents of each size in the removed rows.

    The emptiest chains are removed; a chain with more rows than needed loses only its last rows.
    """
    stay, moved = list[Chain](), np.zeros(cuts.sizes, np.int64)
    for chain in sorted(chains, key=lambda chain: chain[-1].fill):
        times = chain[0].rows
        if gone := min(times, rows // len(chain)):
            moved += cuts.count_documents(_repeat(chain, gone))
            rows -= gone * len(chain)
        if times > gone:
            stay.append(_repeat(chain, times - gone))
    if rows:
        index = next(n for n, chain in enumerate(stay) if len(chain) > rows)
        chain = _repeat(stay[index], 1)
        stay[index] = _repeat(stay[index], stay[index][0].rows - 1)
        stay.append(_end(chain[: len(chain) - rows], cuts))
        moved += cuts.count_documents(chain) - cuts.count_documents(stay[-1])
    return [chain for chain in stay if count_rows(chain)], moved


def _end(rows: Chain, cuts: Cuts) -> Chain:
    """A chain of the first rows of a longer one; its last row loses the piece that continues."""
    *first, last = rows
    *pieces, (piece, _) = last.pieces
    fill = last.fill - cuts.positions(piece)
    return [*first, Pattern(tuple(pieces), last.rows, fill, last.segments - 1)]


def _lay(
    counts: np.ndarray, length: int, cuts: Cuts, max_segments: int | None, copies: int
) -> list[Chain]:
    """Chains with the documents of a histogram; the caller makes `copies` of each chain.

    With several copies, the last chain is left out if its documents do not fill its rows.

    A row has the second piece of the document that was cut last, then whole documents, each the
    longest that fits. Last comes the first piece of the longest document. If the row is full, or
    that document is too short to be cut, the chain ends.
    """
    least, most = least_piece(length), max_segments or length
    stock, chains, rows = Remaining(counts), list[Chain](), list[Pattern]()
    second, carried = 0, 0  # the second piece of the document that was cut last, and its positions
    while stock.segments or carried:
        row = [(second, 1)] if carried else []
        room, free, carried = length - carried, most - len(row), 0
        if copies > 1 and stock.positions < room and stock.segments <= free:
            break
        while free and (size := stock.longest(room)):
            times = min(stock.counts[size], room // size, free)
            stock.take(size, times)
            room, free = room - size * times, free - times
            row.append((size, times))
        first = min(room, stock.longest(length) - least)
        if free and first >= least:
            size = stock.longest(length)
            stock.take(size)
            piece, second = cuts.pieces(size, first)
            row.append((piece, 1))
            room, carried = room - first, size - first
        segments = sum(times for _, times in row)
        rows.append(Pattern(tuple(row), 1, length - room, segments))
        if not carried:
            chains.append(rows)
            rows = []
    return chains
