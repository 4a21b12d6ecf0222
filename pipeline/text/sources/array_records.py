"""ArrayRecord files, whose records are read by number, many at a time; and those of TFDS."""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

from etils import epath

from pipeline.errors import InvalidValue, Missing, require
from pipeline.fs.atomic import as_path
from pipeline.text.fingerprints import fingerprint
from pipeline.text.sources import files
from pipeline.text.sources.source import Numbered


class ArrayRecords(Numbered, files.FileSource):
    """Records of ArrayRecord files: `{"text": bytes}`, or the results of `parse`.

    Records are requested in batches: in this format, 512 at once cost a thirtieth of 512 one by
    one. `array_record` is installed with Grain. One file at a time is open.

    Args:
        paths: names or globs, one or several.
        parse: a function from a record's bytes to a dict, such as `json.loads`; at the top of a
            module, so that workers can pickle it, with a fingerprint
            (`pipeline.text.fingerprints`).
    """

    format = "ArrayRecord files"
    handles = ("_latest",)
    _latest: tuple[int, Any] = -1, None  # the reader of the file that was read last

    def __init__(
        self, paths: files.Paths, *, parse: Callable[[bytes], dict[str, Any]] | None = None
    ):
        super().__init__(paths)
        self.parse = parse
        self.prefix = f"array_record-{fingerprint(parse)}" if parse else "array_record"

    def _open(self, file: int) -> Any:
        from array_record.python.array_record_data_source import ArrayRecordDataSource

        if self._latest[0] != file:
            path = self.files[file]
            self._latest = file, self._guard(path, ArrayRecordDataSource, os.fspath(path))
        return self._latest[1]

    def _counts(self) -> list[tuple[str, int]]:
        return [(os.fspath(path), len(self._open(file))) for file, path in enumerate(self.files)]

    def _read(self, file: int, numbers: Sequence[int]) -> list[Any]:
        contents = self._guard(self.files[file], self._open(file).__getitems__, list(numbers))
        return list(map(self._parse, contents))

    def _parse(self, content: bytes) -> Any:
        try:
            return {"text": content} if self.parse is None else self.parse(content)
        except Exception as error:
            name = getattr(self.parse, "__qualname__", fingerprint(self.parse))
            return InvalidValue(
                f"it cannot be parsed by {name}: {error!r}; correct the record, or give another "
                "parse="
            )


class Tfds(Numbered, files.FileSource):
    """Records of a split of a data set that TFDS prepared with `file_format="array_record"`.

    Text is `bytes`, as TFDS returns it.

    Args:
        name: as TFDS spells it: `name`, `name/config`, `name:1.0.0` or `name/config:1.0.0`.
        split: as TFDS spells it: `train`, `train[:90%]`, `validation`.
        data_dir: where the data set was prepared; by default where TFDS looks.

    Raises:
        FileNotFoundError: the data set is not on disk. Nothing is ever downloaded.
        ValueError: it has no such split, or its files have no random access.
    """

    handles = ("_builder", "_records")

    def __init__(self, name: str, split: str, data_dir: epath.PathLike | None = None):
        self.name, self.split = name, split
        self.data_dir = None if data_dir is None else os.fspath(as_path(data_dir))
        info = self._builder.info
        kind = info.file_format.value if info.file_format else "unknown"
        if kind != "array_record":
            raise InvalidValue(
                f"the data set {name} was prepared as {kind}, which needs TensorFlow; prepare it "
                "again with file_format='array_record'"
            )
        try:
            known = info.splits[split]
        except (KeyError, ValueError) as error:
            raise InvalidValue(
                f"the data set {name} has no split {split!r}; its splits are "
                f"{', '.join(info.splits)}, or parts of them such as train[:90%]"
            ) from error
        if not known.num_examples:
            raise InvalidValue(f"the split {split!r} of {name} is empty")
        self.prefix = f"tfds-{info.full_name}-{split}"
        super().__init__([piece.filename for piece in known.file_instructions])

    @functools.cached_property
    def _builder(self) -> Any:
        tfds = require("tensorflow_datasets", extra="tfds", purpose="reading a TFDS data set")
        try:
            return tfds.core.read_only_builder.builder_from_files(self.name, data_dir=self.data_dir)
        except (tfds.core.registered.DatasetNotFoundError, FileNotFoundError) as error:
            where = self.data_dir or "the data directory of TFDS"
            raise Missing(
                f"the data set {self.name} is not in {where}. Prepare it there first: "
                "tfds.builder(name, data_dir=…, file_format='array_record')"
                ".download_and_prepare(); a data set with configs is named name/config"
            ) from error

    @functools.cached_property
    def _records(self) -> Any:
        return self._builder.as_data_source(split=self.split)

    def _counts(self) -> list[tuple[str, int]]:
        return [("", len(self._records))]

    def _read(self, file: int, numbers: Sequence[int]) -> Sequence[dict[str, Any]]:
        return self._records.__getitems__(list(numbers))

    def __str__(self) -> str:
        return f"{self.name}, split {self.split}"
