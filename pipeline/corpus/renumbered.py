"""Renumbered: the examples of other corpora, or some of them, under consecutive numbers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipeline.corpus.interface import AnyCorpus, computed, derived
from pipeline.corpus.nodes import Nodes
from pipeline.corpus.side import Side
from pipeline.corpus.stored.gather import Fields, Pieces, gather
from pipeline.planning.layout import ranges
from pipeline.planning.lengths import NO_EXAMPLES
from pipeline.text.features import LOSS_WEIGHTS, Feature


class Numbering(NamedTuple):
    """The examples of each member, one member after another.

    Attributes:
        first: the number of the first example of each member, then the total: int64 [members + 1].
        chosen: the numbers of the examples of each member, ascending; None: all.
    """

    first: np.ndarray
    chosen: tuple[np.ndarray | None, ...]

    def locate(self, examples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `AnyCorpus.locate`."""
        member = np.searchsorted(self.first, examples, side="right") - 1
        numbers = examples - self.first[member]
        for index, chosen in enumerate(self.chosen):
            if chosen is not None:
                selected = slice(None) if len(self.chosen) == 1 else member == index
                numbers[selected] = chosen[numbers[selected]]
        return member, numbers

    def select(self, index: int, values: np.ndarray) -> np.ndarray:
        """The values of the examples of a member, from those of all that it has."""
        chosen = self.chosen[index]
        return values if chosen is None else values[chosen]

    def find(self, index: int, numbers: np.ndarray) -> np.ndarray:
        """The examples that have some of these numbers, ascending, in a member."""
        chosen = self.chosen[index]
        if chosen is not None:
            positions = np.searchsorted(chosen, numbers)
            inside = positions < len(chosen)
            inside[inside] = chosen[positions[inside]] == numbers[inside]
            numbers = positions[inside]
        return self.first[index] + numbers

    def divide(self, index: int, files: np.ndarray) -> np.ndarray:
        """The examples in each file of a member, from the number of all that files have."""
        chosen = self.chosen[index]
        if chosen is None:
            return files
        return np.diff(np.searchsorted(chosen, np.cumsum(files)), prepend=0)


class Renumbered(AnyCorpus):
    """The examples of other corpora under new numbers: all of a corpus, or some; then the next.

    Examples have length 0 on sides that their corpus lacks.

    Args:
        members: at least one corpus.
        chosen: the numbers of the examples of each member, ascending; None: all.
        names: the names of the sides, in order; None: those of the first member.
    """

    def __init__(
        self,
        members: Sequence[AnyCorpus],
        chosen: Sequence[np.ndarray | None] | None = None,
        names: Sequence[str] | None = None,
    ):
        self.members, first = tuple(members), members[0]
        chosen = tuple(chosen or [None] * len(members))
        counts = [len(m) if n is None else len(n) for m, n in zip(members, chosen, strict=True)]
        self._numbering = Numbering(np.cumsum([0, *counts]), chosen)
        self.sides = {
            name: RenumberedSide([member.sides.get(name) for member in members], self._numbering)
            for name in names or first.side_names
        }
        self.loss, self.vocab_size = first.loss, first.vocab_size
        self.task = first.task if len(self.sides) == 1 else None
        self.unpriced = tuple(dict.fromkeys(n for member in members for n in member.unpriced))
        self.directory = first.directory if len(members) == 1 else None
        files = [
            self._numbering.divide(index, member.files)
            for index, member in enumerate(members)
            if member.files is not None
        ]
        self.files = np.concatenate(files) if len(files) == len(members) else None

    def __len__(self) -> int:
        return int(self._numbering.first[-1])

    def _numbered(self) -> Iterator[tuple[int, AnyCorpus]]:
        """The members whose examples these are, with their places; others may have more of them."""
        return zip(range(len(self._numbering.chosen)), self.members, strict=False)

    def locate(self, examples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `AnyCorpus`."""
        return self._numbering.locate(examples)

    @computed
    def identity(self) -> Mapping[str, Any]:
        """That of the first member."""
        return self.members[0].identity

    @computed
    def lengths(self) -> np.ndarray:
        """Positions of each example, over all members."""
        all_lengths = []
        for index, member in self._numbered():
            values = self._numbering.select(index, member.lengths)
            if member.side_names != self.side_names:
                lacking, values = values, np.zeros((len(values), len(self.sides)), np.uint32)
                columns = [self.side_names.index(name) for name in member.side_names]
                values[:, columns] = lacking.reshape(len(values), -1)
                values.flags.writeable = False
            all_lengths.append(values)
        return all_lengths[0] if len(all_lengths) == 1 else np.concatenate(all_lengths)

    @computed
    def lengths_digest(self) -> str | None:
        """That of the first member, if all lengths are as there."""
        first = self.members[0]
        return first.lengths_digest if self.lengths is first.lengths else None

    @computed
    def silent(self) -> np.ndarray:
        """The examples without loss, of all members."""
        members = self._numbered()
        return np.concatenate([self._numbering.find(at, member.silent) for at, member in members])

    @derived
    def partly_learnt(self) -> bool:
        """See `AnyCorpus`; it is not, if no member is."""
        return super().partly_learnt and any(member.partly_learnt for member in self.members)

    @computed
    def num_learnt(self) -> int | None:
        """Positions that carry loss; None unless all members have all examples and know it."""
        return self._sum("num_learnt")

    @computed
    def text_bytes(self) -> int | None:
        """UTF-8 bytes of the text that is learnt; None as for `num_learnt`."""
        return self._sum("text_bytes")

    def _sum(self, name: str) -> int | None:
        if any(numbers is not None for numbers in self._numbering.chosen):
            return None
        values = [getattr(member, name) for _, member in self._numbered()]
        return None if None in values else sum(values)

    def find_unsplit(self, examples: np.ndarray) -> tuple[np.ndarray, int]:
        """See `AnyCorpus`; of several members, in `Corpora` of what they were before."""
        member, numbers = self.locate(examples)
        first = [0]
        for index, corpus in self._numbered():
            selected = member == index
            numbers[selected], room = corpus.find_unsplit(numbers[selected])
            first.append(first[-1] + room)
        return numbers + np.array(first)[member], first[-1]

    def map_leaves(self, change: Callable[[AnyCorpus], AnyCorpus]) -> AnyCorpus:
        """See `AnyCorpus`."""

        def apply(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {name: apply(entry) for name, entry in value.items()}
            return value.map_leaves(change) if isinstance(value, AnyCorpus) else value

        return self.make(**apply(self.arguments()))

    def _example(self, number: int) -> Fields:
        member, numbers = self.locate(np.array([number]))
        return self.members[int(member[0])]._example(int(numbers[0]))

    def __repr__(self) -> str:
        return repr(self.members[0])

    def __str__(self) -> str:
        return str(self.members[0])


class RenumberedSide(Side):
    """A side of the examples of several corpora; None in place of a side that a corpus lacks."""

    def __init__(self, sides: Sequence[Side | None], numbering: Numbering):
        self._sides, self._numbering = sides, numbering
        present = [side for side in sides if side is not None]
        self.weighted = any(side.weighted for side in present)
        self.has_tokens = any(side.has_tokens for side in present)
        self.features: Mapping[str, Feature] = {
            name: feature for side in present for name, feature in side.features.items()
        }
        if any(side.trees is not None for side in present):
            self.trees = np.concatenate(
                [
                    Nodes.of_documents(self._lengths_of(index)).table
                    if side is None or side.trees is None
                    else numbering.select(index, side.trees)
                    for index, side in enumerate(sides)
                ]
            )

    def __len__(self) -> int:
        return int(self._numbering.first[-1])

    def _lengths_of(self, index: int) -> np.ndarray:
        if (side := self._sides[index]) is None:
            return np.zeros(np.diff(self._numbering.first)[index], np.uint32)
        return self._numbering.select(index, side.lengths)

    @computed
    def lengths(self) -> np.ndarray:
        """Positions of each example."""
        return np.concatenate([self._lengths_of(index) for index in range(len(self._sides))])

    def _require_positions(self, pieces: Pieces) -> None:
        """Each member checks its own pieces."""

    def _read(self, pieces: Pieces, names: Sequence[str]) -> Fields:
        member, numbers = self._numbering.locate(pieces.examples)
        pieces = pieces._replace(examples=numbers)
        if len(self._sides) == 1 and not np.ndim(pieces.epoch):
            return self._read_member(0, pieces, names)
        # All pieces of a member and an epoch are read at once, then put into the order of `pieces`.
        key = member + len(self._sides) * pieces.epoch
        order = np.argsort(key, kind="stable")
        subsets = np.split(order, np.flatnonzero(np.diff(key[order])) + 1)
        read = []
        for subset in subsets:
            epoch, index = divmod(int(key[subset[0]]), len(self._sides)) if len(subset) else (0, 0)
            taken = pieces.take(subset)._replace(epoch=epoch)
            read.append(self._read_member(index, taken, names))
        if len(subsets) == 1:
            return read[0]
        first, reach = np.empty_like(order), pieces.reach
        first[order] = np.cumsum(reach[order]) - reach[order]
        return {
            name: gather(np.concatenate([fields[name] for fields in read]), first, reach)
            for name in read[0]
        }

    def _read_member(self, index: int, pieces: Pieces, names: Sequence[str]) -> Fields:
        """Pieces of one member: weights of 1 if it has none, and the `fill` of missing features."""
        fields, side = Fields(), self._sides[index]
        if side is not None:
            fields = side.read(*pieces, side.select(names))
        schemas = {name: self.features[name] for name in names}
        schemas |= {"loss_weights": LOSS_WEIGHTS} if self.weighted else {}
        for name, feature in schemas.items():
            if name not in fields:
                fields[name] = feature.filled(int(pieces.reach.sum()))
        return fields

    def _read_examples(self, examples: np.ndarray, names: Sequence[str]) -> Fields:
        ones = np.ones(len(examples), np.int64)
        several = 0 * ones if self.trees is None else self.trees[examples, 1]
        counts = {name: ones if self.features[name].of == "example" else several for name in names}
        fields = {name: self.features[name].filled(int(counts[name].sum())) for name in names}
        for side, rows, numbers in self._divide(examples):
            if side is not None:
                for name, values in side.read_examples(numbers, side.select(names)).items():
                    count = counts[name]
                    fields[name][ranges((np.cumsum(count) - count)[rows], count[rows])] = values
        return fields

    def read_nodes(self, examples: np.ndarray) -> Nodes:
        """See `Side.read_nodes`."""
        by_member = [
            (rows, Nodes.of_documents(0 * numbers) if side is None else side.read_nodes(numbers))
            for side, rows, numbers in self._divide(examples)
        ]
        if not by_member:
            return Nodes.of_documents(NO_EXAMPLES)
        order = np.argsort(np.concatenate([rows for rows, _ in by_member]))
        return Nodes.concatenate([nodes for _, nodes in by_member]).take(order)

    def _divide(self, examples: np.ndarray) -> Iterator[tuple[Side | None, np.ndarray, np.ndarray]]:
        """The side of each member with some of the examples, their places, and their numbers."""
        member, numbers = self._numbering.locate(examples)
        for index in np.unique(member).tolist():
            rows = np.flatnonzero(member == index)
            yield self._sides[index], rows, numbers[rows]


class Covering(Renumbered):
    """A corpus whose plans have examples without loss, too; made by `AnyCorpus.covering`.

    Attributes:
        corpus: the corpus.
    """

    kind = "covering"
    silent = AnyCorpus.silent

    def __init__(self, corpus: AnyCorpus):
        super().__init__([corpus])
        self.corpus, self.sides = corpus, corpus.sides

    @derived
    def partly_learnt(self) -> bool:
        """Plans leave out none."""
        return False

    def arguments(self) -> dict[str, Any]:
        """See `AnyCorpus`."""
        return {"corpus": self.corpus}
