"""Jinja: the chat template of a tokenizer, so that training and serving spell a chat alike."""

import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from etils import epath

from pipeline.errors import InvalidValue
from pipeline.fs.atomic import as_path
from pipeline.text.markup import Markup, any_of, join
from pipeline.text.messages import name_reasoning, read_calls, read_message, read_tools
from pipeline.text.notes import note
from pipeline.text.omissions import note_omissions
from pipeline.text.regions import Conversation, strip
from pipeline.text.sandbox import find_sought, render, tell_day
from pipeline.text.tokenizer import extend
from pipeline.text.turns import UNANSWERED, read_turns, weigh
from pipeline.text.values import change_texts, read_json, texts_in

# A character that no text has: after signs that are text.
TAINT = "\ufdd0"
ENDLESS = "have an answer that ends without a special token, so a model does not learn to stop"


class Jinja:
    """The chat template of a Hugging Face tokenizer, with the loss on the text of the assistant.

    The template runs in a sandbox, without files, and without what differs each time, such as the
    filter `random`. Special tokens that it puts there are parsed; those in the text of a record
    stay text. The text to learn is inside `{% generation %}`, if the template has that. If not, an
    answer is what follows its prompt in the text of the whole chat, with the mark that ends it;
    `prepare` counts answers that the template spells otherwise while they are the last. Marks that
    the template looks for in an answer, such as `</think>`, are tokens there, too.

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
        spans_tokenizer = extend(tokenizer)
        if not spans_tokenizer.parses_special or not hasattr(tokenizer, "path"):
            raise InvalidValue(
                f"tokenizer is {tokenizer!r:.200}; give a tokenizers.HuggingFace with its default "
                "parse_special=True, whose folder has a chat template"
            )
        if tokenizer.begin_id is not None or tokenizer.end_id is not None:
            raise InvalidValue(
                f"{tokenizer!r} marks where texts begin or end, and so does a chat template; give "
                "begin=False, end=False to the tokenizer"
            )
        templates, self._special = _read_folder(as_path(tokenizer.path).parent)
        self._templates = {"default": template} if template else templates
        if not self._templates:
            raise InvalidValue(
                f"there is no chat_template.jinja or tokenizer_config.json with a chat_template "
                f"beside {tokenizer.path}; put one there, or give template="
            )
        self._marks = sorted(spans_tokenizer.marks, key=len, reverse=True)
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
        self._sought = {text: self._find_sought(text) for text in self._templates.values()}

    def __call__(self, record: Mapping[str, Any]) -> list[tuple[str, float]]:
        """The spans of a record, each with the weight of its turn, or 0."""
        what = f"its {self._messages}"
        turns = [
            read_message(turn, f"turn {number} of {what}")
            for number, turn in enumerate(read_turns(record[self._messages], what))
        ]
        if not turns:
            raise InvalidValue(f"{what} are empty")
        tools = read_tools(record.get(self._tools), f"its {self._tools}")
        template = self._choose(tools)
        turns, marked = self._spell_calls(template, turns, tools)
        spell = functools.partial(self._render, template, tools=tools)
        chat = Conversation(turns, spell, marked, what, self._sought[template][0])
        note_omissions(chat, record, template, tools, self._tools)
        regions = chat.find(chat.answers[-1:] if self._last_only else chat.answers)
        edges = [at for region in regions for at in (region.begin, region.end)]
        *pieces, rest = self._find_marks(chat, template, tools).cut(edges)
        spans = list[tuple[str, float]]()
        for number, region in enumerate(regions):
            before, answer = pieces[2 * number : 2 * number + 2]
            of_turn = f"turn {region.turn} of {what}"
            is_last = number + 1 == len(regions) or regions[number + 1].turn != region.turn
            kinds = [is_markup for text, is_markup in answer.parts if text.strip()]
            if is_last and kinds[-1:] != [True]:
                note(ENDLESS, of_turn)
            weight = weigh(turns[region.turn], 1.0, of_turn)
            if weight and all(kinds):
                note(UNANSWERED, of_turn)
            spans += [(before, 0.0), (answer, weight)]
        return [*spans, (rest, 0.0)] if rest or not spans else spans

    def _find_sought(self, template: str) -> tuple[str, str]:
        """Patterns of the texts that a template looks for, and of those that answers may have."""
        sought = find_sought(template)
        # A part of a mark, such as "<|", would let the mark itself into an answer.
        partial = {text for text in sought if any(text in mark != text for mark in self._marks)}
        texts = sorted(text for text in sought if text.strip())
        return any_of(texts), any_of(sorted(sought - partial))

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
            "messages": [*map(name_reasoning, turns)],
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
        with_objects = [read_calls(turn) for turn in turns]
        try:
            return with_objects, self._render(template, with_objects, tools=tools)
        except InvalidValue:
            if with_objects == turns:
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

        def taint(value: Any, sought: str) -> Any:
            pattern = re.compile(f"(?!{sought})[{re.escape(''.join(signs))}]")
            return change_texts(value, lambda text: pattern.sub(rf"\g<0>{TAINT}", text))

        if any(sign in text for text in texts_in([turns, tools]) for sign in signs):
            nothing, in_answers = any_of([]), self._sought[template][1]
            changed = [
                taint(turn, in_answers if turn.get("role") == "assistant" else nothing)
                for turn in turns
            ]
            tainted = strip(self._render(template, changed, tools=taint(tools, nothing)))
            if tainted.replace(TAINT, "") != text:
                raise InvalidValue(
                    "the chat template looks for marks in the text of a turn; remove them from the "
                    "record, or give what they divide as fields of the turn"
                )
        pieces = re.split(f"({any_of(self._marks)})", tainted)
        return join(*((piece.replace(TAINT, ""), n % 2 == 1) for n, piece in enumerate(pieces)))


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
    stored, templates = described.get("chat_template"), dict[str, str]()
    if isinstance(stored, str):
        templates["default"] = stored
    elif isinstance(stored, list):
        templates = {entry["name"]: entry["template"] for entry in stored}
    others = folder / "additional_chat_templates"
    if others.exists():
        templates |= {path.stem: path.read_text() for path in sorted(others.glob("*.jinja"))}
    return templates | ({"default": file.read_text()} if file.exists() else {}), special
