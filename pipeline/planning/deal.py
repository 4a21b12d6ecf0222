"""The deal: the order of the rows of a window, such that all batches are alike.

Best fit puts segments of one length together: some rows have very many short segments, and others
have a few long ones. In batches of random rows, the mean length of a segment then varies more than
in batches of random segments. So each batch gets rows with many, some and few segments. Which rows
these are is random.
"""

from collections.abc import Callable

import numpy as np

from pipeline.planning.order import Purpose, permutation, shuffle, sort_by_group

# The most rows of a batch that make up for its other rows; more of them change little.
EVENING = 4
# Rows that are alike together where a plan takes any number of rows. A batch that begins or ends
# within such a group differs from its neighbour: with longer groups, by more.
GROUP = 4


def deal(
    segments: np.ndarray, rows_per_batch: int | None, draw: Callable[[Purpose, int], np.ndarray]
) -> np.ndarray:
    """An order of rows whose batches have about the same number of segments: int64 [rows].

    Rows are divided into as many strata as a batch has rows, by their number of segments, and each
    batch gets one row of each stratum. The three quarters with the fewest segments are one stratum:
    these rows differ less in segments than in the cost of attention, and if each batch had one of
    the costliest, all would take as long. Rows of a stratum are dealt at random, except in the last
    ones: there the batch with the fewest segments so far gets the row with the most.

    `segments` has the number of segments of each row, ascending. Without `rows_per_batch`, a plan
    takes any number of rows at a time: each `GROUP` rows are then a batch, in random order.
    `draw(purpose, n)` returns n random uint64.
    """
    if rows_per_batch is None:
        order = deal(segments, GROUP, draw)
        whole = len(order) // GROUP * GROUP
        bits = draw(Purpose.GROUPS, whole).reshape(-1, GROUP)
        order[:whole] = shuffle(order[:whole].reshape(-1, GROUP), bits).ravel()
        return order
    rows = len(segments)
    full = rows // rows_per_batch  # batches
    evening = min(EVENING, rows_per_batch // 4)  # rows of each batch
    bits = draw(Purpose.ROWS, rows + evening * full + 1)
    if not full or rows_per_batch == 1 or segments[0] == segments[-1]:
        return permutation(bits[:rows])
    # Each stratum has a row for each full batch, and some have one more for the last batch: the row
    # with number `spare` in it.
    high, low = divmod(int(bits[-1]), 1 << 32)
    edges = (np.arange(rows_per_batch + 1) * rows + high % rows_per_batch) // rows_per_batch
    more, spare = np.diff(edges) - full, low % (full + 1)
    numbers = np.arange(full)
    numbers = np.stack([numbers, numbers + (numbers >= spare)])[more]
    numbers += edges[:-1, None]
    random = bits[: full * rows_per_batch].reshape(rows_per_batch, full)
    most = 3 * rows_per_batch // 4
    pool = shuffle(numbers[:most].ravel(), random[:most].ravel()).reshape(most, full)
    dealt = np.concatenate([pool, shuffle(numbers[most:], random[most:])])
    total = segments[dealt[: rows_per_batch - evening]].sum(axis=0)
    last = dealt[rows_per_batch - evening :]
    for row, tie in zip(last[::-1], bits[rows:-1].reshape(-1, full), strict=True):
        row[sort_by_group(total, tie)] = np.sort(row)[::-1]
        total += segments[row]
    return np.concatenate([dealt.T.ravel(), edges[:-1][more > 0] + spare])
