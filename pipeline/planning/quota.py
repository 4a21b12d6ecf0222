"""Quotas: places that are distributed in fixed shares, evenly, or in ascending order by cycles."""

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Protocol


class Order(Protocol):
    """Distributes places 0, 1, 2, … over takers: each place has one."""

    def between(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        """The takers of places `begin` to `end`: (taker, places before `begin`, before `end`)."""
        ...

    def before(self, place: int) -> list[int]:
        """The number of places below `place` that each taker has; the sum is `place`."""
        ...

    def done(self, place: int) -> int:
        """The number of places before a place in its cycle; 0 if there are no cycles."""
        ...


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
        """See `Order`."""
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
        """See `Order`."""
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

    def done(self, place: int) -> int:
        """See `Order`."""
        return 0


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
        """See `Order`."""
        return place - self._around(place)[0]

    def between(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        """See `Order`."""
        both = zip(self.before(begin), self.before(end), strict=True)
        return [(taker, low, high) for taker, (low, high) in enumerate(both) if low < high]

    def before(self, place: int) -> list[int]:
        """See `Order`."""
        begin, end = self._around(place)
        counts, all_counts = self._quota.before(max(begin, 0)), self._quota.before(end)
        left = place - max(begin, 0)
        for taker, count in enumerate(all_counts):
            more = min(count - counts[taker], left)
            counts[taker], left = counts[taker] + more, left - more
        return counts


# What makes an order of each curriculum, from the quota that it keeps.
ORDERS: Mapping[str, type[ShortFirst]] = {"short_first": ShortFirst}
