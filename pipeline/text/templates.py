"""Templates: from a record to spans of text, each with the loss weight of its tokens.

A template is a pure function or an instance of a dataclass, so that it has a fingerprint; see
`pipeline.text.fingerprints`.
"""

import dataclasses
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from pipeline.errors import InvalidValue, require_type
from pipeline.text.chats import Chat
from pipeline.text.features import LOSS_WEIGHTS, TOKEN_IDS, TOKENS, WEIGHTS, Column, Feature
from pipeline.text.fingerprints import fingerprint
from pipeline.text.jinja import Jinja
from pipeline.text.ragged import Ragged
from pipeline.text.sources.source import text_of
from pipeline.text.tokenizers import Markup, Tokenizer
from pipeline.text.tokenizers.markup import Null, parse_format, parts_of
from pipeline.text.values import as_text, count_bytes, decode_bytes, not_text, note

MOST = float(np.finfo(np.float32).max)  # that a weight can be

__all__ = [
    "Answer",
    "Chat",
    "Function",
    "Jinja",
    "LeftOut",
    "Markup",
    "Pair",
    "Preference",
    "Slots",
    "Span",
    "Template",
    "encode",
    "fingerprint",
    "note",
]

# A piece of text, the loss weight of each of its tokens (0: no loss), and optionally the value of
# each token for features, by name.
Span = tuple[str, float] | tuple[str, float, Mapping[str, Any]]

# A template of several sides returns `{"inputs": spans, "patches": {"patches": …, "patch_yx": …}}`:
# the spans of a side of tokens, and arrays by feature of the others. If inputs and targets are
# sides of their own, it has an attribute `sides`, as `Pair` has. A side that it does not return is
# read from fields of the record; return an empty dict for one that an example lacks.
#
# A template of groups has an attribute `nodes`, such as 3 for a prefix and two continuations, and
# returns that many lists of spans. A template may have its `features` as an attribute, too.
Template = Callable[[dict[str, Any]], Sequence[Span] | Sequence[Sequence[Span]] | Mapping[str, Any]]


class Slots(str):
    """Placeholder tokens that point to a side, in place of the text of a span.

    >>> picture = [("What is this? ", 0.0), (Slots(9, at=[0, 1, 2]), 0.0), ("A cat.", 1.0)]

    Attributes:
        id: the token id of each placeholder.
        at: the position that each of them points to, if the tokens have one pointer; or a dict of
            such positions and of the values of other features of tokens, `[n, *shape]`, by name.
    """

    id: int
    at: Any

    def __new__(cls, id: int, at: Any) -> "Slots":  # noqa: D102
        slots = super().__new__(cls)  # no text
        slots.id, slots.at = id, at
        return slots

    @property
    def size(self) -> int:
        """The number of placeholders."""
        return len(next(iter(self.at.values())) if isinstance(self.at, Mapping) else self.at)

    def values(self, features: Mapping[str, Feature]) -> dict[str, np.ndarray]:
        """The values of features of tokens, `[n, *shape]`, by name."""
        pointers = [name for name, each in features.items() if each.to is not None]
        if not isinstance(self.at, Mapping) and len(pointers) != 1:
            raise InvalidValue(
                f"it returned Slots, and the pointers of tokens are {', '.join(pointers) or 'none'}"
                "; give Slots(id, {pointer: positions}), and a feature with to= for each pointer"
            )
        at = self.at if isinstance(self.at, Mapping) else {pointers[0]: self.at}
        if unknown := [name for name in at if name not in features]:
            raise InvalidValue(f"it returned Slots with {unknown[0]!r}, no feature of the tokens")
        return {
            name: features[name].convert([values], f"{name} of the slots", [self.size])
            for name, values in at.items()
        }


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

    Both are format strings of the record's fields, which hold texts or numbers. Special tokens are
    parsed in the format strings alone, not in the fields; see `Markup`.

    >>> Answer(prompt="Q: {question}\nA: ", answer="{answer}")({"question": "2+2", "answer": "4"})
    [('Q: 2+2\nA: ', 0.0), ('4', 1.0)]

    Attributes:
        prompt: the text before the answer.
        answer: the text to learn.
        null: the text of fields that are null or NaN, such as ""; or a dict of such texts by field.
            Default None: they are errors.

    Raises:
        ValueError: a format string has a brace or a field that is not complete.
    """

    prompt: str
    answer: str
    null: Null = None

    def __post_init__(self) -> None:
        for name in ("prompt", "answer"):
            require_type(name, getattr(self, name), str, "a text, with fields such as {question}")
            parse_format(getattr(self, name), name)

    def __call__(self, record: Mapping[str, Any]) -> list[Span]:
        """The two spans of a record."""
        prompt, answer = (
            Markup.fill(each, record, self.null) for each in (self.prompt, self.answer)
        )
        return [(prompt, 0.0), (answer, 1.0)]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The inputs and the targets of a record, two sides, for sequence to sequence.

    >>> Pair(inputs="de", targets="en")({"de": "ja", "en": "yes"})
    {'inputs': [('ja', 1.0)], 'targets': [('yes', 1.0)]}

    Attributes:
        inputs: the field of the text, or a template.
        targets: the same; a template decides which tokens carry loss.
    """

    inputs: str | Template
    targets: str | Template

    sides: ClassVar = ("inputs", "targets")

    def __post_init__(self) -> None:
        for each in (self.inputs, self.targets):
            if count_nodes(each) > 1 or hasattr(each, "sides"):
                raise InvalidValue(
                    f"the template {fingerprint(each)} makes groups or sides, and one of inputs or "
                    "of targets makes a list of spans; give it to prepare alone"
                )

    @classmethod
    def of(cls, fields: Any) -> "Pair":
        """The template of two fields or templates, of inputs and targets."""
        if len(fields) != 2 or isinstance(fields, str):
            raise InvalidValue(
                f"fields is {fields!r}; it must be two, of the inputs and of the targets"
            )
        return cls(inputs=fields[0], targets=fields[1])

    @property
    def fields(self) -> dict[str, str] | None:
        """The field of each side, if both are fields."""
        if isinstance(self.inputs, str) and isinstance(self.targets, str):
            return {"inputs": self.inputs, "targets": self.targets}
        return None

    @property
    def unweighted(self) -> bool:
        """Whether all tokens of the targets carry loss."""
        return isinstance(self.targets, str)

    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        """The spans of both sides of a record."""
        return {
            side: [(text_of(record, each), 1.0)] if isinstance(each, str) else _apply(each, record)
            for side, each in (("inputs", self.inputs), ("targets", self.targets))
        }


class LeftOut(InvalidValue):
    """A record that is not trained on, though nothing is wrong with it; `prepare` counts these."""


@dataclass(frozen=True, kw_only=True)
class Preference:
    r"""A group of a prompt, the preferred answer, and one or several rejected ones.

    The prompt and the sides are format strings of the record's fields, like those of `Answer`, or
    templates, such as `Chat`. The spans that all sides begin with are the prefix, whose tokens have
    weight 0, since they cancel in every pairwise loss.

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

    Without a prompt, the prefix of texts ends where a word ends, before white space:

    >>> Preference(chosen="{a}", rejected="{b}")({"a": "Q: 2+2 A: four", "b": "Q: 2+2 A: five"})
    [[('Q: 2+2 A:', 0.0)], [(' four', 1.0)], [(' five', 1.0)]]

    A record is in no batch if its preferred side equals another one, or if a side has no loss, or
    adds no text to the prefix but marks; `prepare` counts such records.

    Attributes:
        prompt: what comes before all sides. Default nothing: the sides begin with it.
        chosen: the preferred side.
        rejected: the other side; or a list of several.
        null: as for `Answer`.

    Raises:
        ValueError: as for `Answer`.
    """

    prompt: str | Template = ""
    chosen: str | Template
    rejected: str | Template | Sequence[str | Template]
    null: Null = None

    def __post_init__(self) -> None:
        for name in ("prompt", "chosen", "rejected"):
            for side in self._sides if name == "rejected" else [getattr(self, name)]:
                if isinstance(side, str):
                    parse_format(side, name)
        sides = self.prompt, self.chosen, *self._sides
        if self.prompt and any(isinstance(each, Jinja) for each in sides):
            raise InvalidValue(
                "prompt is given, and Jinja spells whole chats, each with its beginning; omit it, "
                "and let the sides be whole chats, such as a function that returns "
                'jinja({"messages": [*record["prompt"], *record["chosen"]]})'
            )

    @property
    def _sides(self) -> Sequence[str | Template]:
        """The rejected sides."""
        rejected: Any = self.rejected
        return rejected if isinstance(rejected, list | tuple) else [rejected]

    @property
    def nodes(self) -> int:
        """The prefix and the sides."""
        return 2 + len(self._sides)

    def __call__(self, record: dict[str, Any]) -> list[list[Any]]:
        """The spans of the prefix of a record, of its preferred side, and of the others."""
        given = [self.chosen, *self._sides]
        sides = [self._fill(side, record, 1.0) for side in given]
        if self.prompt:
            prompt = [(text, 0.0, *more) for text, _, *more in self._fill(self.prompt, record, 0.0)]
            begin, *texts = ("".join(text for text, *_ in each) for each in (prompt, *sides))
            if begin.strip() and all(text.startswith(begin) for text in texts):
                note("have sides that begin with the prompt, which is twice", repr(begin[:40]))
            sides = [[*prompt, *side] for side in sides]
        elif all(isinstance(side, str) for side in given):
            sides = _share_words([side[0][0] for side in sides])
        # What decides tokens, weights and features.
        first, *others = keys = [
            [(parts_of(text), pickle.dumps(rest)) for text, *rest in side] for side in sides
        ]
        if first in others:
            raise LeftOut("have a chosen and a rejected side that are equal")
        shared = _count_shared(keys)
        rests = [side[shared:] for side in sides]
        if not all(map(_has_text, rests, given)):
            raise LeftOut("have a side that is empty, or that ends where another one goes on")
        if not all(any(weight for _, weight, *_ in rest) for rest in rests):
            raise LeftOut("have a side without loss, such as a chat that ends with the user")
        prefix = [(text, 0.0, *more) for text, _, *more in sides[0][:shared]]
        return [prefix or [("", 0.0)], *rests]

    def _fill(self, side: str | Template, record: dict[str, Any], weight: float) -> list[Any]:
        if isinstance(side, str):
            return [(Markup.fill(side, record, self.null), weight)]
        spans = _apply(side, record)
        _check(spans)
        return [*spans]


def _count_shared(several: Sequence[Sequence[Any]]) -> int:
    """How many entries sequences have in common, from their beginning on."""
    entries = enumerate(zip(*several, strict=False))
    other = (n for n, each in entries if each.count(each[0]) < len(each))
    return next(other, min(map(len, several)))


def _share_words(texts: Sequence[Markup]) -> list[list[Any]]:
    """Each text as a span, after a span of the words that all begin with, if there are any."""
    ends = (at for at in range(_count_shared(texts), 0, -1) if not texts[0][at - 1].isspace())
    borders = (at for at in ends if all((text[at : at + 1] or " ").isspace() for text in texts))
    if (at := next(borders, 0)) > 0:
        parts = [text.split_at(at) for text in texts]
        if len({first.parts for first, _ in parts}) == 1:
            return [[(first, 0.0), (rest, 1.0)] for first, rest in parts]
    return [[(text, 1.0)] for text in texts]


def _has_text(spans: Sequence[Any], side: str | Template) -> bool:
    """Whether spans have text: that of fields, or of a format string itself."""
    parts = [part for text, *_ in spans for part in parts_of(text)]
    own = isinstance(side, str) and "{" not in side
    return any(text and (own or not is_own) for text, is_own in parts)


def count_nodes(template: Any) -> int:
    """The number of lists of spans that a template makes of a record: 1, or more for groups."""
    return getattr(template, "nodes", 1)


# A span with its weight, and for each feature the value of its tokens, `[1, *shape]`; of `Slots`
# that of the marks around them, and one for each of them.
Filled = tuple[str, float, Mapping[str, np.ndarray]]


def fill(
    template: Template,
    record: Mapping[str, Any],
    tokens: Mapping[str, Mapping[str, Feature] | None] | None = None,
    arrays: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What a template makes of a record, checked: by side, the spans, or arrays by feature.

    Spans are a list of lists: one, or one for each node of groups.

    >>> fill(Answer(prompt="{q}=", answer="{a}"), {"q": "2+2", "a": b"4"})
    {'inputs': [[('2+2=', 0.0, {}), ('4', 1.0, {})]]}

    Args:
        template: see `Template`.
        record: its fields.
        tokens: the sides of tokens, and the features of each. None: as the template returns, and
            without features.
        arrays: the other sides; None: any.
    """
    try:
        given: Any = _apply(template, record)
        if not isinstance(given, Mapping) and (tokens is None or len(tokens) == 1):
            given = {next(iter(tokens or ("inputs",))): given}
        found = given if isinstance(given, Mapping) else {}
        of_spans = [side for side, each in found.items() if not isinstance(each, Mapping)]
        tokens = dict.fromkeys(of_spans) if tokens is None else tokens
        known = {**tokens, **(found if arrays is None else arrays)}
        if {*of_spans} != {*tokens} or not {*found} <= {*known}:
            raise InvalidValue(
                f"it returned {given!r:.80}; return a dict of sides, with spans for "
                f"{' and '.join(tokens) or 'none'}, and arrays by feature for others "
                f"({', '.join(arrays or ()) or 'none'}), which features= describe"
            )
        return {
            side: _fill_nodes(template, each, tokens[side]) if side in tokens else each
            for side, each in found.items()
        }
    except (LeftOut, MemoryError):
        raise
    except Exception as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        name = getattr(template, "__qualname__", type(template).__qualname__)
        raise InvalidValue(
            f"it does not suit the template {name}: {reason}. Its fields are "
            f"{', '.join(map(str, record))}; correct it, or give another template"
        ) from error


def _fill_nodes(
    template: Template, given: Any, features: Mapping[str, Feature] | None
) -> list[list[Filled]]:
    """The spans of one side of a record, for each node a list."""
    if (nodes := count_nodes(template)) == 1:
        given = [given]
    elif not isinstance(given, list | tuple) or len(given) != nodes:
        raise InvalidValue(
            f"it returned {given!r:.80}, and its attribute `nodes` is {nodes}; return that "
            "many lists of spans, the prefix first"
        )
    return [
        [(text, weight, _values_of(text, more, features)) for text, weight, more in _check(spans)]
        for spans in given
    ]


def texts(template: Template, record: Mapping[str, Any]) -> list[str]:
    """The text of the spans that a template makes of a record, for each node one text.

    >>> texts(Answer(prompt="{q}=", answer="{a}"), {"q": "2+2", "a": "4"})
    ['2+2=4']
    """
    try:
        sides = [each for each in fill(template, record).values() if isinstance(each, list)]
        nodes = ["".join(text for text, *_ in spans) for each in sides for spans in each]
        return [as_text(text, "the text of a template") for text in nodes]
    except LeftOut:
        return []


def _apply(template: Template, record: Mapping[str, Any]) -> Any:
    """The result of a template; a function gets text in place of bytes.

    A row of a table, whose columns are read when they are asked for, has text already.
    """
    own = isinstance(template, Answer | Chat | Jinja | Pair | Preference)
    as_is = own or not isinstance(record, dict)
    return template(record if as_is else decode_bytes(record))  # type: ignore[arg-type]


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
    try:
        spans = [(text, float(weight), *(more or [{}])) for text, weight, *more in spans]
    except (TypeError, ValueError):
        weights = [weight for _, weight, *_ in spans]
        raise InvalidValue(
            f"it returned the weights {weights!r:.80}; each must be a number from 0 up"
        ) from None
    if not spans:
        raise InvalidValue("it returned no spans; return at least one text with its weight")
    for text, weight, _ in spans:
        if not isinstance(text, str):
            raise InvalidValue(f"it returned a span that is {type(text).__name__}, not text")
        if not 0 <= weight <= MOST:
            raise InvalidValue(f"it returned the weight {weight}; it must be from 0 to {MOST:.2g}")
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
    In the place of `Slots` are their placeholders.

    A tokenizer that puts a space before a text puts it before the first text of an example alone.
    Each node of a group is an example. Prefixes have the begin marks, and continuations the end
    marks.

    >>> from pipeline.text.tokenizers import Bytes
    >>> def greeting(record):
    ...     return [(record["name"], 0.0), ("!", 1.0)]
    >>> chunk = encode([fill(greeting, {"name": "Jo"})["inputs"]], Bytes())
    >>> chunk.flat.tolist(), chunk.weights.tolist()
    ([1, 77, 114, 36, 2], [0.0, 0.0, 0.0, 1.0, 1.0])
    """
    nodes = [spans for record in filled for spans in record]
    spans = [span for each in nodes for span in each]
    sizes = np.array([len(each) for each in nodes], np.int64)
    node = np.array([number for record in filled for number in range(len(record))], np.int64)
    alone = np.array([len(record) == 1 for record in filled for _ in record], bool)
    texts = [text for text, *_ in spans]
    try:
        text_sizes = [count_bytes(text) for text in texts]
    except UnicodeError as error:
        raise not_text("a span that the template returned", error) from error
    if of_spans := getattr(tokenizer, "encode_spans", None):
        words = getattr(tokenizer, "marks_words", False)
        flat, counts = of_spans(texts, _find_inside(filled, words))
    else:
        flat, counts = tokenizer.encode_batch(texts)
    # Which value of its span each token has, counted over all spans.
    value = np.arange(len(spans))
    if any(isinstance(text, Slots) for text in texts):
        flat, counts, value = _insert_slots(texts, flat, counts, tokenizer.begin_id is not None)
    else:
        value = value.repeat(counts if features else 0)  # one for each token takes much memory
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
    weighted = [
        size if weight else 0 for size, (_, weight, _) in zip(text_sizes, spans, strict=True)
    ]
    text_bytes = np.bincount(example, weighted, len(sizes)).astype(np.int64)
    columns = {
        TOKENS: Column(TOKEN_IDS, flat[keep]),
        WEIGHTS: Column(LOSS_WEIGHTS, weights[keep]),
    }
    for name, feature in (features or {}).items():
        values = np.concatenate([of_span[name] for *_, of_span in spans])
        columns[name] = Column(feature, values[value[keep]])
    return Ragged(tokens, columns, text_bytes)


def _insert_slots(
    texts: Sequence[str], flat: np.ndarray, counts: np.ndarray, begins: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens of spans with the placeholders of `Slots`, their counts, and the value of each token.

    A value is that of the span, or after it one of the placeholders. `begins`: whether each span
    has a begin mark.
    """
    sizes = np.array([each.size if isinstance(each, Slots) else 0 for each in texts])
    ids = np.array([each.id if isinstance(each, Slots) else 0 for each in texts])
    at = (np.cumsum(counts) - counts + begins).repeat(sizes)
    flat, counts = np.insert(flat.astype(np.int64), at, ids.repeat(sizes)), counts + sizes
    number = np.arange(sizes.sum()) - (np.cumsum(sizes) - sizes).repeat(sizes)
    value = (np.arange(len(sizes)) + np.cumsum(sizes) - sizes).repeat(counts)
    value[(np.cumsum(counts) - counts + begins).repeat(sizes) + number] += 1 + number
    return flat, counts, value


def _find_inside(filled: Sequence[Sequence[Sequence[Filled]]], words: bool) -> list[bool]:
    """For each span of some records, whether text comes before it in its example.

    If the tokenizer marks where `words` begin or end, a span may not begin inside one.
    """
    inside: list[bool] = []
    for record in filled:
        of_prefix = ""
        for node in record:
            last = of_prefix  # the last character before a span
            for text, *_ in node:
                inside.append(bool(last))
                if isinstance(text, Slots):
                    last = last and " "  # no word goes on after it
                if words and last.isalnum() and text[:1].isalnum():
                    raise InvalidValue(
                        f"the span {text!r:.40} begins inside a word, after {last!r}, and the "
                        "tokenizer would make a word of it; let spans begin where words do"
                    )
                last = text[-1:] or last
            of_prefix = last if node is record[0] else of_prefix
    return inside


def _values_of(
    text: str, given: Mapping[str, Any], features: Mapping[str, Feature] | None
) -> dict[str, np.ndarray]:
    """The values of the tokens of a span by feature, `[1, *shape]`; of `Slots`, see `Filled`."""
    slots = text.values(features) if isinstance(text, Slots) and features is not None else {}
    values: dict[str, np.ndarray] = {}
    for name, feature in (features or {}).items():
        if name in given:
            one = dataclasses.replace(feature, of="example", to=None)
            values[name] = one.convert([given[name]], f"{name} of the span {text!r:.40}", [1])
        elif feature.fill is None and name not in slots:
            raise InvalidValue(
                f"the template returned no {name!r} for the span {text!r:.40}; return it as the "
                f"third entry of the span, {{{name!r}: …}}, or give the feature a fill="
            )
        else:
            values[name] = feature.filled(1)
        if isinstance(text, Slots):
            rest = slots.get(name, values[name].repeat(text.size, axis=0))
            values[name] = np.concatenate([values[name], rest])
    return values
