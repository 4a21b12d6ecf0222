"""Corpora: several corpora read as one, with consecutive example numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.corpus.interface import AnyCorpus
from pipeline.corpus.renumbered import Renumbered
from pipeline.corpus.split import Split
from pipeline.errors import InvalidValue, require_type
from pipeline.planning.identity import flatten
from pipeline.text.features import Feature


class Corpora(Renumbered):
    """Several corpora as one: the examples of the first, then those of the second, and so on.

    It is read and planned like a corpus, each example once per epoch; with weights, `Plan` gives
    each corpus a share of every batch. Examples of a corpus that lacks sides of arrays, such as
    text without pictures, have length 0 there.

    Args:
        corpora: at least one, by name: corpora, pairs or views, of one task and one tokenizer.

    Attributes:
        given: as `corpora` was given.
        corpora: the same, with all sides in each.
        first: the number of the first example of each corpus, then the total: int64 [corpora + 1].
    """

    kind = "corpora"

    def __init__(self, corpora: Mapping[str, AnyCorpus]):
        require_type("corpora", corpora, Mapping, "a dict of corpora by name")
        for name, corpus in corpora.items():
            require_type("a name of corpora", name, str, "a text")
            if not name:
                raise InvalidValue(f"a name of corpora is empty, of {corpus!r:.80}; give it a name")
            require_type(f"corpora[{name!r}]", corpus, AnyCorpus, "a corpus, opened or in memory")
        if not corpora:
            raise InvalidValue("corpora is empty; give at least one, such as {'name': corpus}")
        self.given, self.corpora = dict(corpora), _give_sides(corpora)
        members = [*self.corpora.values()]
        super().__init__(members)
        self.first = self._numbering.first
        first, expected = next(iter(self.corpora)), _traits(members[0], self.unpriced)
        for name, corpus in self.corpora.items():
            traits = _traits(corpus, self.unpriced)
            for trait in {**expected, **traits}:
                if traits.get(trait) != expected.get(trait):
                    raise InvalidValue(
                        f"{name} has {trait} {traits.get(trait)} and {first} has {trait} "
                        f"{expected.get(trait)}; corpora that are read as one must agree; prepare "
                        "both with the same one, or write both with the same vocab_size="
                    )
        _require_features(self.corpora)
        self.directory = None
        if len(members) > 1:
            identities = {name: corpus.identity for name, corpus in self.corpora.items()}
            self.identity = {"corpora": identities}

    def arguments(self) -> dict[str, Any]:
        """See `AnyCorpus`."""
        return {"corpora": self.given}

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

    def split(
        self, hold_out: float = 0.01, *, by: str | None = None
    ) -> tuple["Corpora", "Corpora"]:
        """Two views, each `Corpora` of views of these corpora; see `AnyCorpus.split`."""
        split = {}
        for name, corpus in self.corpora.items():
            try:
                split[name] = corpus.split(hold_out, by=by)
            except InvalidValue as error:
                raise InvalidValue(f"the corpus {name!r}: {error}") from error
        train, held_out = ({name: views[at] for name, views in split.items()} for at in (0, 1))
        return Corpora(train), Corpora(held_out)

    def __repr__(self) -> str:
        return f"Corpora({self.corpora!r})"

    def __str__(self) -> str:
        return "\n\n".join(f"{name}\n{corpus}" for name, corpus in self.corpora.items())


class Lacking(Renumbered):
    """Examples of a corpus that lack some sides, and have length 0 there.

    Args:
        corpus: a corpus of one of the sides, or of several.
        names: the names of all sides, in order.
    """

    kind = "lacking"

    def __init__(self, corpus: AnyCorpus, names: Sequence[str]):
        super().__init__([corpus], names=names)
        self.corpus, self.unpriced = corpus, ()
        if len(corpus.sides) == 1:
            self.identity = {corpus.side_names[0]: corpus.identity}

    def arguments(self) -> dict[str, Any]:
        """See `AnyCorpus`."""
        return {"corpus": self.corpus, "names": self.side_names}

    def split(
        self, hold_out: float = 0.01, *, by: str | None = None
    ) -> tuple[AnyCorpus, AnyCorpus]:
        """See `AnyCorpus`; the corpus itself is split."""
        train, held_out = self.corpus.split(hold_out, by=by)
        return Lacking(train, self.side_names), Lacking(held_out, self.side_names)


def _require_features(corpora: Mapping[str, AnyCorpus]) -> None:
    """Refuses features that differ, and missing ones that have no `fill`."""
    schemas: dict[str, tuple[str, Feature]] = {}
    for name, corpus in corpora.items():
        for label, feature in corpus.features.items():
            first, expected = schemas.setdefault(label, (name, feature))
            if expected != feature:
                raise InvalidValue(
                    f"the feature {label!r} of {name} is {feature}, but that of {first} is "
                    f"{expected}; give both the same dtype and shape"
                )
    for label, (first, feature) in schemas.items():
        for name, corpus in corpora.items():
            due = (
                not feature.of_arrays
                and not feature.key
                and (feature.of != "continuation" or corpus.trees is not None)
            )
            if due and label not in corpus.features and feature.fill is None:
                raise InvalidValue(
                    f"{name} has no feature {label!r}, which {first} has; give the feature a fill="
                    ", the value for examples that lack it, or add it to the corpus"
                )


# The entries of an identity that corpora must share to be read as one.
SHARED = "task", "tokenizer"


def _give_sides(corpora: Mapping[str, AnyCorpus]) -> dict[str, AnyCorpus]:
    """The corpora, all with the same sides: those that lack some have length 0 there."""
    names = tuple(dict.fromkeys(name for corpus in corpora.values() for name in corpus.side_names))
    arrays = {name for corpus in corpora.values() for name in corpus.unpriced}
    result = dict(corpora)
    for name, corpus in corpora.items():
        if not arrays.issuperset(side for side in names if side not in corpus.side_names):
            raise InvalidValue(
                f"{name} has the sides {', '.join(corpus.side_names)}, and all have "
                f"{', '.join(names)}; corpora that are read as one must agree: only sides of "
                "arrays may be missing"
            )
        if corpus.side_names != names:
            result[name] = Lacking(corpus, names)
    return result


def _traits(corpus: AnyCorpus, arrays: Sequence[str]) -> dict[str, Any]:
    """The properties that corpora must share to be read as one; sides of arrays do not count."""
    entries = {
        (name.split(" of ")[0], name): value
        for name, value in flatten(corpus.identity)
        if name.split(" of ")[-1] not in arrays
    }
    shared = {name: value for (kind, name), value in entries.items() if kind in SHARED}
    # Corpora, pairs and views of one kind have the same names of entries, whether or not they are
    # split or have added features.
    names = ", ".join(
        name for kind, name in entries if f" of {Split.kind}" not in name and kind != "features"
    )
    return shared | {
        "the loss on the side": corpus.loss,
        "vocabulary": corpus.vocab_size,
        "an identity of": names,
    }
