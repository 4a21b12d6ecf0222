"""Orders: seeded shuffles, even spacing, quotas, and rows whose slices cost the same.

Randomness is the raw output of a counter-based generator, Philox (Salmon et al., 2011), whose
stream NumPy never changes; orders come from sorting keys that are all different, so that no two
sorting algorithms can disagree: they are the same on every machine and under every NumPy version.
"""

import enum
import functools
import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np


class Purpose(enum.IntEnum):
    """What a random stream is for; streams of different purposes are independent."""

    PARTITION = 1  # which window an example belongs to
    WINDOWS = 2  # the order of windows in an epoch
    EXAMPLES = 3  # which example takes which slot
    ROWS = 4  # which rows share a batch
    PHASE = 5  # where each bucket's batches fall


def random_bits(seed: int, purpose: Purpose, count: int, *, epoch=0, window=0, bucket=0):
    """`count` random uint64, a pure function of the arguments."""
    generator = np.random.Philox(
        key=np.array([seed, purpose], np.uint64),
        counter=np.array([0, bucket, window, epoch], np.uint64),
    )
    return generator.random_raw(count)


def sort_by_group(groups: np.ndarray, bits: np.ndarray | None) -> np.ndarray:
    """The indices that sort `groups`, in random order inside each group: int64 [n].

    Without `bits`, indices ascend inside a group.

    >>> sort_by_group(np.array([2, 1, 2, 1]), None).tolist()
    [1, 3, 0, 2]

    Args:
        groups: unsigned or non-negative integers, shape [n].
        bits: random uint64 [n], or None.
    """
    count = len(groups)
    index_bits = max(1, (count - 1).bit_length())
    group_bits = int(groups.max(initial=0)).bit_length()
    # One key holds group, randomness and index, from the highest bits to the lowest. The index
    # makes keys unique; 64 bits leave over 20 random ones for two million examples of length
    # below two million, and equal random bits only mean that two neighbours keep their order.
    keys = np.arange(count, dtype=np.uint64)
    if bits is not None:
        keys |= bits >> np.uint64(group_bits + index_bits) << np.uint64(index_bits)
    if group_bits:
        keys |= groups.astype(np.uint64) << np.uint64(64 - group_bits)
    keys.sort()
    keys &= np.uint64((1 << index_bits) - 1)
    return keys.view(np.int64)


def permutation(bits: np.ndarray) -> np.ndarray:
    """A random order of `len(bits)` things: int64 [n]."""
    return sort_by_group(np.zeros(len(bits), np.uint8), bits)


def interleave(numbers: np.ndarray, offsets: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """So many things of each kind, evenly spread: the kind of each, and which of its kind it is.

    >>> [part.tolist() for part in interleave(np.array([2, 1]), [1 << 23, 1 << 23])]
    [[0, 1, 0], [0, 0, 1]]

    Args:
        numbers: how many there are of each kind.
        offsets: 0 to 2**24 for each kind. Thing `k` of `n` falls at `(k + offset / 2**24) / n`.

    Returns:
        Two int64 arrays of `sum(numbers)`.
    """
    counts = numbers.tolist()
    kind = np.repeat(np.arange(len(counts)), numbers)
    number = np.concatenate([np.arange(count) for count in counts])
    when = [
        (((np.arange(count) << 24) + offset) << 14) // max(count, 1)
        for count, offset in zip(counts, offsets, strict=True)
    ]
    order = np.argsort(np.concatenate(when), kind="stable")
    return kind[order], number[order]


class Quota:
    """Deals places 0, 1, 2, … to takers, so that each has had its share at every place.

    Like seats given to parties: among any first `n` places each taker has its share of `n`,
    rounded. Takers are the leaves of a tree, the two rarest joined first (Huffman, 1952), and at
    each node the places are divided in two by rounding; so how many places came before any one is
    a walk down the tree, with whole numbers only: exact for shares of any size, at any distance.

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

    def taker(self, place: int) -> int:
        """Who has `place`."""
        node = self._root
        while not isinstance(node, int):
            left, right, share, whole = node
            to_left = (2 * place * share + whole) // (2 * whole)
            goes_left = (2 * (place + 1) * share + whole) // (2 * whole) > to_left
            node, place = (left, to_left) if goes_left else (right, place - to_left)
        return node


@functools.cache
def even_order(rows: int) -> np.ndarray:
    """Which rank, counted from the costliest row, stands in which row: int64 [rows].

    For four rows the halves hold ranks {0, 3} and {1, 2}.

    >>> even_order(4).tolist()
    [0, 3, 1, 2]
    """
    groups = np.arange(rows)[None]
    left = rows
    while left > 1:
        factor = next(p for p in range(2, left + 1) if left % p == 0)
        left //= factor
        groups = groups.reshape(-1, left, factor)
        groups[:, 1::2] = groups[:, 1::2, ::-1]
        groups = groups.transpose(0, 2, 1).reshape(-1, left)
    return groups.ravel()


def balance(costs: np.ndarray, total: int) -> tuple[np.ndarray, np.ndarray]:
    """An even order of rows that cost so much, and the place of each in a batch of `total` rows.

    Places that no row has are empty rows; they cost nothing and are spread like cheap ones.

    Args:
        costs: what each row costs; at most `total` of them.
        total: rows in the batch.
    """
    ranked = (-costs).argsort(kind="stable")
    rank = even_order(total)
    if len(costs) == total:
        return ranked[rank], np.arange(total)
    places = (rank < len(costs)).nonzero()[0]
    return ranked[rank[places]], places


def imbalance(segments: np.ndarray, rows: int, hosts: int) -> float:
    """The work of the busiest host in a batch, as a multiple of the mean: at least 1.

    >>> imbalance(np.array([[0, 0, 0, 3], [1, 1, 0, 1]]), rows=2, hosts=2)  # 9 against 1
    1.8

    Args:
        segments: int64 [n, 4] or [n, 5], as in `PlannedBatch`.
        rows: rows of the batch.
        hosts: how many share them, in contiguous slices; divides `rows`.
    """
    squares = (segments[:, 3:] ** 2.0).sum(axis=1)
    costs = np.bincount(segments[:, 0], weights=squares, minlength=rows)
    shares = costs.reshape(hosts, -1).sum(axis=1)
    return float(shares.max() / shares.mean())
