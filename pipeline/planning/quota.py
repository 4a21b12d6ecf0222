"""Quota: numbered places dealt in fixed shares, evenly, and found in closed form.

Like seats given to parties: among any first `n` places each taker has its share of `n`, rounded.
Takers are the leaves of a tree, the two rarest joined first (Huffman, 1952), and at each node the
places are divided in two by rounding; so how many places came before any one is a walk down the
tree, with whole numbers only: exact for shares of any size, at any distance.
"""

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any


class Quota:
    """Deals places 0, 1, 2, … to takers, so that each has had its share at every place.

    >>> quota = Quota([3, 1])
    >>> [quota.before(place) for place in range(1, 5)]
    [[1, 0], [2, 0], [2, 1], [3, 1]]

    Args:
        shares: what is due to each taker, in any unit; those of 0 get nothing, and one is above.
    """

    def __init__(self, shares: Sequence[int | Fraction]):
        exact = [Fraction(share) for share in shares]
        unit = math.lcm(*(share.denominator for share in exact))
        whole = [int(share * unit) for share in exact]
        common = math.gcd(*whole)
        self._takers = len(whole)
        # A node is the number of a taker, or two nodes and which share of its places goes to the
        # left one, as numerator and denominator. Ties go by number: the tree is always the same.
        heap: list[tuple[int, int, Any]]
        heap = [(share // common, taker, taker) for taker, share in enumerate(whole) if share]
        heapq.heapify(heap)
        while len(heap) > 1:
            right, left = heapq.heappop(heap), heapq.heappop(heap)
            both = left[0] + right[0]
            node = left[2], right[2], left[0], both
            heapq.heappush(heap, (both, min(left[1], right[1]), node))
        self._root = heap[0][2]

    def before(self, place: int) -> list[int]:
        """How many of the places below `place` each taker has; they add up to `place`."""
        counts = [0] * self._takers
        todo = [(self._root, place)]
        while todo:
            node, number = todo.pop()
            if isinstance(node, int):
                counts[node] = number
            else:
                left, right, share, whole = node
                to_left = (2 * number * share + whole) // (2 * whole)  # rounded, halves up
                todo += (left, to_left), (right, number - to_left)
        return counts
