"""Turns: a conversation as data sets store it, and the weights of its turns."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.errors import InvalidValue
from pipeline.text.notes import note
from pipeline.text.values import NUMBERS, as_dict, as_text, is_null, read_json

# Names that data sets give to the weight of a single turn.
WEIGHTS_OF_TURNS = ("weight", "train", "trainable", "loss", "loss_mask")

UNANSWERED = "have an answer without text, so a model learns to say nothing"
UNASKED = "have a prompt without text, so a model learns to answer nothing"
NOT_RENDERED = "have {} {!r}, which the template does not render"
MEASURED = "have turns whose {!r} is a number other than 0 and 1, which is their weight"

# Fields beside the turns that are meant for the beginning of a chat.
BESIDE_TURNS = ("system", "tools", "functions", "documents", "chat_template_kwargs")

# Fields beside the turns whose pictures and sounds no text has.
MEDIA = ("image", "images", "video", "videos", "audio", "audios")

# Roles that are in use, besides those that have a weight.
ROLES = ("system", "user", "assistant", "tool", "function", "developer")


def note_media(record: Mapping[str, Any]) -> None:
    """Notes fields of pictures and sounds, which a chat does not render.

    Of a row of a table, whose columns are read when they are asked for, the names are enough.
    """
    for name in MEDIA:
        if name in record and not (isinstance(record, dict) and is_empty(record[name])):
            note(NOT_RENDERED.format("a field", name), "pictures and sounds need templates.Slots")


def note_role(role: str, roles: Sequence[str]) -> None:
    """Notes a role that is none of the `roles`, so that its turns have no loss."""
    if role not in roles and role != "human":
        note("have turns of a role that is not known and has no weight", repr(role))


def is_empty(value: Any) -> bool:
    """Whether a field says nothing: it is null, or has no entries, or none but nulls by name."""
    if value is None or isinstance(value, str):  # at once, as most values
        return not value
    if isinstance(value, Mapping):
        return all(map(is_empty, value.values()))
    if hasattr(value, "shape"):  # an array without axes has no length
        return 0 in value.shape
    return is_null(value) or (hasattr(value, "__len__") and len(value) == 0)


def weigh(turn: Mapping[str, Any], weight: float, what: str, fields: Sequence[str] = ()) -> float:
    """The weight of a turn whose role has `weight`; `fields` are no weights, whatever their names.

    >>> weigh({"weight": 0.5}, 2.0, "turn 0"), weigh({"train": True}, 0.0, "turn 0")
    (1.0, 1.0)
    """
    factors = {}
    for name in WEIGHTS_OF_TURNS:
        value = turn.get(name)
        if name in fields or is_null(value):
            continue
        if not isinstance(value, NUMBERS | bool | np.bool) or not 0 <= value < float("inf"):
            raise InvalidValue(
                f"the {name} of {what} is {value!r:.60}; it must be true, false, or a number from "
                "0 up"
            )
        factors[name] = float(value)
        if name != "weight" and value not in (0, 1):
            note(MEASURED.format(name), f"{what} has {value}")
    if len({*factors.values()}) > 1:
        raise InvalidValue(f"the weights of {what} differ: {factors}; give it one of them")
    return next(iter(factors.values())) * (weight or 1.0) if factors else weight


def require_role(role: str, roles: Sequence[str]) -> None:
    """Refuses a role that differs from one of `roles`, the last alike, by case or spaces.

    The first ones are `ROLES`; others have a weight of their own, whatever they are like.
    """
    alike = [known for known in roles if _fold(known) == _fold(role)]
    if alike and role not in (alike[-1], *roles[len(ROLES) :]):
        raise InvalidValue(
            f"a turn has the role {role!r:.80}, and a known role is {alike[-1]!r}; spell both "
            "alike in the records, or give the other one a weight in weights="
        )


def _fold(role: str) -> str:
    return re.sub(r"\s", "", role).casefold()


def read_turns(value: Any, what: str) -> list[Mapping[str, Any]]:
    """The turns of a conversation, as dicts, from any form in which data sets store them.

    >>> read_turns('[{"role": "user", "content": "Hi"}]', "its messages")
    [{'role': 'user', 'content': 'Hi'}]
    >>> read_turns({"role": ["user"], "content": ["Hi"]}, "its messages")
    [{'role': 'user', 'content': 'Hi'}]
    >>> read_turns([[("role", "user"), ("content", "Hi")]], "its messages")
    [{'role': 'user', 'content': 'Hi'}]

    Raises:
        ValueError: it is none of these; `what` names it.
    """
    turns = _parse(value, what)
    if isinstance(turns, Mapping):
        columns = [_listed(column) for column in turns.values()]
        if not all(isinstance(column, list) for column in columns):
            turns = [turns]
        elif len({*map(len, columns)}) > 1:
            raise InvalidValue(
                f"{what} is a dict of lists that are not equally long; give each turn a value in "
                "every list"
            )
        else:
            turns = [dict(zip(turns, row, strict=True)) for row in zip(*columns, strict=True)]
    if not isinstance(turns, Sequence):
        raise _no_turns(turns, what)
    return [
        turn if type(turn) is dict else _as_turn(turn, f"turn {number} of {what}")
        for number, turn in enumerate(turns)
    ]


def _as_turn(value: Any, what: str) -> Mapping[str, Any]:
    turn = _parse(value, what)
    if isinstance(turn, Mapping):
        return turn
    if isinstance(turn, list) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str)
        for pair in turn
    ):
        try:
            return as_dict(turn)  # as Arrow gives maps
        except InvalidValue as error:
            raise InvalidValue(f"{what}: {error}") from None
    raise _no_turns(turn, what)


def _listed(value: Any) -> Any:
    """A sequence that is no text, such as an array, as a list; other values unchanged."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return list(value) if isinstance(value, tuple) else value


def _parse(value: Any, what: str) -> Any:
    """A value that may be JSON, as the value itself."""
    while isinstance(value, str | bytes):
        try:
            value = read_json(as_text(value, what))
        except InvalidValue as error:
            raise InvalidValue(
                f"{what} is the text {value!r:.60}: {error}; give a list of turns, such as "
                "{'role': 'user', 'content': 'Hi'}, or JSON of one"
            ) from None
    return _listed(value)


def _no_turns(value: Any, what: str) -> InvalidValue:
    kind = "null" if is_null(value) else type(value).__name__
    return InvalidValue(
        f"{what} is {kind} ({value!r:.60}); a conversation is a list of turns, such as "
        "{'role': 'user', 'content': 'Hi'}"
    )
