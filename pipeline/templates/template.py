"""Template: what `prepare` calls to learn which text of a record is trained on, and how much."""

import hashlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.ragged import Ragged
from pipeline.sources.source import Source, read_records, where
from pipeline.tokenizers import Tokenizer

# A piece of text, and what the loss at each of its tokens counts for: 0 for what is only read.
Span = tuple[str, float]

# A pure function at the top of a module, or an object of such a class, so that it pickles.
Template = Callable[[Mapping[str, Any]], Sequence[Span]]


def fingerprint(template: Template) -> str:
    """Tells templates apart: by their `repr` where it says all (dataclasses), else by their source.

    >>> def shout(record):
    ...     return [(record["text"].upper(), 1.0)]
    >>> fingerprint(shout)[:-8]
    'pipeline.templates.template.shout-'
    """
    if not inspect.isroutine(template):
        return repr(template)
    try:
        source = inspect.getsource(template)
    except OSError:  # typed into a shell
        source = ""
    name = f"{template.__module__}.{template.__qualname__}"
    return f"{name}-{hashlib.sha256(source.encode()).hexdigest()[:8]}"


def encode(
    template: Template, source: Source, indices: Sequence[int], tokenizer: Tokenizer
) -> Ragged:
    """The tokens and weights of some records.

    Spans are tokenised one by one, so that each token has one weight. The tokenizer's marks stand
    around the whole: the begin mark weighs 0, the end mark as much as the last span.

    >>> from pipeline.tokenizers import Bytes
    >>> def greeting(record):
    ...     return [(record["name"], 0.0), ("!", 1.0)]
    >>> chunk = encode(greeting, [{"name": "Jo"}], [0], Bytes())
    >>> chunk.flat.tolist(), chunk.weights.tolist()
    ([1, 77, 114, 36, 2], [0.0, 0.0, 0.0, 1.0, 1.0])

    Raises:
        ValueError: the template fails on a record, or gives no spans or weights that are none;
            names the record.
    """
    spans: list[Span] = []
    sizes = []
    for index, record in zip(indices, read_records(source, indices), strict=True):
        try:
            mine = [(text, float(weight)) for text, weight in template(decoded(record))]
            _check(mine)
        except Exception as error:
            seen = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(
                f"{where(source, index)} does not suit the template {fingerprint(template)}: "
                f"{seen}. Its fields are {', '.join(map(str, record))}; mend it, or give another "
                "template"
            ) from error
        spans += mine
        sizes.append(len(mine))
    flat, counts = tokenizer.encode_batch([text for text, _ in spans])
    weights = np.repeat(np.array([weight for _, weight in spans], np.float32), counts)
    # Each span came with marks of its own; only those at the ends of a record stay.
    ends = np.cumsum(counts)
    last = np.cumsum(sizes) - 1
    keep = np.ones(len(flat), bool)
    if tokenizer.begin_id is not None:
        begins = ends - counts
        first = last - np.array(sizes) + 1
        keep[begins] = False
        keep[begins[first]] = True
        weights[begins[first]] = 0
    if tokenizer.end_id is not None:
        keep[ends - 1] = False
        keep[ends[last] - 1] = True
    record_of = np.repeat(np.arange(len(sizes)), sizes)
    kept = np.bincount(np.repeat(record_of, counts)[keep], minlength=len(sizes))
    learnt = [len(text.encode()) if weight else 0 for text, weight in spans]
    text_bytes = np.bincount(record_of, learnt, len(sizes)).astype(np.int64)
    return Ragged(flat[keep], kept, text_bytes, weights[keep])


def decoded(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record, with text as `str`: some sources give `bytes`."""
    return {
        name: value.decode() if isinstance(value, bytes) else value
        for name, value in record.items()
    }


def _check(spans: Sequence[Span]) -> None:
    if not spans:
        raise ValueError("it gave no spans; give at least one text with its weight")
    for text, weight in spans:
        if not isinstance(text, str):
            raise ValueError(f"it gave a span that is {type(text).__name__}, not text")
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"it gave the weight {weight}; a weight is a number from 0 up")
