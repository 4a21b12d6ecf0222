"""Records: records in Python, as a list or a data source has them."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.errors import InvalidValue
from pipeline.text.source import read_records

# The default fingerprint comes from this many records, spread evenly.
SAMPLES = 1024


class Records:
    """Anything with a length and random access: a list, a `grain.MapDataset`, a data source.

    Entries are dicts, or texts (`str`, `bytes`), which become `{"text": …}`. Many are requested at
    once if `records` has `__getitems__`, as data sources of Grain and TFDS have.

    >>> Records(["one", "two"])[1]
    {'text': 'two'}

    Args:
        records: entries by number; workers pickle it.
        fingerprint: that of `Source`. None: a hash of the length and up to 1,024 entries spread
            evenly, so a change that misses all of them goes unnoticed.

    Raises:
        ValueError: `records` has no length, or no random access; or, while reading, an entry is
            neither dict nor text.
    """

    def __init__(self, records: Any, *, fingerprint: str | None = None):
        has_numbers = hasattr(records, "__getitem__") and hasattr(records, "__len__")
        if (
            not has_numbers
            or isinstance(records, str | bytes | Mapping)
            or hasattr(records, "iloc")
            or hasattr(records, "to_pylist")
        ):
            raise InvalidValue(
                f"records is a {type(records).__name__}, not records by number; give a list of "
                "them, or of a data frame frame.to_dict('records'), or table.to_pylist()"
            )
        self.records, self._fingerprint = records, fingerprint

    @property
    def fingerprint(self) -> str:
        """See `Source`."""
        if self._fingerprint is not None:
            return self._fingerprint
        samples = min(len(self), SAMPLES)
        entries = read_records(self.records, [at * len(self) // samples for at in range(samples)])
        try:
            lines = [json.dumps(entry, sort_keys=True, default=_as_json) for entry in entries]
        except TypeError as error:  # such as None, where csv.DictReader has cells without a name
            raise InvalidValue(
                f"the records have no fingerprint: {error}; the keys of a record, and of dicts in "
                "it, must be texts: remove others"
            ) from error
        content = "".join(f"{line}\n" for line in [len(self), *lines])
        return f"records-{hashlib.sha256(content.encode()).hexdigest()[:12]}"

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return _as_record(self.records[index])

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """The records with these numbers."""
        return list(map(_as_record, read_records(self.records, [*map(int, indices)])))

    def __str__(self) -> str:
        return f"{len(self):,} records of a {type(self.records).__name__}"


def _as_record(entry: Any) -> dict[str, Any]:
    if isinstance(entry, dict):
        if None in entry:
            raise InvalidValue(
                f"it has cells without a name, {entry[None]!r:.80}, as csv.DictReader gives them "
                "where a delimiter is not quoted; read the file with pipeline.sources.Csv, which "
                "names its line"
            )
        return entry
    if isinstance(entry, str | bytes):
        return {"text": entry}
    hint = "; a filtered MapDataset has gaps, so give a list of it" if entry is None else ""
    raise InvalidValue(
        f"it is a {type(entry).__name__}, and a record must be a dict, or text{hint}"
    )


def _as_json(value: Any) -> Any:
    """JSON for a value that has none: arrays and sets become lists, bytes become text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    text = repr(value)
    if re.search(r" at 0x[0-9a-f]+", text):
        raise InvalidValue(
            f"the records have no fingerprint: one holds {text:.80}, whose address differs between "
            "processes; remove such fields, or give a string that you change whenever the records "
            'change, as in Records(records, fingerprint="v1")'
        )
    return text
