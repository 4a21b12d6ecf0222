"""Collation: from planned segments to the arrays of a batch, without a loop over segments."""

import numpy as np

from pipeline.plan import PlannedBatch
from pipeline.sharding import Block

INT = np.int32


def collate(corpus, planned: PlannedBatch, block: Block) -> dict[str, np.ndarray]:
    """The arrays of `block` of a planned batch; padding is 0 in every field.

    A row with two segments, the second a later piece that starts at position 7 of its example:

        inputs_segment_ids  [1, 1, 1, 2, 2, 0]
        inputs_positions    [0, 1, 2, 7, 8, 0]
        loss_weights        [1, 1, 1, 1, 1, 0]

    Args:
        corpus: anything with the `read` of `pipeline.Corpus`.
        planned: the segments of the global batch.
        block: the rows and columns to build.

    Returns:
        The corpus's features (`inputs`, `targets`, int32), `inputs_segment_ids` and
        `inputs_positions` (int32) and `loss_weights` (float32), each `[rows, length]` of the block.
    """
    height, width = block.shape
    row, column, ids, example, start, size = _clip(planned.segments, block)
    # The block, flattened, is a run of padding, a segment, a run of padding, a segment, …
    begin = row * width + column
    runs = np.empty(2 * len(begin) + 1, np.int64)
    end = begin + size
    runs[1::2] = size
    runs[0:-1:2] = begin - np.concatenate([[0], end[:-1]])
    runs[-1] = height * width - (end[-1] if len(end) else 0)

    def spread(values, dtype):
        each = np.zeros(len(runs), dtype)
        each[1::2] = values
        return np.repeat(each, runs)

    real = spread(1, bool)
    segment_ids = spread(ids, INT)
    positions = np.arange(height * width, dtype=INT)
    positions -= spread(begin - start, INT)
    full = bool(real.all())
    if not full:
        positions[~real] = 0
    batch = {}
    for name, values in corpus.read(example, start, size).items():
        if full:
            batch[name] = values
        else:
            batch[name] = np.zeros(height * width, values.dtype)
            batch[name][real] = values
    batch["inputs_segment_ids"] = segment_ids
    batch["inputs_positions"] = positions
    batch.setdefault("loss_weights", real.astype(np.float32))
    return {name: values.reshape(height, width) for name, values in batch.items()}


def _clip(segments: np.ndarray, block: Block):
    """The segments' parts inside the block: row and column in it, segment id, example, start, size.

    Segment ids count over the whole row, whichever columns the block has.
    """
    row, example, start, size = segments.T
    first = np.flatnonzero(np.diff(row, prepend=-1))  # each row's first segment
    times = np.diff(first, append=len(row))
    ids = np.arange(len(row)) - np.repeat(first, times) + 1
    before = np.cumsum(size) - size
    column = before - np.repeat(before[first], times)
    if len(block.rows) and block.rows[-1] - block.rows[0] + 1 == len(block.rows):
        # Contiguous rows are a slice of the segments, which are in row order.
        keep: slice | np.ndarray = slice(*np.searchsorted(row, [block.rows[0], block.rows[-1] + 1]))
        row = row[keep] - block.rows[0]
    else:
        keep = np.flatnonzero(np.isin(row, block.rows))
        row = np.searchsorted(block.rows, row[keep])
    ids, example, start, size, column = (
        values[keep] for values in (ids, example, start, size, column)
    )
    left, right = block.columns
    cut = np.maximum(left - column, 0)
    size = np.minimum(column + size, right) - column - cut
    start, column = start + cut, column + cut - left
    inside = size > 0
    if inside.all():
        return row, column, ids, example, start, size
    return tuple(values[inside] for values in (row, column, ids, example, start, size))
