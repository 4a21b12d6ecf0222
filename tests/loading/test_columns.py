"""What columns of a row have to do with one another, from the definition."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline
from pipeline import Bucket, Examples, attention_mask
from pipeline.loading import cu_seqlens, segment_starts, targets_ahead

SIZES = st.lists(st.integers(2, 20), min_size=1, max_size=10)


@given(SIZES, st.sampled_from([1, 4]), st.sampled_from(["best_fit", "fill"]))
@settings(max_examples=20)
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


@given(SIZES, st.sampled_from([1, 4]), st.integers(1, 9), st.booleans())
@settings(max_examples=20)
def test_targets_further_ahead_are_those_of_their_own_segment(sizes, align, ahead, weighted):
    rng = np.random.default_rng(len(sizes))
    columns = {"tokens": [rng.integers(1, 99, size) for size in sizes]}
    if weighted:
        columns["weights"] = [rng.integers(0, 4, size) / 2 for size in sizes]
    corpus = Examples(columns)
    weights = columns.get("weights", [np.ones(size) for size in sizes])
    for planned, batch in pipeline.pack(corpus, [Bucket(2, 8)], overflow="split", align=align):
        expected, used = np.zeros((2, 2, 8)), [0, 0]
        for row, example, start, size in planned.segments.tolist():
            used[row] += -used[row] % align
            for place in range(size - ahead):
                token = start + place + 1 + ahead
                of_token = columns["tokens"][example][token], weights[example][token]
                expected[:, row, used[row] + place] = of_token
            used[row] += size
        found = targets_ahead(batch, ahead)
        np.testing.assert_array_equal(found, expected)
        assert [each.dtype for each in found] == [np.int32, np.float32]


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
