"""Statistics of a dataset: lengths, sources, and use of the vocabulary."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.corpus.interface import AnyCorpus
from pipeline.planning.lengths import histogram
from pipeline.report.dataset import Dataset

PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9)
BINS = 48

# Vocabulary use is counted over examples of about this many tokens, spread over the corpus, which
# are read in so many blocks.
TOKENS, BLOCKS = 1 << 24, 16


def statistics(dataset: Dataset, side: int, longest: int) -> dict[str, Any]:
    """What the report's JSON has for a dataset, or for one side of pairs.

    `side` is 0, or 1 for the targets of pairs; examples are overlong beyond `longest` positions.

    Returns:
        `examples`; `tokens`, positions to train on; `empty` and `overlong` examples; `mean` and
        `percentiles` of the lengths above 0; their `histogram`; `sources`, with the share of each;
        and for corpora `vocabulary`.
    """
    lengths = dataset.lengths.reshape(len(dataset.lengths), -1)[:, side]
    sizes, counts = histogram(lengths)
    tokens, all_examples = int(counts @ sizes), int(counts.sum())
    overlong = int(counts[sizes > longest].sum())
    sizes, counts = sizes[sizes > 0], counts[sizes > 0]
    below, examples = np.cumsum(counts), int(counts.sum())
    at = {f"{p:g}": int(sizes[np.searchsorted(below, p / 100 * examples)]) for p in PERCENTILES}
    return {
        "examples": all_examples,
        "tokens": tokens,
        "empty": all_examples - examples,
        "overlong": overlong,
        "longest_row": longest,
        "shortest": int(sizes[0]),
        "longest": int(sizes[-1]),
        "mean": tokens / examples,
        "percentiles": at,
        "histogram": _histogram(sizes, counts),
        "sources": _sources(dataset.sources, lengths),
        "vocabulary": [vocabulary(corpus, side) for corpus in dataset.corpora],
    }


def _histogram(sizes: np.ndarray, counts: np.ndarray) -> dict[str, Any]:
    """Examples and positions between `edges` that grow by a fixed factor.

    Each column has the lengths from its edge up to the next, exclusive; short columns hold a single
    length.
    """
    edges = np.unique(np.ceil(np.geomspace(1, sizes[-1] + 1, BINS + 1) - 1e-9).astype(np.int64))
    at = np.searchsorted(sizes, edges)
    examples, tokens = (
        np.diff(np.concatenate([[0], np.cumsum(each)])[at]) for each in (counts, counts * sizes)
    )
    return {"edges": edges.tolist(), "examples": examples.tolist(), "tokens": tokens.tolist()}


def _sources(sources: Sequence[tuple[str, int]], lengths: np.ndarray) -> list[dict[str, Any]]:
    ends = np.cumsum([examples for _, examples in sources])
    parts = np.split(lengths, ends[:-1])
    tokens = [int(part.sum(dtype=np.int64)) for part in parts]
    return [
        {
            "name": name,
            "examples": examples,
            "tokens": of_source,
            "share_of_examples": examples / max(len(lengths), 1),
            "share_of_tokens": of_source / max(sum(tokens), 1),
        }
        for (name, examples), of_source in zip(sources, tokens, strict=True)
    ]


def vocabulary(corpus: AnyCorpus, side: int = 0) -> dict[str, Any]:
    """Which ids the targets of a corpus use; for pairs, those of a side.

    Returns:
        `tokens` counted, of `of` in all; `size` of the vocabulary or None; ids `used`; `rare`, used
        fewer than ten times; `half`, how many of the most frequent ids make half of all tokens;
        `entropy`, of single tokens, in bits; `text_bytes_per_token` or None.
    """
    whole = np.asarray(corpus.lengths).reshape(len(corpus), -1)[:, side]
    total = int(whole.sum(dtype=np.int64))
    examples = np.arange(0, len(corpus), max(-(-total // TOKENS), 1))
    counts = np.zeros(corpus.vocab_size or 1, np.int64)
    for block in np.array_split(examples, BLOCKS):
        fields = corpus.sides[side].read(block, np.zeros_like(block), whole[block])
        ids = fields["targets" if "targets" in fields else "inputs"]
        more = np.bincount(ids, minlength=len(counts))
        more[: len(counts)] += counts
        counts = more
    tokens = int(counts.sum())
    frequent = np.sort(counts)[::-1]
    share = frequent[frequent > 0] / max(tokens, 1)
    return {
        "tokens": tokens,
        "of": total,
        "size": corpus.vocab_size,
        "used": int(np.count_nonzero(counts)),
        "rare": int(np.count_nonzero((counts > 0) & (counts < 10))),
        "half": int(np.searchsorted(np.cumsum(frequent), tokens / 2)) + 1,
        "entropy": float(-(share * np.log2(share)).sum()),
        "text_bytes_per_token": corpus.text_bytes / total
        if corpus.text_bytes and total and side == len(corpus.sides) - 1
        else None,
    }
