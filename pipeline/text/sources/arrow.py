"""Arrow and Feather files, and Hugging Face data sets saved to disk, read with pyarrow alone."""

import json
import os
from collections.abc import Callable, Sequence

import pyarrow as pa
from etils import epath

from pipeline.errors import InvalidValue, Missing
from pipeline.fs.atomic import as_path, is_local
from pipeline.text.sources.tables import Group, Tables


class ArrowFiles(Tables):
    """Records from Arrow IPC files or streams, and Feather files; see `Tables` for the arguments.

    Local files are mapped into memory; only compressed record batches are ever copied.
    """

    format, prefix = "Arrow", "arrowfiles"

    def _open(self, path: epath.Path) -> tuple[list[str], list[int], Callable[[int], Group]]:
        raw = pa.memory_map(os.fspath(path)) if is_local(path) else pa.py_buffer(path.read_bytes())
        try:
            file = pa.ipc.open_file(raw)
            names, read = file.schema.names, file.get_batch
            rows = [read(number).num_rows for number in range(file.num_record_batches)]
        except pa.ArrowInvalid:  # no footer: a stream, as Hugging Face writes it
            stream = pa.ipc.open_stream(pa.memory_map(os.fspath(path)) if is_local(path) else raw)
            batches = list(stream)
            names, read = stream.schema.names, batches.__getitem__
            rows = [batch.num_rows for batch in batches]
        if self.columns is None:
            return names, rows, read
        return names, rows, lambda group: read(group).select(self.columns)


class HuggingFaceDataset(ArrowFiles):
    """Records of a data set that `datasets` wrote with `save_to_disk`, without that library.

    Args:
        directory: what was given to `save_to_disk`.
        split: of a `DatasetDict`, which of its data sets; of a single `Dataset`, None.
        columns: the columns to read; None for all.

    Raises:
        FileNotFoundError: there is no saved data set.
        ValueError: there is no such split, or rows were selected and not yet written out.
    """

    format, prefix = "a Hugging Face data set", "huggingface"

    def __init__(
        self,
        directory: epath.PathLike,
        split: str | None = None,
        *,
        columns: Sequence[str] | None = None,
    ):
        root = as_path(directory)
        place = root
        if (several := root / "dataset_dict.json").exists():
            splits = json.loads(several.read_text())["splits"]
            if split is None or split not in splits:
                raise InvalidValue(
                    f"{os.fspath(root)} has no split {split!r}; its splits are {', '.join(splits)}"
                )
            place = root / split
        elif split is not None and (root / "state.json").exists():
            raise InvalidValue(
                f"{os.fspath(root)} is one data set and has no splits; leave out split={split!r}"
            )
        if not (place / "state.json").exists():
            raise Missing(
                f"there is no data set in {os.fspath(place)} (no state.json); write one there "
                "with datasets.Dataset.save_to_disk"
            )
        state = json.loads((place / "state.json").read_text())
        if state.get("_indices_data_files"):
            raise InvalidValue(
                f"{os.fspath(place)} selects rows through an index; call flatten_indices() before "
                "save_to_disk"
            )
        names = [place / entry["filename"] for entry in state["_data_files"]]
        super().__init__(names, columns=columns)
