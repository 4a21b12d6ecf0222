"""Jinja: the chat template of a tokenizer, so that training and serving spell a chat alike."""

import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from etils import epath

from pipeline.errors import InvalidValue
from pipeline.fs.atomic import as_path
from pipeline.text.markup import Markup, join
from pipeline.text.regions import Conversation, strip
from pipeline.text.sandbox import compile_template, render, tell_day
from pipeline.text.tokenizer import extend
from pipeline.text.turns import (
    BESIDE_TURNS,
    NOT_RENDERED,
    ROLES,
    UNANSWERED,
    UNASKED,
    WEIGHTS_OF_TURNS,
    is_empty,
    note_media,
    note_role,
    read_turns,
    require_role,
    weigh,
)
from pipeline.text.values import (
    as_text,
    change_texts,
    decode_bytes,
    is_inspecting,
    is_null,
    note,
    read_json,
    texts_in,
)

# A character that no text has: after signs that are text.
TAINT = "\ufdd0"
TAKEN = re.compile("[\ufdd0-\ufdef]")
NULLS = "have nulls inside of a field of a turn, or of tools, which the template may spell"
CHANGED = "have turns whose content the template changes or leaves out"
TRIMMED = "have turns whose content has white space at its ends that the template removes"
ENDLESS = "have an answer that ends without a special token, so a model does not learn to stop"
ARGUMENTS = "have a call whose arguments are no object, which a template may quote as a text"
WEIGHED = "have a turn with a weight that is none of the assistant, and is not learnt"
# Fields of the reasoning of an answer.
REASONING = ("reasoning_content", "thinking", "reasoning")
# Types of parts that are text.
TEXTS = ("text", "input_text", "output_text", "thinking", "reasoning")
NONE = "have a content that is null, which the template spells as 'None'"


class Jinja:
    """The chat template of a Hugging Face tokenizer, with the loss on the text of the assistant.

    The template runs in a sandbox, without files. Special tokens that it puts there are parsed;
    those in the text of a record stay text. The text to learn is inside `{% generation %}`, if the
    template has that. If not, an answer is what follows its prompt in the text of the whole chat,
    with the mark that ends it; `prepare` counts answers that the template spells otherwise while
    they are the last. Marks that the template looks for in an answer, such as `</think>`, are
    tokens there, too.

    Tools and calls of them that are JSON reach the template as lists of dicts, and arguments of a
    call that are JSON of an object as that object, as in servers, or as the text that they are if
    the template needs that. A null content is null; other nulls of turns and parts are left out.
    Parts that are no text are refused.

    >>> tokenizer = HuggingFace("m/tokenizer.json", begin=False, end=False)  # doctest: +SKIP
    >>> corpus = prepare(chats, tokenizer, "corpus", template=Jinja(tokenizer))  # doctest: +SKIP

    Args:
        tokenizer: a `HuggingFace` tokenizer with `tokenizer_config.json` or `chat_template.jinja`
            beside its file. It must have no begin or end mark, which the template has.
        template: the text of another template; default None: that of the tokenizer.
        messages: the field of a record that lists the turns; see `read_turns`.
        tools: the field with the tools that the template may describe, if a record has it.
        last_only: whether the last answer is the only one with loss.
        date: the day that `strftime_now` of the template spells, such as "2024-07-26"; default
            None: a template that needs one is refused.

    Attributes:
        fingerprint: a hash of the template, its special tokens and these options.

    Raises:
        ValueError: there is no template, it is not Jinja, or the tokenizer has marks of its own.
        ImportError: jinja2 is not installed, or is older than 3.1.6.
    """

    takes_bytes: ClassVar = True
    whole: ClassVar = True

    def __init__(
        self,
        tokenizer: Any,
        *,
        template: str | None = None,
        messages: str = "messages",
        tools: str = "tools",
        last_only: bool = False,
        date: str | None = None,
    ):
        known = extend(tokenizer)
        if not known.parses_special or not hasattr(tokenizer, "path"):
            raise InvalidValue(
                f"tokenizer is {tokenizer!r:.200}; give a tokenizers.HuggingFace with its default "
                "parse_special=True, whose folder has a chat template"
            )
        if tokenizer.begin_id is not None or tokenizer.end_id is not None:
            raise InvalidValue(
                f"{tokenizer!r} marks where texts begin or end, and so does a chat template; give "
                "begin=False, end=False to the tokenizer"
            )
        found, self._special = _read_folder(as_path(tokenizer.path).parent)
        self._templates = {"default": template} if template else found
        if not self._templates:
            raise InvalidValue(
                f"there is no chat_template.jinja or tokenizer_config.json with a chat_template "
                f"beside {tokenizer.path}; put one there, or give template="
            )
        self._marks = sorted(known.marks, key=len, reverse=True)
        self._messages, self._tools, self._last_only = messages, tools, last_only
        if date is not None:
            tell_day(date)  # or it is refused
        self._date = date
        used = {name: self._templates.get(name) for name in ("default", "tool_use")}
        described = [used["default"], self._special, self._marks, messages, tools, last_only]
        described += [{"tool_use": used["tool_use"]}] if used["tool_use"] else []
        described += [{"date": date}] if date else []
        digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
        self.fingerprint = f"Jinja-{digest[:12]}"
        # Patterns of what each template looks for in texts, and of that in answers.
        self._sought = {each: self._find_sought(each) for each in self._templates.values()}

    def __call__(self, record: Mapping[str, Any]) -> list[tuple[str, float]]:
        """The spans of a record, each with the weight of its turn, or 0."""
        what = f"its {self._messages}"
        turns = [
            _read_turn(turn, f"turn {number} of {what}")
            for number, turn in enumerate(read_turns(record[self._messages], what))
        ]
        if not turns:
            raise InvalidValue(f"{what} are empty")
        tools = _read_tools(record.get(self._tools), f"its {self._tools}")
        template = self._choose(tools)
        turns, marked = self._spell_calls(template, turns, tools)
        spell = functools.partial(self._render, template, tools=tools)
        chat = Conversation(turns, spell, marked, what, self._sought[template][0])
        _note_contents(turns, chat.text, what)
        if nulls := [n for n, turn in enumerate(turns) if turn.get("content", "") is None]:
            spelt = sum(each.count("None") for each in [template, *texts_in([turns, tools])])
            if chat.text.count("None") > spelt:
                note(NONE, f"turn {nulls[0]} of {what}")
        self._note_beside(record, chat.text, tools)
        if is_inspecting():
            _note_trimmed(chat)
            self._note_unused(chat, tools)
        answers = [n for n, turn in enumerate(turns) if turn.get("role") == "assistant"]
        answers = answers[-1:] if self._last_only else answers
        regions = chat.find(answers)
        edges = [at for region in regions for at in (region.begin, region.end)]
        *pieces, rest = self._find_marks(chat, template, tools).cut(edges)
        spans = list[tuple[str, float]]()
        for number, region in enumerate(regions):
            before, answer = pieces[2 * number : 2 * number + 2]
            place = f"turn {region.turn} of {what}"
            is_last = number + 1 == len(regions) or regions[number + 1].turn != region.turn
            if is_last and [own for text, own in answer.parts if text.strip()][-1:] != [True]:
                note(ENDLESS, place)
            weight = weigh(turns[region.turn], 1.0, place)
            if weight and not any(text.strip() and not own for text, own in answer.parts):
                note(UNANSWERED, place)
            spans += [(before, 0.0), (answer, weight)]
        return [*spans, (rest, 0.0)] if rest or not spans else spans

    def _find_sought(self, template: str) -> tuple[str, str]:
        """Patterns of the texts that a template looks for, and of those that answers may have."""
        sought = _find_sought(template)
        # A part of a mark, such as "<|", would let the mark itself into an answer.
        parts = {each for each in sought if any(each in mark != each for mark in self._marks)}
        return _any_of(each for each in sought if each.strip()), _any_of(sought - parts)

    def _choose(self, tools: Any) -> str:
        """The template of a record, which transformers chooses alike."""
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" not in self._templates:
            raise InvalidValue(
                f"the chat templates of the tokenizer are {', '.join(self._templates)}, and none "
                "is 'default'; give the text of one as template="
            )
        return self._templates["default"]

    def _render(
        self, template: str, turns: Sequence[Mapping[str, Any]], prompt: bool = False, *, tools: Any
    ) -> str:
        values = {
            "messages": [*map(_name_reasoning, turns)],
            "tools": tools,
            "documents": None,
            **self._special,
        }
        if self._date is not None:
            values["strftime_now"] = tell_day(self._date)
        return render(template, {**values, "add_generation_prompt": prompt})

    def _spell_calls(
        self, template: str, turns: Sequence[dict[str, Any]], tools: Any
    ) -> tuple[list[dict[str, Any]], str]:
        """The turns with arguments of calls as the template takes them, and their text.

        They are objects, or JSON as the record has it, if the template adds them to text.
        """
        read = [_with_calls(turn) for turn in turns]
        try:
            return read, self._render(template, read, tools=tools)
        except InvalidValue:
            if read == turns:
                raise
            with contextlib.suppress(InvalidValue):
                return [*turns], self._render(template, turns, tools=tools)
            raise

    def _find_marks(self, chat: Conversation, template: str, tools: Any) -> Markup:
        """A text in which the marks that the template put there, and no others, are markup.

        A character after each sign with which marks begin tells those in the text of a record. What
        the template looks for in an answer has none, so that it is found, and may be a mark.
        """
        turns, text = chat.turns, chat.text
        signs, tainted = {mark[0] for mark in self._marks}, text
        own = self._sought[template][1]

        def taint(value: Any, sought: str = "") -> Any:
            pattern = re.compile(f"(?!{sought or '(?!)'})[{re.escape(''.join(signs))}]")
            return change_texts(value, lambda each: pattern.sub(rf"\g<0>{TAINT}", each))

        if any(sign in each for each in texts_in([turns, tools]) for sign in signs):
            sought = {"assistant": own}
            changed = [taint(turn, sought.get(str(turn.get("role")), "")) for turn in turns]
            tainted = strip(self._render(template, changed, tools=taint(tools)))
            if tainted.replace(TAINT, "") != text:
                raise InvalidValue(
                    "the chat template looks for marks in the text of a turn; remove them from the "
                    "record, or give what they divide as fields of the turn"
                )
        pieces = re.split(f"({'|'.join(map(re.escape, self._marks)) or '(?!)'})", tainted)
        return join(*((each.replace(TAINT, ""), n % 2 == 1) for n, each in enumerate(pieces)))

    def _note_unused(self, chat: Conversation, tools: Any) -> None:
        """Notes fields of turns, and tools, without which the text of a chat is the same."""
        turns = chat.turns

        def is_unused(turns: Sequence[Any], **others: Any) -> bool:
            with contextlib.suppress(InvalidValue):  # a template may fail without what it needs
                return chat.spell(turns, False, **others) == chat.marked
            return False

        for name in dict.fromkeys(name for turn in turns for name in turn):
            holders = [n for n, turn in enumerate(turns) if not is_empty(turn.get(name))]
            if name in ("role", "content", *WEIGHTS_OF_TURNS) or not holders:
                continue
            if is_unused([{key: turn[key] for key in turn if key != name} for turn in turns]):
                first = turns[holders[0]][name]
                place = f"turn {holders[0]} of its {self._messages}"
                note(NOT_RENDERED.format("turns with", name), f"{place} has {first!r:.60}")
        found: dict[str, Any] = {}
        for part in (part for turn in turns for part in _parts(turn)):
            found = {name: each for name, each in part.items() if not is_empty(each)} | found
        for name in sorted(found.keys() - {"type", *TEXTS}):
            if is_unused([_without(turn, name) for turn in turns]):
                note(NOT_RENDERED.format("parts with", name), f"one has {found[name]!r:.60}")
        if tools and is_unused(turns, tools=None):
            about = NOT_RENDERED.format("a field", self._tools)
            note(about, f"it has {tools!r:.60}")

    def _note_beside(self, record: Mapping[str, Any], text: str, tools: Any) -> None:
        """Notes fields of a record beside its turns that no template gets."""
        if tools and _has_null(tools):
            note(NULLS, f"its {self._tools} are {tools!r:.60}")
        note_media(record)
        for name in BESIDE_TURNS:
            value = record.get(name) if name != self._tools else None
            spelt = isinstance(value, str) and value.strip() in text
            if not is_empty(value) and not spelt:
                note(NOT_RENDERED.format("a field", name), f"it has {value!r:.60}")


def _note_contents(turns: Sequence[Mapping[str, Any]], text: str, what: str) -> None:
    """Notes contents that are not in the text as they are; refuses those that Python spelt."""
    at = 0
    for number, turn in enumerate(turns):
        place, content = f"turn {number} of {what}", turn.get("content")
        if isinstance(content, list | Mapping) and f"{content}" in text:
            raise InvalidValue(
                f"the chat template spells the content of {place} as Python does, "
                f"{f'{content}':.60}; give its text, or a template that reads such parts"
            )
        for own in (each.strip() for each in _contents(turn)):
            # Contents come in order, so that each is near the one before it.
            if (found := text.find(own, at)) >= 0:
                at = found
            elif own not in text:
                note(CHANGED, f"{place} has {own!r:.60}")
        texts = _contents(turn)
        if turn.get("role") == "user" and texts and not any(text.strip() for text in texts):
            note(UNASKED, place)
        if turn.get("role") != "assistant" and weigh(turn, 0.0, place):
            note(WEIGHED, place)


def _parts(turn: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The parts of the content of a turn; a text is one."""
    content = turn.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    return [part for part in parts if isinstance(part, Mapping)]


def _without(turn: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A turn without a field of the parts of its content."""
    if not isinstance(turn.get("content"), list):
        return turn
    parts = [{key: part[key] for key in part if key != name} for part in _parts(turn)]
    return {**turn, "content": parts}


def _note_trimmed(chat: Conversation) -> None:
    """Notes white space at the ends of contents that the text of a chat lacks."""
    bare = list[Mapping[str, Any]]()
    for turn in chat.turns:
        content = change_texts(turn.get("content"), lambda text: text.strip())
        is_there = all(own.strip() in chat.text for own in _contents(turn))
        bare.append({**turn, "content": content} if is_there and "content" in turn else turn)

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


def _contents(turn: Mapping[str, Any]) -> list[str]:
    """The texts in the content of a turn."""
    found = [part.get("text") for part in _parts(turn)]
    return [each for each in found if isinstance(each, str)]


def _read_turn(turn: Mapping[str, Any], what: str) -> dict[str, Any]:
    """A turn without nulls but that of its content; refuses text that is no text, or not there."""
    found = {key: decode_bytes(each) for key, each in turn.items() if not is_null(each)}
    _require_text(found, what)
    require_role(role := str(found.get("role")), ROLES)
    note_role(role, ROLES)
    if calls := _read_tools(found.pop("tool_calls", None), f"the tool_calls of {what}"):
        found["tool_calls"] = calls
        functions = [call.get("function", call) for call in map(_read_call, calls)]
        for each in functions:
            if isinstance(each, Mapping) and not isinstance(each.get("arguments", {}), Mapping):
                note(ARGUMENTS, f"{what} has {each['arguments']!r:.60}")
    if isinstance(content := found.get("content"), list):
        found["content"] = [_read_part(part, what) for part in content]
    if "content" in turn and "content" not in found:
        found["content"] = None  # other nulls are those of tables, where each turn has all columns
    for key, each in found.items():
        if key != "content" and _has_null(each):
            note(NULLS, f"the {key} of {what} is {each!r:.60}")
    others = [each for key, each in found.items() if key != "role"]
    if found.get("content") is None and not any(texts_in(others)):
        raise InvalidValue(f"{what} has no content; correct the record, or give it a text")
    return found


def _name_reasoning(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    """A turn whose reasoning has the names that templates read, as transformers gives it."""
    found = (turn[name] for name in REASONING if turn.get(name) is not None)
    if (reasoning := next(found, None)) is None:
        return turn
    return {"thinking": reasoning, **turn, "reasoning_content": reasoning}


def _read_part(part: Any, what: str) -> Any:
    """A part of a content without nulls; refuses pictures and sounds."""
    if not isinstance(part, Mapping):
        return part
    found = {key: each for key, each in part.items() if not is_null(each)}
    kind = found.get("type", "text")
    media = [name for name in ("image", "image_url", "video", "audio") if found.get(name)]
    if kind in TEXTS and not {*found} - {"type"}:
        raise InvalidValue(f"{what} has a part without text; correct the record, or give it a text")
    if kind not in TEXTS or media:
        raise InvalidValue(
            f"{what} has a part of the type {(media or [kind])[0]!r}, and a chat template would "
            "spell its mark without what it stands for; give a function as the template that "
            "returns templates.Slots in its place, or leave such parts out of the records"
        )
    return found


def _with_calls(turn: dict[str, Any]) -> dict[str, Any]:
    """A turn with arguments of calls as objects."""
    calls = turn.get("tool_calls")
    return {**turn, "tool_calls": [*map(_read_call, calls)]} if calls else turn


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


def _read_tools(given: Any, what: str) -> list[Any] | None:
    """Tools or calls of them as dicts, from any form in which data sets store them; None: none."""
    given = _require_text(decode_bytes(given), what)
    if is_null(given) or (isinstance(given, str) and given.strip() in ("", "null")):
        return None
    try:
        found = [*read_turns(given, what)]
    except InvalidValue as error:
        raise InvalidValue(
            f"{what} is {given!r:.60}; it must be a list of dicts, such as {{'name': 'f'}}, or JSON"
        ) from error
    return found or None


def _has_null(value: Any) -> bool:
    parts = value.values() if isinstance(value, Mapping) else value
    return is_null(value) or (isinstance(value, Mapping | list) and any(map(_has_null, parts)))


def _require_text(value: Any, what: str) -> Any:
    """The value; refuses text in it that is none, or that has the characters of this module."""
    for text in texts_in(value):
        if TAKEN.search(as_text(text, f"a text in {what}")):
            raise InvalidValue(f"{what} has {text!r:.60}, whose U+FDD0 to U+FDD2 are no text")
    return value


def _read_folder(folder: epath.Path) -> tuple[dict[str, str], dict[str, str]]:
    """The chat templates in the folder of a tokenizer, by name; and the special tokens it names."""
    config, file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    try:
        described = read_json(config.read_text()) if config.exists() else {}
        if not isinstance(described, dict):
            raise InvalidValue(f"it holds a JSON {type(described).__name__}, not an object")
    except ValueError as error:
        raise InvalidValue(f"{config} cannot be read: {error}; restore the file") from error
    special = {
        name: token["content"] if isinstance(token, Mapping) else token
        for name, token in described.items()
        if name.endswith("_token") and isinstance(token, str | Mapping)
    }
    found = described.get("chat_template")
    if isinstance(found, str):
        found = {"default": found}
    elif isinstance(found, list):
        found = {each["name"]: each["template"] for each in found}
    else:
        found = {}
    others = folder / "additional_chat_templates"
    if others.exists():
        found |= {each.stem: each.read_text() for each in sorted(others.glob("*.jinja"))}
    return found | ({"default": file.read_text()} if file.exists() else {}), special


def _find_sought(template: str) -> set[str]:
    """The texts that a template looks for in others, such as `</think>`, and `<think>` with it."""
    tree = compile_template(template).environment.parse(template)
    from jinja2 import nodes

    methods = (each for each in tree.find_all(nodes.Call) if isinstance(each.node, nodes.Getattr))
    operands = [operand for each in methods for operand in each.args]
    operands += [each.expr for each in tree.find_all(nodes.Compare) if each.ops[0].op == "in"]
    values = [each.value for each in operands if isinstance(each, nodes.Const)]
    found = {each for each in values if isinstance(each, str) and each}
    return {*found, *(each.replace("</", "<", 1) for each in found)}


def _any_of(texts: Iterable[str]) -> str:
    """A pattern of texts."""
    return "|".join(map(re.escape, sorted(texts)))
