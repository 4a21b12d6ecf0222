"""What columns of a row have to do with one another, from the definition."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline
from pipeline import Bucket, Examples
from pipeline.loading import segment_starts

SIZES = st.lists(st.integers(2, 20), min_size=1, max_size=10)


@given(SIZES, st.sampled_from([1, 4]), st.sampled_from(["best_fit", "fill"]))
@settings(max_examples=30)
def test_state_starts_anew_at_each_document_and_at_each_piece(sizes, align, packing):
    packing = packing if align == 1 else "best_fit"
    corpus = Examples([np.arange(size) for size in sizes])
    plan = pipeline.Plan(corpus, [Bucket(2, 8)], align=align, packing=packing)
    for step in range(plan.num_batches()):
        batch, expected = pipeline.Batches(corpus, plan)[step], np.zeros((2, 8), bool)
        columns = [0, 0]
        for row, _, _, size in plan.batch(step).segments.tolist():
            columns[row] += -columns[row] % align
            expected[row, columns[row]] = True
            columns[row] += size
        np.testing.assert_array_equal(segment_starts(batch), expected)


def test_groups_and_renamed_batches_have_no_starts():
    samples = Examples.from_groups([([1, 5, 2], [[7, 3], [8, 9, 3]])])
    ((_, batch),) = pipeline.pack(samples, [Bucket(1, 8)])
    with pytest.raises(ValueError, match="the batch has groups"):
        segment_starts(batch)
    with pytest.raises(ValueError, match="has no inputs_segment_ids; it has ids"):
        segment_starts({"ids": batch["inputs"]})
