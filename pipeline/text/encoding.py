"""Encoding: the tokens of spans, with their weights and features."""

from collections.abc import Mapping, Sequence

import numpy as np

from pipeline.errors import InvalidValue
from pipeline.text.features import LOSS_WEIGHTS, TOKEN_IDS, TOKENS, WEIGHTS, Column, Feature
from pipeline.text.ragged import Ragged
from pipeline.text.slots import Slots
from pipeline.text.template import Filled
from pipeline.text.tokenizer import Tokenizer, extend
from pipeline.text.values import count_bytes, not_text


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
    >>> from pipeline.text.templates import fill
    >>> def greeting(record):
    ...     return [(record["name"], 0.0), ("!", 1.0)]
    >>> chunk = encode([fill(greeting, {"name": "Jo"})["inputs"]], Bytes())
    >>> chunk.flat.tolist(), chunk.weights.tolist()
    ([1, 77, 114, 36, 2], [0.0, 0.0, 0.0, 1.0, 1.0])
    """
    nodes = [spans for record in filled for spans in record]
    spans = [span for node in nodes for span in node]
    sizes = np.array([len(node) for node in nodes], np.int64)
    in_record = np.array([number for record in filled for number in range(len(record))], np.int64)
    alone = np.array([len(record) == 1 for record in filled for _ in record], bool)
    texts = [text for text, *_ in spans]
    try:
        text_sizes = [count_bytes(text) for text in texts]
    except UnicodeError as error:
        raise not_text("a span that the template returned", error) from error
    extended = extend(tokenizer)
    flat, counts = extended.encode_spans(texts, _find_inside(filled, extended.marks_words))
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
        first = begins[last - sizes + 1][in_record == 0]
        keep[begins] = False
        keep[first] = True
        weights[first] = 0
    if tokenizer.end_id is not None:
        keep[ends - 1] = False
        keep[ends[last][(in_record > 0) | alone] - 1] = True
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
    sizes = np.array([text.size if isinstance(text, Slots) else 0 for text in texts])
    ids = np.array([text.id if isinstance(text, Slots) else 0 for text in texts])
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
