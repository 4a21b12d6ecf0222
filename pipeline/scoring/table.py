"""The table of scores: a row for each example, in the order of the corpus, made from parts.

Parts have the values of fixed ranges of steps, and stay on disk until all of them are there. Their
records are written to the places of their examples in scratch files, which the system keeps in
memory if there is room, and from there to the table.
"""

import contextlib
import dataclasses
import io
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from etils import epath

from pipeline.errors import InvalidValue
from pipeline.fs.atomic import atomic_write, is_local
from pipeline.fs.step_files import StepFiles
from pipeline.planning.layout import ranges
from pipeline.scoring.values import Value

# Arrays of a part: the segments of the plan, and the records of each value.
SEGMENTS, VALUE = "segments", "value:"

# Rows of a record batch of the table.
ROWS = 1 << 16


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of some ranges of steps: arrays with a line for each segment, in order of steps."""

    files: StepFiles
    ranges: Sequence[range]

    def __iter__(self) -> Iterator[Mapping[str, np.ndarray]]:
        for steps in self.ranges:
            if (content := self.files.read(steps)) is None:
                raise InvalidValue(
                    f"the scores of steps {steps[0]:,} to {steps[-1]:,} in {self.files.directory} "
                    "are missing or damaged; score again to repeat these steps"
                )
            yield np.load(io.BytesIO(content))

    def write(self, number: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Writes a part, whole or not at all."""
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **arrays)
        self.files.write(self.ranges[number], buffer.getvalue())


def open_table(path: epath.Path) -> pa.Table:
    """The table in a file, mapped if it is local; a `ValueError` if the file is damaged."""
    try:
        if not is_local(path):
            return pa.ipc.open_file(pa.py_buffer(path.read_bytes())).read_all()
        with pa.memory_map(os.fspath(path)) as file:
            return pa.ipc.open_file(file).read_all()
    except pa.ArrowException as error:
        raise InvalidValue(f"{path} is damaged ({error}); delete it, and score again") from error


def write_table(
    path: epath.Path, parts: Parts, values: Mapping[str, Value], shape: tuple[int, int]
) -> None:
    """Writes the table of all parts; an example that is in none of them has nulls.

    `shape` is the number of examples, which are the rows of the table, and of sides: 1, or 2 for
    pairs.
    """
    positions = np.zeros(shape, np.int64)
    for part in parts:
        np.add.at(positions, part[SEGMENTS][:, 1], part[SEGMENTS][:, 3:])
    counts = {name: value.count_examples(positions) for name, value in values.items()}
    offsets = {name: np.cumsum(count) - count for name, count in counts.items()}
    with contextlib.ExitStack() as stack:
        records = {}
        for name, value in values.items():
            folder = path.parent if is_local(path) else None
            scratch = stack.enter_context(tempfile.TemporaryFile(dir=folder))
            count = int(counts[name].sum()) if value.ragged else shape[0]
            size = max(count, 1), *value.shape
            records[name] = np.memmap(scratch, value.sum_dtype, "w+", shape=size)
        for part in parts:
            example, start = part[SEGMENTS][:, 1], part[SEGMENTS][:, 2]
            for name, value in values.items():
                if value.ragged:
                    # Those of the positions from `start` on, if the example is split.
                    places = ranges(offsets[name][example] + start, value.count(part[SEGMENTS]))
                    records[name][places] = part[VALUE + name]
                else:  # each once, or in the order of the plan, which is always the same
                    np.add.at(records[name], example, part[VALUE + name])
        batches = _batches(values, records, np.any(positions, axis=1), counts, offsets)
        first = next(batches)
        with atomic_write(path) as file, pa.ipc.new_file(file, first.schema) as writer:
            for batch in (first, *batches):
                writer.write_batch(batch)


def _batches(
    values: Mapping[str, Value],
    records: Mapping[str, np.ndarray],
    there: np.ndarray,
    counts: Mapping[str, np.ndarray],
    offsets: Mapping[str, np.ndarray],
) -> Iterator[pa.RecordBatch]:
    """The rows of the table; `there` is True for examples that are in a batch."""
    for first in range(0, len(there), ROWS):
        rows = slice(first, first + ROWS)
        missing = pa.array(~there[rows])
        columns = {}
        for name, value in values.items():
            if value.ragged:
                sizes, begin = counts[name][rows], int(offsets[name][first])
                lists = as_column(records[name][begin : begin + int(sizes.sum())])
                ends = np.concatenate([[0], np.cumsum(sizes)])
                column = pa.LargeListArray.from_arrays(pa.array(ends), lists)
            else:
                column = as_column(value.finish(records[name][rows], counts[name][rows]))
            null = pa.scalar(None, column.type)
            columns[name] = pc.call_function("if_else", [missing, null, column])
        yield pa.record_batch(columns)


def as_column(records: np.ndarray) -> pa.Array:
    """Records `[n, *shape]` as an Arrow array of numbers, or of lists of fixed size.

    >>> as_column(np.array([[1, 2], [3, 4]])).to_pylist()
    [[1, 2], [3, 4]]
    """
    column = pa.array(np.asarray(records).reshape(-1))
    for size in reversed(records.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column
