"""Ways to put several examples into a row: concatenated and split, or packed into open rows."""

from collections.abc import Callable, Sequence

import numpy as np

from pipeline.report.simulated import Simulated, dealt, sum_of_squares, total
from pipeline.report.stream import Stream

# Large arrays are walked in parts of this many documents.
PART = 1 << 22


def concatenate_and_split(stream: Stream, *, rows: int, length: int) -> Simulated:
    """All documents one after another, cut every `length` positions; `rows` in a batch.

    To go on, the document that the last row ended in is read again.
    """
    start = cut = squares = 0
    for first in range(0, len(stream.documents), PART):
        ends = start + np.cumsum(stream.documents[first : first + PART], dtype=np.int64)
        starts = np.concatenate([[start], ends[:-1]])
        start = int(ends[-1])
        first_row, last_row = starts // length, (ends - 1) // length
        several = last_row > first_row
        cut += int(np.count_nonzero(several))
        squares += sum_of_squares((ends - starts)[~several])
        head = length - starts[several] % length
        tail = (ends[several] - 1) % length + 1
        squares += sum_of_squares(head) + sum_of_squares(tail)
        squares += int((last_row - first_row - 1)[several].sum()) * length**2
    sizes = dealt(-(-start // length), rows)
    return Simulated(
        rows=sizes,
        lengths=np.full(len(sizes), length, np.int64),
        tokens=start,
        squares=squares,
        cut=cut,
        reread=min(cut, 1),
    )


def first_fit(stream: Stream, *, rows: int, length: int, open_rows: int) -> Simulated:
    """Each example goes into the first of `open_rows` rows that has room for it.

    When none has, all are handed out and as many are opened anew, as Grain's
    `FirstFitPackIterDataset` does. To go on, all examples of the open rows are packed again.
    """
    return _packed(stream, rows, length, _first_fit(stream.pieces.tolist(), length, open_rows))


def best_fit(stream: Stream, *, rows: int, length: int, open_rows: int) -> Simulated:
    """As `first_fit`, but into the row that it leaves least room in: `BestFitPackIterDataset`."""
    return _packed(stream, rows, length, _best_fit(stream.pieces.tolist(), length, open_rows))


PACKERS: dict[str, Callable[..., Simulated]] = {"first fit": first_fit, "best fit": best_fit}


def _packed(stream: Stream, rows: int, length: int, groups: tuple[int, int]) -> Simulated:
    used, largest = groups
    sizes = dealt(used, rows)
    return Simulated(
        rows=sizes,
        lengths=np.full(len(sizes), length, np.int64),
        tokens=total(stream.pieces),
        squares=sum_of_squares(stream.pieces),
        cut=stream.cut,
        reread=largest,
    )


def _first_fit(sizes: Sequence[int], length: int, open_rows: int) -> tuple[int, int]:
    """Rows used, and the most examples that were in the open rows together.

    The rows are leaves of a tree whose nodes hold the most room below them, so the first row with
    room is found in the logarithm of their number.
    """
    leaves = 1 << (open_rows - 1).bit_length()
    empty = [0] * (2 * leaves)
    empty[leaves : leaves + open_rows] = [length] * open_rows
    for node in range(leaves - 1, 0, -1):
        empty[node] = max(empty[2 * node], empty[2 * node + 1])
    room = empty.copy()
    used = largest = begun = 0
    for number, size in enumerate(sizes):
        if room[1] < size:
            used += _used(room, leaves, open_rows, length)
            largest, begun = max(largest, number - begun), number
            room = empty.copy()
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < size:
                node += 1
        room[node] -= size
        while node > 1:
            node //= 2
            most = max(room[2 * node], room[2 * node + 1])
            if room[node] == most:
                break
            room[node] = most
    return used + _used(room, leaves, open_rows, length), max(largest, len(sizes) - begun)


def _used(room: list[int], leaves: int, open_rows: int, length: int) -> int:
    return open_rows - room[leaves : leaves + open_rows].count(length)


def _best_fit(sizes: Sequence[int], length: int, open_rows: int) -> tuple[int, int]:
    """As `_first_fit`. Rows with equal room are alike: bit r of `rooms` says that there is one."""
    number_of = [0] * (length + 1)
    number_of[length], rooms = open_rows, 1 << length
    used = largest = begun = 0
    for number, size in enumerate(sizes):
        fitting = rooms >> size
        if not fitting:
            used += open_rows - number_of[length]
            largest, begun = max(largest, number - begun), number
            number_of = [0] * (length + 1)
            number_of[length], rooms = open_rows, 1 << length
            fitting = rooms >> size
        left = (fitting & -fitting).bit_length() - 1
        number_of[left + size] -= 1
        if not number_of[left + size]:
            rooms ^= 1 << (left + size)
        number_of[left] += 1
        rooms |= 1 << left
    return used + open_rows - number_of[length], max(largest, len(sizes) - begun)
