"""Template: what turns a record into spans of text, each with the loss weight of its tokens."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.errors import InvalidValue
from pipeline.text.features import Feature
from pipeline.text.notes import is_inspecting, note, watch
from pipeline.text.slots import Slots
from pipeline.text.turns import UNANSWERED
from pipeline.text.values import as_text, decode_bytes, name_fields

MOST = float(np.finfo(np.float32).max)  # that a weight can be

# A piece of text, the loss weight of each of its tokens (0: no loss), and optionally the value of
# each token for features, by name.
Span = tuple[str, float] | tuple[str, float, Mapping[str, Any]]

# A template of several sides returns `{"inputs": spans, "patches": {"patches": …, "patch_yx": …}}`:
# the spans of a side of tokens, and arrays by feature of the others. If inputs and targets are
# sides of their own, it has an attribute `sides`, as `Pair` has. A side that it does not return is
# read from fields of the record; return an empty dict for one that an example lacks.
#
# A template of groups has an attribute `nodes`, such as 3 for a prefix and two continuations, and
# returns that many lists of spans. See `Traits` for all such attributes.
Template = Callable[[dict[str, Any]], Sequence[Span] | Sequence[Sequence[Span]] | Mapping[str, Any]]


class LeftOut(InvalidValue):
    """A record that is not trained on, though nothing is wrong with it; `prepare` counts these."""


@dataclass(frozen=True)
class Traits:
    """What is asked of a template, beside calling it: attributes that it may have.

    Attributes:
        takes_bytes: whether it takes records as they are; others get text in place of bytes.
        whole: whether it spells a chat as one text, with its beginning, so that nothing comes
            before it.
        sides: the names of the sides that are inputs and targets, if it returns such.
        fields: the field of the text of each of these sides, if all are fields as they are.
        unweighted: whether all tokens of the targets carry loss.
        nodes: the number of lists of spans that it returns: 1, or more for groups.
        features: the features of what it returns, by name.
    """

    takes_bytes: bool = False
    whole: bool = False
    sides: tuple[str, ...] = ()
    fields: Mapping[str, str] | None = None
    unweighted: bool = False
    nodes: int = 1
    features: Mapping[str, Feature] = dataclasses.field(default_factory=dict)


TRAITS = tuple(trait.name for trait in dataclasses.fields(Traits))


def traits_of(template: Any) -> Traits:
    """What a template has of `Traits`, and for others their defaults; None has these, too.

    `fields` may also be an attribute of a user's own, which is no mapping of these sides.
    """
    traits: dict[str, Any] = {
        name: value for name in TRAITS if (value := getattr(template, name, None)) is not None
    }
    fields, sides = traits.get("fields"), traits.get("sides", ())
    if not isinstance(fields, Mapping) or {*fields} != {*sides}:
        traits["fields"] = None
    return Traits(**traits)


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

    >>> from pipeline.text.templates import Answer
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
        traits = traits_of(template)
        result: Any = apply(template, record, traits)
        if not isinstance(result, Mapping) and (tokens is None or len(tokens) == 1):
            result = {next(iter(tokens or ("inputs",))): result}
        sides = result if isinstance(result, Mapping) else {}
        of_spans = [side for side, content in sides.items() if not isinstance(content, Mapping)]
        tokens = dict.fromkeys(of_spans) if tokens is None else tokens
        allowed = {*tokens, *(sides if arrays is None else arrays)}
        if {*of_spans} != {*tokens} or not {*sides} <= allowed:
            raise InvalidValue(
                f"it returned {result!r:.80}; return a dict of sides, with spans for "
                f"{' and '.join(tokens) or 'none'}, and arrays by feature for others "
                f"({', '.join(arrays or ()) or 'none'}), which features= describe"
            )
        for side in sides.keys() & (arrays or {}).keys():
            _note_undescribed(sides[side], (arrays or {})[side])
        return {
            side: _fill_nodes(traits.nodes, content, tokens[side]) if side in tokens else content
            for side, content in sides.items()
        }
    except (LeftOut, MemoryError):
        raise
    except Exception as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        name = getattr(template, "__qualname__", type(template).__qualname__)
        raise InvalidValue(
            f"it does not suit the template {name}: {reason}. Its fields are "
            f"{name_fields(record)}; correct it, or give another template"
        ) from error


def _note_undescribed(values: Mapping[str, Any], features: Mapping[str, Any]) -> None:
    """Notes values that a template returned, and no feature describes."""
    for name in values.keys() - features.keys():
        about = f"have values of {name!r} by the template, which no feature describes"
        note(about, f"{values[name]!r:.60}")


def _fill_nodes(
    nodes: int, result: Any, features: Mapping[str, Feature] | None
) -> list[list[Filled]]:
    """The spans of one side of a record, for each node a list."""
    if nodes == 1:
        result = [result]
    elif not isinstance(result, list | tuple) or len(result) != nodes:
        raise InvalidValue(
            f"it returned {result!r:.80}, and its attribute `nodes` is {nodes}; return that "
            "many lists of spans, the prefix first"
        )
    spans_of_nodes = [*map(check, result)]
    if nodes == 1 and is_inspecting():
        (spans,) = spans_of_nodes
        filled = [weight for text, weight, _ in spans if text.strip() or isinstance(text, Slots)]
        if filled and not any(filled) and any(weight for _, weight, _ in spans):
            note(UNANSWERED, "")
    return [
        [(text, weight, _values_of(text, values, features)) for text, weight, values in spans]
        for spans in spans_of_nodes
    ]


def texts(template: Template, record: Mapping[str, Any]) -> list[str]:
    """The text of the spans that a template makes of a record, for each node one text.

    >>> from pipeline.text.templates import Answer
    >>> texts(Answer(prompt="{q}=", answer="{a}"), {"q": "2+2", "a": "4"})
    ['2+2=4']
    """
    try:
        sides = fill(template, record).values()
        nodes = [spans for side in sides if isinstance(side, list) for spans in side]
        joined = ["".join(text for text, *_ in spans) for spans in nodes]
        return [as_text(text, "the text of a template") for text in joined]
    except LeftOut:
        return []


def apply(template: Template, record: Mapping[str, Any], traits: Traits | None = None) -> Any:
    """The result of a template; a function gets text in place of bytes.

    A row of a table, whose columns are read when they are asked for, has text already. `traits` are
    those of the template, if they are known.
    """
    traits = traits or traits_of(template)
    if isinstance(record, dict) and not traits.takes_bytes:
        record = decode_bytes(dict(dict.items(record)))  # of one that is watched, none is read yet
    return template(watch(record))


def check(result: Any) -> list[tuple[str, float, Mapping[str, Any]]]:
    """The result of a template, as spans with values for features."""
    spans: list[Any] = [result] if result is None or isinstance(result, str) else list(result)
    if not all(
        isinstance(span, tuple | list)
        and (len(span) == 2 or (len(span) == 3 and isinstance(span[2], Mapping)))
        for span in spans
    ):
        raise InvalidValue(
            f"it returned {result!r:.80}; return a list of spans, each a text and its weight, such "
            'as [("Q: ", 0.0), ("A", 1.0)], and as a third entry a dict of values for features'
        )
    try:
        spans = [(text, float(weight), *(values or [{}])) for text, weight, *values in spans]
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


def _values_of(
    text: str, of_span: Mapping[str, Any], features: Mapping[str, Feature] | None
) -> dict[str, np.ndarray]:
    """The values of the tokens of a span by feature, `[1, *shape]`; of `Slots`, see `Filled`."""
    slots = text.values(features) if isinstance(text, Slots) and features is not None else {}
    values: dict[str, np.ndarray] = {}
    if of_span and features is not None:
        _note_undescribed(of_span, features)
    for name, feature in (features or {}).items():
        if name in of_span:
            one = dataclasses.replace(feature, of="example", to=None)
            values[name] = one.convert([of_span[name]], f"{name} of the span {text!r:.40}", [1])
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
