"""Collation: each segment at its columns, whatever follows it, on any part of a batch."""

import dataclasses

import numpy as np
import pytest

from pipeline import Batches, Bucket, Plan
from pipeline.loading.collate import collate
from pipeline.loading.sharding import slice_of_process

SHAPES = (Bucket(8, 32), Bucket(4, 64))
FIELDS = {
    0: ("inputs", "inputs_segment_ids", "inputs_positions"),
    1: ("targets", "targets_segment_ids", "targets_positions"),
}


@pytest.mark.parametrize("align", [1, 8, 16])
@pytest.mark.parametrize("kind", ["causal", "pairs"])
def test_segments_are_at_the_columns_that_the_plan_says(kind, align, corpus, pairs):
    data = {"causal": corpus, "pairs": pairs}[kind]
    shapes = (Bucket(4, (96, 64)),) if kind == "pairs" else SHAPES
    plan = Plan(data, shapes, align=align, overflow="truncate")
    for step, batch in enumerate(Batches(data, plan)):
        planned = plan.batch(step)
        for number, side in enumerate(planned.sides):
            prefix = FIELDS[number]
            expected = {name: np.zeros(side.bucket.shape, np.int32) for name in prefix}
            for (row, example, start, size), at, of in zip(
                side.segments.tolist(), side.columns.tolist(), side.numbers.tolist(), strict=True
            ):
                place = row, slice(at, at + size)
                assert not at % align
                expected[prefix[1]][place] = of + 1
                expected[prefix[2]][place] = np.arange(start, start + size)
                tokens = data[example][prefix[0]]
                expected[prefix[0]][place] = tokens[start : start + size]
            for name in prefix:
                np.testing.assert_array_equal(batch[name], expected[name])
        ids = batch[FIELDS[len(planned.sides) - 1][1]]
        assert not batch["loss_weights"][ids == 0].any()


def test_parts_of_an_aligned_batch_are_parts_of_the_whole(corpus):
    plan = Plan(corpus, SHAPES, align=16)
    parts = [Batches(corpus, plan, process_index=n, process_count=4) for n in range(4)]
    for step, whole in enumerate(Batches(corpus, plan)):
        for name, values in whole.items():
            np.testing.assert_array_equal(
                np.concatenate([part[step][name] for part in parts]), values
            )


@pytest.mark.parametrize("align", [1, 16])
def test_columns_may_be_divided_within_a_segment_and_within_padding(align, corpus):
    plan = Plan(corpus, [Bucket(4, 64)], align=align)
    planned, (reader,) = plan.batch(0), corpus.sides
    block = slice_of_process(planned.bucket.shape, 0, 1)
    whole = collate(reader, planned, block)
    for edges in ((0, 7), (7, 40), (40, 41), (41, 64)):
        part = collate(reader, planned, dataclasses.replace(block, columns=edges))
        for name, values in whole.items():
            np.testing.assert_array_equal(part[name], values[:, slice(*edges)])
