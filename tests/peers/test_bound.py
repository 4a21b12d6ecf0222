"""The bound that `benchmarks histograms` shows beside best fit."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.bound import Knapsack, fewest_rows
from pipeline import Bucket, Plan


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=4, unique=True).map(sorted),
    st.lists(st.integers(0, 9), min_size=4, max_size=4),
    st.integers(1, 16),
)
def test_the_knapsack_is_exact(sizes, values, longest):
    values = np.array(values[: len(sizes)], float)
    sack = Knapsack(np.array(sizes), values, longest)
    for room in range(longest + 1):
        times = (range(room // size + 1) for size in sizes)
        rows = [row for row in itertools.product(*times) if np.dot(row, sizes) <= room]
        assert sack.worth[room] == max(np.dot(row, values) for row in rows)
        found = sack.rows(room).T
        assert len(found) == sum(size <= room for size in sizes)
        for number, row in enumerate(found):
            assert row[number]
            assert tuple(row) in rows
            assert row @ values == max(np.dot(each, values) for each in rows if each[number])


@given(st.lists(st.integers(1, 12), min_size=1, max_size=7))
def test_no_packing_has_fewer_rows_than_the_bound(lengths):
    def fewest(left, rows):  # tries every row for each segment
        if not left:
            return len(rows)
        size, rest = left[0], left[1:]
        fits = {room: at for at, room in enumerate(rows) if room >= size}
        tries = [
            fewest(rest, [*rows[:at], room - size, *rows[at + 1 :]]) for room, at in fits.items()
        ]
        return min([*tries, fewest(rest, [*rows, 12 - size])])

    bound, best = fewest_rows(np.bincount(lengths), 12), fewest(lengths, [])
    assert sum(lengths) / 12 * (1 - 1e-8) <= bound <= best
    assert best <= Plan(lengths, [Bucket(1, 12)]).num_batches()


def test_the_bound_is_above_the_mean_fill_where_no_row_can_be_full():
    assert fewest_rows(np.bincount([7] * 6), 10) == pytest.approx(6)
    assert fewest_rows(np.bincount([4, 4, 3, 3, 3, 3]), 10) == pytest.approx(2)  # best fit: 3
