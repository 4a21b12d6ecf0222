"""What columns of a row have to do with one another, from the definition."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline
from pipeline import Batches, Bucket, Examples, Plan, attention_mask
from pipeline.loading import cu_seqlens, segment_starts, targets_ahead
from pipeline.steps import segment_last, segment_mean
from tests.loading.definition import define_segments


@settings(max_examples=25)
@given(
    st.lists(st.integers(2, 20), min_size=1, max_size=12),
    st.sampled_from([(1, "best_fit"), (1, "fill"), (4, "best_fit")]),
    st.integers(1, 9),
    st.booleans(),
    st.sampled_from([(), (3,), (2, 3)]),
)
def test_columns_know_their_own_segment_alone(sizes, rows, ahead, weighted, shape):
    (align, packing), rng = rows, np.random.default_rng(len(sizes))
    columns = {"tokens": [rng.integers(1, 99, size) for size in sizes]}
    weights = [rng.integers(1, 4, size) / 2 if weighted else np.ones(size) for size in sizes]
    corpus = Examples(columns | ({"weights": weights} if weighted else {}))
    plan = Plan(corpus, [Bucket(2, 8)], align=align, packing=packing)
    for planned, batch in Batches(corpus, plan).with_plans():
        values = rng.normal(size=(2, 8, *shape)).astype(np.float32)
        values[batch["inputs_segment_ids"] == 0] = np.nan  # padding counts for nothing
        starts, later = np.zeros((2, 8), bool), np.zeros((2, 2, 8))
        means, last = np.zeros((2, 2, 8, *shape), np.float32)
        mask = np.eye(8, dtype=bool)[None].repeat(2, axis=0)
        for row, example, start, places in define_segments(planned, align):
            (begin, size), (number, _) = places["inputs"], places["example"]
            here = slice(begin, begin + size)
            starts[row, begin] = True
            for of_tokens, each in zip(later, (columns["tokens"], weights), strict=True):
                targets = each[example][start + 1 : start + size + 1]
                of_tokens[row, begin : begin + max(size - ahead, 0)] = targets[ahead:]
            means[row, number] = values[row, here].mean(axis=0)
            last[row, number] = values[row, here][-1]
            mask[row, here, here] = True
        np.testing.assert_array_equal(segment_starts(batch), starts)
        found = targets_ahead(batch, ahead)
        np.testing.assert_array_equal(found, later)
        assert [each.dtype for each in found] == [np.int32, np.float32]
        np.testing.assert_allclose(segment_mean(values, batch, 8), means, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(segment_last(values, batch, 8), last)
        np.testing.assert_array_equal(attention_mask(batch), np.tril(mask))
        alone = {"inputs_segment_ids": batch["inputs_segment_ids"]}
        for fields in (batch, alone):
            np.testing.assert_array_equal(attention_mask(fields, causal=False), mask)


def test_what_has_no_such_columns_is_refused():
    samples = Examples.from_groups([([1, 5, 2], [[7, 3], [8, 9, 3]])])
    ((_, groups),) = pipeline.pack(samples, [Bucket(1, 8)])
    ((_, inputs),) = pipeline.pack(Examples([[1, 2]], task=pipeline.corpus.INPUTS), [Bucket(1, 8)])
    ahead = functools.partial(targets_ahead, ahead=1)
    for call, batch, sentence in (
        (segment_starts, groups, "the batch has groups"),
        (segment_starts, {"ids": groups["inputs"]}, "has no inputs_segment_ids; it has ids"),
        (ahead, groups, "the batch has groups"),
        (ahead, {**groups, "decoder_inputs": 0}, "the batch is of pairs"),
        (ahead, inputs, "the batch has no targets"),
        (lambda batch: targets_ahead(batch, 0), inputs, "ahead is 0; it must be a whole number"),
        (lambda batch: cu_seqlens(batch, 3), groups, "the batch has groups"),
        (lambda batch: cu_seqlens(batch, 3), {"ids": 0}, "no inputs_segment_ids; .* is renamed"),
        (lambda batch: attention_mask(batch, causal=False), groups, "groups.* causal attention"),
        (attention_mask, {**inputs, "decoder_inputs": 0}, "of pairs is not causal; give side"),
    ):
        with pytest.raises(ValueError, match=sentence):
            call(batch)
