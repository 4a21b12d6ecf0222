"""The log of losses: what each segment of each step lost, in the order of the plan."""

import io
import itertools
import json
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from etils import epath

from pipeline.errors import InvalidValue
from pipeline.history.step_files import StepFiles
from pipeline.planning.planned import PlannedBatch

NAME = "losses"

# The most segments in memory and, 8 bytes each before compression, in a file.
SEGMENTS = 1 << 20


class LossLog:
    """The sums of losses and weights of all segments of a run, in Arrow files of some steps each.

    A file has the columns `loss` and `weight`, float32, and in its schema the number of segments of
    each of its steps. It names no examples: the plan says which they are.

    Args:
        workdir: the files are in its folder `losses`.
        step: the step that the run goes on from; files from there on are removed.
    """

    def __init__(self, workdir: epath.Path, step: int):
        self._files = _files(workdir)
        self._files.remove(step)
        self._sums: dict[int, np.ndarray] = {}
        self._count = 0

    def add(self, step: int, planned: PlannedBatch, sums: np.ndarray) -> None:
        """Takes the sums of the segments of a step, `[2, rows, segments]` as of `sum_segments`."""
        row = planned.segments[:, 0]
        self._sums[step] = sums[:, row, np.arange(len(row)) - np.searchsorted(row, row)]
        self._count += len(row)
        if self._count >= SEGMENTS:
            self.flush()

    def flush(self) -> None:
        """Writes what was added since the last time."""
        if not self._sums:
            return
        steps = range(min(self._sums), max(self._sums) + 1)
        sums = [self._sums.get(step, np.zeros((2, 0), np.float32)) for step in steps]
        loss, weight = np.concatenate(sums, axis=1)
        batch = pa.record_batch({"loss": pa.array(loss), "weight": pa.array(weight)})
        counts = {"segments": [each.shape[1] for each in sums]}
        schema, buffer = batch.schema.with_metadata({"lockstep": json.dumps(counts)}), io.BytesIO()
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_file(buffer, schema, options=options) as writer:
            writer.write_batch(batch.replace_schema_metadata(schema.metadata))
        self._files.write(steps, buffer.getvalue())
        self._sums, self._count = {}, 0


def read_sums(workdir: epath.Path) -> Iterator[tuple[int, np.ndarray]]:
    """Each step that has losses and, float32 [2, segments], the sums of its losses and weights.

    Raises:
        ValueError: a file is damaged.
    """
    files = _files(workdir)
    ranges = files.ranges()
    for steps, following in itertools.zip_longest(ranges, ranges[1:]):
        if (content := files.read(steps)) is None:
            raise InvalidValue(
                f"the losses of steps {steps[0]:,} to {steps[-1]:,} in {files.directory} are "
                "damaged; delete their file, and the losses of other steps can be read"
            )
        table = pa.ipc.open_file(pa.py_buffer(content)).read_all()
        counts = json.loads(table.schema.metadata[b"lockstep"])["segments"]
        sums = np.stack([table[name].to_numpy() for name in ("loss", "weight")])
        each = np.split(sums, np.cumsum(counts)[:-1], axis=1)
        for step, found in zip(steps, each, strict=True):
            # A run that went on from before the end of a file has these steps in the next one.
            if found.size and (following is None or step < following[0]):
                yield step, found


def _files(workdir: epath.Path) -> StepFiles:
    return StepFiles(workdir / NAME, "arrow")
