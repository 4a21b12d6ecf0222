"""Statistics of a corpus: how long its examples are, where they come from, what ids they use."""

from typing import Any

import numpy as np

from pipeline.planning import lengths as lengths_lib
from pipeline.report.subject import Subject
from pipeline.storage.interface import AnyCorpus

PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9)
BINS = 48

# Vocabulary use is counted over examples of about this many tokens, spread over the corpus.
TOKENS, READ = 1 << 24, 1 << 20


def statistics(subject: Subject, side: int, counts: np.ndarray, longest: int) -> dict[str, Any]:
    """What there is to say of the examples.

    Args:
        subject: what the report is about.
        side: of pairs, 0 for the inputs and 1 for the targets; else 0.
        counts: the histogram, how many examples have each length.
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
        "sources": _sources(subject, side),
        "vocabulary": [vocabulary(corpus, side) for corpus in subject.corpora],
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


def _sources(subject: Subject, side: int) -> list[dict[str, Any]]:
    lengths = subject.lengths[:, side] if subject.pairs else subject.lengths
    total = sum(int(piece.sum(dtype=np.int64)) for piece in lengths_lib.chunks(lengths))
    shares, first = [], 0
    for name, examples in subject.sources:
        part = lengths[first : first + examples]
        first += examples
        tokens = sum(int(piece.sum(dtype=np.int64)) for piece in lengths_lib.chunks(part))
        shares.append(
            {
                "name": name,
                "examples": examples,
                "tokens": tokens,
                "share_of_examples": examples / max(len(lengths), 1),
                "share_of_tokens": tokens / max(total, 1),
            }
        )
    return shares


def vocabulary(corpus: AnyCorpus, side: int = 0) -> dict[str, Any]:
    """Which ids the targets of a corpus use; of pairs, those of a side.

    Returns:
        `tokens` counted, of `of` in all; `size` of the vocabulary or None; ids `used`; `rare`, used
        fewer than ten times; `half`, how many of the most frequent ids make half of all tokens;
        `entropy`, of single tokens, in bits; `text_bytes_per_token` or None.
    """
    whole = np.asarray(corpus.lengths).reshape(len(corpus), -1)[:, side]
    total = int(whole.sum(dtype=np.int64))
    step = max(-(-total // TOKENS), 1)
    chosen = np.arange(0, len(corpus), step)
    lengths = whole[chosen].astype(np.int64)
    counts = np.zeros(corpus.vocab_size or 1, np.int64)
    blocks = np.cumsum(lengths) // READ  # about as many tokens are read at a time
    for block in np.unique(blocks):
        first, last = np.searchsorted(blocks, [block, block + 1])
        part = slice(first, last)
        starts = np.zeros(last - first, np.int64)
        fields = corpus.sides[side].read(chosen[part], starts, lengths[part])
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
