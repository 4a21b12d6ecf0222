"""Copies: examples that are the same as earlier ones, token by token."""

import hashlib
import itertools

import numpy as np

from pipeline.corpus.interface import AnyCorpus
from pipeline.corpus.side import Side


def duplicates(corpus: AnyCorpus) -> np.ndarray:
    """The numbers of the examples that are copies of an earlier one: int64, ascending.

    Copies have the same tokens and loss weights, or the same arrays; groups also the same tree, and
    several sides the same on each. Nothing is stored: one pass reads all tokens, at some 100
    million a second, and keeps 16 bytes for each example of a side. Examples of length 0 never
    count as copies.

    >>> pipeline.Plan(corpus, buckets, exclude=duplicates(corpus))  # doctest: +SKIP

    Args:
        corpus: a corpus, pairs, or several as one; for a view, its corpus is compared.
    """
    # The fields of views are drawn at random.
    corpus = corpus.map_leaves(lambda leaf: getattr(leaf, "corpus", leaf))
    lengths = np.reshape(corpus.lengths, (len(corpus), -1))
    numbers = np.flatnonzero(lengths.any(axis=1))
    # The rows of this table are equal where examples are.
    table = np.concatenate([
        _digests(side, numbers, lengths[numbers, column].astype(np.int64))
        for column, side in enumerate(corpus.sides.values())
    ], axis=1)  # fmt: skip
    order = np.lexsort(table.T)  # stable, so that the earliest of several copies comes first
    table = table[order]
    return np.sort(numbers[order[1:][(table[1:] == table[:-1]).all(axis=1)]])


def _digests(side: Side, examples: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """128 bits of the SHA-256 of each example: uint64 [examples, 2]."""
    digests = bytearray()
    features = () if side.has_tokens else None  # arrays are features alone
    for block, fields in side.read_blocks(examples, 0 * examples, lengths, features):
        if side.trees is not None:  # groups with equal tokens may have different trees
            nodes = side.read_nodes(examples[block])
            fields["until"] = nodes.until.astype(np.int32).repeat(nodes.columns)
        flat = [np.ascontiguousarray(field) for field in fields.values()]
        ends = np.cumsum(lengths[block]).tolist()
        for begin, end in itertools.pairwise([0, *ends]):
            content = b"".join(field[begin:end].tobytes() for field in flat)
            digests += hashlib.sha256(content).digest()[:16]
    return np.frombuffer(digests, np.uint64).reshape(-1, 2)
