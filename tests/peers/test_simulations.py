"""The simulations of other packers that benchmarks compare with, beside these packers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import simulations, updates


def shapes(made):
    return list(zip(made.rows.tolist(), made.lengths.tolist(), strict=True))


@pytest.mark.parametrize(
    ("make", "lengths", "options", "due"),
    [
        # Batches are [2, 5], [3, 1] and [4], padded to the longest of all, and to their own.
        ("pad_batches", [2, 5, 3, 1, 4], {"rows": 2, "window": 2, "length": 5},
         [(2, 5), (2, 5), (1, 5)]),
        ("pad_batches", [2, 5, 3, 1, 4], {"rows": 2, "window": 2}, [(2, 5), (2, 3), (1, 4)]),
        # Windows [7, 1, 6, 2] and [5, 3] become 1 2 | 6 7 and 3 5.
        ("pad_batches", [7, 1, 6, 2, 5, 3], {"rows": 2, "window": 4}, [(2, 2), (2, 7), (2, 5)]),
        # The window 9 4 4 3 3 under a budget of 12: one row of 9, three of 4, and one of 3 is left.
        # The next window is 6 1: two rows of 6.
        ("token_budget", [3, 9, 4, 3, 4, 1, 6], {"budget": 12, "window": 5},
         [(1, 9), (3, 4), (1, 3), (2, 6)]),
        # An example over the budget has a batch to itself.
        ("token_budget", [9, 8], {"budget": 5, "window": 2}, [(1, 9), (1, 8)]),
    ],
)  # fmt: skip
def test_batches_of_others_by_hand(make, lengths, options, due):
    made = getattr(simulations, make)(np.array(lengths), **options)
    assert shapes(made) == due
    positions = sum(rows * length for rows, length in due)
    assert (made.tokens, made.positions, made.shapes) == (sum(lengths), positions, len({*due}))
    assert made.padding == 1 - sum(lengths) / positions


def test_next_fit_closes_a_row_at_the_first_that_does_not_fit():
    assert simulations.next_fit(np.array([5, 3, 2, 7]), length=8).tolist() == [0, 0, 1, 2]


def test_first_fit_decreasing_fills_rows_from_the_longest_down():
    rows = simulations.first_fit_decreasing(np.array([3, 2, 7, 1, 5]), length=8)
    assert rows.tolist() == [1, 2, 0, 0, 1]


@given(st.lists(st.integers(1, 1000), min_size=4, max_size=200), st.integers(2, 4))
def test_parts_of_karmarkar_and_karp_descend_and_differ_by_at_most_the_largest(costs, parts):
    found = simulations.karmarkar_karp(np.array(costs), parts)
    sums = np.bincount(found, costs, parts)
    assert (np.diff(sums) <= 0).all()
    assert sums[0] - sums[-1] <= max(costs)


def test_no_packing_has_fewer_rows_than_the_bound():
    assert updates.bound_rows(np.array([6, 6, 6, 2]), length=8) == 3
    assert updates.bound_rows(np.array([3, 3, 3]), length=8) == 2  # tokens alone say so
    assert updates.bound_rows(np.array([5, 4, 4, 4]), length=8) == 3  # and here
    assert updates.bound_rows(np.array([5, 5, 5, 4]), length=8) == 4
