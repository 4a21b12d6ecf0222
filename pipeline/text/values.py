"""Values: what a field may hold where a text is due; and notes of what is not trained on."""

import collections
import contextlib
import contextvars
import decimal
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.errors import InvalidValue

NUMBERS = int | float | decimal.Decimal | np.integer | np.floating


def is_null(value: Any) -> bool:
    """Whether a value stands for none: None, NaN, or the blanks of pandas."""
    if isinstance(value, float | np.floating | decimal.Decimal):
        return value != value
    return value is None or type(value).__name__ in ("NAType", "NaTType")


def as_text(value: Any, what: str, null: str | None = None) -> str:
    """A value as text: text itself, bytes of UTF-8, or a number, as it prints exactly.

    >>> as_text(b"caf\\xc3\\xa9", "its field 'q'"), as_text(0.1, "its field 'q'")
    ('café', '0.1')

    Args:
        value: of a field of a record, or inside of one.
        what: names it in errors.
        null: the text of a null or NaN; None: these are refused.

    Raises:
        ValueError: it is anything else, such as a list, or text that UTF-8 cannot encode.
    """
    try:
        if isinstance(value, str):
            count_bytes(value)
            return value
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value).decode()
    except UnicodeError as error:
        raise not_text(what, error) from None
    if is_null(value):
        if null is None:
            raise InvalidValue(
                f"{what} is null ({value!r}); correct or remove the record, or give a template "
                "with null='', which reads nulls as empty texts"
            )
        return null
    if isinstance(value, NUMBERS) and not isinstance(value, bool):
        if math.isfinite(value):
            return str(value)
        raise InvalidValue(
            f"{what} holds float ({value!s:.60}), which is infinite; correct it, or write it as a "
            "text, in quotes"
        )
    raise InvalidValue(
        f"{what} holds {type(value).__name__} ({value!r:.60}), not text or a number; convert it to "
        "a string first, name another field or an entry such as {field[0]}, or give it a template, "
        "such as templates.Chat for the turns of a chat"
    )


def name_fields(record: Mapping[Any, Any]) -> str:
    """The fields of a record for messages, spelt so that what cannot be seen is."""
    names = (
        each
        if isinstance(each, str) and each.isprintable() and each.strip() == each != ""
        else repr(each)
        for each in record
    )
    return ", ".join(names) or "none"


def count_bytes(text: str) -> int:
    """The bytes of a text in UTF-8.

    Raises:
        UnicodeError: it has half of a surrogate pair, as JSON can spell it, which is no text.
    """
    return len(text) if text.isascii() else len(text.encode())


def not_text(what: str, error: UnicodeError) -> InvalidValue:
    """The error of a text that UTF-8 cannot encode, or of bytes that are none; `what` names it."""
    return InvalidValue(f"{what} is not UTF-8 text ({error}); correct or remove the record")


def change_texts(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same value with `change` applied to each text in it, and to bytes, also in keys."""
    if isinstance(value, str | bytes):
        return change(value)
    if isinstance(value, Mapping):
        pairs = value.items()
        return {change_texts(key, change): change_texts(each, change) for key, each in pairs}
    if isinstance(value, list | tuple):
        return [change_texts(each, change) for each in value]
    return value


def texts_in(value: Any) -> list[str]:
    """All texts in a value, also keys."""
    found: list[Any] = []
    change_texts(value, found.append)
    return [each for each in found if isinstance(each, str)]


def decode_bytes(value: Any) -> Any:
    """The same value with text in place of bytes; those that are not UTF-8 stay, as of images."""
    return change_texts(value, _decode)


def _decode(value: str | bytes) -> str | bytes:
    try:
        return value if isinstance(value, str) else value.decode()
    except UnicodeDecodeError:
        return value


class Written(float):
    """A number of JSON that prints as it is written there, such as a price of 19.90."""

    _text: str

    def __new__(cls, text: str) -> "Written":  # noqa: D102
        number = super().__new__(cls, text)
        number._text = text
        return number

    def __str__(self) -> str:
        return self._text


class Single(float):
    """A number of 32 bits, which prints with as many digits as tell it apart from others."""

    __slots__ = ()

    def __str__(self) -> str:
        return str(float(str(np.float32(self))))  # digits of 32 bits, in the notation of Python


class Half(float):
    """A number of 16 bits; see `Single`."""

    __slots__ = ()

    def __str__(self) -> str:
        return str(float(str(np.float16(self))))


def _as_number(text: str) -> float:
    number = float(text)
    return number if repr(number) == text else Written(text)


def _as_whole(text: str) -> float:
    return Written(text) if text == "-0" else int(text)


def as_dict(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A dict of pairs of a key and a value; refuses a key that is there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise InvalidValue(f"it has the key {twice!r} twice; keep one of the two values")
    return found


_JSON = json.JSONDecoder(object_pairs_hook=as_dict, parse_float=_as_number)
# The same for text that may have -0, which is no integer; it is slow where there are many numbers.
_JSON_OF_ZEROS = json.JSONDecoder(
    object_pairs_hook=as_dict, parse_float=_as_number, parse_int=_as_whole
)


def read_json(text: str) -> Any:
    """The value of JSON, with numbers that print as they are written there.

    >>> print(*read_json("[19.90, 1e3, 0.12345678901234567890]"))
    19.90 1e3 0.12345678901234567890

    Raises:
        ValueError: it is no JSON, or an object has a key twice.
    """
    try:
        return (_JSON_OF_ZEROS if "-0" in text else _JSON).decode(text)
    except InvalidValue:
        raise
    except json.JSONDecodeError as error:
        raise InvalidValue(f"it is not valid JSON: {error.msg} at column {error.colno}") from None
    except (RecursionError, ValueError) as error:  # Python limits both
        raise InvalidValue(
            "it cannot be read: its JSON is nested too deeply, or has a number of too many digits "
            f"({error})"
        ) from None


# The notes of the record that is read now, each with an example; None: nobody counts them. And the
# fields of records that templates read meanwhile.
_notes: contextvars.ContextVar[dict[str, str] | None] = contextvars.ContextVar("notes")
_read: contextvars.ContextVar[set[str]] = contextvars.ContextVar("read")


def note(about: str, example: str) -> None:
    """Notes that a record has something that is not trained on, when `prepare` looks at a sample.

    Args:
        about: what it is, after "5 of 20 records": "have turns with 'reasoning', which …".
        example: the first of it.
    """
    if (notes := _notes.get(None)) is not None:
        notes.setdefault(about, example)


def is_inspecting() -> bool:
    """Whether the record that is read now is one of a sample, for which more may be looked at.

    What a template leaves out is found so, as by spelling a record again without a field.
    """
    return _notes.get(None) is not None


@contextlib.contextmanager
def collect_notes(read: set[str] | None = None) -> Iterator[dict[str, str]]:
    """The dict that `note` writes to inside the block, in this thread; see `take_notes`.

    `read` gets the names of the fields of records that templates read.
    """
    notes: dict[str, str] = {}
    before, read_before = _notes.set(notes), _read.set(set() if read is None else read)
    try:
        yield notes
    finally:
        _notes.reset(before)
        _read.reset(read_before)


def _marking(name: str, one: bool) -> Any:
    """A method of dict that adds to what was read: the key that it gets, or all."""
    method = getattr(dict, name)

    def mark(self: Any, *arguments: Any) -> Any:
        self.read.update(arguments[:1] if one else dict.keys(self))
        return method(self, *arguments)

    return mark


class Watched(dict[str, Any]):
    """A record that adds the names of fields to a set when they are read.

    If it is copied, or gone through, all of them are.
    """

    def __init__(self, record: Mapping[str, Any], read: set[str]):
        super().__init__(record)
        self.read = read


for _name in ("__getitem__", "get", "pop", "setdefault"):
    setattr(Watched, _name, _marking(_name, one=True))
for _name in ("__iter__", "__or__", "__ror__", "__repr__", "keys", "values", "items", "copy"):
    setattr(Watched, _name, _marking(_name, one=False))


def watch(record: Any) -> Any:
    """A record in a dict, which tells what is read of it if notes are collected."""
    if isinstance(record, Watched) or not isinstance(record, dict) or not is_inspecting():
        return record
    return Watched(record, _read.get())


def take_notes() -> dict[str, str]:
    """The notes of the record that was read last; none if they are not collected."""
    notes = _notes.get(None) or {}
    found = dict(notes)
    notes.clear()
    return found
