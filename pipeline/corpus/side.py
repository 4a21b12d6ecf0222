"""Side: the tokens of examples, the inputs or targets of pairs, or arrays, read in pieces."""

import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.corpus.nodes import Nodes
from pipeline.corpus.stored.gather import Fields, Pieces
from pipeline.errors import InvalidValue, OutOfRange, suggest_option
from pipeline.text.features import Feature

# Positions of pieces that `read_blocks` reads together.
POSITIONS = 1 << 22


class Side:
    """One side of a corpus: the tokens of examples, the inputs or targets of pairs, or arrays.

    A class of sides sets `lengths`, and what else differs from the defaults here, and writes
    `_read`; with features of examples, also `_read_examples`, and with groups, `read_nodes`.

    Attributes:
        lengths: positions of each example: unsigned [examples].
        weighted: whether `read` returns `loss_weights`, too; if not, every token weighs 1.
        has_tokens: whether positions have tokens; if not, they have features alone, as arrays have.
        features: the features of examples, by name.
        trees: the `Nodes.table` of all examples if some are groups, else None: int64 [examples, 3].
    """

    lengths: np.ndarray
    weighted: bool = False
    has_tokens: bool = True
    features: Mapping[str, Feature] = types.MappingProxyType({})
    trees: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def read(
        self,
        examples: Any,
        starts: Any,
        lengths: Any,
        reach: Any = None,
        epoch: Any = 0,
        features: Iterable[str] | None = None,
    ) -> Fields:
        """Pieces of examples, one after another; all batches get their tokens from here.

        Args:
            examples: the example of each piece; ints, [pieces].
            starts: the first position of each piece, within its example.
            lengths: the positions of each piece; may be 0.
            reach: the places that each piece takes in the result, at least its length, or 0 for
                a piece of length 0; places beyond its length hold any numbers. None: `lengths`.
            epoch: decides the random choices of a view. For joined corpora, it may be one for each
                piece.
            features: names of features of tokens to read as well; None: all.

        Returns:
            A flat int32 array of `sum(reach)` for each field of the task (for causal text, `inputs`
            and `targets`), float32 `loss_weights` if tokens have weights, and an array
            `[sum(reach), *shape]` for each of the features.

        Raises:
            IndexError: there is no such example, or it is too short for its piece.
        """
        names = self._check_names(features, per_example=False)
        columns = examples, starts, lengths, lengths if reach is None else reach
        epoch = np.asarray(epoch) if np.ndim(epoch) else epoch
        pieces = Pieces._make([*(np.asarray(column, np.int64) for column in columns), epoch])
        self._require_numbers(pieces.examples)
        if not pieces.lengths.all():
            pieces = pieces.take(pieces.lengths != 0)
        self._require_positions(pieces)
        return self._read(pieces, names)

    def read_blocks(
        self, examples: np.ndarray, starts: np.ndarray, lengths: np.ndarray, features: Any = ()
    ) -> Iterator[tuple[slice, Fields]]:
        """The fields of many pieces, some `POSITIONS` positions at a time, and which pieces."""
        blocks = np.cumsum(lengths, dtype=np.int64) // POSITIONS
        for number in np.unique(blocks):
            block = slice(*np.searchsorted(blocks, [number, number + 1]).tolist())
            pieces = examples[block], starts[block], lengths[block]
            yield block, self.read(*pieces, features=features)

    def _require_numbers(self, examples: np.ndarray) -> None:
        """Refuses numbers of examples that are negative or too high."""
        # As an unsigned number, a negative one is higher than all others.
        count = len(self)
        if len(examples) and int(examples.view(np.uint64).max()) >= count:
            wrong = examples[(examples < 0) | (examples >= count)][0]
            raise OutOfRange(f"example {wrong} of {count:,}; examples are numbered from 0")

    def _require_positions(self, pieces: Pieces) -> None:
        """Refuses pieces that are not within their examples, or do not fit their places."""
        examples, starts, lengths, reach, _ = pieces
        room = self.lengths.take(examples).astype(np.int64)
        # A negative number has the highest bit, and so has the union of all.
        union = starts | lengths | (room - starts - lengths) | (reach - lengths)
        for at in np.flatnonzero(union < 0)[:1] if union.min(initial=0) < 0 else ():
            if reach[at] < lengths[at]:
                raise InvalidValue(
                    f"reach is {reach[at]} for a piece of length {lengths[at]}; give at least the "
                    "length"
                )
            end = int(starts[at]) + int(lengths[at])
            raise OutOfRange(
                f"piece {at} has positions {starts[at]} to {end} of example {examples[at]}, which "
                f"has length {room[at]}"
            )

    def _read(self, pieces: Pieces, names: Sequence[str]) -> Fields:
        """The fields of `read`, for checked pieces."""
        raise NotImplementedError

    def read_examples(self, examples: Any, features: Iterable[str] | None = None) -> Fields:
        """The features of whole examples: an array `[n, *shape]` for each.

        For features of continuations, `[continuations, *shape]`; a document has none.

        Args:
            examples: their numbers; ints, [n].
            features: names of features of examples or continuations; None: all.
        """
        names = self._check_names(features, per_example=True)
        examples = np.asarray(examples, np.int64)
        self._require_numbers(examples)
        return self._read_examples(examples, names) if names else {}

    def _read_examples(self, examples: np.ndarray, names: Sequence[str]) -> Fields:
        """The features of `read_examples`, for checked arguments."""
        raise NotImplementedError

    def read_nodes(self, examples: np.ndarray) -> Nodes:
        """The nodes of whole examples, int64 [n]; a document is one node."""
        return Nodes.of_documents(self.lengths[examples])

    def select(self, names: Iterable[str]) -> list[str]:
        """Those of some names that are features of this side."""
        return [name for name in names if name in self.features]

    def _check_names(self, features: Iterable[str] | None, *, per_example: bool) -> list[str]:
        """The names of the features to read, of examples or of positions; refuses unknown ones."""
        options = [n for n, feature in self.features.items() if feature.per_example == per_example]
        if features is None:
            return options
        names = list(features)
        for name in names:
            if name not in options:
                kind = "examples" if per_example else "tokens"
                raise InvalidValue(f"there is no feature of {kind} {suggest_option(name, options)}")
        return names
