"""Values: what a field may hold where a text is due, and JSON of them."""

import collections
import decimal
import json
import math
from collections.abc import Callable, Mapping, Sequence
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
        name
        if isinstance(name, str) and name.isprintable() and name.strip() == name != ""
        else repr(name)
        for name in record
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
        entries = value.items()
        return {change_texts(key, change): change_texts(entry, change) for key, entry in entries}
    if isinstance(value, list | tuple):
        return [change_texts(entry, change) for entry in value]
    return value


def texts_in(value: Any) -> list[str]:
    """All texts in a value, also keys."""
    texts: list[Any] = []
    change_texts(value, texts.append)
    return [text for text in texts if isinstance(text, str)]


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
    _type: Any = np.float32

    def __str__(self) -> str:
        return str(float(str(self._type(self))))  # digits of its bits, in the notation of Python


class Half(Single):
    """A number of 16 bits; see `Single`."""

    __slots__ = ()
    _type = np.float16


def _as_number(text: str) -> float:
    number = float(text)
    return number if repr(number) == text else Written(text)


def _as_whole(text: str) -> float:
    return Written(text) if text == "-0" else int(text)


def as_dict(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A dict of pairs of a key and a value; refuses a key that is there twice."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        counts = collections.Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise InvalidValue(f"it has the key {twice!r} twice; keep one of the two values")
    return entries


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
