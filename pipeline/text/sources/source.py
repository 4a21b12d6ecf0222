"""Source: random access to records, and the text in them."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pipeline.errors import InvalidValue


class Source(Protocol):
    """Records by number; the same object in every process it is pickled to.

    A source may also have `__getitems__(indices) -> list`, used where many records are read at
    once, and `where(index) -> str`, which says in an error where a record came from.
    """

    @property
    def fingerprint(self) -> str:
        """Tells the content apart: the same on every host that has the same data.

        It is read before and after all records are; where it differs, the source was edited.
        """
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


def read_records(source: Source, indices: Sequence[int]) -> list[Mapping[str, Any]]:
    """The records with these numbers, in one request where the source has one."""
    if batched := getattr(source, "__getitems__", None):
        return batched(indices)
    return [source[index] for index in indices]


def where(source: Source, index: int) -> str:
    """Where a record came from, for people.

    >>> where([{"text": "a"}], 0)
    'record 0'
    """
    known = getattr(source, "where", None)
    return known(index) if known else f"record {index}"


def read_texts(source: Source, indices: Sequence[int], field: str) -> list[str]:
    """The text in `field` of each record.

    >>> read_texts([{"text": b"caf\\xc3\\xa9"}, {"text": "au lait"}], [0, 1], "text")
    ['café', 'au lait']

    Raises:
        ValueError: a record has no such field, or what it holds is not text; names the record.
    """
    return [
        _text(record, field, source, index)
        for record, index in zip(read_records(source, indices), indices, strict=True)
    ]


def _text(record: Mapping[str, Any], field: str, source: Source, index: int) -> str:
    try:
        value = record[field]
    except KeyError:
        there = ", ".join(map(str, record)) or "none"
        raise InvalidValue(
            f"{where(source, index)} has no field {field!r} (its fields: {there}); name the one "
            "that holds the text with field="
        ) from None
    try:
        if isinstance(value, bytes):
            return value.decode()
        if isinstance(value, str):
            value.encode()  # JSON can spell half of a surrogate pair, which is not text
            return value
    except UnicodeError as error:
        raise InvalidValue(
            f"{where(source, index)}: field {field!r} is not UTF-8 text ({error}); mend the record "
            "or leave it out"
        ) from None
    raise InvalidValue(
        f"{where(source, index)}: field {field!r} holds {type(value).__name__}, not text; name "
        "another field with field=, or turn it into a string first"
    )
