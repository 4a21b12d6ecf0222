"""Groups: examples of a prefix and its continuations, which share the prefix in a row.

A group is one example, never split; its length is the number of its columns (see `corpus.nodes`).
Its nodes are stored as examples of an ordinary corpus, each with the number of nodes back to its
parent.
"""

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.corpus.interface import AnyCorpus, SingleCorpus, computed
from pipeline.corpus.nodes import Nodes
from pipeline.corpus.stored.gather import Fields, Pieces, gather
from pipeline.corpus.tasks import ABOVE, CAUSAL
from pipeline.corpus.views.cuts import cut_groups
from pipeline.corpus.views.trees import Shape, Tree, divide_columns
from pipeline.errors import InvalidValue, counted, require_whole
from pipeline.planning.layout import ranges
from pipeline.text.features import TOKENS, Feature, check_features

logger = logging.getLogger(__name__)


class Groups(SingleCorpus):
    """Groups as a corpus of causal examples; made by `from_groups` of `Corpus` or `Examples`.

    A group `(A B C, [D E, F])` takes 5 columns, where separate rows take 4 and 3:

        inputs             A B C D C
        targets            B C D E F
        inputs_positions   0 1 2 3 2
        visible_until      5 5 4 4 5
        inputs_branch_ids  0 0 1 1 2

    Its prefix counts as often as it would in separate rows: by default, a node weighs the number of
    continuations below it.

    Attributes:
        nodes: the corpus whose examples are the nodes, depth first.
        trees: for each group, the positions on its longest path, the number of its continuations
            and its cost, as in `trees.Nodes.table`: int64 [groups, 3].
    """

    kind = "groups"

    def __init__(self, nodes: AnyCorpus, max_length: int | None = None):
        self.nodes, self.members, self.task = nodes, (nodes,), CAUSAL
        (self._side,) = nodes.sides.values()
        self.weighted, self.vocab_size, self.directory = True, nodes.vocab_size, nodes.directory
        self.features = {name: feature for name, feature in nodes.features.items() if name != ABOVE}
        self.identity = {**nodes.identity, "task": CAUSAL.name}
        self._above = nodes.read_examples(np.arange(len(nodes)), [ABOVE])[ABOVE]
        roots = np.flatnonzero(self._above == 0)
        self._edges = np.append(roots, len(nodes))
        begin = np.append(-1, roots)[np.cumsum(self._above == 0)]  # of the group of each node
        parent = np.arange(len(nodes)) - self._above
        if not ((begin >= 0) & (self._above >= 0) & (parent >= begin)).all():
            raise InvalidValue(
                f"{nodes!r} is damaged: its nodes do not make groups; prepare it again"
            )
        self._lay_out(nodes.lengths)
        self._max_length, self._alike, self._partly = max_length, 0, 0
        if max_length is not None:
            cut = cut_groups(self._side, Tree(self._above), self._sizes, max_length)
            self._alike, self._partly = cut.alike, cut.partly
            self._lay_out(cut.sizes)
            if self._side.weighted:  # weights of the rest are not counted
                self.num_learnt = None
            self.identity["tokens"] += f" cut to {max_length}"
        if nodes.files is not None:
            ends = np.searchsorted(roots, np.cumsum(nodes.files))
            self.files = np.diff(ends, prepend=0)

    def _lay_out(self, sizes: np.ndarray) -> None:
        """Sets what the number of tokens of each node decides."""
        tree = Tree(self._above)
        # A node that `prepare(on_error="skip")` left without tokens keeps its group out of batches.
        self._sizes = sizes * (np.bincount(tree.group, sizes == 0) == 0)[tree.group]
        nodes = tree.lay_out(self._sizes)
        self.lengths = nodes.sum(nodes.columns).astype(np.uint32)
        self.trees = nodes.table
        self.lengths.flags.writeable = nodes.table.flags.writeable = False
        self.num_tokens = int(self.lengths.sum(dtype=np.int64))
        self.num_learnt = self.nodes.num_learnt if self._side.weighted else self.num_tokens

    def truncate(self, max_length: int) -> "Groups":
        """The same groups with continuations cut, so that they have at most `max_length` columns.

        In a longer group, the longest continuations lose their last tokens, and end up equally
        long, give or take one. Shared prefixes stay complete. A group that is too long even with
        one token in each continuation has length 0: it is in no batch, and plans count it. So has
        one whose continuations are alike in all tokens that they may keep, and differed before: a
        pair of answers of which nothing prefers one.

        >>> samples = Examples.from_groups([([1, 2], [[3, 4, 5, 6, 7], [8]])])  # doctest: +SKIP
        >>> samples.truncate(5)[0]["targets"].tolist()  # doctest: +SKIP
        [2, 3, 4, 5, 8]
        """
        max_length = require_whole("max_length", max_length, 1)
        longest = int(self.lengths.max(initial=0))
        if longest <= max_length:
            return self
        groups = Groups(self.nodes, max_length)
        if partly := groups._partly:
            logger.warning(
                f"{partly:,} of {counted(len(self), 'group')} stay, though cut to {max_length:,} "
                "columns some of their continuations are the same; give a longer bucket"
            )
        if alike := groups._alike:
            logger.warning(
                f"{alike:,} of {counted(len(self), 'group')} are left out: cut to {max_length:,} "
                "columns, their continuations are the same; give a longer bucket"
            )
        if lost := int(np.count_nonzero((groups.lengths == 0) & (self.lengths > 0))) - alike:
            logger.warning(
                f"{lost:,} of {counted(len(self), 'group')} are left out: even with one token in "
                f"each continuation, they have more than {max_length:,} columns"
            )
        return groups

    @computed
    def silent(self) -> np.ndarray:
        """The groups without loss on any continuation, or on their prefix."""
        group = np.searchsorted(self._edges, self.nodes.silent, side="right") - 1
        silent = np.flatnonzero(np.bincount(group, minlength=len(self)) == np.diff(self._edges) - 1)
        if not self._side.weighted:
            return silent
        begin, learnt = self._edges[silent], np.zeros(len(silent), bool)
        sizes = self._sizes[begin].astype(np.int64)
        for block, fields in self._side.read_blocks(begin, 0 * begin, sizes):
            prefix = np.arange(block.start, block.stop).repeat(sizes[block])
            learnt[prefix[fields["loss_weights"] != 0]] = True
        return silent[~learnt & (self.lengths[silent] > 0)]

    def read_nodes(self, examples: np.ndarray) -> Nodes:
        """See `Side.read_nodes`."""
        numbers, tree = self._tree(examples)
        return tree.lay_out(self._sizes[numbers])

    def _tree(self, examples: np.ndarray) -> tuple[np.ndarray, Tree]:
        """The numbers of the nodes of groups, and their tree."""
        begin = self._edges[examples]
        numbers = ranges(begin, self._edges[np.asarray(examples) + 1] - begin)
        return numbers, Tree(self._above[numbers])

    def _read(self, pieces: Pieces, names: Sequence[str]) -> Fields:
        examples, starts, lengths, reach, _ = pieces
        numbers, tree = self._tree(examples)
        piece = np.arange(len(examples)).repeat(tree.counts)
        size = np.asarray(self._sizes[numbers], np.int64)
        # The input of a node's first column is the token before its own, so a piece of m columns
        # needs m + 1 tokens, from consecutive nodes.
        first = tree.lay_out(size).first
        token = first + ~tree.root  # where its own tokens begin in the group
        begin = np.maximum(token, starts[piece])
        count = np.minimum(token + size, (starts + lengths)[piece] + 1) - begin
        nonempty = count > 0
        # First columns whose input is not the token before them: of all children but the first.
        before = np.cumsum(reach) - reach
        inside = (first >= starts[piece]) & (first < (starts + lengths)[piece])
        copies = np.flatnonzero((tree.above > 1) & inside)
        positions = (before[piece] + first - starts[piece])[copies]
        parent, none = tree.parent[copies], np.ones_like(copies)
        read = self._side.read(
            np.append(numbers[nonempty], numbers[parent]),
            np.append((begin - token)[nonempty], size[parent] - 1),
            np.append(count[nonempty], none),
            features=names,
        )
        if "loss_weights" not in read:
            leaves = tree.sum_leaves(tree.branch.astype(np.float32))
            flat = leaves[nonempty].repeat(count[nonempty])
            read["loss_weights"] = np.append(flat, none.astype(np.float32))
        ends = np.cumsum(lengths + 1)
        at = ends - lengths - 1
        later = {"targets", "loss_weights", *(n for n in names if self.features[n].of == "targets")}
        fields = {}
        for name, values in read.items():
            fields[name] = gather(values, at + (name in later), lengths, reach)
            if name not in later:
                fields[name][positions] = values[len(values) - len(copies) :]
        return fields

    def _read_examples(self, examples: np.ndarray, names: Sequence[str]) -> Fields:
        of_groups = [name for name in names if self.features[name].of == "example"]
        fields = self._side.read_examples(self._edges[examples], of_groups)
        if more := [name for name in names if name not in of_groups]:
            # In the corpus of nodes, these are features of examples.
            numbers, tree = self._tree(examples)
            fields |= self._side.read_examples(numbers[tree.branch], more)
        return fields

    def with_features(
        self, columns: Mapping[str, Iterable[Any]], *, features: Mapping[str, Feature]
    ) -> "Groups":
        """The same groups with more features, stored beside them; see `AnyCorpus.with_features`.

        Columns are as for `Corpus.from_groups`, with an entry for each group.
        """
        schemas = check_features(features)
        shapes = (
            Shape(self.nodes.lengths[begin:end], self._above[begin:end])
            for begin, end in itertools.pairwise(self._edges.tolist())
        )
        more = divide_columns({TOKENS: shapes, **columns}, schemas)
        del more[TOKENS], more[ABOVE]
        return Groups(self.nodes.with_features(more, features=schemas), self._max_length)

    def decode(self, index: int) -> str:
        """The text of a group: a line for each node, indented below its parent."""
        if self.tokenizer is None:
            raise InvalidValue(f"{self!r:.200} was made without a tokenizer, so it has no text")
        numbers, tree = self._tree(np.array([range(len(self))[index]]))
        lines, depth = [], [0] * len(numbers)
        for number, (node, parent) in enumerate(zip(numbers, tree.parent.tolist(), strict=True)):
            depth[number] = depth[parent] + (number > 0)
            ids = self.nodes[int(node)]["inputs"][: self._sizes[node]]
            lines.append("  " * depth[number] + self.tokenizer.decode(ids))
        return "\n".join(lines)

    def arguments(self) -> dict[str, Any]:
        """See `AnyCorpus`."""
        return {"nodes": self.nodes, "max_length": self._max_length}

    def __repr__(self) -> str:
        return f"Groups of {self.nodes!r}"


def truncate_groups(corpus: AnyCorpus, max_length: int) -> AnyCorpus:
    """The corpus with all groups in it cut by `Groups.truncate`."""
    return corpus.map_leaves(
        lambda leaf: leaf.truncate(max_length) if isinstance(leaf, Groups) else leaf
    )
