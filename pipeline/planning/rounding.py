"""Rounding: from a linear program's fractional rows to whole rows of segments."""

import numpy as np

from pipeline.planning.columns import Columns
from pipeline.planning.patterns import Pattern

# Rows are rounded in rounds; after each, the program is solved again for the remaining segments.
# A round makes at least this share of the rows, and may add new patterns this often.
SHARE = 0.2
ITERATIONS = 2
ROUNDS = 60

# A row may have this many more positions of padding than its pattern. A pattern that would lose
# more, because its segments are used up, waits for the next round. When a round makes no row, the
# limit is multiplied by four.
LOSS = 2

# Rounding stops when this share of the rows remains; best fit packs the rest as well.
ENOUGH = 1e-4


class SegmentStock:
    """The number of segments of each length that have no row yet, and the rows of each bucket."""

    def __init__(self, counts: np.ndarray, rooms: np.ndarray, most: int | None):
        self.counts = counts.tolist()
        self.counts[0] = 0
        self.patterns: list[list[Pattern]] = [[] for _ in rooms]
        self._rooms, self._most = rooms.tolist(), most
        # Bit n is set if segments of length n remain.
        self._lengths = sum(1 << size for size, count in enumerate(self.counts) if count)

    def place(self, places: list[tuple[int, int]], index: int, rows: int, loss: int) -> int:
        """Fills up to `rows` rows of bucket number `index`; returns how many it filled.

        `places` has lengths, the longest first, each with its number of places in a row. A place
        takes the longest segment that fits into it; more such segments fill the rest. A row has at
        most `loss` positions of padding beyond those that `places` leave.
        """
        padding = max(self._rooms[index] - sum(size * times for size, times in places), 0)
        done = 0
        while done < rows:
            row, room = self._fill_row(places, self._rooms[index])
            if not row or room > padding + loss:
                break
            times = min(rows - done, min(self.counts[size] // many for size, many in row.items()))
            for size, many in row.items():
                self.counts[size] -= times * many
                if not self.counts[size]:
                    self._lengths &= ~(1 << size)
            self.patterns[index].append(Pattern.of_lengths(row.items(), times))
            done += times
        return done

    def _fill_row(self, places: list[tuple[int, int]], room: int) -> tuple[dict[int, int], int]:
        """The segments of one row, and the room that remains in it."""
        row: dict[int, int] = {}
        segments = self._most or room
        for size, times in [*places, (room, segments)]:
            for _ in range(min(times, segments)):
                longest = self._find_longest(min(size, room), row)
                if not longest:
                    break
                row[longest] = row.get(longest, 0) + 1
                room -= longest
                segments -= 1
        return row, room

    def _find_longest(self, size: int, row: dict[int, int]) -> int:
        """The longest segment of at most `size` that remains besides the row's; 0 for none."""
        lengths = self._lengths & ((1 << (size + 1)) - 1)
        while lengths:
            longest = lengths.bit_length() - 1
            if self.counts[longest] > row.get(longest, 0):
                return longest
            lengths &= ~(1 << longest)
        return 0


def round_rows(columns: Columns, counts: np.ndarray) -> list[list[Pattern]]:
    """Patterns of each bucket, with whole rows, at nearly the cost of the program's solution.

    Each round makes the whole part of the program's rows, then one row for each of the largest
    fractions. Segments may remain at the end.
    """
    stock = SegmentStock(counts, columns.rooms, columns.most)
    loss, total = LOSS, 0.0
    for _ in range(ROUNDS):
        demand = columns.demand(np.array(stock.counts))
        if not demand.any():
            break
        rows = columns.solve(demand, ITERATIONS)
        total = max(total, rows.sum())
        if rows.sum() < ENOUGH * total:
            break
        done = 0
        whole = np.floor(rows + 1e-6).astype(np.int64)
        for column in np.flatnonzero(whole)[::-1]:
            done += stock.place(*columns.places(column), int(whole[column]), loss)
        fraction = rows - whole
        for column in np.argsort(-fraction, kind="stable"):
            if done >= max(SHARE * rows.sum(), 1) or fraction[column] <= 1e-6:
                break
            done += stock.place(*columns.places(column), 1, loss)
        if not done:
            loss *= 4
            if loss > columns.rooms[-1]:
                break
    return stock.patterns
