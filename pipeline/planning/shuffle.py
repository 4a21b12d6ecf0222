"""Seeded order that is the same on every machine and under every NumPy version.

Randomness is the raw output of a counter-based generator, Philox (Salmon et al., 2011), whose
stream NumPy never changes; orders come from sorting keys that are all different, so that no two
sorting algorithms can disagree.
"""

import enum

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
