"""Records in memory: a sequence, or a Grain MapDataset."""

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from pipeline.errors import InvalidValue, OutOfRange
from pipeline.text.sources.source import read_records

# The default fingerprint reads this many records, spread evenly.
SAMPLES = 1024


class Records:
    """Anything with a length and random access: a list, a `grain.MapDataset`, a data source.

    Entries are dicts, or texts (`str`, `bytes`), which become `{"text": …}`.

    >>> Records(["one", "two"])[1]
    {'text': 'two'}

    Args:
        records: entries by number. For workers it must pickle.
        fingerprint: tells the content apart, as `Source` wants it. None: from the length and up to
            1,024 entries spread evenly, so a change that misses all of them goes unnoticed.

    Raises:
        ValueError: `records` has no length, or, from reading, an entry is neither dict nor text.
    """

    def __init__(self, records: Any, *, fingerprint: str | None = None):
        if not hasattr(records, "__getitem__") or not hasattr(records, "__len__"):
            raise InvalidValue(
                f"records is a {type(records).__name__}, without random access or a length; put "
                "them into a list first"
            )
        self.records, self._given = records, fingerprint

    @property
    def fingerprint(self) -> str:
        """See `Source`.

        Raises:
            ValueError: it was not given, and an entry holds an object that says nothing of itself.
        """
        if self._given is not None:
            return self._given
        count = len(self)
        samples = min(count, SAMPLES)
        sha = hashlib.sha256(f"{count}\n".encode())
        for record in self.__getitems__([at * count // samples for at in range(samples)]):
            sha.update(json.dumps(record, sort_keys=True, default=_as_json).encode() + b"\n")
        return f"records-{sha.hexdigest()[:12]}"

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """The records with these numbers."""
        for index in indices:
            if not 0 <= index < len(self):  # a list would count from its end
                raise OutOfRange(f"record {index} of {len(self):,}")
        entries = read_records(self.records, [int(index) for index in indices])
        return [_as_record(*pair) for pair in zip(indices, entries, strict=True)]

    def __str__(self) -> str:
        return f"{len(self):,} records of a {type(self.records).__name__}"


def _as_record(index: int, entry: Any) -> dict[str, Any]:
    if isinstance(entry, dict):
        return entry
    if isinstance(entry, str | bytes):
        return {"text": entry}
    hint = "; a filtered MapDataset has gaps: filter before it is one" if entry is None else ""
    raise InvalidValue(
        f"record {index} is a {type(entry).__name__}; a record is a dict, or text{hint}"
    )


def _as_json(value: Any) -> Any:
    """A value that JSON cannot hold: arrays and sets become lists, bytes become text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    text = repr(value)
    if re.search(r" at 0x[0-9a-f]+", text):
        raise InvalidValue(
            f"the records have no fingerprint: one holds {text:.80}, which another process would "
            "see at another address. Leave such fields out, or give a text that you change "
            'whenever the records change, as in Records(records, fingerprint="v1")'
        )
    return text
