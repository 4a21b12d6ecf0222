"""The partition: all pieces in the seed's order, and where each length's lie in it.

The pieces of a corpus are taken in blocks of neighbours, the blocks in the seed's order. In that
order the pieces of each length are ranked, and a window is a run of ranks of each length. Common
lengths come at an even rate, so a window finds them in few blocks; where rare ones are is noted.
One pass over the lengths counts them. What is kept is a sixth of the lengths' own size at most,
and a sixteenth for a billion examples of up to 8,192 positions.
"""

import numpy as np

from pipeline.planning.order import Purpose, permutation, random_bits, sort_by_group
from pipeline.planning.pieces import Pieces

# Pieces in a block at most, and blocks in a unit: what is counted and read at a time.
BLOCK, UNIT = 4096, 64

# Windows take at least this many blocks each, so that they mix all of the corpus.
BLOCKS = 512

# With more windows than this, the rarest lengths, one in 32 pieces, are noted piece by piece: ranks
# of rare lengths run far ahead of the others or behind, and to find them would be to read it all.
FEW, RARE = 8, 32


class Partition:
    """The pieces in the seed's order of blocks; in their own order for a `seed` of None.

    Attributes:
        counts: int64 [longest + 1], how many pieces have each length.
    """

    def __init__(self, pieces: Pieces, window: int, seed: int | None):
        self._pieces = pieces
        # Pieces in a block, as a power of two.
        self._shift = min(BLOCK, max(window // BLOCKS, 1)).bit_length() - 1
        blocks = np.arange(-(-len(pieces) >> self._shift))
        if seed is not None:
            blocks = permutation(random_bits(seed, Purpose.PARTITION, len(blocks)))
        # A unit's counts take as much memory as an eighth of its lengths, at the most.
        unit = max(UNIT, 8 * (pieces.longest + 1) >> self._shift)
        self._units = [blocks[at : at + unit] for at in range(0, len(blocks), unit)]
        size = pieces.longest + 1
        self._number = np.uint32 if len(pieces) < 1 << 32 else np.int64
        # _before[u]: the rank of the first piece of each length in unit u; last, all counts.
        self._before = np.zeros((len(self._units) + 1, size), self._number)
        self._rare = np.zeros(size, bool)
        if len(pieces) > FEW * window:
            self._rare = self._rarest(size)
        noted = []
        for number in range(len(self._units)):
            lengths = self._read(number)
            counted = np.bincount(lengths, minlength=size)
            np.add(self._before[number], counted, out=self._before[number + 1], casting="unsafe")
            noted.append(self._rare_pieces(number, lengths))
        self.counts = self._before[-1].astype(np.int64)
        self._start, self._noted = self._by_rank(noted)
        # The rest of the last block is read as length 0.
        self.counts[0] -= (len(blocks) << self._shift) - len(pieces)

    def _read(self, unit: int) -> np.ndarray:
        return self._pieces.blocks(self._units[unit], 1 << self._shift).ravel()

    def _ids(self, unit: int, places: np.ndarray) -> np.ndarray:
        """The pieces at some places of a unit."""
        begin = (self._units[unit] << self._shift).astype(self._number)
        return begin[places >> self._shift] + (places & ((1 << self._shift) - 1)).astype(
            self._number
        )

    # ---- rare lengths

    def _rarest(self, size: int) -> np.ndarray:
        """Which lengths are rare, judged by the first units: bool [size]."""
        seen = np.zeros(size, np.int64)
        for unit in range(-(-len(self._units) // 64)):
            seen += np.bincount(self._read(unit), minlength=size)
        order = np.argsort(seen, kind="stable")
        rare = np.zeros(size, bool)
        rare[order[np.cumsum(seen[order]) <= seen.sum() // RARE]] = True
        rare[0] = False
        return rare

    def _rare_pieces(self, unit: int, lengths: np.ndarray) -> np.ndarray:
        """The unit's pieces of rare lengths, by length, in order inside each."""
        places = _outside_largest_gap(lengths, np.flatnonzero(self._rare))
        places = np.arange(len(lengths)) if places is None else places
        places = places[self._rare[lengths[places]]]
        places = places[sort_by_group(lengths[places], None)]
        return self._ids(unit, places)

    def _by_rank(self, noted: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Where the pieces of each rare length start, and all of them, by length and rank."""
        rare = np.flatnonzero(self._rare)
        start = np.zeros(len(self.counts), np.int64)
        start[rare] = np.cumsum(self.counts[rare]) - self.counts[rare]
        ordered = np.empty(int(self.counts[rare].sum()), self._number)
        for unit, pieces in enumerate(noted):
            here, after = (self._before[unit + i, rare].astype(np.int64) for i in (0, 1))
            ordered[_runs(start[rare] + here, after - here)] = pieces
        return start, ordered

    # ---- windows

    def members(self, first: np.ndarray, share: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The pieces of ranks `first` to `first + share` of each length, and their lengths.

        Args:
            first: int64 [longest + 1].
            share: int64 [longest + 1]; for length 0 it must be 0.
        """
        rare = np.flatnonzero(self._rare)
        noted = self._noted[_runs(self._start[rare] + first[rare], share[rare])]
        found = [(noted, np.repeat(rare.astype(np.uint32), share[rare]))]
        wanted = np.flatnonzero((share > 0) & ~self._rare)
        if len(wanted):
            last = first + share
            begin, end = self._unit_of(first, wanted), self._unit_of(last - 1, wanted)
            found += [
                self._members(unit, wanted[(begin <= unit) & (unit <= end)], first, last)
                for unit in range(int(begin.min()), int(end.max()) + 1)
            ]
        pieces, lengths = (np.concatenate(each) for each in zip(*found, strict=True))
        assert len(pieces) == share.sum(), "every rank has a piece"
        return pieces, lengths

    def _unit_of(self, rank: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """The unit that holds the piece of `rank` of each wanted length, by bisection."""
        low = np.zeros(len(wanted), np.int64)
        high = np.full(len(wanted), len(self._units))
        while (apart := high - low > 1).any():
            middle = (low + high) // 2
            reached = self._before[middle, wanted] <= rank[wanted]
            low = np.where(apart & reached, middle, low)
            high = np.where(apart & ~reached, middle, high)
        return low

    def _members(self, unit: int, wanted: np.ndarray, first: np.ndarray, last: np.ndarray):
        """The unit's pieces of the wanted lengths and ranks, and their lengths."""
        if not len(wanted):
            return np.zeros(0, self._number), np.zeros(0, np.uint32)
        here, after = (self._before[unit + i, wanted].astype(np.int64) for i in (0, 1))
        low, high = np.maximum(first[wanted] - here, 0), np.minimum(last[wanted], after) - here
        # Of each length: 0 none of the unit's pieces, 1 all of them, 2 those of ranks low to high.
        taken = np.zeros(len(first), np.uint8)
        taken[wanted] = np.where(high - low == after - here, 1, 2) * (high > low)
        lengths = self._read(unit)
        places = _outside_largest_gap(lengths, np.flatnonzero(taken))
        if places is not None:
            lengths = lengths[places]
        how = taken.take(lengths)
        chosen = np.flatnonzero(how != 0)
        how, sizes = how[chosen], lengths[chosen].astype(np.uint32)
        places = chosen if places is None else places[chosen]
        part = np.flatnonzero(how == 2)
        if len(part):
            bounds = np.zeros((2, len(first)), np.int64)
            bounds[:, wanted] = low, high
            rank, size = _ranks(sizes[part]), sizes[part]
            stays = np.ones(len(places), bool)
            stays[part] = (rank >= bounds[0, size]) & (rank < bounds[1, size])
            places, sizes = places[stays], sizes[stays]
        return self._ids(unit, places), sizes


def _outside_largest_gap(lengths: np.ndarray, wanted: np.ndarray) -> np.ndarray | None:
    """The places whose length is not in the largest gap between wanted ones; None for all.

    Where rare lengths alone are wanted, long ones above all, one comparison leaves few places to
    look at more closely.
    """
    if not len(wanted):
        return np.zeros(0, np.int64)
    edges = np.concatenate([[0], wanted])
    widest = int(np.argmax(np.diff(edges)))
    low, high = int(edges[widest]), int(edges[widest + 1])
    if high - low < len(wanted):
        return None
    return np.flatnonzero((lengths <= low) | (lengths >= high))


def _runs(first: np.ndarray, times: np.ndarray) -> np.ndarray:
    """`times` numbers from each `first` on.

    >>> _runs(np.array([5, 0, 9]), np.array([2, 3, 0])).tolist()
    [5, 6, 0, 1, 2]
    """
    before = np.cumsum(times) - times
    return np.repeat(first - before, times) + np.arange(int(times.sum()))


def _ranks(sizes: np.ndarray) -> np.ndarray:
    """How many equal sizes come before each.

    >>> _ranks(np.array([7, 3, 7, 7])).tolist()
    [0, 0, 1, 2]
    """
    order = sort_by_group(sizes, None)
    ordered = sizes[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    ranks = np.empty(len(sizes), np.int64)
    ranks[order] = np.arange(len(sizes)) - np.repeat(starts, np.diff(starts, append=len(sizes)))
    return ranks
