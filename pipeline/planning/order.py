"""Orders: seeded shuffles, and dealing rows to batches.

Random bits are the raw output of Philox, a counter-based generator (Salmon et al., 2011), whose
stream NumPy never changes. Orders come from sorting distinct keys, so that every sorting algorithm
gives the same result. Every order is therefore the same on every machine and NumPy version.
"""

import enum
import hashlib
from collections.abc import Callable

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
