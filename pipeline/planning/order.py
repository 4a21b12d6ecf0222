"""Orders: seeded shuffles, dealing rows to batches, quotas, and curricula.

Random bits are the raw output of Philox, a counter-based generator (Salmon et al., 2011), whose
stream NumPy never changes. Orders come from sorting distinct keys, so that every sorting algorithm
gives the same result. Every order is therefore the same on every machine and NumPy version.
"""

import enum
import hashlib
import heapq
import math
from collections.abc import Callable, Sequence

import numpy as np

# The most rows of a batch that even out its number of segments; more of them change little.
EVENING = 4
# Where a plan takes any number of rows at a time, groups of this many rows are evened out, not
# batches. A batch that begins or ends within a group is less even: with longer groups, by more.
GROUP = 4


class Purpose(enum.IntEnum):
    """The purpose of a random stream; streams of different purposes are independent."""

    WINDOWS = 1  # the window of each run of pieces
    ORDER = 2  # the order of windows in an epoch
    EXAMPLES = 3  # the pieces of each key
    ROWS = 4  # the rows of each batch
    BUCKETS = 5  # the bucket with which an epoch begins
    TIERS = 6  # the order of batches in a block of steps
    GROUPS = 7  # rows that a plan takes one by one
    SHARES = 8  # the files of each share
    MATCHED = 9  # the batches of the costliest rows of each share


def random_key(seed: int, *names: object) -> int:
    """The key of independent random bits for a seed and some names, below 2**64."""
    text = ":".join(map(repr, (seed, *names)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def random_bits(
    key: int, purpose: Purpose, count: int, *, epoch: int = 0, window: int = 0, bucket: int = 0
) -> np.ndarray:
    """`count` random uint64 numbers, a pure function of the arguments."""
    generator = np.random.Philox(
        key=np.array([key, purpose], np.uint64),
        counter=np.array([0, bucket, window, epoch], np.uint64),
    )
    return generator.random_raw(count)


def sort_by_group(groups: np.ndarray, bits: np.ndarray | None) -> np.ndarray:
    """The indices that sort `groups`, in random order within each group: int64 [n].

    `bits` are random uint64 [n]; without them, indices ascend within a group.

    >>> sort_by_group(np.array([2, 1, 2, 1]), None).tolist()
    [1, 3, 0, 2]
    """
    count = len(groups)
    index_bits = max(1, (count - 1).bit_length())
    group_bits = int(groups.max(initial=0)).bit_length()
    # A key has, from the highest bits to the lowest, the group, random bits and the index, which
    # makes keys distinct. With two million elements in two million groups, over 20 bits of 64 are
    # random; elements with equal random bits keep their order.
    keys = np.arange(count, dtype=np.uint64)
    if bits is not None:
        keys |= bits >> np.uint64(group_bits + index_bits) << np.uint64(index_bits)
    if group_bits:
        keys |= groups.astype(np.uint64) << np.uint64(64 - group_bits)
    keys.sort()
    keys &= np.uint64((1 << index_bits) - 1)
    return keys.view(np.int64)


def permutation(bits: np.ndarray) -> np.ndarray:
    """A random order of `len(bits)` elements: int64 [n]."""
    return shuffle(np.arange(len(bits)), bits)


def shuffle(numbers: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """Distinct non-negative numbers in random order along the last axis; `bits` as many uint64."""
    number_bits = int(numbers.max(initial=0)).bit_length()
    keys = bits >> np.uint64(number_bits)
    keys <<= np.uint64(number_bits)
    keys |= numbers.view(np.uint64)
    keys.sort()
    keys &= np.uint64((1 << number_bits) - 1)
    return keys.view(np.int64)


def deal(
    segments: np.ndarray,
    rows_per_batch: int | None,
    draw: Callable[[Purpose, int], np.ndarray],
    first: int = 0,
) -> np.ndarray:
    """An order of rows in which batches have about the same number of segments: int64 [rows].

    Best fit puts segments of one length together. In batches of random rows, the mean length of a
    segment then varies more than in batches of random segments.

    The `first` rows complete a batch that an earlier window began, and the last ones are too few
    for a batch: both are evenly spaced samples of all. The others are divided by their number of
    segments, which `segments` has, ascending, into as many strata as a batch has rows, and each
    batch gets one row of each stratum. The three quarters with the fewest segments are one stratum:
    if each batch had one of the costliest of them, every batch would take as long as the slowest.
    Rows of a stratum are dealt at random, except in the last strata: there the batch with the
    fewest segments so far gets the row with the most.

    If `rows_per_batch` is None, a plan takes any number of rows at a time: every `GROUP` rows then
    count as a batch, in random order. `draw(purpose, n)` returns n random uint64.
    """
    if rows_per_batch is None:
        order = deal(segments, GROUP, draw)
        whole = len(order) // GROUP * GROUP
        bits = draw(Purpose.GROUPS, whole).reshape(-1, GROUP)
        order[:whole] = shuffle(order[:whole].reshape(-1, GROUP), bits).ravel()
        return order
    first = min(first, len(segments))
    last = (len(segments) - first) % rows_per_batch
    bits, rows, samples = draw(Purpose.ROWS, len(segments)), np.arange(len(segments)), []
    for sample_bits in (bits[:first], bits[len(bits) - last :]):
        edges = np.arange(len(sample_bits) + 1) * len(rows) // max(len(sample_bits), 1)
        within = (sample_bits >> np.uint64(33)).astype(np.int64)
        places = edges[:-1] + (within * np.diff(edges) >> 31)
        samples.append(shuffle(rows[places], sample_bits << np.uint64(32)))
        rows = np.setdiff1d(rows, rows[places], assume_unique=True)
    strata = rows.reshape(rows_per_batch, -1)
    bits = bits[first : len(bits) - last].reshape(strata.shape)
    most = 3 * rows_per_batch // 4
    pool = shuffle(strata[:most].ravel(), bits[:most].ravel()).reshape(strata[:most].shape)
    dealt = np.concatenate([pool, shuffle(strata[most:], bits[most:])])
    even = max(rows_per_batch - EVENING, most)
    total = segments[dealt[:even]].sum(axis=0)
    for number in reversed(range(even, rows_per_batch)):
        dealt[number, sort_by_group(total, bits[number])] = strata[number, ::-1]
        total += segments[dealt[number]]
    return np.concatenate([samples[0], dealt.T.ravel(), samples[1]])


class Quota:
    """Distributes places 0, 1, 2, … over takers in fixed shares.

    Among the first `n` places, each taker has its share of `n`, to within a place or two. Takers
    are the leaves of a Huffman tree (Huffman, 1952), and each node divides its places in two by
    rounding. One walk down the tree counts the places before any place. It uses integers only, so
    it is exact for all shares and places. Shares are whole numbers of any unit.

    >>> quota = Quota([3, 1])
    >>> [quota.before(place) for place in range(1, 5)]
    [[1, 0], [2, 0], [2, 1], [3, 1]]

    A quota may continue where others ended: `owed` has the places that each taker is owed (below 0
    if it had too many), in units of 1 / `unit`. They are made up for as soon as possible.

    >>> [Quota([1, 1], owed=[-2, 2], unit=1).before(place) for place in range(1, 5)]
    [[0, 1], [0, 2], [0, 3], [0, 4]]

    It may also begin at the place `first` of such an order, and counts from there.
    """

    def __init__(
        self,
        shares: Sequence[int],
        owed: Sequence[int] | None = None,
        unit: int = 1,
        *,
        first: int = 0,
    ):
        common = math.gcd(*shares)
        self._takers = len(shares)
        # Nodes are numbered after the takers. A node has its left and right side, the share of the
        # left side and of both, and what is added before rounding down.
        self._nodes: list[tuple[int, int, int, int, int]] = []
        # An entry is a share, the least taker below a node, the node, and what it is owed. Equal
        # shares are ordered by taker, so that the tree is always the same.
        heap = [
            (share // common, taker, taker, owed[taker] if owed else 0)
            for taker, share in enumerate(shares)
            if share
        ]
        heapq.heapify(heap)
        while len(heap) > 1:
            right, left = heapq.heappop(heap), heapq.heappop(heap)
            both, due = left[0] + right[0], left[3] + right[3]
            # The places of the node include what it is owed, of which the left side has its share.
            more = (left[3] * both - due * left[0]) // unit if due or left[3] else 0
            node = self._takers + len(self._nodes)
            self._nodes.append((left[2], right[2], left[0], both, both // 2 + more))
            heapq.heappush(heap, (both, min(left[1], right[1]), node, due))
        self._root = heap[0][2] if heap else 0  # without shares, no place is looked up
        self._first, self._skipped = 0, [0] * self._takers  # places before the first one
        if first:
            self._first, self._skipped = first, self.before(first)

    def between(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        """The takers of places `begin` to `end`: (taker, places before `begin`, before `end`)."""
        ranges, takers, nodes = [], self._takers, self._nodes
        todo = [(self._root, self._first + begin, self._first + end)]
        while todo:
            node, begin, end = todo.pop()
            if node < takers:
                skipped = self._skipped[node]
                ranges.append((node, begin - skipped, end - skipped))
                continue
            left, right, share, whole, more = nodes[node - takers]
            low, high = (begin * share + more) // whole, (end * share + more) // whole
            low = 0 if low < 0 else begin if low > begin else low
            high = 0 if high < 0 else end if high > end else high
            if low < high:
                todo.append((left, low, high))
            if begin - low < end - high:
                todo.append((right, begin - low, end - high))
        ranges.sort()
        return ranges

    def before(self, place: int) -> list[int]:
        """The number of places below `place` that each taker has; the sum is `place`."""
        counts, takers, nodes = [0] * self._takers, self._takers, self._nodes
        todo = [(self._root, self._first + place)]
        while todo:
            node, number = todo.pop()
            if node < takers:
                counts[node] = number - self._skipped[node]
            elif number:
                left, right, share, whole, more = nodes[node - takers]
                to_left = (number * share + more) // whole
                to_left = 0 if to_left < 0 else number if to_left > number else to_left
                todo += (left, to_left), (right, number - to_left)
        return counts


class ShortFirst:
    """Distributes places as a quota does, but in each cycle takers come in ascending order.

    `cycles` cycles have `places` places, as evenly as whole numbers allow. A cycle has as many
    places of each taker as the quota gives it there.

    >>> order = ShortFirst(Quota([4, 2]), places=6, cycles=2)
    >>> [order.between(place, place + 1)[0][0] for place in range(6)]
    [0, 0, 1, 0, 0, 1]

    It may go on after the first `done` places of a cycle, and end before the place `end`:

    >>> order = ShortFirst(Quota([2, 1]), places=6, cycles=2, done=1, end=3)
    >>> [order.between(place, place + 1)[0][0] for place in range(3)], order.done(3)
    ([0, 1, 0], 1)
    """

    def __init__(
        self, quota: Quota, *, places: int, cycles: int, done: int = 0, end: int | None = None
    ):
        self._quota, self._places, self._cycles = quota, places, cycles
        self._done, self._end = done, end

    def _around(self, place: int) -> tuple[int, int]:
        """The first place of the cycle of a place, perhaps below 0, and one past its last one."""
        number = ((place + self._done + 1) * self._cycles - 1) // self._places
        begin, end = (n * self._places // self._cycles - self._done for n in (number, number + 1))
        return begin, end if self._end is None else min(end, self._end)

    def done(self, place: int) -> int:
        """The number of places before a place in its cycle."""
        return place - self._around(place)[0]

    def between(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        """See `Quota.between`."""
        both = zip(self.before(begin), self.before(end), strict=True)
        return [(taker, low, high) for taker, (low, high) in enumerate(both) if low < high]

    def before(self, place: int) -> list[int]:
        """See `Quota.before`."""
        begin, end = self._around(place)
        counts, all_counts = self._quota.before(max(begin, 0)), self._quota.before(end)
        left = place - max(begin, 0)
        for taker, count in enumerate(all_counts):
            more = min(count - counts[taker], left)
            counts[taker], left = counts[taker] + more, left - more
        return counts
