"""Trees: the parents of the nodes of groups, and groups as users nest them, as columns of nodes.

A user gives `(prefix, [continuation, …])`, where a continuation may be such a pair again. Nodes are
stored depth first, each as an example, with the number of nodes back to its parent.
"""

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.corpus.nodes import Nodes
from pipeline.corpus.tasks import ABOVE, GROUPS, add_parents
from pipeline.errors import InvalidValue, counted
from pipeline.text.features import (
    LOSS_WEIGHTS,
    TOKENS,
    WEIGHTS,
    Feature,
    as_array,
    split_columns,
    zip_columns,
)
from pipeline.text.ragged import require_weights, validate_tokens


class Tree:
    """The parents of the nodes of some groups, one group after another, in depth-first order.

    Attributes:
        above: how many nodes back the parent of each node is; 0 for a prefix: int64 [nodes].
        parent: the place of the parent of each node; for a prefix, its own.
        root: whether each node is a prefix: bool [nodes].
        branch: whether it is a continuation: bool [nodes].
    """

    def __init__(self, above: np.ndarray):
        self.above = np.asarray(above, np.int64)
        self.root, self.parent = self.above == 0, np.arange(len(above)) - self.above
        self.branch = ~self.root
        self.branch[self.parent[~self.root]] = False
        # The nodes on the way to a prefix, counted by ways that double.
        depth, upper = (~self.root).astype(np.int64), self.parent
        while depth[upper].any():
            depth, upper = depth + depth[upper], upper[upper]
        order = np.argsort(depth, kind="stable")
        ends = np.flatnonzero(np.diff(depth[order])) + 1
        self._levels = np.split(order, ends)[1:]  # from the children of prefixes down

    @property
    def group(self) -> np.ndarray:
        """The number of the group of each node: int64 [nodes]."""
        return np.cumsum(self.root) - 1

    @property
    def counts(self) -> np.ndarray:
        """The number of nodes of each group."""
        return np.diff(np.flatnonzero(self.root), append=len(self.root))

    def sum_leaves(self, values: np.ndarray) -> np.ndarray:
        """For each node, the sum over the continuations below it; for a continuation, its value."""
        sums = values * self.branch
        for level in reversed(self._levels):
            np.add.at(sums, self.parent[level], sums[level])
        return sums

    def lay_out(self, tokens: np.ndarray) -> Nodes:
        """The nodes of the groups as columns, from the number of tokens of each node."""
        columns = np.maximum(np.asarray(tokens, np.int64) - self.root, 0)  # 0 tokens: no group
        ends = columns.cumsum()
        before = (ends - columns)[self.root].repeat(self.counts)
        first, until = ends - columns - before, ends - before
        position = np.zeros_like(columns)
        for level in self._levels:
            parent = self.parent[level]
            position[level] = position[parent] + columns[parent]
        for level in reversed(self._levels):
            np.maximum.at(until, self.parent[level], until[level])
        return Nodes(self.counts, first, columns, position, until, self.branch)


class Shape:
    """The nodes of one group, while it is divided into columns of nodes.

    Attributes:
        sizes: the number of tokens of each node.
        tree: the parents of the nodes.
        tokens: the ids of each node; None if they are stored already.
    """

    def __init__(self, sizes: np.ndarray, above: np.ndarray, tokens: Any = None):
        self.sizes, self.tokens, self.tree = sizes.tolist(), tokens, Tree(above)
        self._below = np.bincount(self.tree.parent[1:], minlength=len(sizes)).tolist()

    @classmethod
    def of(cls, group: Any, what: str, vocab_size: int | None) -> "Shape":
        """The nodes of a group of token ids, checked; `what` names the group in errors."""
        if not _is_branching(group):
            raise InvalidValue(
                f"{what} is {group!r:.60}; a group must be (prefix, [continuation, …]) of token "
                "ids, where a continuation may itself be such a pair"
            )
        tokens, above = [], []
        for content, number, name in _unnest(group, what):
            tokens.append(validate_tokens([as_array(content, name)], name, vocab_size))
            above.append(number)
            if not len(tokens[-1]):
                raise InvalidValue(
                    f"{name} has no token; give each prefix and each continuation at least one, "
                    "such as a mark"
                )
        return cls(np.array([*map(len, tokens)]), np.array(above), tokens)

    def spread(self, values: Any, feature: Feature, what: str) -> list[np.ndarray]:
        """The values of a feature for each node."""
        if feature.of == "continuation":
            return list(self._of_leaves(values, feature, what))
        if feature.of == "example":
            none = np.zeros(feature.shape, feature.dtype)
            return [*feature.convert([values], what, [0])] + [none] * (len(self.sizes) - 1)
        return [
            feature.convert([content], name, [size])
            for (content, _, name), size in zip(
                _unnest(values, what, self._below), self.sizes, strict=True
            )
        ]

    def weigh(self, weights: Any, what: str) -> list[np.ndarray]:
        """The weights of the tokens of each node, from numbers or arrays."""
        if _is_branching(weights):
            contents = [(content, name) for content, _, name in _unnest(weights, what, self._below)]
        else:  # a number for each continuation
            numbers = self._of_leaves(weights, LOSS_WEIGHTS, what)
            contents = [(weight, what) for weight in self.tree.sum_leaves(numbers)]
        result = []
        for (content, name), size in zip(contents, self.sizes, strict=True):
            array = LOSS_WEIGHTS.cast(as_array(content, name), name)
            if array.shape not in [(), (size,)]:
                raise InvalidValue(
                    f"{name} cannot have shape {array.shape}; give a number, or one for each of "
                    f"its {counted(size, 'token')}"
                )
            result.append(np.array(np.broadcast_to(require_weights(array, name), size)))
        result[0][0] = 0  # the first token of the group is no target
        return result

    def _of_leaves(self, entries: Any, feature: Feature, what: str) -> np.ndarray:
        """Values of continuations, and 0 for other nodes: `[nodes, *shape]`."""
        array, leaves = as_array(entries, what), int(self.tree.branch.sum())
        if array.shape != (leaves, *feature.shape):
            raise InvalidValue(
                f"the shape of {what} is {array.shape}; for a group of "
                f"{counted(leaves, 'continuation')}, it must be {(leaves, *feature.shape)}"
            )
        values = np.zeros((len(self.sizes), *feature.shape), feature.dtype)
        values[self.tree.branch] = feature.cast(array, what)
        return values


def _is_branching(node: Any) -> bool:
    """Whether `node` is a pair of a prefix and a list, rather than an array of numbers."""
    pair = isinstance(node, tuple | list) and len(node) == 2
    return pair and hasattr(node[1], "__len__") and getattr(node[1], "ndim", 1) > 0


def _unnest(
    nested: Any, what: str, below: Sequence[int] | None = None
) -> Iterator[tuple[Any, int, str]]:
    """The content of each node, depth first, how many nodes back its parent is, and its name.

    `below` is the number of children of each node, known from the tokens; None: `nested` decides.
    """
    stack: list[tuple[Any, int, str]] = [(nested, 0, what)]
    for number in itertools.count():
        if not stack:
            return
        content, parent, name = stack.pop()
        branches = _is_branching(content)
        if below is not None:
            if below[number] and not (branches and len(content[1]) == below[number]):
                raise InvalidValue(
                    f"{name} is {content!r:.60}; nest it like the tokens: (prefix, [one for each "
                    f"of the {counted(below[number], 'continuation')}])"
                )
            branches = below[number] > 0
        if branches:
            content, children = content
            if not len(children):
                raise InvalidValue(f"{name} has a prefix and no continuation; give at least one")
            inner = [
                (child, number, f"continuation {n} of {name}") for n, child in enumerate(children)
            ]
            stack += reversed(inner)
            name = f"the prefix of {name}"
        yield content, number - parent, name


def divide_groups(
    columns: Any, features: Mapping[str, Feature] | None, vocab_size: int | None
) -> tuple[dict[str, Iterator[Any]], dict[str, Feature]]:
    """Columns of groups as columns of their nodes, for `from_arrays`, and the features of these."""
    lists, schemas = split_columns(columns, GROUPS.check(features))
    schemas.pop(WEIGHTS, None)
    shapes = (
        Shape.of(group, f"group {number}", vocab_size) for number, group in enumerate(lists[TOKENS])
    )
    schemas = add_parents(schemas)
    return divide_columns({**lists, TOKENS: shapes}, schemas), schemas


def divide_columns(
    columns: Mapping[str, Iterable[Any]], schemas: dict[str, Feature]
) -> dict[str, Iterator[Any]]:
    """An iterator over the entries of nodes for each column; `tokens` has a `Shape` per group."""

    def rows() -> Iterator[dict[str, Any]]:
        for number, entries in zip_columns(columns):
            shape: Shape = entries.pop(TOKENS)
            of_node = {TOKENS: shape.tokens or shape.sizes, ABOVE: shape.tree.above}
            for name, value in entries.items():
                what = f"{name} of group {number}"
                if name == WEIGHTS:
                    of_node[name] = shape.weigh(value, f"the {what}")
                    continue
                feature = schemas[name]
                prefix = _is_branching(value) and not feature.per_example
                feature = schemas[name] = feature.infer(value[0] if prefix else value, what)
                of_node[name] = shape.spread(value, feature, what)
            for row in zip(*of_node.values(), strict=True):
                yield dict(zip(of_node, row, strict=True))

    names = [*columns, ABOVE]
    return {
        name: map(operator.itemgetter(name), copy)
        for name, copy in zip(names, itertools.tee(rows(), len(names)), strict=True)
    }
