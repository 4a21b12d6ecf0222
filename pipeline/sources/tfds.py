"""TFDS: any prepared TensorFlow Datasets data set, read without TensorFlow."""

import functools
import os
from collections.abc import Sequence
from typing import Any

from etils import epath

from pipeline.atomic import as_path
from pipeline.extras import require
from pipeline.sources import files


class Tfds:
    """Records of a split of a data set that TFDS prepared with `file_format="array_record"`.

    Args:
        name: as TFDS spells it: `name`, `name/config`, `name:1.0.0` or `name/config:1.0.0`.
        split: as TFDS spells it: `train`, `train[:90%]`, `validation`.
        data_dir: where the data set was prepared; by default where TFDS looks.

    Raises:
        FileNotFoundError: the data set is not on disk. Nothing is ever downloaded.
        ValueError: it has no such split, or its files have no random access.
    """

    def __init__(self, name: str, split: str, data_dir: epath.PathLike | None = None):
        self.name, self.split = name, split
        self.data_dir = None if data_dir is None else os.fspath(as_path(data_dir))
        self._require_split()

    @functools.cached_property
    def _builder(self) -> Any:
        tfds = require("tensorflow_datasets", extra="tfds", purpose="reading a TFDS data set")
        try:
            return tfds.core.read_only_builder.builder_from_files(self.name, data_dir=self.data_dir)
        except (tfds.core.registered.DatasetNotFoundError, FileNotFoundError) as error:
            where = self.data_dir or "the data directory of TFDS"
            raise FileNotFoundError(
                f"the data set {self.name} is not in {where}. Prepare it there first: "
                "tfds.builder(name, data_dir=…, file_format='array_record')"
                ".download_and_prepare(); a data set with configs is named name/config"
            ) from error

    def _require_split(self) -> None:
        info = self._builder.info
        kind = info.file_format.value if info.file_format else "unknown"
        if kind != "array_record":
            raise ValueError(
                f"the data set {self.name} was prepared as {kind}, which cannot be read at random "
                "without TensorFlow; prepare it again with file_format='array_record'"
            )
        try:
            known = info.splits[self.split].num_examples
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"the data set {self.name} has no split {self.split!r}; its splits are "
                f"{', '.join(info.splits)}, or parts of them such as train[:90%]"
            ) from error
        if not known:
            raise ValueError(f"the split {self.split!r} of {self.name} is empty")

    @functools.cached_property
    def _records(self) -> Any:
        return self._builder.as_data_source(split=self.split)

    @functools.cached_property
    def _content(self) -> files.Content:
        pieces = self._builder.info.splits[self.split].file_instructions
        return files.Content(epath.Path(piece.filename) for piece in pieces)

    @property
    def fingerprint(self) -> str:
        """See `Source`; from the version, the split, and content samples of its files.

        Raises:
            ValueError: a file changed since the first time; names it.
        """
        return f"tfds-{self._builder.info.full_name}-{self.split}-{self._content.digest}"

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """The records with these numbers; text is `bytes`, as TFDS gives it."""
        return self._records.__getitems__([int(index) for index in indices])

    def where(self, index: int) -> str:
        """The data set, the split and the number of a record."""
        return f"record {index} of {self}"

    def __getstate__(self) -> dict:
        handles = ("_builder", "_records")
        return {key: value for key, value in self.__dict__.items() if key not in handles}

    def __str__(self) -> str:
        return f"{self.name}, split {self.split}"
