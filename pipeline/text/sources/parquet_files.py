"""Parquet: the rows of row groups as records."""

import itertools
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from etils import epath

from pipeline.text import files
from pipeline.text.tables import TableFile, TableFormat, Tables


class ParquetFiles(Tables):
    """Records from Parquet files, one for each row.

    A row group is read by one worker, in batches, so it may be of any size.

    Args:
        paths: names or globs, one or several.
        columns: the columns that records have; None: all.
    """

    extensions = (".parquet",)

    def __init__(self, paths: files.Paths, *, columns: Sequence[str] | None = None):
        super().__init__(TableFormat("Parquet", "parquetfiles", _open_parquet, columns), paths)


def _open_parquet(path: epath.Path) -> TableFile:
    from pyarrow import parquet

    file = parquet.ParquetFile(path.open("rb"))  # whatever its name is
    groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
    # What is read, the row that is next, and the batches from there on.
    reading: Any = None, 0, iter(())

    def read(group: int, first: int, count: int, names: list[str]) -> pa.Table:
        nonlocal reading
        of, at, batches = reading
        if (of, at) != ((group, names), first):
            of, at = (group, names), 0
            batches = file.iter_batches(count, row_groups=[group], columns=names)
        slices: list[pa.RecordBatch] = []
        while at < first + count:
            batch = next(batches)
            begin, end = max(first - at, 0), min(batch.num_rows, first + count - at)
            slices += [batch.slice(begin, end - begin)] if begin < end else []
            at += end
            if end < batch.num_rows:
                batches = itertools.chain([batch.slice(end)], batches)
        reading = of, at, batches
        return pa.Table.from_batches(slices)

    sizes = [(group.num_rows, group.total_byte_size) for group in groups]
    return TableFile(file.schema_arrow, sizes, read)
