"""The table of scores: a row for each example, in the order of the corpus, made from parts.

Each part has the values of a fixed range of steps, and stays on disk until all parts are there. The
records of all parts are sorted by example in scratch files, which the system keeps in memory if
there is room, and then written to the table.
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
from pipeline.history.step_files import StepFiles
from pipeline.scoring.values import Records, Value

# Arrays of a part: the segments of the plan, and the records of each value.
SEGMENTS, VALUE = "segments", "value:"

# Rows of a record batch of the table.
ROWS = 1 << 16


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of some ranges of steps, each a dict of arrays with the segments of its steps."""

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
        with pa.memory_map(os.fsencode(path)) as file:
            return pa.ipc.open_file(file).read_all()
    except pa.ArrowException as error:
        raise InvalidValue(f"{path} is damaged ({error}); delete it, and score again") from error


def write_table(
    path: epath.Path, parts: Parts, values: Mapping[str, Value], shape: tuple[int, int]
) -> None:
    """Writes the table of all parts; an example that is in none of them has nulls.

    `shape` is the number of examples, which are the rows of the table, and of sides.
    """
    positions = np.zeros(shape, np.int64)
    for part in parts:
        np.add.at(positions, part[SEGMENTS][:, 1], part[SEGMENTS][:, 3:])
    folder = path.parent if is_local(path) else None
    with contextlib.ExitStack() as stack:

        def make(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
            scratch = stack.enter_context(tempfile.TemporaryFile(dir=folder))
            return np.memmap(scratch, dtype, "w+", shape=(max(shape[0], 1), *shape[1:]))

        records = {name: Records(value, positions, make) for name, value in values.items()}
        for part in parts:
            segments = part[SEGMENTS]
            for name, each in records.items():
                each.add(segments, part[VALUE + name])
        batches = _batches(records, ~np.any(positions, axis=1))
        first = next(batches)
        with atomic_write(path) as file, pa.ipc.new_file(file, first.schema) as writer:
            for batch in (first, *batches):
                writer.write_batch(batch)


def _batches(records: Mapping[str, Records], missing: np.ndarray) -> Iterator[pa.RecordBatch]:
    """The rows of the table; `missing` is True for examples that are in no batch."""
    for first in range(0, len(missing), ROWS):
        last = first + ROWS
        nulls, columns = pa.array(missing[first:last]), {}
        for name, each in records.items():
            column = as_column(each.read(first, last))
            if each.value.ragged:
                ends = np.cumsum(np.insert(each.counts[first:last], 0, 0))
                column = pa.LargeListArray.from_arrays(pa.array(ends), column)
            null = pa.scalar(None, column.type)
            columns[name] = pc.call_function("if_else", [nulls, null, column])
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
