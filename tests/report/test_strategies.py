"""The ways to make batches that the report compares: simulations beside plain loops, and plans."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks import simulations
from pipeline.report import Options, strategies
from pipeline.report.strategies import (
    compare_other_pairs,
    compare_others,
    cut_documents,
    draw_order,
    pad_windows,
    read_ahead,
)

SKEWED = np.clip(np.random.default_rng(0).lognormal(4, 1, 3000), 1, 512).astype(int)
few_lengths = st.lists(st.integers(1, 30), min_size=1, max_size=80)


def test_an_order_has_every_length_once_and_is_always_the_same():
    drawn = draw_order(*np.unique(SKEWED, return_counts=True))
    assert drawn.tolist() == draw_order(*np.unique(SKEWED, return_counts=True)).tolist()
    assert np.sort(drawn).tolist() == np.sort(SKEWED).tolist()
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.05
    assert draw_order(np.array([4, 9]), np.array([0, 2])).tolist() == [9, 9]


def pad(lengths, rows, window):
    """The rows of each batch and the length of its longest example."""
    windows = [sorted(lengths[at : at + window])[::-1] for at in range(0, len(lengths), window)]
    batches = [w[at : at + rows] for w in windows for at in range(0, len(w), rows)]
    return [(len(batch), max(batch)) for batch in batches]


@given(few_lengths, st.sampled_from([(1, 1), (4, 4), (4, 12), (3, 30)]))
def test_windows_are_sorted_and_their_batches_padded_to_the_longest(lengths, sizes):
    heights, longest = pad_windows(np.array(lengths)[:, None], *sizes)
    assert list(zip(heights, longest[:, 0], strict=True)) == pad(lengths, *sizes)


@given(few_lengths, st.integers(1, 100))
def test_a_budget_cuts_what_is_read_ahead(lengths, budget):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategies, "READ_AHEAD", 25)
        heights, longest = read_ahead(np.array(lengths)[:, None], budget)
    made = simulations.token_budget(np.array(lengths), budget=budget, window=25)
    assert (heights.tolist(), longest[:, 0].tolist()) == (made.rows.tolist(), made.lengths.tolist())


few_pairs = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), min_size=1, max_size=80)


@given(few_pairs, st.integers(1, 40))
def test_batches_of_pairs_are_padded_on_each_side(pairs, row):
    for overflow, trained in (
        ("drop", [pair for pair in pairs if max(pair) <= row]),
        ("truncate", [tuple(np.minimum(pair, row)) for pair in pairs]),
    ):
        if not trained:
            continue
        options = Options({"tokens_per_batch": 60, "overflow": overflow})
        longest, *others = compare_other_pairs(np.array(pairs), options, (row, row))
        most = [max(side) for side in zip(*trained, strict=True)]
        positions = len(trained) * sum(most)
        assert (1 - longest.padding) * positions == pytest.approx(sum(map(sum, trained)))
        assert all(longest.padding >= way.padding - 1e-9 for way in others[:2])
        assert {longest.batches, *(way.batches for way in others[:2])} == {-(-len(trained) // 32)}


@given(few_pairs, st.integers(1, 300))
def test_a_budget_counts_the_padding_of_both_sides(pairs, budget):
    heights, longest = read_ahead(np.array(pairs), budget)
    left = sorted(pairs, key=sum, reverse=True)
    for rows, lengths in zip(heights.tolist(), longest.tolist(), strict=True):
        batch, left = left[:rows], left[rows:]
        assert sum(map(sum, batch)) <= rows * sum(lengths)
        assert rows == 1 or rows * sum(lengths) <= budget
    assert not left


@given(few_lengths, st.integers(1, 40))
def test_documents_are_cut_at_the_ends_of_rows(lengths, row):
    cut, squares, position = 0, 0, 0
    for length in lengths:
        rows = [(position + n) // row for n in range(length)]
        pieces = [rows.count(row) for row in set(rows)]
        cut, squares = cut + (len(pieces) > 1), squares + sum(piece**2 for piece in pieces)
        position += length
    assert cut_documents(np.array(lengths), row) == (cut, squares)


def others(lengths, row, **options):
    given = Options({"tokens_per_batch": 256, **options})
    return compare_others(*np.unique(lengths, return_counts=True), given, row)


@pytest.mark.parametrize("overflow", ["split", "truncate", "drop"])
@given(st.lists(st.integers(0, 200), min_size=1, max_size=60), st.sampled_from([50, 200]))
def test_every_strategy_counts_all_tokens_that_are_trained_on(overflow, lengths, row):
    trained = [min(n, row) if overflow == "truncate" else n for n in lengths]
    trained = [n for n in trained if n and (n <= row or overflow == "split")]
    assume(trained)
    found = others(lengths, row, overflow=overflow)
    for way in found:
        assert way.work["dense"] >= way.work["segment"] >= 1 / (1 - way.padding) >= 1
    (longest, *_, run), tokens = found, sum(trained)
    pieces, rows = sum(-(-length // row) for length in trained), -(-tokens // row)
    assert longest.batches == -(-pieces // 32)
    for way, positions in ((longest, pieces * min(max(trained), row)), (run, rows * row)):
        assert (1 - way.padding) * positions == pytest.approx(tokens)


def test_a_few_examples_worked_by_hand():
    # 40 examples of 6: batches of 32 and 8. In rows of 4, each has pieces of 4 and 2.
    longest, batch, windows, _, run = others([6] * 40, 8)
    for way in (longest, batch, windows):
        assert (way.batches, way.padding, way.cut, way.shapes) == (2, 0, 0, 2)
    assert (run.batches, run.padding) == (1, 0)
    assert [way.shapes for way in others([6] * 64, 8)] == [1, 1, 1, 2, 2]
    longest, *_ = others([6] * 40, 4)
    assert (longest.cut, longest.batches, longest.padding) == (40, 3, 0.25)
