"""Templates: from a record to spans of text, each with the loss weight of its tokens.

A template is a pure function or an instance of a dataclass, so that it has a fingerprint; see
`pipeline.text.fingerprints`.
"""

import dataclasses
import math
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from pipeline.errors import InvalidValue
from pipeline.text.features import LOSS_WEIGHTS, TOKEN_IDS, TOKENS, WEIGHTS, Column, Feature
from pipeline.text.fingerprints import fingerprint
from pipeline.text.ragged import Ragged
from pipeline.text.tokenizers import Markup, Tokenizer
from pipeline.text.tokenizers.markup import parts_of

__all__ = [
    "Answer",
    "Chat",
    "Function",
    "Markup",
    "Preference",
    "Span",
    "Template",
    "encode",
    "fingerprint",
]

# A piece of text, the loss weight of each of its tokens (0: no loss), and optionally the value of
# each token for features, by name.
Span = tuple[str, float] | tuple[str, float, Mapping[str, Any]]

# A template of groups has an attribute `nodes`, such as 3 for a prefix and two continuations, and
# returns that many lists of spans.
Template = Callable[[dict[str, Any]], Sequence[Span] | Sequence[Sequence[Span]]]


@dataclass(frozen=True)
class Function:
    """A function with a fingerprint that you give it, if none can be computed.

    >>> shout = Function(lambda record: [(record["text"].upper(), 1.0)], fingerprint="shout-1")
    >>> shout({"text": "a"}), fingerprint(shout)
    ([('A', 1.0)], 'shout-1')

    Args:
        function: any callable; workers pickle it.
        fingerprint: change it whenever `function` would return something else.

    Raises:
        ValueError: `fingerprint` is not a string, or is empty.
    """

    function: Callable[..., Any]
    fingerprint: str = field(kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.fingerprint, str) or not self.fingerprint:
            raise InvalidValue(f'fingerprint is {self.fingerprint!r}; give a string, such as "v1"')

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """The result of the function."""
        return self.function(*arguments, **options)


@dataclass(frozen=True, kw_only=True)
class Answer:
    r"""A prompt without loss, then an answer with loss; for instruction and prefix tuning.

    Both are format strings of the record's fields. Special tokens are parsed in the format strings
    alone, not in the fields; see `Markup`.

    >>> Answer(prompt="Q: {question}\nA: ", answer="{answer}")({"question": "2+2", "answer": "4"})
    [('Q: 2+2\nA: ', 0.0), ('4', 1.0)]
    """

    prompt: str
    answer: str

    def __call__(self, record: Mapping[str, Any]) -> list[Span]:
        """The two spans of a record."""
        return [(Markup.fill(self.prompt, record), 0.0), (Markup.fill(self.answer, record), 1.0)]


@dataclass(frozen=True, kw_only=True)
class Chat:
    r"""The turns of a conversation, one after another, each between `before` and `after`.

    The loss is on the text of the chosen roles and on the `after` that ends it, so that the model
    learns to stop; `before` carries no loss. Special tokens are parsed in `before` and `after`
    alone, not in the text of turns; see `Markup`.

    >>> Chat()({"messages": [{"role": "user", "content": "Hi"},
    ...                      {"role": "assistant", "content": "Hello."}]})
    [('<|user|>\n', 0.0), ('Hi<|end|>\n', 0.0), ('<|assistant|>\n', 0.0), ('Hello.<|end|>\n', 1.0)]

    Attributes:
        weights: the loss weight of each role; other roles weigh 0.
        before: text before each turn; `{role}` is its role.
        after: text after each turn.
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
        weights = self.weights.values() if isinstance(self.weights, Mapping) else [None]
        if not all(isinstance(weight, int | float) for weight in weights):
            raise InvalidValue(
                f"weights is {self.weights!r}; it must map roles to numbers, such as "
                "{'assistant': 1.0}"
            )

    def __call__(self, record: Mapping[str, Any]) -> list[Span]:
        """Two spans for each turn of a record."""
        spans: list[Span] = []
        for turn in record[self.messages]:
            role, content = turn[self.role], turn[self.content]
            if not isinstance(content, str):
                raise InvalidValue(f"a turn of {role} holds {type(content).__name__}, not text")
            if re.search(r"[<>|\[\]{}\r\n]", str(role)):
                raise InvalidValue(
                    f"a turn has the role {role!r:.80}; a role becomes part of a mark, so it must "
                    "not have < > | [ ] { } or line breaks"
                )
            spans.append((Markup(self.before.format(role=role)), 0.0))
            spans.append((content + Markup(self.after), self.weights.get(role, 0.0)))
        if not spans:
            raise InvalidValue(f"its {self.messages} are empty")
        return spans


@dataclass(frozen=True, kw_only=True)
class Preference:
    r"""A group of a prompt, the preferred answer, and the rejected one.

    The two sides are format strings of the record's fields, like those of `Answer`, or templates,
    such as `Chat`. The spans that both sides begin with are the prefix, whose tokens have weight 0,
    since they cancel in every pairwise loss.

    >>> record = {"question": "2+2", "right": "4", "wrong": "5"}
    >>> Preference(prompt="Q: {question}\nA: ", chosen="{right}", rejected="{wrong}")(record)
    [[('Q: 2+2\nA: ', 0.0)], [('4', 1.0)], [('5', 1.0)]]

    If a record has two chats, as lists of turns, the prefix is the turns that they share:

    >>> chats = Preference(chosen=Chat(messages="chosen"), rejected=Chat(messages="rejected"))
    >>> question = {"role": "user", "content": "2+2"}
    >>> answers = [{"role": "assistant", "content": content} for content in ("4", "5")]
    >>> chats({"chosen": [question, answers[0]], "rejected": [question, answers[1]]})
    [[('<|user|>\n', 0.0), ('2+2<|end|>\n', 0.0), ('<|assistant|>\n', 0.0)],
     [('4<|end|>\n', 1.0)], [('5<|end|>\n', 1.0)]]

    Attributes:
        prompt: a format string, whose text comes before both sides. Default none.
        chosen: the preferred side.
        rejected: the other side.

    Raises:
        ValueError: the sides of a record are equal.
    """

    nodes: ClassVar[int] = 3

    prompt: str = ""
    chosen: str | Template
    rejected: str | Template

    def __call__(self, record: dict[str, Any]) -> list[list[Any]]:
        """The spans of the prefix of a record, of its preferred side, and of the other."""
        sides = [self._fill(side, record) for side in (self.chosen, self.rejected)]
        pairs = list(zip(*sides, strict=False))
        shared = next((n for n, pair in enumerate(pairs) if not _is_same(*pair)), len(pairs))
        if shared == max(map(len, sides)):
            raise InvalidValue("its two sides are equal, so neither is preferred; remove it")
        prefix = [(text, 0.0, *more) for text, _, *more in sides[0][:shared]]
        # A side without more text gets an empty span, whose end mark may carry loss.
        ends = [side[shared:] or [("", *side[-1][1:])] for side in sides]
        return [prefix or [("", 0.0)], *ends]

    def _fill(self, side: str | Template, record: dict[str, Any]) -> list[Any]:
        before = [(Markup.fill(self.prompt, record), 0.0)] if self.prompt else []
        own = [(Markup.fill(side, record), 1.0)] if isinstance(side, str) else side(record)
        _check(own)
        return [*before, *own]


def _is_same(one: Any, other: Any) -> bool:
    """Whether two spans give the same tokens, weights and features."""
    (text, *rest), (its_text, *its_rest) = one, other
    return parts_of(text) == parts_of(its_text) and pickle.dumps(rest) == pickle.dumps(its_rest)


def count_nodes(template: Template | None) -> int:
    """The number of lists of spans that a template makes of a record: 1, or more for groups."""
    return getattr(template, "nodes", 1)


# A span with its weight, and the value of its tokens for each feature, `[1, *shape]`.
Filled = tuple[str, float, Mapping[str, np.ndarray]]


def fill(
    template: Template, record: Mapping[str, Any], features: Mapping[str, Feature] | None = None
) -> list[list[Filled]]:
    """The spans that a template makes of a record, checked: a list, or one for each node of groups.

    >>> fill(Answer(prompt="{q}=", answer="{a}"), {"q": "2+2", "a": b"4"})
    [[('2+2=', 0.0, {}), ('4', 1.0, {})]]
    """
    try:
        # Some sources give text as bytes.
        decoded = {k: v.decode() if isinstance(v, bytes) else v for k, v in record.items()}
        given: Any = template(decoded)
        if (nodes := count_nodes(template)) == 1:
            given = [given]
        elif not isinstance(given, list | tuple) or len(given) != nodes:
            raise InvalidValue(
                f"it returned {given!r:.80}, and its attribute `nodes` is {nodes}; return that "
                "many lists of spans, the prefix first"
            )
        return [
            [
                (text, weight, {n: _value_of(text, more, n, each) for n, each in known.items()})
                for known in [features or {}]
                for text, weight, more in _check(spans)
            ]
            for spans in given
        ]
    except Exception as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        name = getattr(template, "__qualname__", type(template).__qualname__)
        raise InvalidValue(
            f"it does not suit the template {name}: {reason}. Its fields are "
            f"{', '.join(map(str, record))}; correct it, or give another template"
        ) from error


def texts(template: Template, record: Mapping[str, Any]) -> list[str]:
    """The text of the spans that a template makes of a record, for each node one text.

    >>> texts(Answer(prompt="{q}=", answer="{a}"), {"q": "2+2", "a": "4"})
    ['2+2=4']
    """
    return ["".join(text for text, *_ in spans) for spans in fill(template, record)]


def _check(given: Any) -> list[tuple[str, float, Mapping[str, Any]]]:
    """The result of a template, as spans with values for features."""
    spans: list[Any] = [given] if given is None or isinstance(given, str) else list(given)
    if not all(
        isinstance(each, tuple | list)
        and (len(each) == 2 or (len(each) == 3 and isinstance(each[2], Mapping)))
        for each in spans
    ):
        raise InvalidValue(
            f"it returned {given!r:.80}; return a list of spans, each a text and its weight, such "
            'as [("Q: ", 0.0), ("A", 1.0)], and as a third entry a dict of values for features'
        )
    spans = [(text, float(weight), *(more or [{}])) for text, weight, *more in spans]
    if not spans:
        raise InvalidValue("it returned no spans; return at least one text with its weight")
    for text, weight, _ in spans:
        if not isinstance(text, str):
            raise InvalidValue(f"it returned a span that is {type(text).__name__}, not text")
        if not (math.isfinite(weight) and weight >= 0):
            raise InvalidValue(f"it returned the weight {weight}; a weight must be at least 0")
    return spans


def encode(
    filled: Sequence[Sequence[Sequence[Filled]]],
    tokenizer: Tokenizer,
    features: Mapping[str, Feature] | None = None,
) -> Ragged:
    """The tokens of records that `fill` has filled, with their weights and features.

    Spans are tokenised one by one, so that each token has one weight. The tokenizer's marks enclose
    each record: the begin mark weighs 0, the end mark as much as the last span. For features, the
    begin mark has the value of the first span. A span without a value has the feature's `fill`.

    Each node of a group is an example. Prefixes have the begin marks, and continuations the end
    marks.

    >>> from pipeline.text.tokenizers import Bytes
    >>> def greeting(record):
    ...     return [(record["name"], 0.0), ("!", 1.0)]
    >>> chunk = encode([fill(greeting, {"name": "Jo"})], Bytes())
    >>> chunk.flat.tolist(), chunk.weights.tolist()
    ([1, 77, 114, 36, 2], [0.0, 0.0, 0.0, 1.0, 1.0])
    """
    nodes = [spans for record in filled for spans in record]
    spans = [span for each in nodes for span in each]
    sizes = np.array([len(each) for each in nodes], np.int64)
    node = np.array([number for record in filled for number in range(len(record))], np.int64)
    alone = np.array([len(record) == 1 for record in filled for _ in record], bool)
    flat, counts = tokenizer.encode_batch([text for text, *_ in spans])
    weights = np.repeat(np.array([weight for _, weight, _ in spans], np.float32), counts)
    # The tokenizer marks each span; only the marks at the ends of a record stay.
    ends = np.cumsum(counts)
    begins, last = ends - counts, np.cumsum(sizes) - 1
    keep = np.ones(len(flat), bool)
    if tokenizer.begin_id is not None:
        first = begins[last - sizes + 1][node == 0]
        keep[begins] = False
        keep[first] = True
        weights[first] = 0
    if tokenizer.end_id is not None:
        keep[ends - 1] = False
        keep[ends[last][(node > 0) | alone] - 1] = True
    example = np.repeat(np.arange(len(sizes)), sizes)
    tokens = np.bincount(np.repeat(example, counts)[keep], minlength=len(sizes))
    weighted = [len(text.encode()) if weight else 0 for text, weight, _ in spans]
    text_bytes = np.bincount(example, weighted, len(sizes)).astype(np.int64)
    columns = {
        TOKENS: Column(TOKEN_IDS, flat[keep]),
        WEIGHTS: Column(LOSS_WEIGHTS, weights[keep]),
    }
    for name, feature in (features or {}).items():
        values = np.concatenate([of_span[name] for *_, of_span in spans])
        columns[name] = Column(feature, np.repeat(values, counts, axis=0)[keep])
    return Ragged(tokens, columns, text_bytes)


def _value_of(text: str, values: Mapping[str, Any], name: str, feature: Feature) -> np.ndarray:
    """The value of the tokens of a span, `[1, *shape]`."""
    if name in values:
        one = dataclasses.replace(feature, of="example")
        return one.convert([values[name]], f"{name} of the span {text!r:.40}", [1])
    if feature.fill is None:
        raise InvalidValue(
            f"the template returned no {name!r} for the span {text!r:.40}; return it as the third "
            f"entry of the span, {{{name!r}: …}}, or give the feature a fill="
        )
    return feature.filled(1)
