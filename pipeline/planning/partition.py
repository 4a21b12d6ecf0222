"""The partition: divides the pieces of a large corpus into windows.

Blocks of consecutive pieces are shuffled by the seed. In the order of the blocks, the pieces of
each size have ranks 0, 1, 2, …; a window has a range of ranks of each size. Pieces of common sizes
are spread evenly, so a window finds its ranks in few blocks. For rare sizes, the partition stores a
list of the pieces. One pass over the sizes counts them. The stored counts and lists take at most a
sixth of the memory of the sizes, and a sixteenth for a billion examples of up to 8,192 positions.
"""

import numpy as np

from pipeline.planning.order import Purpose, permutation, random_bits, sort_by_group
from pipeline.planning.pieces import Pieces

# The most pieces in a block. A unit is the number of blocks that are counted and read at a time.
BLOCK, UNIT = 4096, 64

# A window has pieces of at least this many blocks, so that it mixes all parts of the corpus.
BLOCKS = 512

# With more than MANY windows, the rarest sizes, which have one in RARE pieces together, are listed.
# Their ranks can be anywhere in the order, so that a search would read all of it.
MANY, RARE = 8, 32


class Partition:
    """The ranks of all pieces in an order of blocks, which the seed shuffles if there is one.

    `window` is the most pieces in a window; `counts` has the pieces of each size.
    """

    def __init__(self, pieces: Pieces, window: int, seed: int | None):
        self._pieces = pieces
        # Pieces in a block, as a power of two.
        self._shift = min(BLOCK, max(window // BLOCKS, 1)).bit_length() - 1
        blocks = np.arange(-(-len(pieces) >> self._shift))
        if seed is not None:
            blocks = permutation(random_bits(seed, Purpose.PARTITION, len(blocks)))
        # The counts of a unit take at most an eighth of the memory of its sizes.
        unit = max(UNIT, 8 * (pieces.longest + 1) >> self._shift)
        self._units = [blocks[at : at + unit] for at in range(0, len(blocks), unit)]
        size = pieces.longest + 1
        self._number = np.uint32 if len(pieces) < 1 << 32 else np.int64
        # _before[u]: the rank of the first piece of each size in unit u; the last line: all counts.
        self._before = np.zeros((len(self._units) + 1, size), self._number)
        self._rare = np.zeros(size, bool)
        if len(pieces) > MANY * window:
            self._rare = self._find_rare(size)
        listed = []
        for number in range(len(self._units)):
            sizes = self._read(number)
            counts = np.bincount(sizes, minlength=size)
            np.add(self._before[number], counts, out=self._before[number + 1], casting="unsafe")
            listed.append(self._list_rare(number, sizes))
        self.counts = self._before[-1].astype(np.int64)
        self._start, self._list = self._sort_by_rank(listed)
        # The end of the last block is read as pieces of size 0.
        self.counts[0] -= (len(blocks) << self._shift) - len(pieces)

    def _read(self, unit: int) -> np.ndarray:
        return self._pieces.blocks(self._units[unit], 1 << self._shift).ravel()

    def _pieces_at(self, unit: int, places: np.ndarray) -> np.ndarray:
        begin = (self._units[unit] << self._shift).astype(self._number)
        return begin[places >> self._shift] + (places & ((1 << self._shift) - 1)).astype(
            self._number
        )

    # ---- rare sizes

    def _find_rare(self, size: int) -> np.ndarray:
        """Which sizes are rare, estimated from the first units: bool [size]."""
        counts = np.zeros(size, np.int64)
        for unit in range(-(-len(self._units) // 64)):
            counts += np.bincount(self._read(unit), minlength=size)
        order = np.argsort(counts, kind="stable")
        rare = np.zeros(size, bool)
        rare[order[np.cumsum(counts[order]) <= counts.sum() // RARE]] = True
        rare[0] = False
        return rare

    def _list_rare(self, unit: int, sizes: np.ndarray) -> np.ndarray:
        """The pieces of rare sizes in a unit, sorted by size and rank."""
        places = _outside_largest_gap(sizes, np.flatnonzero(self._rare))
        if places is None:
            places = np.flatnonzero(self._rare.take(sizes))
        else:
            places = places[self._rare[sizes[places]]]
        places = places[sort_by_group(sizes[places], None)]
        return self._pieces_at(unit, places)

    def _sort_by_rank(self, listed: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """All pieces of rare sizes by size and rank, after the index at which each size starts."""
        rare = np.flatnonzero(self._rare)
        start = np.zeros(len(self.counts), np.int64)
        start[rare] = np.cumsum(self.counts[rare]) - self.counts[rare]
        ordered = np.empty(int(self.counts[rare].sum()), self._number)
        for unit, pieces in enumerate(listed):
            here, after = (self._before[unit + i, rare].astype(np.int64) for i in (0, 1))
            ordered[_ranges(start[rare] + here, after - here)] = pieces
        return start, ordered

    # ---- windows

    def members(self, first: np.ndarray, share: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The pieces of ranks `first` to `first + share` of each size, and their sizes."""
        rare = np.flatnonzero(self._rare)
        listed = self._list[_ranges(self._start[rare] + first[rare], share[rare])]
        found = [(listed, np.repeat(rare.astype(np.uint32), share[rare]))]
        common = np.flatnonzero((share > 0) & ~self._rare)
        if len(common):
            last = first + share
            begin, end = self._unit_of(first, common), self._unit_of(last - 1, common)
            found += [
                self._members_in(unit, common[(begin <= unit) & (unit <= end)], first, last)
                for unit in range(int(begin.min()), int(end.max()) + 1)
            ]
        pieces, sizes = (np.concatenate(each) for each in zip(*found, strict=True))
        assert len(pieces) == share.sum(), "every rank has a piece"
        return pieces, sizes

    def _unit_of(self, rank: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """The unit with the piece of `rank` of each size in `wanted`, by bisection."""
        low = np.zeros(len(wanted), np.int64)
        high = np.full(len(wanted), len(self._units))
        while (apart := high - low > 1).any():
            middle = (low + high) // 2
            is_before = self._before[middle, wanted] <= rank[wanted]
            low = np.where(apart & is_before, middle, low)
            high = np.where(apart & ~is_before, middle, high)
        return low

    def _members_in(
        self, unit: int, wanted: np.ndarray, first: np.ndarray, last: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The pieces of a unit with ranks `first` to `last` of some sizes, and their sizes."""
        if not len(wanted):
            return np.zeros(0, self._number), np.zeros(0, np.uint32)
        here, after = (self._before[unit + i, wanted].astype(np.int64) for i in (0, 1))
        low, high = np.maximum(first[wanted] - here, 0), np.minimum(last[wanted], after) - here
        # For each size: 0 takes no piece of the unit, 1 takes all, 2 takes ranks low to high.
        mode = np.zeros(len(first), np.uint8)
        mode[wanted] = np.where(high - low == after - here, 1, 2) * (high > low)
        sizes = self._read(unit)
        places = _outside_largest_gap(sizes, np.flatnonzero(mode))
        if places is not None:
            sizes = sizes[places]
        modes = mode.take(sizes)
        taken = np.flatnonzero(modes != 0)
        modes, sizes = modes[taken], sizes[taken].astype(np.uint32)
        places = taken if places is None else places[taken]
        part = np.flatnonzero(modes == 2)
        if len(part):
            bounds = np.zeros((2, len(first)), np.int64)
            bounds[:, wanted] = low, high
            rank, size = _ranks(sizes[part]), sizes[part]
            stays = np.ones(len(places), bool)
            stays[part] = (rank >= bounds[0, size]) & (rank < bounds[1, size])
            places, sizes = places[stays], sizes[stays]
        return self._pieces_at(unit, places), sizes


def _outside_largest_gap(sizes: np.ndarray, wanted: np.ndarray) -> np.ndarray | None:
    """The places whose size is not in the largest gap between wanted sizes; None for all places.

    If the wanted sizes are rare, and above all if they are long, one comparison excludes most
    places from further tests.
    """
    if not len(wanted):
        return np.zeros(0, np.int64)
    edges = np.concatenate([[0], wanted])
    widest = int(np.argmax(np.diff(edges)))
    low, high = int(edges[widest]), int(edges[widest + 1])
    if high - low < len(wanted):
        return None
    return np.flatnonzero((sizes <= low) | (sizes >= high))


def _ranges(first: np.ndarray, times: np.ndarray) -> np.ndarray:
    """The ranges of `times` consecutive numbers from each `first` on, one after another.

    >>> _ranges(np.array([5, 0, 9]), np.array([2, 3, 0])).tolist()
    [5, 6, 0, 1, 2]
    """
    before = np.cumsum(times) - times
    return np.repeat(first - before, times) + np.arange(int(times.sum()))


def _ranks(sizes: np.ndarray) -> np.ndarray:
    """The rank of each element among the elements of its size.

    >>> _ranks(np.array([7, 3, 7, 7])).tolist()
    [0, 0, 1, 2]
    """
    order = sort_by_group(sizes, None)
    ordered = sizes[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    ranks = np.empty(len(sizes), np.int64)
    ranks[order] = np.arange(len(sizes)) - np.repeat(starts, np.diff(starts, append=len(sizes)))
    return ranks
