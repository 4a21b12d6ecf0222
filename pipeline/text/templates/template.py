"""Template: a function from a record to the text to train on, and how much each part counts."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pipeline.errors import InvalidValue
from pipeline.text.fingerprints import fingerprint
from pipeline.text.ragged import Ragged
from pipeline.text.sources.source import Source, read_records, where
from pipeline.text.tokenizers import Tokenizer

# A piece of text, and the loss weight of each of its tokens: 0 for what is only read.
Span = tuple[str, float]

# A pure function at the top of a module, or an object of a dataclass there, so that it pickles and
# has a fingerprint; see `pipeline.text.fingerprints`.
Template = Callable[[dict[str, Any]], Sequence[Span]]


def fill(template: Template, source: Source, indices: Sequence[int]) -> list[list[Span]]:
    """The spans that a template makes of each record.

    Raises:
        ValueError: the template fails on a record, or gives no spans or invalid weights; names the
            record.
    """
    filled = []
    for index, record in zip(indices, read_records(source, indices), strict=True):
        try:
            # Some sources give text as bytes.
            texts = {k: v.decode() if isinstance(v, bytes) else v for k, v in record.items()}
            spans = [(text, float(weight)) for text, weight in template(texts)]
            _check(spans)
            filled.append(spans)
        except Exception as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise InvalidValue(
                f"{where(source, index)} does not suit the template {fingerprint(template)}: "
                f"{reason}. Its fields are {', '.join(map(str, record))}; mend it, or give another "
                "template"
            ) from error
    return filled


def _check(spans: Sequence[Span]) -> None:
    if not spans:
        raise InvalidValue("it gave no spans; give at least one text with its weight")
    for text, weight in spans:
        if not isinstance(text, str):
            raise InvalidValue(f"it gave a span that is {type(text).__name__}, not text")
        if not (math.isfinite(weight) and weight >= 0):
            raise InvalidValue(f"it gave the weight {weight}; a weight is a number from 0 up")


def encode(
    template: Template, source: Source, indices: Sequence[int], tokenizer: Tokenizer
) -> Ragged:
    """The tokens and weights of some records.

    Spans are tokenised one by one, so that each token has one weight. The tokenizer's marks stand
    around the whole: the begin mark weighs 0, the end mark as much as the last span.

    >>> from pipeline.text.tokenizers import Bytes
    >>> def greeting(record):
    ...     return [(record["name"], 0.0), ("!", 1.0)]
    >>> chunk = encode(greeting, [{"name": "Jo"}], [0], Bytes())
    >>> chunk.flat.tolist(), chunk.weights.tolist()
    ([1, 77, 114, 36, 2], [0.0, 0.0, 0.0, 1.0, 1.0])

    Raises:
        ValueError: as `fill`.
    """
    filled = fill(template, source, indices)
    spans = [span for each in filled for span in each]
    sizes = np.array([len(each) for each in filled])
    flat, counts = tokenizer.encode_batch([text for text, _ in spans])
    weights = np.repeat(np.array([weight for _, weight in spans], np.float32), counts)
    # The tokenizer marks each span; only the marks at the ends of a record stay.
    ends = np.cumsum(counts)
    begins, last = ends - counts, np.cumsum(sizes) - 1
    keep = np.ones(len(flat), bool)
    if tokenizer.begin_id is not None:
        first = begins[last - sizes + 1]
        keep[begins] = False
        keep[first] = True
        weights[first] = 0
    if tokenizer.end_id is not None:
        keep[ends - 1] = False
        keep[ends[last] - 1] = True
    record_of = np.repeat(np.arange(len(sizes)), sizes)
    tokens = np.bincount(np.repeat(record_of, counts)[keep], minlength=len(sizes))
    weighted = [len(text.encode()) if weight else 0 for text, weight in spans]
    text_bytes = np.bincount(record_of, weighted, len(sizes)).astype(np.int64)
    return Ragged(flat[keep], tokens, text_bytes, weights[keep])
