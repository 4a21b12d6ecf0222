"""From fractions of rows to whole ones: what a linear program found, made into patterns."""

import numpy as np

from pipeline.planning.optimal import Columns
from pipeline.planning.packing import Pattern

# After each round of whole rows the program is solved again for what is left. A round takes at
# least this share of the rows, and may ask for new patterns this often.
SHARE = 0.2
ITERATIONS = 2
ROUNDS = 60

# A row may end up with this many more positions of padding than its pattern has; patterns that
# would lose more, because their segments are used up, wait for the next round. When none is left
# that loses so little, the figure is multiplied by four.
LOSS = 2

# Once this share of the rows is all that is left, best fit does as well.
ENOUGH = 1e-4


class Stock:
    """The segments that are still to be placed, and the rows made so far."""

    def __init__(self, counts: np.ndarray, rooms: np.ndarray, most: int | None):
        self.left = counts.tolist()
        self.left[0] = 0
        self.patterns: list[list[Pattern]] = [[] for _ in rooms]
        self._rooms, self._most = rooms.tolist(), most
        # Bit n says that there are segments of length n.
        self._there = sum(1 << size for size, count in enumerate(self.left) if count)

    def place(self, places: list[tuple[int, int]], index: int, rows: int, loss: int) -> int:
        """Fills up to `rows` rows of bucket number `index`; returns how many it filled.

        Args:
            places: lengths, from the longest, and how many places a row has for each. A place
                takes the longest segment that it can hold, and what room is left more of them.
            index: number of the bucket.
            rows: how many rows to fill.
            loss: no row may have this many positions of padding more than the places leave.
        """
        padding = max(self._rooms[index] - sum(size * times for size, times in places), 0)
        done = 0
        while done < rows:
            row, room = self._row(places, self._rooms[index])
            if not row or room > padding + loss:
                break
            times = min(rows - done, min(self.left[size] // many for size, many in row.items()))
            for size, many in row.items():
                self.left[size] -= times * many
                if not self.left[size]:
                    self._there &= ~(1 << size)
            self.patterns[index].append(Pattern(tuple(row.items()), times))
            done += times
        return done

    def _row(self, places: list[tuple[int, int]], room: int) -> tuple[dict[int, int], int]:
        """The segments of one row, and the room that they leave."""
        row: dict[int, int] = {}
        segments = self._most or room
        for size, times in [*places, (room, segments)]:
            for _ in range(min(times, segments)):
                longest = self._longest(min(size, room), row)
                if not longest:
                    break
                row[longest] = row.get(longest, 0) + 1
                room -= longest
                segments -= 1
        return row, room

    def _longest(self, size: int, row: dict[int, int]) -> int:
        """The longest segment of at most `size` that is left beside those in `row`; 0: none."""
        there = self._there & ((1 << (size + 1)) - 1)
        while there:
            longest = there.bit_length() - 1
            if self.left[longest] > row.get(longest, 0):
                return longest
            there &= ~(1 << longest)
        return 0


def whole_rows(columns: Columns, counts: np.ndarray) -> tuple[list[list[Pattern]], np.ndarray]:
    """Patterns for each bucket, near the cost of `columns`' program, and the counts left over.

    Rounds the rows of the program down, then the largest fractions up, and solves it again for the
    segments that are left.

    Args:
        columns: the program, with the patterns that solve it.
        counts: int64 [longest + 1], segments of each length.
    """
    stock = Stock(counts, columns.rooms, columns.most)
    loss, total = LOSS, 0.0
    for _ in range(ROUNDS):
        demand = columns.demand(np.array(stock.left))
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
        part = rows - whole
        for column in np.argsort(-part, kind="stable"):
            if done >= max(SHARE * rows.sum(), 1) or part[column] <= 1e-6:
                break
            done += stock.place(*columns.places(column), 1, loss)
        if not done:
            loss *= 4
            if loss > columns.rooms[-1]:
                break
    return stock.patterns, np.array(stock.left)
