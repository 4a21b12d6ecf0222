"""Chats: turns of several roles, with a loss on some of them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import InvalidValue
from pipeline.text.templates.template import Span
from pipeline.text.tokenizers import Markup


@dataclass(frozen=True, kw_only=True)
class Chat:
    r"""The turns of a conversation, one after another, each between `before` and `after`.

    The loss is on what the chosen roles say and on the `after` that ends it, by which the model
    learns to stop; `before` is never learnt. Special tokens are parsed in `before` and `after`
    alone, not in what somebody says; see `Markup`.

    >>> Chat()({"messages": [{"role": "user", "content": "Hi"},
    ...                      {"role": "assistant", "content": "Hello."}]})
    [('<|user|>\n', 0.0), ('Hi<|end|>\n', 0.0), ('<|assistant|>\n', 0.0), ('Hello.<|end|>\n', 1.0)]

    Attributes:
        weights: of each role that is learnt, the weight; others weigh 0.
        before: stands before each turn; `{role}` is its role.
        after: stands after each turn.
        messages: the field of a record that lists the turns.
        role: the field of a turn that names its role.
        content: the field of a turn that holds its text.

    Raises:
        ValueError: `weights` does not map roles to numbers.
    """

    weights: Mapping[str, float] = field(default_factory=lambda: {"assistant": 1.0})
    before: str = "<|{role}|>\n"
    after: str = "<|end|>\n"
    messages: str = "messages"
    role: str = "role"
    content: str = "content"

    def __post_init__(self) -> None:
        valid = isinstance(self.weights, Mapping)
        if not valid or not all(isinstance(each, int | float) for each in self.weights.values()):
            raise InvalidValue(
                f"weights is {self.weights!r}; it must map roles to numbers, such as "
                "{'assistant': 1.0}"
            )

    def __call__(self, record: Mapping[str, Any]) -> list[Span]:
        """Two spans for each turn of a record.

        Raises:
            ValueError: there is no turn, what it says is not text, or its role has signs that marks
                have.
        """
        spans: list[Span] = []
        for turn in record[self.messages]:
            role, content = turn[self.role], turn[self.content]
            if not isinstance(content, str):
                raise InvalidValue(f"a turn of {role} says {type(content).__name__}, not text")
            if re.search(r"[<>|\[\]{}\r\n]", str(role)):
                raise InvalidValue(
                    f"a turn has the role {role!r:.80}; a role becomes part of a mark, so it is a "
                    "name without < > | [ ] { } and line breaks"
                )
            spans.append((Markup(self.before.format(role=role)), 0.0))
            spans.append((content + Markup(self.after), self.weights.get(role, 0.0)))
        if not spans:
            raise InvalidValue(f"its {self.messages} are empty")
        return spans
