"""ArrayRecord: files of records that are read at random, many at a time."""

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.sources import files


class ArrayRecords:
    """Records of ArrayRecord files; `{"text": bytes}` unless `parse` says otherwise.

    Records are asked for in batches, which the format needs: 512 at once cost a thirtieth of 512
    one by one. `array_record` comes with Grain.

    Args:
        paths: names or globs, one or several.
        parse: makes a dict of a record's bytes, for example `json.loads`; a function at the top of
            a module, so that it reaches workers.

    Raises:
        FileNotFoundError: a file does not exist, or a glob matches none.
        ValueError: from reading, when a file is damaged or `parse` fails; names file and record.
    """

    def __init__(
        self, paths: files.Paths, *, parse: Callable[[bytes], dict[str, Any]] | None = None
    ):
        self.files, self.parse = files.find(paths), parse

    @functools.cached_property
    def _readers(self) -> list[Any]:
        from array_record.python.array_record_data_source import ArrayRecordDataSource

        readers = []
        for path in self.files:
            try:
                readers.append(ArrayRecordDataSource(os.fspath(path)))
            except (RuntimeError, ValueError) as error:
                raise ValueError(
                    f"{os.fspath(path)} is not a whole ArrayRecord file: {error}. Write it again, "
                    "or fetch it again"
                ) from error
        return readers

    @functools.cached_property
    def _first(self) -> list[int]:
        """The number of the first record of each file, and of all records."""
        return [0, *itertools.accumulate(map(len, self._readers))]

    @functools.cached_property
    def fingerprint(self) -> str:
        """See `Source`; from names, sizes and content samples of the files."""
        name = f"-{self.parse.__module__}.{self.parse.__qualname__}" if self.parse else ""
        return f"array_record{name}-{files.digest(self.files)}"

    def __len__(self) -> int:
        return self._first[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """The records with these numbers, in one request for each file."""
        asked: dict[int, list[tuple[int, int]]] = {}
        for place, index in enumerate(indices):
            number, within = files.locate(self._first, index)
            asked.setdefault(number, []).append((place, within))
        found: list[bytes] = [b""] * len(indices)
        for number, wanted in asked.items():
            try:
                records = self._readers[number].__getitems__([within for _, within in wanted])
            except (RuntimeError, ValueError) as error:
                records = wanted[0][1], wanted[-1][1]
                raise ValueError(
                    f"{os.fspath(self.files[number])} cannot be read from record {min(records)} "
                    f"to {max(records)}: {error}. It is damaged; fetch it again"
                ) from error
            for (place, _), record in zip(wanted, records, strict=True):
                found[place] = record
        if self.parse is None:
            return [{"text": record} for record in found]
        return [self._parsed(*pair) for pair in zip(indices, found, strict=True)]

    def _parsed(self, index: int, record: bytes) -> dict[str, Any]:
        assert self.parse
        try:
            return self.parse(record)
        except Exception as error:
            raise ValueError(
                f"{self.where(index)} cannot be parsed by {self.parse.__qualname__}: {error!r}; "
                "mend the record, or give another parse="
            ) from error

    def where(self, index: int) -> str:
        """The file of a record, and its number there."""
        number, within = files.locate(self._first, index)
        return f"{os.fspath(self.files[number])}, record {within}"

    def __getstate__(self) -> dict:
        return {key: self.__dict__[key] for key in ("files", "parse")}

    def __str__(self) -> str:
        return f"ArrayRecord files {files.described(self.files)}"
