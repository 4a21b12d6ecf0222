"""Messages: the turns of a chat and its tools, in the form in which servers give them to templates.

A chat template of Jinja gets them; see `templates.Jinja`.
"""

import contextlib
import re
from collections.abc import Mapping
from typing import Any

from pipeline.errors import InvalidValue
from pipeline.text.notes import note
from pipeline.text.turns import ROLES, note_role, read_turns, require_role
from pipeline.text.values import as_text, decode_bytes, is_null, read_json, texts_in

# Characters that no text has: signs of `regions` and `templates.jinja` are among them.
RESERVED = re.compile("[\ufdd0-\ufdef]")
NULLS = "have nulls inside of a field of a turn, or of tools, which the template may spell"
ARGUMENTS = "have a call whose arguments are no object, which a template may quote as a text"
# Fields of the reasoning of an answer.
REASONING = ("reasoning_content", "thinking", "reasoning")
# Types of parts that are text, and fields of those that are not.
TEXTS = ("text", "input_text", "output_text", "thinking", "reasoning")
MEDIA_PARTS = ("image", "image_url", "video", "audio")


def read_message(turn: Mapping[str, Any], what: str) -> dict[str, Any]:
    """A turn without nulls but that of its content; refuses text that is no text, or not there."""
    message = {key: decode_bytes(value) for key, value in turn.items() if not is_null(value)}
    _require_text(message, what)
    require_role(role := str(message.get("role")), ROLES)
    note_role(role, ROLES)
    if calls := read_tools(message.pop("tool_calls", None), f"the tool_calls of {what}"):
        message["tool_calls"] = calls
        functions = [call.get("function", call) for call in map(_read_call, calls)]
        for function in functions:
            arguments = function.get("arguments", {}) if isinstance(function, Mapping) else {}
            if not isinstance(arguments, Mapping):
                note(ARGUMENTS, f"{what} has {arguments!r:.60}")
    if isinstance(content := message.get("content"), list):
        message["content"] = [_read_part(part, what) for part in content]
    if "content" in turn and "content" not in message:
        message["content"] = None  # other nulls are of tables, where each turn has all columns
    for key, value in message.items():
        if key != "content" and has_null(value):
            note(NULLS, f"the {key} of {what} is {value!r:.60}")
    others = [value for key, value in message.items() if key != "role"]
    if message.get("content") is None and not any(texts_in(others)):
        raise InvalidValue(f"{what} has no content; correct the record, or give it a text")
    return message


def _read_part(part: Any, what: str) -> Any:
    """A part of a content without nulls; refuses pictures and sounds."""
    if not isinstance(part, Mapping):
        return part
    fields = {key: value for key, value in part.items() if not is_null(value)}
    kind = fields.get("type", "text")
    media = [name for name in MEDIA_PARTS if fields.get(name)]
    if kind in TEXTS and not {*fields} - {"type"}:
        raise InvalidValue(f"{what} has a part without text; correct the record, or give it a text")
    if kind not in TEXTS or media:
        raise InvalidValue(
            f"{what} has a part of the type {(media or [kind])[0]!r}, and a chat template would "
            "spell its mark without what it stands for; give a function as the template that "
            "returns templates.Slots in its place, or leave such parts out of the records"
        )
    return fields


def list_parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The parts of the content of a message; a text is one."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    return [part for part in parts if isinstance(part, Mapping)]


def list_contents(message: Mapping[str, Any]) -> list[str]:
    """The texts in the content of a message."""
    contents = (part.get("text") for part in list_parts(message))
    return [content for content in contents if isinstance(content, str)]


def name_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose reasoning has the names that templates read, as transformers gives it."""
    reasonings = (message[name] for name in REASONING if message.get(name) is not None)
    if (reasoning := next(reasonings, None)) is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def read_calls(message: dict[str, Any]) -> dict[str, Any]:
    """A message with arguments of calls as objects."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [*map(_read_call, calls)]} if calls else message


def _read_call(call: Any) -> Any:
    """A call of a tool with its arguments as an object, if they are JSON of one."""
    if not isinstance(call, Mapping):
        return call
    if "function" in call:
        return {**call, "function": _read_call(call["function"])}
    arguments = call.get("arguments")
    with contextlib.suppress(InvalidValue):
        arguments = read_json(arguments) if isinstance(arguments, str) else arguments
    return {**call, "arguments": arguments} if isinstance(arguments, Mapping) else call


def read_tools(value: Any, what: str) -> list[Any] | None:
    """Tools or calls of them as dicts, from any form in which data sets store them; None: none."""
    value = _require_text(decode_bytes(value), what)
    if is_null(value) or (isinstance(value, str) and value.strip() in ("", "null")):
        return None
    try:
        return [*read_turns(value, what)] or None
    except InvalidValue as error:
        raise InvalidValue(
            f"{what} is {value!r:.60}; it must be a list of dicts, such as {{'name': 'f'}}, or JSON"
        ) from error


def has_null(value: Any) -> bool:
    """Whether a value is null, or has one inside of it."""
    entries = value.values() if isinstance(value, Mapping) else value
    return is_null(value) or (isinstance(value, Mapping | list) and any(map(has_null, entries)))


def _require_text(value: Any, what: str) -> Any:
    """The value; refuses text in it that is none, or that has reserved characters."""
    for text in texts_in(value):
        if RESERVED.search(as_text(text, f"a text in {what}")):
            raise InvalidValue(f"{what} has {text!r:.60}, whose U+FDD0 to U+FDD2 are no text")
    return value
