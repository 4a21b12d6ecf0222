"""Omissions: notes of what a chat template leaves out of a chat, or changes in it."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.errors import InvalidValue
from pipeline.text.messages import NULLS, TEXTS, has_null, list_contents, list_parts
from pipeline.text.notes import is_inspecting, note
from pipeline.text.regions import Conversation, strip
from pipeline.text.turns import (
    BESIDE_TURNS,
    NOT_RENDERED,
    UNASKED,
    WEIGHTS_OF_TURNS,
    is_empty,
    note_media,
    weigh,
)
from pipeline.text.values import change_texts, texts_in

CHANGED = "have turns whose content the template changes or leaves out"
TRIMMED = "have turns whose content has white space at its ends that the template removes"
WEIGHED = "have a turn with a weight that is none of the assistant, and is not learnt"
NONE = "have a content that is null, which the template spells as 'None'"


def note_omissions(
    chat: Conversation, record: Mapping[str, Any], template: str, tools: Any, tools_field: str
) -> None:
    """Notes what the text of a chat lacks of its record; refuses contents that Python spelt.

    Args:
        chat: the chat, spelt by the template.
        record: the record that it was read from.
        template: the text of the template.
        tools: the tools that the template got, or None.
        tools_field: the field of the record that has them.
    """
    _note_contents(chat)
    if nulls := [n for n, turn in enumerate(chat.turns) if turn.get("content", "") is None]:
        spelt = sum(text.count("None") for text in [template, *texts_in([chat.turns, tools])])
        if chat.text.count("None") > spelt:
            note(NONE, f"turn {nulls[0]} of {chat.what}")
    if tools and has_null(tools):
        note(NULLS, f"its {tools_field} are {tools!r:.60}")
    note_media(record)
    for name in BESIDE_TURNS:
        value = record.get(name) if name != tools_field else None
        is_spelt = isinstance(value, str) and value.strip() in chat.text
        if not is_empty(value) and not is_spelt:
            note(NOT_RENDERED.format("a field", name), f"it has {value!r:.60}")
    if is_inspecting():
        _note_trimmed(chat)
        _note_unused_fields(chat)
        if tools and _is_spelt_alike(chat, chat.turns, tools=None):
            note(NOT_RENDERED.format("a field", tools_field), f"it has {tools!r:.60}")


def _note_contents(chat: Conversation) -> None:
    """Notes contents that are not in the text as they are; refuses those that Python spelt."""
    at = 0
    for number, turn in enumerate(chat.turns):
        of_turn, content = f"turn {number} of {chat.what}", turn.get("content")
        if isinstance(content, list | Mapping) and f"{content}" in chat.text:
            raise InvalidValue(
                f"the chat template spells the content of {of_turn} as Python does, "
                f"{f'{content}':.60}; give its text, or a template that reads such parts"
            )
        contents = [text.strip() for text in list_contents(turn)]
        for text in contents:
            # Contents come in order, so that each is near the one before it.
            if (begin := chat.text.find(text, at)) >= 0:
                at = begin
            elif text not in chat.text:
                note(CHANGED, f"{of_turn} has {text!r:.60}")
        if turn.get("role") == "user" and contents and not any(contents):
            note(UNASKED, of_turn)
        if turn.get("role") != "assistant" and weigh(turn, 0.0, of_turn):
            note(WEIGHED, of_turn)


def _note_trimmed(chat: Conversation) -> None:
    """Notes white space at the ends of contents that the text of a chat lacks."""
    bare = list[Mapping[str, Any]]()
    for turn in chat.turns:
        content = change_texts(turn.get("content"), lambda text: text.strip())
        is_spelt = all(text.strip() in chat.text for text in list_contents(turn))
        bare.append({**turn, "content": content} if is_spelt and "content" in turn else turn)

    def is_lost(numbers: Sequence[int]) -> bool:
        changed = [bare[n] if n in numbers else turn for n, turn in enumerate(chat.turns)]
        before, after = (sum(map(len, texts_in(turns))) for turns in (chat.turns, changed))
        with contextlib.suppress(InvalidValue):
            return len(chat.text) - len(strip(chat.spell(changed, False))) < before - after
        return False

    padded = [n for n, turn in enumerate(chat.turns) if turn != bare[n]]
    if padded and is_lost(padded):
        first = next((n for n in padded if is_lost([n])), padded[0])
        note(TRIMMED, f"turn {first} of {chat.what} has {chat.turns[first]['content']!r:.60}")


def _note_unused_fields(chat: Conversation) -> None:
    """Notes fields of turns, and of parts, without which the text of a chat is the same."""
    turns = chat.turns
    for name in dict.fromkeys(name for turn in turns for name in turn):
        holders = [n for n, turn in enumerate(turns) if not is_empty(turn.get(name))]
        if name in ("role", "content", *WEIGHTS_OF_TURNS) or not holders:
            continue
        if _is_spelt_alike(chat, [_leave_out(turn, name) for turn in turns]):
            value = turns[holders[0]][name]
            of_turn = f"turn {holders[0]} of {chat.what}"
            note(NOT_RENDERED.format("turns with", name), f"{of_turn} has {value!r:.60}")
    first_values: dict[str, Any] = {}
    for part in (part for turn in turns for part in list_parts(turn)):
        for name, value in part.items():
            if not is_empty(value):
                first_values.setdefault(name, value)
    for name in sorted(first_values.keys() - {"type", *TEXTS}):
        changed = [
            {**turn, "content": [_leave_out(part, name) for part in list_parts(turn)]}
            if isinstance(turn.get("content"), list)
            else turn
            for turn in turns
        ]
        if _is_spelt_alike(chat, changed):
            note(NOT_RENDERED.format("parts with", name), f"one has {first_values[name]!r:.60}")


def _leave_out(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return {key: value for key, value in fields.items() if key != name}


def _is_spelt_alike(chat: Conversation, turns: Sequence[Any], **others: Any) -> bool:
    """Whether the template makes the same text of other turns, or of other tools."""
    with contextlib.suppress(InvalidValue):  # a template may fail without what it needs
        return chat.spell(turns, False, **others) == chat.marked
    return False
