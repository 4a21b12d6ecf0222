"""Statistics of a corpus: how long its examples are, where they come from, what ids they use."""

from typing import Any

import numpy as np

from pipeline.planning import lengths as lengths_lib
from pipeline.report.subject import Subject
from pipeline.storage.corpus import Corpus
from pipeline.storage.joined import Joined

PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9)
BINS = 48

# Vocabulary use is counted over examples of about this many tokens, spread over the corpus.
TOKENS, READ = 1 << 24, 1 << 20


def statistics(subject: Subject, counts: np.ndarray, longest: int) -> dict[str, Any]:
    """What there is to say of the examples.

    Args:
        subject: what the report is about.
        counts: its histogram, how many examples have each length.
        longest: positions of the longest row; longer examples are too long.

    Returns:
        `examples`; `tokens`, positions to train on; `empty` and `overlong` examples; `mean` and
        `percentiles` of the lengths of the others; `histograms`: `log` of all of them, and `linear`
        up to the 99.9th percentile; `sources`, with the share of each; and for corpora
        `vocabulary`.
    """
    sizes = np.arange(len(counts))
    counted = counts.copy()
    counted[0] = 0
    below, examples = np.cumsum(counted), int(counted.sum())
    at = {f"{p:g}": int(np.searchsorted(below, p / 100 * examples)) for p in PERCENTILES}
    return {
        "examples": int(counts.sum()),
        "tokens": int(counts @ sizes),
        "empty": int(counts[0]),
        "overlong": int(counts[longest + 1 :].sum()),
        "longest_row": longest,
        "shortest": int(np.flatnonzero(counted)[0]),
        "longest": len(counts) - 1,
        "mean": float(counts @ sizes) / examples,
        "percentiles": at,
        "histograms": {
            "linear": _binned(counted, _linear_edges(at["99.9"])),
            "log": _binned(counted, _log_edges(len(counts) - 1)),
        },
        "sources": _sources(subject),
        "vocabulary": [vocabulary(corpus) for corpus in subject.corpora],
    }


def by_bucket(counts: np.ndarray, lengths: list[int]) -> dict[str, Any]:
    """A linear histogram whose columns end where buckets of these lengths do.

    Columns are `width` wide or less; it reaches as far as the 99.9th percentile of examples and
    the longest bucket.
    """
    counted = counts.copy()
    counted[0] = 0
    below = np.cumsum(counted)
    most = max(int(np.searchsorted(below, 0.999 * below[-1])), lengths[-1])
    edges = _linear_edges(most)
    both = np.union1d(edges, np.array(lengths) + 1)
    return _binned(counted, both) | {"width": int(edges[1] - edges[0])}


def _linear_edges(longest: int) -> np.ndarray:
    """Bins of equal width, a round number, from 1 to beyond the longest."""
    least = max(longest / BINS, 1)
    unit = 10 ** int(np.log10(least))
    width = next(unit * times for times in (1, 2, 5, 10) if unit * times >= least)
    return np.arange(0, longest + width + 1, width) + 1


def _log_edges(longest: int) -> np.ndarray:
    """Bins that grow by a fixed factor; the short ones hold a single length."""
    edges = np.geomspace(1, longest + 1, BINS + 1)
    return np.unique(np.ceil(edges - 1e-9).astype(np.int64))


def _binned(counts: np.ndarray, edges: np.ndarray) -> dict[str, Any]:
    """Examples and positions with lengths from each edge up to the next, exclusive."""
    sizes = np.arange(len(counts))
    sums = []
    for values in (counts, counts * sizes):
        below = np.concatenate([[0], np.cumsum(values)])
        sums.append(np.diff(below[np.minimum(edges, len(counts))]).tolist())
    return {"edges": edges.tolist(), "examples": sums[0], "tokens": sums[1]}


def _sources(subject: Subject) -> list[dict[str, Any]]:
    total = sum(int(piece.sum(dtype=np.int64)) for piece in lengths_lib.pieces(subject.lengths))
    shares, first = [], 0
    for name, examples in subject.sources:
        part = subject.lengths[first : first + examples]
        first += examples
        tokens = sum(int(piece.sum(dtype=np.int64)) for piece in lengths_lib.pieces(part))
        shares.append(
            {
                "name": name,
                "examples": examples,
                "tokens": tokens,
                "share_of_examples": examples / max(len(subject.lengths), 1),
                "share_of_tokens": tokens / max(total, 1),
            }
        )
    return shares


def vocabulary(corpus: Corpus | Joined) -> dict[str, Any]:
    """Which ids the targets of a corpus use.

    Returns:
        `tokens` counted, of `of` in all; `size` of the vocabulary or None; ids `used`; `rare`, used
        fewer than ten times; `half`, how many of the most frequent ids make half of all tokens;
        `entropy`, of single tokens, in bits; `text_bytes_per_token` or None.
    """
    field = next(iter(set(corpus.task.shifts) - {"inputs"}), "inputs")
    step = max(-(-corpus.num_tokens // TOKENS), 1)
    chosen = np.arange(0, len(corpus), step)
    lengths = np.asarray(corpus.lengths)[chosen].astype(np.int64)
    counts = np.zeros(corpus.vocab_size or 1, np.int64)
    blocks = np.cumsum(lengths) // READ  # about as many tokens are read at a time
    for block in np.unique(blocks):
        first, last = np.searchsorted(blocks, [block, block + 1])
        part = slice(first, last)
        ids = corpus.read(chosen[part], np.zeros(last - first, np.int64), lengths[part])[field]
        more = np.bincount(ids, minlength=len(counts))
        more[: len(counts)] += counts
        counts = more
    tokens = int(counts.sum())
    frequent = np.sort(counts)[::-1]
    share = frequent[frequent > 0] / max(tokens, 1)
    return {
        "tokens": tokens,
        "of": corpus.num_tokens,
        "size": corpus.vocab_size,
        "used": int(np.count_nonzero(counts)),
        "rare": int(np.count_nonzero((counts > 0) & (counts < 10))),
        "half": int(np.searchsorted(np.cumsum(frequent), tokens / 2)) + 1,
        "entropy": float(-(share * np.log2(share)).sum()),
        "text_bytes_per_token": corpus.text_bytes / corpus.num_tokens
        if corpus.text_bytes and corpus.num_tokens
        else None,
    }
