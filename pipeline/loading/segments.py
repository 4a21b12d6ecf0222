"""Segments: where the segments of a planned batch lie in the rows and columns of a process."""

from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from pipeline.planning.planned import PlannedBatch

# How later pieces of a split example count their positions.
Positions = Literal["continue", "restart"]
POSITIONS: tuple[Positions, ...] = get_args(Positions)


class Segments(NamedTuple):
    """Segments of a block; all fields but the last three are int64 [segments]."""

    row: np.ndarray  # counted within the block
    column: np.ndarray  # the first one
    ids: np.ndarray  # segment id, from 1 in each row
    example: np.ndarray
    start: np.ndarray  # the first position to read in the example
    position: np.ndarray  # the first value of `inputs_positions`
    size: np.ndarray  # positions
    end: np.ndarray  # the column of the row after the last one, also outside the block
    branch: Any  # the continuations before it in the row, int64 [segments]; 0 without groups
    begins: Any  # its first column on each side, int64 [segments, sides]; 0 without pointers
    epoch: np.ndarray | int  # one for all, or int64 [segments]


def find_in_rows(
    planned: PlannedBatch,
    number: int,
    rows: np.ndarray,
    positions: Positions,
    *,
    with_begins: bool = False,
) -> Segments:
    """The segments of `rows`, at their columns in the global batch on one side."""
    row, example, start = planned.segments[:, :3].T
    size, sides = planned.segments[:, 3 + number], len(planned.bucket.lengths)
    columns = planned.columns.reshape(len(row), sides)
    keep: slice | np.ndarray
    if len(rows) == planned.bucket.rows:
        keep = slice(None)
    elif len(rows) and rows[-1] - rows[0] + 1 == len(rows):
        # Contiguous rows are a slice of the segments, which are in row order.
        keep = slice(*np.searchsorted(row, [rows[0], rows[-1] + 1]))
        row = row[keep] - rows[0]
    else:
        keep = np.flatnonzero(np.isin(row, rows))
        row = np.searchsorted(rows, row[keep])
    example, start, size = (values[keep] for values in (example, start, size))
    column = columns[keep, number]
    return Segments(
        row=row,
        column=column,
        ids=planned.numbers[keep] + 1,
        example=example,
        start=start,
        position=start if positions == "continue" else np.zeros_like(start),
        size=size,
        end=column + size,
        branch=0,
        begins=columns[keep] - start[:, None] if with_begins else 0,
        epoch=planned.epoch if planned.epochs is None else planned.epochs[keep],
    )


def cut_to_columns(segments: Segments, columns: tuple[int, int]) -> Segments:
    """The parts of `segments` inside `columns`, with columns counted from the first of these."""
    left, right = columns
    cut = np.maximum(left - segments.column, 0)
    size = np.minimum(segments.column + segments.size, right) - segments.column - cut
    cut_segments = segments._replace(
        column=segments.column + cut - left,
        start=segments.start + cut,
        position=segments.position + cut,
        size=size,
    )
    inside = size > 0
    if inside.all():
        return cut_segments
    return Segments._make(
        field if isinstance(field, int) else field[inside] for field in cut_segments
    )
