"""Nodes: where those of groups lie among the columns of a row.

A group is a prefix and its continuations, or a tree of these. Its nodes lie one after another,
depth first: the prefix without its last token, then each other node with a copy of its parent's
last token in front, and without its own last token. So the input of a column is the token before
its target, and every token but the first of the prefix is the target of one column.
"""

from typing import NamedTuple

import numpy as np

from pipeline.planning.layout import ranges


class Nodes(NamedTuple):
    """The nodes of some examples, one example after another. A document is a single node.

    Columns count from the first of the example. Of the group `(A B C, [D E, F])`, whose columns
    have the inputs `A B`, `C D` and `C`, they are

        first  columns  position  until  branch
            0        2         0      5  False   the prefix, which all columns up to 5 see
            2        2         2      4  True
            4        1         2      5  True

    Attributes:
        number: the nodes of each example: int64 [examples]; all others are int64 [nodes].
        first: the first column of each node.
        columns: the number of its columns.
        position: the position of its first column; for a continuation, of the copied token.
        until: the first later column that does not see the node: where the nodes below it end.
        branch: bool, whether it is a continuation: a node with none below it, and not a document.
    """

    number: np.ndarray
    first: np.ndarray
    columns: np.ndarray
    position: np.ndarray
    until: np.ndarray
    branch: np.ndarray

    @classmethod
    def of_documents(cls, lengths: np.ndarray) -> "Nodes":
        """The nodes of documents with these lengths, one for each."""
        lengths = np.asarray(lengths, np.int64)
        none = np.zeros_like(lengths)
        return cls(none + 1, none, lengths, none, lengths, none > 0)

    def take(self, examples: np.ndarray) -> "Nodes":
        """The nodes of some of the examples, by their places: int64 [n]."""
        number = self.number[examples]
        nodes = ranges((np.cumsum(self.number) - self.number)[examples], number)
        return Nodes(number, *(column[nodes] for column in self[1:]))

    @classmethod
    def concatenate(cls, several: "list[Nodes]") -> "Nodes":
        """The nodes of the examples of several, one after another."""
        return cls(*map(np.concatenate, zip(*several, strict=True)))

    def sum(self, values: np.ndarray) -> np.ndarray:
        """The sum of the values of the nodes of each example: int64 [examples]."""
        sums = np.append(0, np.cumsum(values, dtype=np.int64))
        ends = np.cumsum(self.number)
        return sums[ends] - sums[ends - self.number]

    @property
    def table(self) -> np.ndarray:
        """The data for planning beside the length of each example: int64 [examples, 3].

        A row has the positions on the longest path, the continuations, and the cost in attention:
        `2 · Σ (until − k) − columns` over columns `k`; for a document, the square of its length.
        """
        path = np.zeros(len(self.number), np.int64)
        example = np.arange(len(self.number)).repeat(self.number)
        np.maximum.at(path, example, self.position + self.columns)
        costs = (2 * (self.until - self.first) - self.columns) * self.columns
        return np.stack([path, self.sum(self.branch), self.sum(costs)], axis=1)
