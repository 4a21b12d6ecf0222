"""Arrow and Feather files, and Hugging Face data sets saved to disk, read with pyarrow alone."""

import json
import os
from collections.abc import Callable
from typing import Any

import pyarrow as pa
from etils import epath

from pipeline.atomic import is_local
from pipeline.sources.tables import Tables, require_columns


class ArrowFiles(Tables):
    """Records from Arrow IPC files or streams, and Feather files; see `Tables` for the arguments.

    Local files are mapped into memory; only compressed record batches are ever copied.
    """

    format = "Arrow"

    def _open(self, path: epath.Path) -> tuple[list[int], Callable[[int], pa.RecordBatch]]:
        raw = pa.memory_map(os.fspath(path)) if is_local(path) else pa.py_buffer(path.read_bytes())
        try:
            file = pa.ipc.open_file(raw)
            batch: Callable[[int], pa.RecordBatch] = file.get_batch
            count, names = file.num_record_batches, file.schema.names
        except pa.ArrowInvalid:  # no footer: a stream, as Hugging Face writes it
            stream = pa.ipc.open_stream(pa.memory_map(os.fspath(path)) if is_local(path) else raw)
            batches = list(stream)
            batch, count, names = batches.__getitem__, len(batches), stream.schema.names
        require_columns(self.columns, names)
        return [batch(number).num_rows for number in range(count)], batch

    def _rows(self, opened: Any) -> list[int]:
        return opened[0]

    def _read(self, opened: Any, group: int) -> pa.RecordBatch:
        batch = opened[1](group)
        return batch if self.columns is None else batch.select(self.columns)


class HuggingFace(ArrowFiles):
    """Records of a data set that `datasets` wrote with `save_to_disk`, without that library.

    Args:
        directory: what was given to `save_to_disk`.
        split: of a `DatasetDict`, which of its data sets; of a single `Dataset`, None.
        columns: the columns to read; None for all.

    Raises:
        FileNotFoundError: there is no saved data set.
        ValueError: there is no such split, or rows were selected and not yet written out.
    """

    format = "a Hugging Face data set"

    def __init__(
        self,
        directory: epath.PathLike,
        split: str | None = None,
        *,
        columns: list[str] | None = None,
    ):
        root = epath.Path(directory).expanduser()
        place = root
        if (several := root / "dataset_dict.json").exists():
            splits = json.loads(several.read_text())["splits"]
            if split not in splits:
                raise ValueError(
                    f"{os.fspath(root)} has no split {split!r}; its splits are {', '.join(splits)}"
                )
            place = root / split
        elif split is not None and (root / "state.json").exists():
            raise ValueError(
                f"{os.fspath(root)} is one data set and has no splits; leave out split={split!r}"
            )
        if not (place / "state.json").exists():
            raise FileNotFoundError(
                f"there is no data set in {os.fspath(place)} (no state.json); write one there "
                "with datasets.Dataset.save_to_disk"
            )
        state = json.loads((place / "state.json").read_text())
        if state.get("_indices_data_files"):
            raise ValueError(
                f"{os.fspath(place)} selects rows through an index; call flatten_indices() before "
                "save_to_disk"
            )
        names = [place / entry["filename"] for entry in state["_data_files"]]
        super().__init__(names, columns=columns)
