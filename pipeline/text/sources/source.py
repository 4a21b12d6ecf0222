"""Source: records by number, and their text; sources in memory, and sources of other sources."""

import bisect
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Protocol

from pipeline.errors import InvalidValue, OutOfRange

# The default fingerprint of `Records` reads this many records, spread evenly.
SAMPLES = 1024


class Source(Protocol):
    """Records by number; it behaves the same in every process it is pickled to.

    A source may also have `__getitems__(indices) -> list`, which reads many records at once, and
    `where(index) -> str`, the place of a record for errors.
    """

    @property
    def fingerprint(self) -> str:
        """A string that is the same on every host with the same content, and differs otherwise.

        It is read before and after all records; if it differs, the source was edited meanwhile.
        """
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


def read_records(source: Source, indices: Sequence[int]) -> list[Mapping[str, Any]]:
    """The records with these numbers, in one request if the source has `__getitems__`."""
    if batched := getattr(source, "__getitems__", None):
        return batched(indices)
    return [source[index] for index in indices]


def where(source: Source, index: int) -> str:
    """The place of a record, for messages."""
    known = getattr(source, "where", None)
    return known(index) if known else f"record {index}"


def read_texts(source: Source, indices: Sequence[int], field: str) -> list[str]:
    """The text in `field` of each record.

    >>> read_texts([{"text": b"caf\\xc3\\xa9"}, {"text": "au lait"}], [0, 1], "text")
    ['café', 'au lait']
    """
    records = zip(read_records(source, indices), indices, strict=True)
    return [_text(record, field, source, index) for record, index in records]


def _text(record: Mapping[str, Any], field: str, source: Source, index: int) -> str:
    if field not in record:
        there = ", ".join(map(str, record)) or "none"
        raise InvalidValue(
            f"{where(source, index)} has no field {field!r} (its fields: {there}); name the field "
            "that holds the text with field="
        )
    value = record[field]
    if not isinstance(value, str | bytes):
        raise InvalidValue(
            f"{where(source, index)}: field {field!r} holds {type(value).__name__}, not text; name "
            "another field, or convert it to a string first"
        )
    try:
        if isinstance(value, bytes):
            return value.decode()
        value.encode()  # JSON can spell half of a surrogate pair, which is not text
        return value
    except UnicodeError as error:
        raise InvalidValue(
            f"{where(source, index)}: field {field!r} is not UTF-8 text ({error}); correct or "
            "remove the record"
        ) from None


class PartedSource:
    """Records numbered over several parts: files, groups of rows, or other sources.

    A subclass has `_sizes`, the number of records of each part; `_read`, records of one part by
    their numbers in it, ascending; and `_where`, the place of one record, for messages.
    """

    _sizes: Callable[[], Sequence[int]]
    _read: Callable[[int, Sequence[int]], Sequence[Any]]
    _where: Callable[[int, int], str]

    @functools.cached_property
    def _first(self) -> list[int]:
        """The number of the first record of each part, and the number of all records."""
        return [0, *itertools.accumulate(self._sizes())]

    def _locate(self, index: int) -> tuple[int, int]:
        """The part that holds a record, and its number there."""
        if not 0 <= index < len(self):
            raise OutOfRange(f"record {index} of {len(self):,}")
        part = bisect.bisect_right(self._first, index) - 1
        return part, index - self._first[part]

    def __len__(self) -> int:
        return self._first[-1]

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The records with these numbers; each part is read once, in ascending order."""
        places = sorted((self._locate(index), at) for at, index in enumerate(indices))
        records: list[Any] = [None] * len(indices)
        for part, run in itertools.groupby(places, key=lambda place: place[0][0]):
            numbers, order = zip(*((number, at) for (_, number), at in run), strict=True)
            for at, record in zip(order, self._read(part, numbers), strict=True):
                records[at] = record
        return records

    def where(self, index: int) -> str:
        """The place of a record, for messages."""
        return self._where(*self._locate(index))


class Concatenated(PartedSource):
    """The records of the first source, then those of the second, and so on.

    >>> both = Concatenated([[{"text": "a"}], [{"text": "b"}, {"text": "c"}]])
    >>> len(both), both[2]
    (3, {'text': 'c'})
    """

    def __init__(self, sources: Sequence[Source]):
        self.sources = list(sources)

    @property
    def fingerprint(self) -> str:
        """See `Source`."""
        return "+".join(source.fingerprint for source in self.sources)

    def _sizes(self) -> list[int]:
        return list(map(len, self.sources))

    def _read(self, part: int, numbers: Sequence[int]) -> Sequence[Any]:
        return read_records(self.sources[part], numbers)

    def _where(self, part: int, number: int) -> str:
        return where(self.sources[part], number)

    def __str__(self) -> str:
        return " and ".join(map(str, self.sources))


class Repeated(PartedSource):
    """Each record of `source` several times, one after another.

    >>> [each["text"] for each in Repeated([{"text": "a"}, {"text": "b"}], 2)]
    ['a', 'a', 'b', 'b']
    """

    def __init__(self, source: Source, times: int):
        self.source, self.times = source, times

    @property
    def fingerprint(self) -> str:
        """See `Source`."""
        return f"{self.source.fingerprint}*{self.times}"

    def _sizes(self) -> list[int]:
        return [len(self.source) * self.times]

    def _read(self, part: int, numbers: Sequence[int]) -> Sequence[Any]:
        of = [number // self.times for number in numbers]
        several = list(dict.fromkeys(of))
        records = dict(zip(several, read_records(self.source, several), strict=True))
        return [records[number] for number in of]

    def _where(self, part: int, number: int) -> str:
        return where(self.source, number // self.times)

    def __str__(self) -> str:
        return str(self.source)


class Slice(PartedSource):
    """The records of `source` from fraction `begin` up to fraction `end`.

    Slices that share a bound share no record and omit none.

    >>> letters = [{"text": letter} for letter in "abcdefg"]
    >>> [len(Slice(letters, 0.0, 0.9)), len(Slice(letters, 0.9, 1.0))]
    [6, 1]

    Raises:
        ValueError: not 0 <= begin < end <= 1.
    """

    def __init__(self, source: Source, begin: float, end: float):
        if not 0 <= begin < end <= 1:
            raise InvalidValue(f"Slice is from {begin} to {end}; give 0.0 <= begin < end <= 1.0")
        self.source, self.begin, self.end = source, begin, end

    @property
    def fingerprint(self) -> str:
        """See `Source`."""
        return f"{self.source.fingerprint}[{self.begin}:{self.end}]"

    @property
    def _range(self) -> range:
        # Exact fractions of the decimal digits: 0.29 * 100 is 28.999… in floating point.
        begin, end = (Fraction(str(float(share))) for share in (self.begin, self.end))
        return range(int(len(self.source) * begin), int(len(self.source) * end))

    def _sizes(self) -> list[int]:
        return [len(self._range)]

    def _read(self, part: int, numbers: Sequence[int]) -> Sequence[Any]:
        inside = self._range
        return read_records(self.source, [inside[number] for number in numbers])

    def _where(self, part: int, number: int) -> str:
        return where(self.source, self._range[number])

    def __str__(self) -> str:
        return f"{self.begin:.1%} to {self.end:.1%} of {self.source}"


class Records(PartedSource):
    """Anything with a length and random access: a list, a `grain.MapDataset`, a data source.

    Entries are dicts, or texts (`str`, `bytes`), which become `{"text": …}`.

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
        if not hasattr(records, "__getitem__") or not hasattr(records, "__len__"):
            raise InvalidValue(
                f"records is a {type(records).__name__}, without random access or a length; give a "
                "list of them"
            )
        self.records, self._given = records, fingerprint

    @property
    def fingerprint(self) -> str:
        """See `Source`."""
        if self._given is not None:
            return self._given
        samples = min(len(self), SAMPLES)
        entries = self.__getitems__([at * len(self) // samples for at in range(samples)])
        lines = [json.dumps(entry, sort_keys=True, default=_as_json) for entry in entries]
        content = "".join(f"{line}\n" for line in [len(self), *lines])
        return f"records-{hashlib.sha256(content.encode()).hexdigest()[:12]}"

    def _sizes(self) -> list[int]:
        return [len(self.records)]

    def _read(self, part: int, numbers: Sequence[int]) -> list[dict[str, Any]]:
        entries = read_records(self.records, [int(number) for number in numbers])
        return [_as_record(*pair) for pair in zip(numbers, entries, strict=True)]

    def _where(self, part: int, number: int) -> str:
        return f"record {number}"

    def __str__(self) -> str:
        return f"{len(self):,} records of a {type(self.records).__name__}"


def _as_record(index: int, entry: Any) -> dict[str, Any]:
    if isinstance(entry, dict):
        return entry
    if isinstance(entry, str | bytes):
        return {"text": entry}
    hint = "; a filtered MapDataset has gaps, so give a list of it" if entry is None else ""
    raise InvalidValue(
        f"record {index} is a {type(entry).__name__}; a record must be a dict, or text{hint}"
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
