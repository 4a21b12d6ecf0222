"""Notes: what a template leaves out of the records of a sample, and which fields it reads."""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class _Notes(NamedTuple):
    """What is noted while a sample is read.

    Attributes:
        of_record: of the record that is read now, each note with its first example.
        fields: the names of the fields that were read of any record.
    """

    of_record: dict[str, str]
    fields: set[str]


_notes: contextvars.ContextVar[_Notes | None] = contextvars.ContextVar("notes", default=None)


def note(about: str, example: str) -> None:
    """Notes that a record has something that is not trained on, when `prepare` looks at a sample.

    Args:
        about: what it is, after "5 of 20 records": "have turns with 'reasoning', which …".
        example: the first of it.
    """
    if (notes := _notes.get()) is not None:
        notes.of_record.setdefault(about, example)


def is_inspecting() -> bool:
    """Whether the record that is read now is one of a sample, for which more may be looked at.

    What a template leaves out is found so, as by spelling a record again without a field.
    """
    return _notes.get() is not None


@contextlib.contextmanager
def collect_notes(fields: set[str] | None = None) -> Iterator[dict[str, str]]:
    """The dict that `note` writes to inside the block, in this thread; see `take_notes`.

    `fields` gets the names of the fields of records that templates read.
    """
    notes = _Notes({}, set() if fields is None else fields)
    token = _notes.set(notes)
    try:
        yield notes.of_record
    finally:
        _notes.reset(token)


def take_notes() -> dict[str, str]:
    """The notes of the record that was read last; none if they are not collected."""
    if (notes := _notes.get()) is None:
        return {}
    of_record = dict(notes.of_record)
    notes.of_record.clear()
    return of_record


def note_read(field: str) -> None:
    """Notes that a field of a record was read."""
    if (notes := _notes.get()) is not None:
        notes.fields.add(field)


class Watched(dict[str, Any]):
    """A record that adds the names of fields to a set when they are read.

    If it is copied, or gone through, all of them are.
    """

    def __init__(self, record: Mapping[str, Any], read: set[str]):
        super().__init__(record)
        self.read = read


def _watch_method(name: str, one: bool) -> Any:
    """A method of dict that adds to what was read: the key that it gets, or all."""
    method = getattr(dict, name)

    def call(self: Any, *arguments: Any) -> Any:
        self.read.update(arguments[:1] if one else dict.keys(self))
        return method(self, *arguments)

    return call


for _name in ("__getitem__", "get", "pop", "setdefault"):
    setattr(Watched, _name, _watch_method(_name, one=True))
for _name in ("__iter__", "__or__", "__ror__", "__repr__", "keys", "values", "items", "copy"):
    setattr(Watched, _name, _watch_method(_name, one=False))


def watch(record: Any) -> Any:
    """A record in a dict, which tells what is read of it if notes are collected."""
    notes = _notes.get()
    if notes is None or isinstance(record, Watched) or not isinstance(record, dict):
        return record
    return Watched(record, notes.fields)
