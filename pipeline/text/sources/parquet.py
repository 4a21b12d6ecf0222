"""Parquet files, read with pyarrow alone."""

from collections.abc import Callable

from etils import epath

from pipeline.fs.atomic import is_local
from pipeline.text.sources.tables import Group, Tables


class ParquetFiles(Tables):
    """Records from Parquet files, a dict for each row; see `Tables` for the arguments.

    A row group is decoded as a whole when one of its rows is requested, so random access is
    cheapest with small row groups; `prepare` reads in order, and decodes each once in a worker.
    """

    format, prefix = "Parquet", "parquetfiles"

    def _open(self, path: epath.Path) -> tuple[list[str], list[int], Callable[[int], Group]]:
        from pyarrow import parquet

        file = parquet.ParquetFile(path if is_local(path) else path.open("rb"), memory_map=True)
        groups = range(file.metadata.num_row_groups)
        rows = [file.metadata.row_group(group).num_rows for group in groups]
        names = file.schema_arrow.names
        return names, rows, lambda group: file.read_row_group(group, columns=self.columns)
