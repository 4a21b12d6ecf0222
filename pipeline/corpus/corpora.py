"""Corpora: several corpora read as one, with consecutive example numbers."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.corpus.interface import AnyCorpus, Readable, Split
from pipeline.corpus.sides import WithSides
from pipeline.corpus.stored.gather import Fields, gather
from pipeline.corpus.stored.reader import Pieces
from pipeline.corpus.trees import Nodes
from pipeline.errors import InvalidValue, require_type
from pipeline.planning.identity import flatten
from pipeline.planning.layout import ranges
from pipeline.text.features import LOSS_WEIGHTS, OF, Feature


class Corpora(AnyCorpus):
    """Several corpora as one: the examples of the first, then those of the second, and so on.

    It is read and planned like a corpus, each example once per epoch; with weights, `Plan` gives
    each corpus a share of every batch. Examples of a corpus that lacks sides of arrays, such as
    text without pictures, have length 0 there.

    Args:
        corpora: at least one, by name: corpora, pairs or views, of one task and one tokenizer.

    Attributes:
        corpora: as given.
        first: the number of the first example of each corpus, then the total: int64 [corpora + 1].
    """

    def __init__(self, corpora: Mapping[str, AnyCorpus]):
        require_type("corpora", corpora, Mapping, "a dict of corpora by name")
        for name, corpus in corpora.items():
            require_type("a name of corpora", name, str, "a text")
            if not name:
                raise InvalidValue(f"a name of corpora is empty, of {corpus!r:.80}; give it a name")
            require_type(f"corpora[{name!r}]", corpus, AnyCorpus, "a corpus, opened or in memory")
        if not corpora:
            raise InvalidValue("corpora is empty; give at least one, such as {'name': corpus}")
        self.corpora = _give_sides(corpora)
        self.members = tuple(self.corpora.values())
        self.first = np.cumsum([0, *map(len, self.members)])
        self.unpriced = tuple(dict.fromkeys(n for each in self.members for n in each.unpriced))
        first, expected = next(iter(self.corpora)), _traits(self.members[0], self.unpriced)
        for name, corpus in self.corpora.items():
            traits = _traits(corpus, self.unpriced)
            for what in {**expected, **traits}:
                if traits.get(what) != expected.get(what):
                    raise InvalidValue(
                        f"{name} has {what} {traits.get(what)} and {first} has {what} "
                        f"{expected.get(what)}; corpora that are read as one must agree; prepare "
                        "both with the same one, or write both with the same vocab_size="
                    )
        _require_features(self.corpora)
        each_side = zip(*(corpus.sides for corpus in self.members), strict=True)
        self.sides = tuple(CorporaSide(sides, self.first) for sides in each_side)
        self.side_names, self.loss_side = self.members[0].side_names, self.members[0].loss_side
        self.vocab_size = self.members[0].vocab_size
        self.covers_all = any(member.covers_all for member in self.members)
        files = [corpus.files for corpus in self.members if corpus.files is not None]
        self.files = np.concatenate(files) if len(files) == len(self.members) else None
        for name in ("text_bytes", "num_learnt"):
            known = [n for member in self.members if (n := getattr(member, name)) is not None]
            setattr(self, name, sum(known) if len(known) == len(self.members) else None)
        self.identity = {"corpora": {name: each.identity for name, each in self.corpora.items()}}
        if len(self.members) == 1:
            self.identity = self.members[0].identity

    def __len__(self) -> int:
        return int(self.first[-1])

    def begin(self, examples: int) -> AnyCorpus:
        """The leading corpora that together hold the first `examples` examples."""
        count = int(np.searchsorted(self.first, examples))
        if count > len(self.members) or self.first[count] != examples:
            raise InvalidValue(
                f"the first {examples:,} examples end in the middle of a corpus; give a number at "
                f"which a corpus ends: {', '.join(f'{end:,}' for end in self.first[1:].tolist())}"
            )
        if count == len(self.members):
            return self if count > 1 else self.members[0]
        return self.members[0] if count == 1 else Corpora(dict(list(self.corpora.items())[:count]))

    def _example(self, number: int) -> Fields:
        which = int(np.searchsorted(self.first, number, side="right")) - 1
        return self.members[which][number - int(self.first[which])]

    @property
    def lengths(self) -> np.ndarray:  # type: ignore[override]  # others have an attribute
        """Positions of each example, over all corpora: uint32 [n] or [n, 2]."""
        return self._lengths  # a cached property would not match the protocol of planning

    @functools.cached_property
    def _lengths(self) -> np.ndarray:
        return np.concatenate([corpus.lengths for corpus in self.members])

    def _find_silent(self) -> np.ndarray:
        each = zip(self.members, self.first, strict=False)
        return np.concatenate([member.silent + first for member, first in each])

    def with_each(self, change: Callable[[AnyCorpus], AnyCorpus]) -> "Corpora":
        """See `AnyCorpus`."""
        return Corpora({name: each.with_each(change) for name, each in self.corpora.items()})

    def find_unsplit(self, examples: np.ndarray) -> tuple[np.ndarray, int]:
        """See `AnyCorpus`; in `Corpora` of the corpora before they were split."""
        member = np.searchsorted(self.first, examples, side="right") - 1
        found, rooms = examples.copy(), []
        for which, corpus in enumerate(self.members):
            mine = member == which
            found[mine], room = corpus.find_unsplit(examples[mine] - self.first[which])
            rooms.append(room)
        first = np.cumsum([0, *rooms])
        return found + first[member], int(first[-1])

    def split(self, hold_out: float = 0.01) -> tuple["Corpora", "Corpora"]:
        """Two views, each `Corpora` of views of these corpora; see `AnyCorpus.split`."""
        split = {name: corpus.split(hold_out) for name, corpus in self.corpora.items()}
        train, held_out = ({name: views[at] for name, views in split.items()} for at in (0, 1))
        return Corpora(train), Corpora(held_out)

    def __repr__(self) -> str:
        return f"Corpora({self.corpora!r})"

    def __str__(self) -> str:
        return "\n\n".join(f"{name}\n{corpus}" for name, corpus in self.corpora.items())


def _require_features(corpora: Mapping[str, AnyCorpus]) -> None:
    """Refuses features that differ, and missing ones that have no `fill`."""
    every: dict[str, tuple[str, Feature]] = {}
    for name, corpus in corpora.items():
        for label, feature in corpus.features.items():
            first, known = every.setdefault(label, (name, feature))
            if known != feature:
                raise InvalidValue(
                    f"the feature {label!r} of {name} is {feature}, but that of {first} is "
                    f"{known}; give both the same dtype and shape"
                )
    for label, (first, feature) in every.items():
        for name, corpus in corpora.items():
            due = feature.of in OF and (feature.of != "continuation" or corpus.trees is not None)
            if due and label not in corpus.features and feature.fill is None:
                raise InvalidValue(
                    f"{name} has no feature {label!r}, which {first} has; give the feature a fill="
                    ", the value for examples that lack it, or add it to the corpus"
                )


# The entries of an identity that corpora must share to be read as one.
SHARED = "task", "tokenizer"


def _give_sides(corpora: Mapping[str, AnyCorpus]) -> dict[str, AnyCorpus]:
    """The corpora, all with the same sides: those that lack some have length 0 there."""
    names = tuple(dict.fromkeys(name for each in corpora.values() for name in each.side_names))
    arrays = {name for each in corpora.values() for name in each.unpriced}
    found = dict(corpora)
    for name, corpus in corpora.items():
        if not arrays.issuperset(side for side in names if side not in corpus.side_names):
            raise InvalidValue(
                f"{name} has the sides {', '.join(corpus.side_names)}, and all have "
                f"{', '.join(names)}; corpora that are read as one must agree: only sides of "
                "arrays may be missing"
            )
        if corpus.side_names != names:
            found[name] = WithSides(corpus, names)
    return found


def _traits(corpus: AnyCorpus, arrays: Sequence[str]) -> dict[str, Any]:
    """The properties that corpora must share to be read as one; sides of arrays do not count."""
    entries = {
        (name.split(" of ")[0], name): value
        for name, value in flatten(corpus.identity)
        if name.split(" of ")[-1] not in arrays
    }
    shared = {name: value for (what, name), value in entries.items() if what in SHARED}
    # Corpora, pairs and views of one kind have the same names of entries, whether or not they are
    # split or have added features.
    names = ", ".join(
        name for what, name in entries if f" of {Split.kind}" not in name and what != "features"
    )
    loss = corpus.loss_side if corpus.loss_side is None else corpus.side_names[corpus.loss_side]
    return shared | {
        "the loss on the side": loss,
        "vocabulary": corpus.vocab_size,
        "an identity of": names,
    }


class CorporaSide(Readable):
    """One side of several corpora read as one; `sides` holds the side of each, in order.

    `first` are the numbers of their first examples, then the total.
    """

    def __init__(self, sides: Sequence[Readable], first: np.ndarray):
        self._sides, self._first = sides, first
        self.weighted = any(side.weighted for side in sides)
        if any(side.trees is not None for side in sides):
            every = (
                Nodes.of_documents(side.lengths).table if side.trees is None else side.trees
                for side in sides
            )
            self.trees = np.concatenate(list(every))
        self.features = {name: each for side in sides for name, each in side.features.items()}

    def __len__(self) -> int:
        return int(self._first[-1])

    def _require_positions(self, pieces: Pieces) -> None:
        """Each corpus checks its own pieces."""

    def _read(self, pieces: Pieces, names: Sequence[str]) -> Fields:
        # Tokens without weights weigh 1; features that a corpus lacks have their `fill`.
        wanted = {name: self.features[name] for name in names}
        wanted |= {"loss_weights": LOSS_WEIGHTS} if self.weighted else {}
        # All pieces of a corpus and an epoch are read at once, then put into the order of `pieces`.
        member = np.searchsorted(self._first, pieces.examples, side="right") - 1
        key = member + len(self._sides) * pieces.epoch
        order = np.argsort(key, kind="stable")
        groups = np.split(order, np.flatnonzero(np.diff(key[order])) + 1)
        read = []
        for mine in groups:
            epoch, which = divmod(int(key[mine[0]]), len(self._sides)) if len(mine) else (0, 0)
            side, taken = self._sides[which], pieces.take(mine)
            here = [name for name in names if name in side.features]
            fields = side.read(taken.examples - self._first[which], *taken[1:4], epoch, here)
            for name, feature in wanted.items():
                if name not in fields:
                    fields[name] = feature.filled(int(taken.reach.sum()))
            read.append(fields)
        if len(groups) == 1:
            return read[0]
        first, reach = np.empty_like(order), pieces.reach
        first[order] = np.cumsum(reach[order]) - reach[order]
        return {
            name: gather(np.concatenate([fields[name] for fields in read]), first, reach)
            for name in read[0]
        }

    def _read_examples(self, examples: np.ndarray, names: Sequence[str]) -> Fields:
        ones = np.ones(len(examples), np.int64)
        several = 0 * ones if self.trees is None else self.trees[examples, 1]
        counts = {name: ones if self.features[name].of == "example" else several for name in names}
        found = {name: self.features[name].filled(int(counts[name].sum())) for name in names}
        for side, mine, numbers in self._members_of(examples):
            here = [name for name in names if name in side.features]
            for name, values in side.read_examples(numbers, here).items():
                count = counts[name]
                found[name][ranges((np.cumsum(count) - count)[mine], count[mine])] = values
        return found

    def read_nodes(self, examples: np.ndarray) -> Nodes:
        """See `Readable.read_nodes`."""
        parts = [(mine, side.read_nodes(n)) for side, mine, n in self._members_of(examples)]
        if not parts:
            return Nodes.of_documents(np.zeros(0, np.int64))
        order = np.argsort(np.concatenate([mine for mine, _ in parts]))
        return Nodes.concatenate([nodes for _, nodes in parts]).take(order)

    def _members_of(
        self, examples: np.ndarray
    ) -> Iterator[tuple[Readable, np.ndarray, np.ndarray]]:
        """The side of each corpus with some of the examples, their places, and their numbers."""
        member = np.searchsorted(self._first, examples, side="right") - 1
        for which in np.unique(member).tolist():
            mine = np.flatnonzero(member == which)
            yield self._sides[which], mine, examples[mine] - self._first[which]
