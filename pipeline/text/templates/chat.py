"""Chat: the turns of a conversation, each between two texts that are given."""

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pipeline.errors import InvalidValue, require_one_of
from pipeline.text.markup import Markup, parse_format
from pipeline.text.notes import note
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
from pipeline.text.values import as_text, is_null


@dataclass(frozen=True, kw_only=True)
class Chat:
    r"""The turns of a conversation, one after another, each between `before` and `after`.

    The loss is on the text of the chosen roles and on the `after` that ends it, so that the model
    learns to stop; `before` carries no loss. Special tokens are parsed in `before` and `after`
    alone, not in the text of turns; see `Markup`.

    >>> Chat()({"messages": [{"role": "user", "content": "Hi"},
    ...                      {"role": "assistant", "content": "Hello."}]})
    [('<|user|>\n', 0.0), ('Hi<|end|>\n', 0.0), ('<|assistant|>\n', 0.0), ('Hello.<|end|>\n', 1.0)]

    Turns are dicts in a list, or what data sets make of it: JSON of the list or of single turns, a
    dict of lists, or lists of pairs of a key and a value. A turn that has `weight`, `train`,
    `trainable`, `loss` or `loss_mask`, a boolean or a number, weighs as many times as much as its
    role, or as 1 if its role has no weight.

    Attributes:
        weights: the loss weight of each role; other roles weigh 0.
        before: text before each turn; `{role}` is its role.
        after: text after each turn.
        messages: the field of a record that lists the turns.
        role: the field of a turn that names its role.
        content: the field of a turn that holds its text, or a list of `{"type": "text", …}`.
        last_only: whether the last turn that has a weight is the only one with loss.
        null: the text of a turn whose content is null or missing; default None: that is an error.
        unknown: what to do with other fields of a turn or a part that are not null or empty, such
            as calls of tools, reasoning or a mask, and with `system`, `tools`, `functions`,
            `documents` and `chat_template_kwargs` of the record: "count" (default) leaves them out,
            and `prepare` logs how many records have them; "error" refuses the record.

    Raises:
        ValueError: `weights` does not map roles to numbers, or another argument is not as above.
    """

    weights: Mapping[str, float] = field(default_factory=lambda: {"assistant": 1.0})
    before: str = "<|{role}|>\n"
    after: str = "<|end|>\n"
    messages: str = "messages"
    role: str = "role"
    content: str = "content"
    last_only: bool = False
    null: str | None = None
    unknown: Literal["count", "error"] = "count"

    takes_bytes: ClassVar = True

    def __post_init__(self) -> None:
        weights = self.weights.values() if isinstance(self.weights, Mapping) else [None]
        if not all(isinstance(weight, int | float) for weight in weights):
            raise InvalidValue(
                f"weights is {self.weights!r}; it must map roles to numbers, such as "
                "{'assistant': 1.0}"
            )
        if {root for _, _, root, *_ in parse_format(self.before, "before")} - {"", "role"}:
            raise InvalidValue(f"before is {self.before!r}; its only field is {{role}}")
        if not isinstance(self.last_only, bool):
            raise InvalidValue(f"last_only is {self.last_only!r}; it must be True or False")
        if not isinstance(self.null, str | None):
            raise InvalidValue(f"null is {self.null!r}; it must be a text, such as '', or None")
        require_one_of("unknown", self.unknown, ("count", "error"))

    def __call__(self, record: Mapping[str, Any]) -> list[tuple[str, float]]:
        """Two spans for each turn of a record."""
        spans: list[tuple[str, float]] = []
        roles, fields = (*ROLES, *self.weights), (self.role, self.content)
        close = Markup(self.after)
        self._note_others(record, BESIDE_TURNS, "a field", "it")
        note_media(record)
        for number, turn in enumerate(read_turns(record[self.messages], f"its {self.messages}")):
            what = f"turn {number} of its {self.messages}"
            role = self._role(turn, what)
            note_role(role, roles)
            weight, content = self.weights.get(role, 0.0), self._content(turn, what)
            if len(turn) > 2:
                others = (name for name in turn if name not in (*fields, *WEIGHTS_OF_TURNS))
                self._note_others(turn, others, "turns with", what)
                weight = weigh(turn, weight, what, fields)
            if (weight or role in ("user", "human")) and not content.strip():
                note(UNANSWERED if weight else UNASKED, what)
            spans.append((_open(self.before, role, roles), 0.0))
            spans.append((content + close, weight))
        if not spans:
            raise InvalidValue(f"its {self.messages} are empty")
        if self.last_only:
            last = max((n for n, (_, weight) in enumerate(spans) if weight), default=-1)
            spans = [(text, weight * (n == last)) for n, (text, weight) in enumerate(spans)]
        return spans

    def _role(self, turn: Mapping[str, Any], what: str) -> str:
        role = turn.get(self.role)
        if isinstance(role, str | bytes):
            role = as_text(role, f"the {self.role} of {what}")
        if not isinstance(role, str) or not role:
            raise _lacks(turn, self.role, "role", what)
        return role

    def _content(self, turn: Mapping[str, Any], what: str) -> str:
        content = turn.get(self.content)
        content = None if isinstance(content, list) and not content else content
        if is_null(content) and self.null is None:
            raise _lacks(turn, self.content, "content", what)
        if not isinstance(content, list):
            return as_text(content, f"the {self.content} of {what}", self.null)
        if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
            raise InvalidValue(
                f"the {self.content} of {what} holds list ({content!r:.60}), and each part must be "
                "{'type': 'text', 'text': …}; leave others out of the records, or give a function "
                "as the template that returns templates.Slots in their place"
            )
        for part in content:
            others = (name for name in part if name not in ("type", "text"))
            self._note_others(part, others, "parts with", f"a part of {what}")
        return "".join(
            as_text(part.get("text"), f"a part of {what}", self.null) for part in content
        )

    def _note_others(
        self, fields: Mapping[str, Any], names: Iterable[str], where: str, what: str
    ) -> None:
        """Notes or refuses fields of a turn, a part or a record that are not rendered."""
        for name in names:
            value = fields[name] if name in fields and name != self.messages else None
            if is_empty(value):
                continue
            if self.unknown == "error":
                raise InvalidValue(
                    f"{what} has {name!r} ({value!r:.60}), which the template does not render; "
                    "remove it, or give unknown='count' to leave it out"
                )
            note(NOT_RENDERED.format(where, name), f"{what} has {value!r:.60}")


@functools.lru_cache(256)
def _open(before: str, role: str, roles: tuple[str, ...]) -> Markup:
    """`before` of a role, which is checked when it is first met."""
    if re.search(r"[<>|\[\]{}\r\n]", role):
        raise InvalidValue(
            f"a turn has the role {role!r:.80}; a role becomes part of a mark, so it must not have "
            "< > | [ ] { } or line breaks"
        )
    require_role(role, roles)
    return Markup(before.format(role=role))


def _lacks(turn: Mapping[str, Any], key: str, option: str, what: str) -> InvalidValue:
    """The error of a turn without a role or a content."""
    if key in turn:
        more = ", or give null='' to read it as an empty text" if option == "content" else ""
        return InvalidValue(
            f"the {key} of {what} is {turn[key]!r:.60}; it must be text: correct the record{more}"
        )
    return InvalidValue(
        f"{what} has no {key!r} (its keys: {', '.join(map(str, turn))}); name the key with "
        f"{option}="
    )
