"""Draws: random bits for the places of examples, a pure function of seed, epoch and example.

Each example has a stream of its own, SplitMix64 (Steele, Lea and Flood, 2014), and place `k` has
number `k` of the stream. So bits do not depend on which places are drawn together, or when.
"""

from collections.abc import Iterator

import numpy as np

from pipeline.planning.layout import ranges

GAMMA = np.uint64(0x9E3779B97F4A7C15)

# Examples that are drawn together, where all of a corpus are; they take some 10 MiB.
EXAMPLES = 1 << 18


def blocks(count: int) -> Iterator[np.ndarray]:
    """The numbers of `count` examples, in order, `EXAMPLES` at a time: int64; at least one array.

    >>> [block.tolist() for block in blocks(3)]
    [[0, 1, 2]]
    """
    for first in range(0, max(count, 1), EXAMPLES):
        yield np.arange(first, min(first + EXAMPLES, count))


def mix(values: np.ndarray) -> np.ndarray:
    """The output function of SplitMix64: uint64 to uint64, one to one; overwrites `values`.

    >>> [hex(bits) for bits in mix(np.arange(1, 3, dtype=np.uint64) * GAMMA).tolist()]
    ['0xe220a8397b1dcdaf', '0x6e789e6aa1b965f4']
    """
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def draw(
    seed: int, epoch: int, examples: np.ndarray, starts: np.ndarray, sizes: np.ndarray
) -> np.ndarray:
    """Random bits for places `starts` to `starts + sizes` of each example: uint64, in order.

    >>> whole = draw(0, 3, np.array([7]), np.array([0]), np.array([5]))
    >>> pieces = draw(0, 3, np.array([7, 7]), np.array([3, 0]), np.array([2, 3]))
    >>> whole[3:].tolist() == pieces[:2].tolist(), whole[:3].tolist() == pieces[2:].tolist()
    (True, True)
    """
    keys = np.array([seed], np.uint64)
    for number in (np.array([epoch]), examples):
        keys = mix(keys + GAMMA) + number.astype(np.uint64) * GAMMA
    keys = mix(keys + GAMMA)
    states = ranges(starts, sizes).view(np.uint64) + np.uint64(1)
    states *= GAMMA
    states += np.repeat(keys, sizes)
    return mix(states)


def hash_numbers(numbers: np.ndarray) -> np.ndarray:
    """A hash of each number of an example, by which `AnyCorpus.split` holds it out: uint64 [n].

    >>> np.flatnonzero(hash_numbers(np.arange(20)) < threshold(0.3)).tolist()
    [2, 4, 6, 8, 18]
    """
    return mix((numbers.astype(np.uint64) + np.uint64(1)) * GAMMA)


def hash_rows(values: np.ndarray, salt: int = 0) -> np.ndarray:
    """A hash of each row of numbers `[n, …]`, whatever their dtype: uint64 [n]; one by each salt.

    >>> a, b = hash_rows(np.array([[3, 4]], np.uint8)), hash_rows(np.array([[3, 4]], np.int32))
    >>> int(a[0]) == int(b[0]) != int(hash_rows(np.array([[4, 3]]))[0])
    True
    """
    columns = values.reshape(len(values), -1)
    is_whole = columns.dtype.kind in "biu"
    # Equal floats have equal bits, but for -0.0, to which 0 is added.
    numbers = columns.astype(np.int64) if is_whole else columns.astype(np.float64) + 0.0
    hashes = np.zeros(len(values), np.uint64)
    for column in np.ascontiguousarray(numbers).view(np.uint64).T:
        hashes = mix(hashes + GAMMA) + column * GAMMA
    hashes = mix(hashes + GAMMA)
    return mix(hashes + np.array([salt], np.uint64) * GAMMA) if salt else hashes


def below(bits: np.ndarray, limit: int | np.ndarray) -> np.ndarray:
    """Random whole numbers below `limit` (at most 2**32, or one for each), from bits: int64."""
    return ((bits >> np.uint64(32)) * np.uint64(limit) >> np.uint64(32)).astype(np.int64)


def threshold(fraction: float) -> np.uint64:
    """The number that random bits are below with the probability `fraction`, itself below 1."""
    return np.uint64(int(fraction * 2**64))
