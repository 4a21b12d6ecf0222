"""Parquet files, read with pyarrow alone."""

from typing import Any

import pyarrow as pa
from etils import epath

from pipeline.atomic import is_local
from pipeline.sources.tables import Tables, require_columns


class ParquetFiles(Tables):
    """Records from Parquet files, a dict for each row; see `Tables` for the arguments.

    A row group is decoded as a whole when one of its rows is asked for, so random access is
    cheapest with small row groups; `prepare` reads in order, and decodes each once in a worker.
    """

    format = "Parquet"

    def _open(self, path: epath.Path) -> Any:
        from pyarrow import parquet

        file = parquet.ParquetFile(path if is_local(path) else path.open("rb"), memory_map=True)
        require_columns(self.columns, file.schema_arrow.names)
        return file

    def _rows(self, opened: Any) -> list[int]:
        metadata = opened.metadata
        return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]

    def _read(self, opened: Any, group: int) -> pa.Table:
        return opened.read_row_group(group, columns=self.columns)
