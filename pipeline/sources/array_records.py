"""ArrayRecord: files of records that are read at random, many at a time."""

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.fingerprints import fingerprint
from pipeline.sources import files


class ArrayRecords(files.FileSource):
    """Records of ArrayRecord files; `{"text": bytes}` unless `parse` says otherwise.

    Records are requested in batches, which the format needs: 512 at once cost a thirtieth of 512
    one by one. `array_record` comes with Grain.

    Args:
        paths: names or globs, one or several.
        parse: makes a dict of a record's bytes, for example `json.loads`; a function at the top of
            a module, so that it reaches workers, with a fingerprint (`pipeline.fingerprints`).

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
                raise ValueError(
                    f"{os.fspath(path)} is not a whole ArrayRecord file: {error}. Write it again, "
                    "or fetch it again"
                ) from error
        return readers

    @functools.cached_property
    def _first(self) -> list[int]:
        """The number of the first record of each file, and of all records."""
        return [0, *itertools.accumulate(map(len, self._readers))]

    def __len__(self) -> int:
        return self._first[-1]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """The records with these numbers, in one request for each file."""
        requests: dict[int, list[tuple[int, int]]] = {}
        for place, index in enumerate(indices):
            number, within = files.locate(self._first, index)
            requests.setdefault(number, []).append((place, within))
        contents: list[bytes] = [b""] * len(indices)
        for number, request in requests.items():
            places, numbers = zip(*request, strict=True)
            try:
                records = self._readers[number].__getitems__(numbers)
            except (RuntimeError, ValueError) as error:
                raise ValueError(
                    f"{os.fspath(self.files[number])} cannot be read from record {min(numbers)} "
                    f"to {max(numbers)}: {error}. It is damaged; fetch it again"
                ) from error
            for place, record in zip(places, records, strict=True):
                contents[place] = record
        return [self._parse(*pair) for pair in zip(indices, contents, strict=True)]

    def _parse(self, index: int, content: bytes) -> dict[str, Any]:
        if self.parse is None:
            return {"text": content}
        try:
            return self.parse(content)
        except Exception as error:
            name = getattr(self.parse, "__qualname__", self._parser)
            raise ValueError(
                f"{self.where(index)} cannot be parsed by {name}: {error!r}; "
                "mend the record, or give another parse="
            ) from error

    def where(self, index: int) -> str:
        """The file of a record, and its number there."""
        number, within = files.locate(self._first, index)
        return f"{os.fspath(self.files[number])}, record {within}"
