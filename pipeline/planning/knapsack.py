"""The most valuable ways to fill a row: an exact knapsack over a histogram's lengths."""

import numpy as np


class Knapsack:
    """For every room up to `longest`, the segments that fit into it and are worth most.

    Each length may be used any number of times (up to `most` segments in all), as dynamic
    programming over the room has it (Gilmore and Gomory, 1963).

    >>> sack = Knapsack(np.array([3, 4]), np.array([5.0, 7.0]), longest=10)
    >>> float(sack.worth[10]), sack.rows(np.array([0]), np.array([10])).T.tolist()
    (17.0, [[2, 1]])

    Args:
        sizes: lengths that a segment may have, int64, ascending, from 1.
        values: what a segment of each is worth, float64, at least 0.
        longest: the most room.
        most: the most segments; None for no limit.

    Attributes:
        worth: float64 [longest + 1], the most that a row of each length can be worth.
    """

    def __init__(
        self, sizes: np.ndarray, values: np.ndarray, longest: int, most: int | None = None
    ):
        self._sizes, self._values = sizes, values
        if most is None or most * int(sizes[0]) >= longest:
            layers = [_unlimited(sizes, values, longest)]
        else:
            layers = _limited(sizes, values, longest, most)
        # layers[k]: worth and the first segment taken (−1: nothing fits) with k segments left; a
        # single layer when there is no limit.
        self._worth, self._first = (np.stack(each) for each in zip(*layers, strict=True))
        self.worth = self._worth[-1]

    def worth_with(self, room: int) -> np.ndarray:
        """The most that a row of `room` is worth that holds a segment of each size: [sizes].

        −1 where the size does not fit.
        """
        rest = room - self._sizes
        layer = self._worth[max(len(self._worth) - 2, 0)]
        return np.where(rest >= 0, self._values + layer[np.maximum(rest, 0)], -1.0)

    def rows(self, first: np.ndarray, room: np.ndarray) -> np.ndarray:
        """How often each size is in the best rows of `room` that hold size number `first`.

        int32 [sizes, rows].
        """
        found = np.zeros((len(self._sizes), len(first)), np.int32)
        column = np.arange(len(first))
        layer, taken = len(self._worth) - 1, first
        left = room.copy()
        while len(column):
            found[taken, column] += 1
            left = left - self._sizes[taken]
            layer = max(layer - 1, 0)
            taken = self._first[layer, left]
            goes_on = taken >= 0
            column, left, taken = column[goes_on], left[goes_on], taken[goes_on]
        return found


def _unlimited(sizes: np.ndarray, values: np.ndarray, longest: int):
    worth, first = np.zeros(longest + 1), np.full(longest + 1, -1)
    fitting = np.searchsorted(sizes, np.arange(longest + 1), side="right")
    for room in range(int(sizes[0]), longest + 1):
        count = fitting[room]
        each = worth[room - sizes[:count]] + values[:count]
        first[room] = best = each.argmax()
        worth[room] = each[best]
        if worth[room] <= worth[room - 1]:
            # What fits into less room is as good, and leaves more for other segments.
            worth[room], first[room] = worth[room - 1], first[room - 1]
    return worth, first


def _limited(sizes: np.ndarray, values: np.ndarray, longest: int, most: int):
    layers = [(np.zeros(longest + 1), np.full(longest + 1, -1))]
    for _ in range(most):
        before = layers[-1][0]
        worth, first = np.zeros(longest + 1), np.full(longest + 1, -1)
        for number, (size, value) in enumerate(zip(sizes.tolist(), values.tolist(), strict=True)):
            each = before[: longest + 1 - size] + value
            better = each > worth[size:]
            worth[size:][better] = each[better]
            first[size:][better] = number
        layers.append((worth, first))
    return layers
