"""Jinja: the chat template of a tokenizer, so that training and serving spell a chat alike."""

import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from pipeline.errors import InvalidValue, require
from pipeline.fs.atomic import as_path
from pipeline.text.chats import (
    BESIDE_TURNS,
    NOT_RENDERED,
    ROLES,
    WEIGHTS_OF_TURNS,
    read_turns,
    require_role,
    weigh,
)
from pipeline.text.tokenizers.hugging_face import HuggingFace
from pipeline.text.tokenizers.markup import Markup, join
from pipeline.text.values import (
    as_text,
    change_texts,
    decode_bytes,
    is_null,
    note,
    read_json,
    texts_in,
)

# Characters that no text has. They mark text of records, and where generated text begins and ends.
TAINT, BEGIN, END = "\ufdd0", "\ufdd1", "\ufdd2"
NULLS = "have nulls inside of a field of a turn, or of tools, which the template may spell"
CHANGED = "have turns whose content the template changes or leaves out"
ENDLESS = "have an answer that ends without a special token, so a model does not learn to stop"
WEIGHED = "have a turn with a weight that is none of the assistant, and is not learnt"
TAKEN = re.compile(f"[{TAINT}{BEGIN}{END}]")


class Jinja:
    """The chat template of a Hugging Face tokenizer, with the loss on the text of the assistant.

    The template runs in a sandbox, without files. Special tokens that it puts there are parsed;
    those in the text of a record stay text. The text to learn is inside `{% generation %}`, if the
    template has that. If not, the chat is rendered up to each answer and after it: what an answer
    adds to its prompt is learnt. A record is refused if the whole chat does not begin with these,
    as when a template drops the reasoning of earlier answers; give `last_only=True` then. Marks
    that the template looks for in an answer, such as `</think>`, are tokens there, too.
    Tools and calls of them that are JSON reach the template as lists of dicts, and arguments of a
    call that are JSON of an object as that object, as in servers.

    >>> tokenizer = HuggingFace("m/tokenizer.json", begin=False, end=False)  # doctest: +SKIP
    >>> corpus = prepare(chats, tokenizer, "corpus", template=Jinja(tokenizer))  # doctest: +SKIP

    Args:
        tokenizer: a `HuggingFace` tokenizer with `tokenizer_config.json` or `chat_template.jinja`
            beside its file. It must have no begin or end mark, which the template has.
        template: the text of another template; default None: that of the tokenizer.
        messages: the field of a record that lists the turns; see `read_turns`.
        tools: the field with the tools that the template may describe, if a record has it.
        last_only: whether the last answer is the only one with loss.

    Attributes:
        fingerprint: a hash of the template, its special tokens and these options.

    Raises:
        ValueError: there is no template, it is not Jinja, or the tokenizer has marks of its own.
        ImportError: jinja2 is not installed.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        template: str | None = None,
        messages: str = "messages",
        tools: str = "tools",
        last_only: bool = False,
    ):
        if not isinstance(tokenizer, HuggingFace) or not tokenizer.parses_special:
            raise InvalidValue(
                f"tokenizer is {tokenizer!r:.200}; give a tokenizers.HuggingFace with its default "
                "parse_special=True, whose folder has a chat template"
            )
        if tokenizer.begin_id is not None or tokenizer.end_id is not None:
            raise InvalidValue(
                f"{tokenizer!r} marks where texts begin or end, and so does a chat template; give "
                "begin=False, end=False to the tokenizer"
            )
        found, self._special = _read_config(as_path(tokenizer.path).parent)
        self._template = template or found or ""
        if not self._template:
            raise InvalidValue(
                f"there is no chat_template.jinja or tokenizer_config.json with a chat_template "
                f"beside {tokenizer.path}; put one there, or give template="
            )
        self._marks = sorted(tokenizer.marks, key=len, reverse=True)
        self._messages, self._tools, self._last_only = messages, tools, last_only
        described = [self._template, self._special, self._marks, messages, tools, last_only]
        digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
        self.fingerprint = f"Jinja-{digest[:12]}"
        sought = _find_sought(self._template)
        # A part of a mark, such as "<|", would let the mark itself into an answer.
        parts = {each for each in sought if any(each in mark != each for mark in self._marks)}
        self._sought = "|".join(map(re.escape, sorted(sought - parts)))

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
        marked = self._render(turns, tools)
        text = _strip(marked)
        _note_contents(turns, text, what)
        self._note_unused(record, turns, tools, marked)
        answers = [n for n, turn in enumerate(turns) if turn.get("role") == "assistant"]
        answers = answers[-1:] if self._last_only else answers
        regions = self._find_regions(turns, tools, answers, marked)
        rest, done, spans = self._find_marks(turns, tools, text), 0, list[tuple[str, float]]()
        for number, (begin, end) in zip(answers, regions, strict=True):
            before, rest = rest.split_at(begin - done)
            answer, rest = rest.split_at(end - begin)
            place = f"turn {number} of {what}"
            if [own for text, own in answer.parts if text.strip()][-1:] != [True]:
                note(ENDLESS, place)
            spans += [(before, 0.0), (answer, weigh(turns[number], 1.0, place))]
            done = end
        return [*spans, (rest, 0.0)] if rest or not spans else spans

    def _render(self, turns: Sequence[Mapping[str, Any]], tools: Any, prompt: bool = False) -> str:
        try:
            return _compile(self._template).render(
                messages=turns, tools=tools, add_generation_prompt=prompt, **self._special
            )
        except Exception as error:  # a template may raise anything
            raise InvalidValue(f"the chat template fails: {error}") from error

    def _find_regions(
        self, turns: Sequence[Any], tools: Any, answers: Sequence[int], marked: str
    ) -> list[tuple[int, int]]:
        """Where each answer begins and ends in the text without marks of generations."""
        if BEGIN in marked:
            regions = _regions(marked)[-1:] if self._last_only else _regions(marked)
            if len(regions) != len(answers):
                raise InvalidValue(
                    f"its {self._messages} have {len(answers)} turns of the assistant, and the "
                    f"template marks {len(regions)} texts as generated; correct the record or the "
                    "template"
                )
            return regions
        regions = []
        for number in answers:
            before = self._render(turns[:number], tools, prompt=True)
            after = self._render(turns[: number + 1], tools)
            if not (marked.startswith(after) and after.startswith(before)):
                raise InvalidValue(
                    f"the chat template spells turn {number} of its {self._messages} otherwise "
                    "when other turns follow it, or than its prompt, so its text cannot be told "
                    "from the rest; give last_only=True, or a template with {% generation %}"
                )
            regions.append((len(before), len(after)))
        return regions

    def _find_marks(self, turns: Sequence[Any], tools: Any, text: str) -> Markup:
        """A text in which the marks that the template put there, and no others, are markup.

        A character after each sign with which marks begin tells those in the text of a record. What
        the template looks for in an answer has none, so that it is found, and may be a mark.
        """
        signs, tainted = {mark[0] for mark in self._marks}, text

        def taint(value: Any, sought: str = "") -> Any:
            pattern = re.compile(f"(?!{sought or '(?!)'})[{re.escape(''.join(signs))}]")
            return change_texts(value, lambda each: pattern.sub(rf"\g<0>{TAINT}", each))

        if any(sign in each for each in texts_in([turns, tools]) for sign in signs):
            sought = {"assistant": self._sought}
            changed = [taint(turn, sought.get(turn.get("role"), "")) for turn in turns]
            tainted = _strip(self._render(changed, taint(tools)))
            if tainted.replace(TAINT, "") != text:
                raise InvalidValue(
                    "the chat template looks for marks in the text of a turn; remove them from the "
                    "record, or give what they divide as fields of the turn"
                )
        pieces = re.split(f"({'|'.join(map(re.escape, self._marks)) or '(?!)'})", tainted)
        return join(*((each.replace(TAINT, ""), n % 2 == 1) for n, each in enumerate(pieces)))

    def _note_unused(
        self, record: Mapping[str, Any], turns: Sequence[Any], tools: Any, marked: str
    ) -> None:
        """Notes what the template does not render: fields of turns, tools, other fields."""
        if tools and _has_null(tools):
            note(NULLS, f"its {self._tools} are {tools!r:.60}")
        for name in dict.fromkeys(name for turn in turns for name in turn):
            holders = [
                n for n, turn in enumerate(turns) if turn.get(name) and any(texts_in(turn[name]))
            ]
            if name in ("role", "content", *WEIGHTS_OF_TURNS) or not holders:
                continue
            others = [{key: turn[key] for key in turn if key != name} for turn in turns]
            if self._render(others, tools) == marked:
                first = turns[holders[0]][name]
                place = f"turn {holders[0]} of its {self._messages}"
                note(NOT_RENDERED.format("turns with", name), f"{place} has {first!r:.60}")
        for name in BESIDE_TURNS:
            value = record.get(name)
            if name == self._tools:
                unused = bool(tools) and self._render(turns, None) == marked
            else:
                spelt = isinstance(value, str) and value.strip() in _strip(marked)
                unused = isinstance(value, str | list | Mapping) and bool(value) and not spelt
            if unused:
                note(NOT_RENDERED.format("a field", name), f"it has {value!r:.60}")


def _note_contents(turns: Sequence[Mapping[str, Any]], text: str, what: str) -> None:
    """Notes contents that are not in the text as they are; refuses those that Python spelt."""
    for number, turn in enumerate(turns):
        place, content = f"turn {number} of {what}", turn.get("content")
        if isinstance(content, list | Mapping) and f"{content}" in text:
            raise InvalidValue(
                f"the chat template spells the content of {place} as Python does, "
                f"{f'{content}':.60}; give its text, or a template that reads such parts"
            )
        if missing := [each for each in _contents(turn) if each.strip() not in text]:
            note(CHANGED, f"{place} has {missing[0]!r:.60}")
        if turn.get("role") != "assistant" and weigh(turn, 0.0, place):
            note(WEIGHED, place)


def _contents(turn: Mapping[str, Any]) -> list[str]:
    """The texts in the content of a turn."""
    content = turn.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    found = [part.get("text") for part in parts if isinstance(part, Mapping)]
    return [each for each in found if isinstance(each, str)]


def _read_turn(turn: Mapping[str, Any], what: str) -> dict[str, Any]:
    """A turn without nulls; refuses text that is no text, or that is not there."""
    found = {key: decode_bytes(each) for key, each in turn.items() if not is_null(each)}
    _require_text(found, what)
    require_role(str(found.get("role")), ROLES)
    if calls := _read_tools(found.pop("tool_calls", None), f"the tool_calls of {what}"):
        found["tool_calls"] = [*map(_read_call, calls)]
    for key, each in found.items():
        if _has_null(each):
            note(NULLS, f"the {key} of {what} is {each!r:.60}")
    others = [each for key, each in found.items() if key != "role"]
    if "content" not in found and not any(texts_in(others)):
        raise InvalidValue(f"{what} has no content; correct the record, or give it a text")
    return found


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


def _strip(marked: str) -> str:
    return re.sub(f"[{BEGIN}{END}]", "", marked)


def _regions(marked: str) -> list[tuple[int, int]]:
    """Where generated texts begin and end in the text without the characters that mark them.

    >>> _regions(f"a{BEGIN}bc{END}d{BEGIN}{END}")
    [(1, 3), (4, 4)]
    """
    places = [
        at - n for n, at in enumerate(m.start() for m in re.finditer(f"[{BEGIN}{END}]", marked))
    ]
    return list(zip(places[::2], places[1::2], strict=True))


def _read_config(folder: epath.Path) -> tuple[str | None, dict[str, str]]:
    """The chat template in the folder of a tokenizer, and the special tokens that it may use."""
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
    found = file.read_text() if file.exists() else described.get("chat_template")
    if isinstance(found, list):  # several by name
        found = {each["name"]: each["template"] for each in found}.get("default")
    return found if isinstance(found, str) else None, special


def _find_sought(template: str) -> set[str]:
    """The texts that a template looks for in others, such as `</think>`, and `<think>` with it."""
    tree = _compile(template).environment.parse(template)
    from jinja2 import nodes

    methods = (each for each in tree.find_all(nodes.Call) if isinstance(each.node, nodes.Getattr))
    operands = [operand for each in methods for operand in each.args]
    operands += [each.expr for each in tree.find_all(nodes.Compare) if each.ops[0].op == "in"]
    values = [each.value for each in operands if isinstance(each, nodes.Const)]
    found = {each for each in values if isinstance(each, str) and each}
    return {*found, *(each.replace("</", "<", 1) for each in found)}


@functools.lru_cache(16)
def _compile(text: str) -> Any:
    """A template, which can read no file and no attribute that is not data."""
    sandbox: Any = require("jinja2.sandbox", extra="jinja", purpose="a chat template")
    from jinja2 import TemplateSyntaxError, ext, nodes

    class Generation(ext.Extension):
        """The block that transformers has for text that a model generates."""

        tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_surround")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _surround(self, caller: Any) -> str:
            return f"{BEGIN}{caller()}{END}"

    def fail(message: str) -> None:
        raise InvalidValue(message)

    def as_json(value: Any, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, **options)

    class Sandbox(sandbox.ImmutableSandboxedEnvironment):
        """Refuses what is unsafe at once, rather than giving it the value of a missing name."""

        def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
            raise sandbox.SecurityError(f"{attribute!r} of {type(obj).__name__!r} is unsafe")

    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = as_json
    environment.globals["raise_exception"] = fail
    try:
        return environment.from_string(text)
    except TemplateSyntaxError as error:
        raise InvalidValue(
            f"the chat template is not Jinja: {error}, in line {error.lineno}; give another one as "
            "template="
        ) from error
