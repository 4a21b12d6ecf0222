"""Values of segments, and the masks that keep them apart, from the definition."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline
from pipeline import Bucket, Examples, attention_mask
from pipeline.corpus import INPUTS
from pipeline.steps import segment_last, segment_mean

SIZES = st.lists(st.integers(1, 20), min_size=1, max_size=12)


def batches_of(sizes, align):
    """Batches of documents of these sizes in rows of 8, so that long ones are split."""
    examples = Examples([np.arange(size) for size in sizes], task=INPUTS)
    return pipeline.pack(examples, [Bucket(2, 8)], overflow="split", align=align, max_segments=8)


def columns_of(planned, align):
    """The row of each segment, its number there, and its columns."""
    used, numbers = [0, 0], [0, 0]
    for row, _, _, size in planned.segments.tolist():
        begin = used[row] + -used[row] % align
        yield row, numbers[row], slice(begin, begin + size)
        used[row], numbers[row] = begin + size, numbers[row] + 1


@given(SIZES, st.sampled_from([1, 4]), st.sampled_from([(), (3,), (2, 3)]))
@settings(max_examples=12)
def test_means_and_last_values_are_those_of_each_segment_alone(sizes, align, shape):
    rng = np.random.default_rng(len(sizes))
    for planned, batch in batches_of(sizes, align):
        values = rng.normal(size=(2, 8, *shape)).astype(np.float32)
        values[batch["inputs_segment_ids"] == 0] = np.nan  # padding counts for nothing
        means, last = np.zeros((2, 2, 8, *shape), np.float32)
        for row, number, columns in columns_of(planned, align):
            means[row, number] = values[row, columns].mean(axis=0)
            last[row, number] = values[row, columns][-1]
        np.testing.assert_allclose(segment_mean(values, batch, 8), means, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(segment_last(values, batch, 8), last)


@given(SIZES, st.sampled_from([1, 4]))
@settings(max_examples=12)
def test_a_mask_that_is_not_causal_shows_each_column_its_segment(sizes, align):
    for planned, batch in batches_of(sizes, align):
        mask = np.eye(8, dtype=bool)[None].repeat(2, axis=0)
        for row, _, columns in columns_of(planned, align):
            mask[row, columns, columns] = True
        np.testing.assert_array_equal(attention_mask(batch, causal=False), mask)
        causal = np.tril(mask)
        np.testing.assert_array_equal(attention_mask(batch), causal)
        alone = {"inputs_segment_ids": batch["inputs_segment_ids"]}
        np.testing.assert_array_equal(attention_mask(alone, causal=False), mask)
