"""Tails: buckets of equal length with fewer rows, for the last rows of a pass.

Full batches use the bucket with the most rows. The last rows would fill only a part of such a
batch, and its empty rows would cost as much as others. Tails hold them.
"""

import functools
import itertools
from collections.abc import Sequence

from pipeline.planning.bucket import Bucket


def group_tails(buckets: Sequence[Bucket]) -> tuple[tuple[Bucket, ...], ...]:
    """The buckets of each length: the one with the most rows, and its tails.

    >>> group_tails([Bucket(4, 16), Bucket(1, 16), Bucket(2, 32)])[0]
    (Bucket(rows=4, length=16), Bucket(rows=1, length=16))
    """
    return tuple(tuple(group) for _, group in itertools.groupby(buckets, lambda each: each.length))


def count_batches(rows: int, group: Sequence[Bucket]) -> list[int]:
    """The number of batches of each bucket of a group that hold `rows` rows.

    The last ones, too few for another batch of the first bucket, use the buckets that leave the
    fewest rows empty, and then the fewest batches.

    >>> count_batches(77, [Bucket(32, 9), Bucket(8, 9), Bucket(4, 9)])  # 13 as 8 + 8
    [2, 2, 0]
    """
    sizes = tuple(bucket.rows for bucket in group)
    whole, last = divmod(rows, sizes[0])
    if len(sizes) == 1:
        return [whole + (last > 0)]
    fewest = _fewest_batches(sizes)
    total = next(n for n in range(last, sizes[0] + 1) if fewest[n] is not None)
    counts = [0] * len(sizes)
    while total:
        # The first size, and so the largest, after which the fewest batches are one fewer.
        used = next(
            number
            for number, size in enumerate(sizes)
            if size <= total
            and (left := fewest[total - size]) is not None
            and left + 1 == fewest[total]
        )
        counts[used] += 1
        total -= sizes[used]
    counts[0] += whole
    return counts


def count_surplus(rows: int, group: Sequence[Bucket]) -> int:
    """The number of rows to remove from `rows` so that batches of a group have no empty row.

    >>> count_surplus(77, [Bucket(32, 9)]), count_surplus(77, [Bucket(32, 9), Bucket(8, 9)])
    (13, 5)
    """
    sizes = tuple(bucket.rows for bucket in group)
    last = rows % sizes[0]
    if len(sizes) == 1:
        return last
    fewest = _fewest_batches(sizes)
    return next(n for n in range(last + 1) if fewest[last - n] is not None)


@functools.lru_cache(maxsize=64)
def _fewest_batches(sizes: tuple[int, ...]) -> list[int | None]:
    """For each number of rows up to the first size, the fewest batches that they fill, or None."""
    found: list[int | None] = [0]
    for rows in range(1, sizes[0] + 1):
        before = [found[rows - size] for size in sizes if size <= rows]
        found.append(min((n + 1 for n in before if n is not None), default=None))
    return found
