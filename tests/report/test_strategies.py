"""The ways to make batches that the report compares: formulas beside counts, and plans."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import simulations
from pipeline.planning.lengths import histogram
from pipeline.report import Options
from pipeline.report.strategies import compare_others, cut_documents, pad_windows, read_ahead

SKEWED = np.clip(np.random.default_rng(0).lognormal(4, 1, 3000), 1, 512).astype(int)


def pad(lengths, rows, window):
    """The positions, squared lengths of rows, and different lengths of sorted, padded windows."""
    windows = [np.sort(lengths[at : at + window]) for at in range(0, len(lengths), window)]
    batches = [w[at : at + rows] for w in windows for at in range(0, len(w), rows)]
    shapes = [(len(batch), int(batch[-1])) for batch in batches]
    return (
        sum(rows * length for rows, length in shapes),
        sum(rows * length**2 for rows, length in shapes),
        len({length for _, length in shapes}),
    )


@pytest.mark.parametrize("window", [32, 320])
def test_padded_batches_are_as_expected_of_a_random_order(window):
    rng = np.random.default_rng(window)
    counted = [pad(rng.permutation(SKEWED), 32, window) for _ in range(60)]
    expected = pad_windows(*histogram(SKEWED), 32, window)
    assert expected == pytest.approx(np.mean(counted, axis=0), rel=0.04)
    assert expected[0] == pytest.approx(np.mean(counted, axis=0)[0], rel=0.01)


def test_read_ahead_is_as_expected_of_a_random_order():
    lengths = np.tile(SKEWED, 8)
    shuffled = np.random.default_rng(0).permutation(lengths)
    made = simulations.token_budget(shuffled, budget=4096, window=10_000)
    positions, _, batches, shapes = read_ahead(*histogram(lengths), 4096)
    assert batches == pytest.approx(len(made.rows), rel=0.02)
    assert positions == pytest.approx(made.positions, rel=0.005)
    assert shapes == pytest.approx(made.shapes, rel=0.2)


def cut(lengths, row):
    """The documents that a cut every `row` positions divides, and the squares of all segments."""
    ends = np.cumsum(lengths)
    begins = ends - lengths
    divided = np.count_nonzero(begins // row < (ends - 1) // row)
    edges = np.unique(np.concatenate([[0], np.arange(0, ends[-1], row), ends]))
    return divided, int(np.square(np.diff(edges)).sum())


@pytest.mark.parametrize("row", [100, 512])
def test_cut_documents_are_as_expected_of_a_random_order(row):
    rng = np.random.default_rng(row)
    counted = [cut(rng.permutation(SKEWED), row) for _ in range(60)]
    expected = cut_documents(*histogram(SKEWED), row)
    assert expected == pytest.approx(np.mean(counted, axis=0), rel=0.01)


def test_documents_that_fill_rows_exactly_are_not_cut():
    assert cut_documents(np.array([16, 32]), np.array([7, 5]), 32)[0] == 2.5 * 0 + 5 * 0.5
    assert cut_documents(np.array([32]), np.array([5]), 32) == (0, 5 * 32**2)
    assert cut_documents(np.array([16]), np.array([6]), 64) == (0, 6 * 16**2)


def others(lengths, row, **options):
    given = Options({"tokens_per_batch": 256, **options})
    return compare_others(*histogram(np.array(lengths)), given, row)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=60))
def test_every_strategy_counts_all_tokens(lengths):
    for row in (50, 200):
        found = others(lengths, row)
        for each in found:
            assert 0 <= each.padding < 1
            assert each.work["dense"] >= each.work["segment"] >= 1 / (1 - each.padding)
        (longest, *_, run), tokens = found, sum(lengths)
        pieces, rows = sum(-(-length // row) for length in lengths), -(-tokens // row)
        assert longest.batches == -(-pieces // 32)
        for each, positions in ((longest, pieces * min(max(lengths), row)), (run, rows * row)):
            assert (1 - each.padding) * positions == pytest.approx(tokens)


def test_a_few_examples_worked_by_hand():
    # 40 examples of 6: batches of 32 and 8. In rows of 4, each has pieces of 4 and 2.
    longest, batch, windows, _, run = others([6] * 40, 8)
    for each in (longest, batch, windows):
        assert (each.batches, each.padding, each.cut, each.shapes) == (2, 0, 0, 2)
    assert (run.batches, run.padding) == (1, 0)
    for count, shapes in ((20, [1, 1, 1, 1, 1]), (64, [1, 1, 1, 1, 2])):
        assert [each.shapes for each in others([6] * count, 8)] == shapes
    longest, *_ = others([6] * 40, 4)
    assert (longest.cut, longest.batches, longest.padding) == (40, 3, 0.25)


def test_truncated_and_dropped_documents_are_no_longer_trained_on():
    for overflow, positions in (("truncate", 3 * 4), ("drop", 2 * 3), ("split", 5 * 4)):
        longest, *_ = others([3, 9, 0, 2], 4, overflow=overflow)
        tokens = {"truncate": 9, "drop": 5, "split": 14}[overflow]
        assert longest.padding == pytest.approx(1 - tokens / positions)
