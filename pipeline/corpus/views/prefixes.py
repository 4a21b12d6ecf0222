"""Prefixes that samples share, found: lists of samples become groups, which compute them once."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.bar import Bar
from pipeline.corpus.tasks import CAUSAL
from pipeline.errors import InvalidValue, counted, require_whole
from pipeline.text.features import TOKENS, WEIGHTS, Feature
from pipeline.text.ragged import Ragged, divide_arrays

SHOWN_AFTER = 1.0  # seconds until there is a bar, since a trainer may call this for each update


def find_prefixes(
    samples: Any, *, min_shared: int = 16, max_length: int | None = None
) -> dict[str, list[Any]]:
    """Columns for `Examples.from_groups`, in which samples share the tokens that they begin with.

    Samples of one prompt become a group, and a conversation whose samples continue each other a
    path. Each token that is shared takes a position once, and weighs the sum of its weights in the
    samples. So sums of losses and gradients are those of the samples in separate rows.

    >>> samples = [[1, 5, 7, 3], [1, 5, 8, 9, 3], [2, 6, 4]]
    >>> for name, column in find_prefixes(samples, min_shared=2).items():
    ...     print(name, [(p.tolist(), [each.tolist() for each in below]) for p, below in column])
    tokens [([1, 5], [[7, 3], [8, 9, 3]]), ([2], [[6, 4]])]
    weights [([0.0, 2.0], [[1.0, 1.0], [1.0, 1.0, 1.0]]), ([0.0], [[1.0, 1.0]])]

    It sorts the samples and compares each with the one before, in time that grows with the number
    of tokens. Groups are in the order of their first samples.

    Args:
        samples: a list of 1-D arrays (or lists) of token ids, each at least two; or a dict with a
            list for each column: "tokens", optionally "weights", and features of "targets", with a
            value for each token, as for `Examples`. A value counts where the sample has weight: a
            token that two samples learn with unlike values is not shared, nor are those after it.
        min_shared: the fewest tokens that samples of one group share.
        max_length: the most columns of a group, such as the length of the longest bucket; samples
            that would exceed it begin another group. None: no limit.

    Returns:
        "tokens", "weights" and the features, each a list with `(prefix, [continuation, …])` for
        each group, nested as the samples branch.

    Raises:
        ValueError: there is no sample, one has fewer than two tokens, a column does not match the
            tokens, or an option is no whole number from 1 up.
    """
    min_shared = require_whole("min_shared", min_shared, 1)
    limit = None if max_length is None else require_whole("max_length", max_length, 1)
    ragged = _read(samples)
    groups, source, weights = _find_groups(ragged, min_shared, limit)
    columns = {TOKENS: ragged.flat[source], WEIGHTS: weights}
    others = [name for name in ragged.features if name != WEIGHTS]
    columns |= {name: ragged.columns[name].values[source] for name in others}
    return {name: [_nest(root, column) for root in groups] for name, column in columns.items()}


def _read(samples: Any) -> Ragged:
    """The samples, checked."""
    columns = samples if isinstance(samples, Mapping) else {TOKENS: samples}
    features = {
        name: Feature("targets", shape=np.shape(entries[0])[1:])
        for name, entries in columns.items()
        if name not in (TOKENS, WEIGHTS) and len(entries)
    }
    chunks = [chunk for _, chunk in divide_arrays(columns, {CAUSAL.side: features}, None)]
    if not chunks:
        raise InvalidValue("samples are empty; give at least one sample")
    ragged = Ragged.concatenate(chunks)
    if (short := np.flatnonzero(ragged.counts < 2)).size:
        raise InvalidValue(
            f"sample {short[0]} has {counted(int(ragged.counts[short[0]]), 'token')}; nothing can "
            "be learnt of fewer than two, so remove it"
        )
    return ragged


@dataclasses.dataclass
class _Node:
    """Tokens that the same samples share, from `first` up to `end`, `depth` tokens after the root.

    They count the tokens of all groups, each once, depth first.
    """

    depth: int
    first: int
    end: int
    children: "list[_Node]"

    def divide(self, depth: int) -> None:
        """Moves the tokens from this depth on into a child, which gets the children."""
        cut = self.first + depth - self.depth
        if cut < self.end:
            self.children = [_Node(depth, cut, self.end, self.children)]
            self.end = cut


def _find_groups(
    ragged: Ragged, min_shared: int, max_length: int | None
) -> tuple[list[_Node], np.ndarray, np.ndarray]:
    """The roots; and for each token, where its values are in `ragged`, and its weight."""
    flat, counts = ragged.flat, ragged.counts
    begins = np.cumsum(counts) - counts
    sample_weights = (
        np.ones(len(flat), np.float32) if ragged.weights is None else ragged.weights.copy()
    )
    sample_weights[begins] = 0  # the first token of a sample is no target
    values = [column.values for n, column in ragged.columns.items() if n not in (TOKENS, WEIGHTS)]
    # As bytes, the most significant first, samples are in the order of their tokens.
    ordered = flat.astype(">u4").tobytes()
    keys = [ordered[4 * b : 4 * (b + n)] for b, n in zip(begins.tolist(), counts, strict=True)]

    source, weights = np.empty(len(flat), np.int64), np.zeros(len(flat), np.float32)

    def count_shared(path: np.ndarray, sample: np.ndarray) -> int:
        """The leading tokens that a sample shares with the path to the sample before it."""
        most = min(len(path), len(sample))
        path, sample = path[:most], sample[:most]
        same = flat[source[path]] == flat[sample]
        both = (weights[path] > 0) & (sample_weights[sample] > 0)
        for column in values:
            equal = column[source[path]] == column[sample]
            same &= ~both | equal.all(axis=(*range(1, equal.ndim),))
        return most if same.all() else int(same.argmin())

    roots: dict[int, _Node] = {}  # by the lowest number of a sample
    size, path, stack, first, lowest = 0, np.zeros(0, np.int64), list[_Node](), 0, 0
    order = sorted(range(len(keys)), key=keys.__getitem__)
    for number in Bar("finding prefixes", order, unit=" sample", delay=SHOWN_AFTER):
        begin, count = int(begins[number]), int(counts[number])
        sample = np.arange(begin, begin + count)
        shared = count_shared(path, sample)
        longer = max_length is not None and size + count - shared - first - 1 > max_length
        if shared < min_shared or longer:
            shared, stack, first, lowest = 0, [_Node(0, size, size + count, [])], size, number
            roots[number] = stack[0]
        elif number < lowest:
            roots[number], lowest = roots.pop(lowest), number
        # The sample's own tokens follow those of the samples before it.
        path = np.append(path[:shared], np.arange(size, size + count - shared))
        source[path[shared:]] = sample[shared:]
        learnt = (sample_weights[sample] > 0) & (weights[path] == 0)
        source[path[learnt]] = sample[learnt]
        weights[path] += sample_weights[sample]
        if shared > 0:
            while stack[-1].depth >= shared:
                stack.pop()
            if shared < count:
                stack[-1].divide(shared)
                stack[-1].children.append(_Node(shared, size, size + count - shared, []))
                stack.append(stack[-1].children[-1])
        size += count - shared
    groups = [roots[number] for number in sorted(roots)]
    for root in groups:
        if not root.children:  # a single sample: its first token is the prefix
            root.divide(1)
    return groups, source[:size], weights[:size]


def _nest(root: _Node, values: np.ndarray) -> Any:
    """The values of the tokens of a group, as `(prefix, [continuation, …])`."""
    order, nested = [root], dict[int, Any]()
    for node in order:  # parents before children
        order += node.children
    for node in reversed(order):
        content = values[node.first : node.end]
        below = [nested[child.first] for child in node.children]
        nested[node.first] = (content, below) if below else content
    return nested[root.first]
