"""ArrayRecord: files of records that are read at random, many at a time."""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.errors import InvalidValue
from pipeline.text.fingerprints import fingerprint
from pipeline.text.sources import files


class ArrayRecords(files.FileSource):
    """Records of ArrayRecord files; `{"text": bytes}` unless `parse` says otherwise.

    Records are requested in batches, which the format needs: 512 at once cost a thirtieth of 512
    one by one. `array_record` comes with Grain.

    Args:
        paths: names or globs, one or several.
        parse: makes a dict of a record's bytes, for example `json.loads`; a function at the top of
            a module, so that it reaches workers, with a fingerprint (`pipeline.text.fingerprints`).

    Raises:
        FileNotFoundError: a file does not exist, or a glob matches none.
        ValueError: `parse` has no fingerprint; or, from reading, a file is damaged or `parse`
            fails; names file and record.
    """

    format = "ArrayRecord files"
    handles = ("_readers", "_first")

    def __init__(
        self, paths: files.Paths, *, parse: Callable[[bytes], dict[str, Any]] | None = None
    ):
        super().__init__(paths)
        self.parse = parse
        self._parser = fingerprint(parse) if parse else ""
        self.prefix = "-".join(["array_record", *filter(None, [self._parser])])

    @functools.cached_property
    def _readers(self) -> list[Any]:
        from array_record.python.array_record_data_source import ArrayRecordDataSource

        readers = []
        for path in self.files:
            try:
                readers.append(ArrayRecordDataSource(os.fspath(path)))
            except (RuntimeError, ValueError) as error:
                raise InvalidValue(
                    f"{os.fspath(path)} is not a whole ArrayRecord file: {error}. Write it again, "
                    "or fetch it again"
                ) from error
        return readers

    @property
    def _sizes(self) -> list[int]:
        return list(map(len, self._readers))

    def _read(self, part: int, numbers: Sequence[int]) -> list[dict[str, Any]]:
        try:
            contents = self._readers[part].__getitems__(numbers)
        except (RuntimeError, ValueError) as error:
            raise InvalidValue(
                f"{os.fspath(self.files[part])} cannot be read from record {min(numbers)} "
                f"to {max(numbers)}: {error}. It is damaged; fetch it again"
            ) from error
        if self.parse is None:
            return [{"text": content} for content in contents]
        return [self._parse(part, *pair) for pair in zip(numbers, contents, strict=True)]

    def _parse(self, part: int, number: int, content: bytes) -> dict[str, Any]:
        assert self.parse is not None
        try:
            return self.parse(content)
        except Exception as error:
            name = getattr(self.parse, "__qualname__", self._parser)
            raise InvalidValue(
                f"{self._where(part, number)} cannot be parsed by {name}: {error!r}; "
                "mend the record, or give another parse="
            ) from error

    def _where(self, part: int, number: int) -> str:
        return f"{os.fspath(self.files[part])}, record {number}"
