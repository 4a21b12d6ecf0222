"""Pieces of memory are copied as slices of arrays are, by either way."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.corpus.stored import gather
from pipeline.corpus.stored.gather import address_of

VALUES = np.random.default_rng(0).integers(0, 256, 500, np.uint8)
PIECES = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 100), st.integers(0, 9)))


@given(PIECES)
def test_both_ways_give_the_slices(pieces):
    first, sizes, rest = np.array(pieces, np.int64).reshape(-1, 3).T
    due = [np.append(VALUES[at : at + n], np.zeros(more, np.uint8)) for at, n, more in pieces]
    due = np.concatenate([np.zeros(0, np.uint8), *due])
    for copy in (gather._copy_at_once, gather._copy_one_by_one):
        assert np.array_equal(copy(address_of(VALUES) + first, sizes, sizes + rest), due)


@pytest.mark.parametrize("fault", ["raises", "sorts"])
def test_an_arrow_that_copies_otherwise_is_not_used(fault, caplog):
    def copy(addresses, sizes, reach):
        if fault == "raises":
            raise ValueError("offsets must ascend")
        return gather._copy_at_once(np.sort(addresses), sizes, reach)

    assert gather.choose_copy(gather._copy_at_once) is gather._copy_at_once
    assert caplog.text == ""
    assert gather.choose_copy(copy) is gather._copy_one_by_one
    assert "install another version of pyarrow" in caplog.text
