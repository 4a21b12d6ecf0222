"""Joined: corpora of the same examples as one, on one side: the tokens of one, features of all."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.corpus.interface import AnyCorpus, computed
from pipeline.corpus.nodes import Nodes
from pipeline.corpus.renumbered import Renumbered
from pipeline.corpus.side import Side
from pipeline.corpus.stored.cache import PartCache
from pipeline.corpus.stored.gather import Fields, Pieces
from pipeline.errors import InvalidValue


class Joined(Renumbered):
    """A corpus of one side, with the features of others of the same examples.

    >>> from pipeline import Examples, Feature
    >>> corpus = Examples([[5, 6, 7], [8, 9]])
    >>> columns = {"tokens": [[0] * 3, [0] * 2], "score": [0.5, 2]}
    >>> scores = Examples(columns, features={"score": Feature("example")})
    >>> float(Joined(corpus, scores)[1]["score"])
    2.0

    Args:
        corpus: with tokens, weights and features.
        others: corpora with as many examples of the same lengths, of which only features are read.

    Raises:
        ValueError: a corpus has several sides, or other lengths, or two have one feature.
    """

    kind = "joined"

    def __init__(self, corpus: AnyCorpus, *others: AnyCorpus):
        super().__init__([corpus])
        self.corpus, self.others = corpus, others
        self.members = corpus, *others
        for member in self.members:
            if len(member.sides) > 1:
                raise InvalidValue(
                    f"{member!r:.80} has several sides; join the corpora of one side each, and "
                    "then make Sides of them"
                )
            lengths = member.lengths
            if lengths is not corpus.lengths and not np.array_equal(lengths, corpus.lengths):
                raise InvalidValue(
                    f"{member!r:.80} has other lengths than {corpus!r:.80}; join corpora of the "
                    "same examples, in the same order"
                )
        names = [name for member in self.members for name in member.features]
        if both := {name for name in names if names.count(name) > 1}:
            raise InvalidValue(
                f"two of the corpora have a feature {min(both)!r}; give them different names"
            )
        sides = [next(iter(member.sides.values())) for member in self.members]
        self.sides = {corpus.side_names[0]: JoinedSide(sides)}

    @computed
    def identity(self) -> Mapping[str, Any]:
        """That of the corpus, and the digests of the others."""
        identity = dict(self.corpus.identity)
        digests = identity["features"].split("+") if "features" in identity else []
        digests += [corpus.fingerprint for corpus in self.others]
        return identity | {"features": "+".join(sorted(digests))}

    @computed
    def caches(self) -> tuple[tuple[PartCache, int], ...]:
        """Those of all; files have the same examples in all of them."""
        return tuple(entry for member in self.members for entry in member.caches)

    def arguments(self) -> dict[str, Any]:
        """See `AnyCorpus`."""
        return {"corpus": self.corpus, "others": self.others}

    @classmethod
    def make(cls, **arguments: Any) -> AnyCorpus:
        """See `AnyCorpus`."""
        return cls(arguments["corpus"], *arguments["others"])

    def _example(self, number: int) -> Fields:
        return AnyCorpus._example(self, number)


class JoinedSide(Side):
    """A side of the tokens of the first of some sides, and the features of all."""

    def __init__(self, sides: Sequence[Side]):
        self._sides, first = sides, sides[0]
        self.weighted, self.has_tokens, self.trees = first.weighted, first.has_tokens, first.trees
        self.features = {name: feature for side in sides for name, feature in side.features.items()}

    @computed
    def lengths(self) -> np.ndarray:
        """Positions of each example."""
        return self._sides[0].lengths

    def _read(self, pieces: Pieces, names: Sequence[str]) -> Fields:
        first, *others = self._sides
        fields = first.read(*pieces, first.select(names))
        for side in others:
            if mine := side.select(names):
                read = side.read(*pieces, mine)
                fields |= {name: read[name] for name in mine}
        return fields

    def _read_examples(self, examples: np.ndarray, names: Sequence[str]) -> Fields:
        fields = Fields()
        for side in self._sides:
            fields |= side.read_examples(examples, side.select(names))
        return {name: fields[name] for name in names}

    def read_nodes(self, examples: np.ndarray) -> Nodes:
        """See `Side.read_nodes`."""
        return self._sides[0].read_nodes(examples)
