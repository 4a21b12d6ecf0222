"""Collation: from planned segments to the arrays of a batch, without a loop over segments."""

from collections.abc import Mapping, Sequence

import numpy as np

from pipeline.loading.compact import SEGMENTS, row_segments
from pipeline.loading.sharding import Block
from pipeline.packing.bucket import Bucket
from pipeline.planning.planned import PlannedBatch
from pipeline.storage.gather import ranges
from pipeline.storage.interface import Readable

INT = np.int32


def collate(
    corpus: Readable, planned: PlannedBatch, block: Block, most: int | None = None
) -> dict[str, np.ndarray]:
    """The arrays of `block` of a planned batch; padding is 0 in every field.

    A row with two segments, the second a later piece that starts at position 7 of its example:

        inputs_segment_ids  [1, 1, 1, 2, 2, 0]
        inputs_positions    [0, 1, 2, 7, 8, 0]
        loss_weights        [1, 1, 1, 1, 1, 0]

    Args:
        corpus: a corpus, or one side of it.
        planned: the segments of the global batch.
        block: the rows and columns to build.
        most: for a compact batch, the most segments that a row of this bucket has.

    Returns:
        The corpus's features (`inputs`, `targets`, int32), `inputs_segment_ids` and
        `inputs_positions` (int32) and `loss_weights` (float32), each `[rows, length]` of the block.
        A compact batch has `segments` in place of these three: see `pipeline.loading.compact`.
    """
    height, width = block.shape
    found, epochs = _in_rows(planned, block.rows)
    (row, column, ids, example, start, size), epochs = _in_columns(block.columns, found, epochs)
    begin, cells = row * width + column, height * width
    # The block, flattened: each segment reaches, with the padding after it, to where the next
    # begins. Padding is little, so everything is made as if there were none, and then set to 0.
    edge = int(begin[0]) if len(begin) else cells
    reach = np.diff(begin, append=cells)
    batch = corpus.read(example, start, size, reach, epochs)
    if most is None:
        batch["inputs_segment_ids"] = np.repeat(ids.astype(INT), reach)
        batch["inputs_positions"] = ranges(start, reach, INT)
        if "loss_weights" not in batch:
            batch["loss_weights"] = np.ones(cells - edge, np.float32)
    padded = np.flatnonzero(reach > size)  # segments with padding after them
    padding = ranges((begin + size - edge)[padded], (reach - size)[padded])
    for name, values in batch.items():
        values[padding] = 0
        if edge:  # the first rows are empty
            values = np.concatenate([np.zeros(edge, values.dtype), values])
        batch[name] = values.reshape(height, width)
    if most is not None:
        row, _, ids, _, start, size = found
        batch[SEGMENTS] = row_segments(row, ids, start, size, (height, most))
    return batch


def collate_pairs(
    sides: Sequence[Readable], planned: PlannedBatch, blocks: Mapping[Bucket, Block]
) -> dict[str, np.ndarray]:
    """The arrays of a planned batch of pairs; segment ids of a pair are equal on both sides.

    A row with a pair of 3 inputs and 2 targets, and one of 1 and 2:

        inputs_segment_ids   [1, 1, 1, 2, 0, 0]
        targets_segment_ids  [1, 1, 2, 2]

    Args:
        sides: inputs and targets.
        planned: the segments of the global batch.
        blocks: the rows and columns to build of each side's bucket.

    Returns:
        `inputs`, `inputs_segment_ids` and `inputs_positions`, of the inputs' block; and of the
        targets' `decoder_inputs`, `targets`, `targets_segment_ids`, `targets_positions` (int32)
        and `loss_weights` (float32).
    """
    inputs, targets = (
        collate(corpus, side, blocks[side.bucket])
        for corpus, side in zip(sides, planned.sides, strict=True)
    )
    del inputs["loss_weights"]
    for field in ("segment_ids", "positions"):
        targets[f"targets_{field}"] = targets.pop(f"inputs_{field}")
    targets["loss_weights"] = targets.pop("loss_weights")  # the last, as in other batches
    return inputs | targets


def _in_rows(
    planned: PlannedBatch, rows: np.ndarray
) -> tuple[tuple[np.ndarray, ...], np.ndarray | int]:
    """Of the segments in `rows`: row among these, column, segment id, example, start and size.

    And the epoch that they belong to, or one for each.
    """
    row, example, start, size = planned.segments.T
    if len(rows) and rows[-1] - rows[0] + 1 == len(rows):
        # Contiguous rows are a slice of the segments, which are in row order.
        keep: slice | np.ndarray = slice(*np.searchsorted(row, [rows[0], rows[-1] + 1]))
        row = row[keep] - rows[0]
    else:
        keep = np.flatnonzero(np.isin(row, rows))
        row = np.searchsorted(rows, row[keep])
    example, start, size = (values[keep] for values in (example, start, size))
    number = np.arange(len(row))
    new = np.empty(len(row), bool)  # whether a segment is the first of its row
    new[:1] = True
    np.not_equal(row[1:], row[:-1], out=new[1:])
    first = np.maximum.accumulate(np.where(new, number, 0))
    before = np.cumsum(size) - size
    epochs = planned.epoch if planned.epochs is None else planned.epochs[keep]
    return (row, before - before[first], number - first + 1, example, start, size), epochs


def _in_columns(
    columns: tuple[int, int], segments: tuple[np.ndarray, ...], epochs: np.ndarray | int
) -> tuple[tuple[np.ndarray, ...], np.ndarray | int]:
    """The parts of segments that are inside `columns`, and their columns among these."""
    row, column, ids, example, start, size = segments
    left, right = columns
    cut = np.maximum(left - column, 0)
    size = np.minimum(column + size, right) - column - cut
    found = row, column + cut - left, ids, example, start + cut, size
    inside = size > 0
    if inside.all():
        return found, epochs
    inside_epochs = epochs if isinstance(epochs, int) else epochs[inside]
    return tuple(values[inside] for values in found), inside_epochs
