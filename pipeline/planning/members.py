"""Members: the corpora of a plan, and which of their examples stay in it."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from pipeline.errors import InvalidValue
from pipeline.planning.lengths import Exclude, Lengths, select, take_first


class Members:
    """One corpus, or several by name; their examples are numbered consecutively.

    >>> both = Members.of_several({"a": [4, 7], "b": [5]})
    >>> both.count, both.firsts.tolist(), both.select([2]).tolist()
    (3, [0, 2], [False, False, True])

    Attributes:
        given: what the plan was given: a corpus or lengths, or several of these by name, of which
            the last ones may join later.
        corpora: the lengths of each corpus by name; a single one has the name "".
        several: whether the corpora have names.
        firsts: int64 [corpora], the number of the first example of each.
        count: the number of all examples.
    """

    def __init__(self, given: Any, corpora: Mapping[str, Lengths], *, several: bool):
        self.given, self.corpora, self.several = given, corpora, several
        ends = np.cumsum([0, *map(len, corpora.values())])
        self.firsts, self.count = ends[:-1], int(ends[-1])

    @classmethod
    def of_one(cls, given: Any) -> "Members":
        """A corpus, or lengths."""
        return cls(given, {"": Lengths.of(given)}, several=False)

    @classmethod
    def of_several(cls, given: Any, names: Iterable[str] | None = None) -> "Members":
        """Corpora by name: those called `names`, which come first; by default all."""
        every = as_corpora(given)
        present = every if names is None else names
        return cls(given, {name: Lengths.of(every[name]) for name in present}, several=True)

    @property
    def stays(self) -> np.ndarray:
        """Whether each example stays in the plan: bool [count]."""
        return np.concatenate([lengths.stays for lengths in self.corpora.values()])

    def select(self, exclude: Exclude) -> np.ndarray:
        """Whether `exclude` selects each example: bool [count]; see `lengths.select`."""
        present = self.given
        if callable(exclude) and self.several and isinstance(present, Mapping):
            present = begin_of(present, self.corpora)
        elif callable(exclude):
            present = take_first(present, self.count)
        return select(exclude, present, self.count)

    def without(self, examples: np.ndarray) -> "Members":
        """The same corpora without some examples: a bool for each."""
        of_corpora = np.split(examples, self.firsts[1:])
        with_parts = zip(self.corpora.items(), of_corpora, strict=True)
        corpora = {name: lengths.exclude(part) for (name, lengths), part in with_parts}
        return Members(self.given, corpora, several=self.several)

    def extend(self, given: Any) -> "Members":
        """With new examples of the only corpus; or with new corpora after the present ones."""
        if not self.several:
            return Members(given, {"": self.corpora[""].extend(given)}, several=False)
        every, present = as_corpora(given), self.corpora
        if list(every)[: len(present)] != [*present]:
            raise InvalidValue(
                f"the corpora are {', '.join(every)}, and the plan has {', '.join(present)}; put "
                "new corpora after the present ones"
            )
        for name, lengths in present.items():
            if not lengths.equals(Lengths.of(every[name])):
                raise InvalidValue(
                    f"corpus {name!r} has other lengths than before; a plan of several corpora "
                    "takes new corpora, not new examples: make a corpus of the new examples"
                )
        corpora = {name: present.get(name) or Lengths.of(corpus) for name, corpus in every.items()}
        return Members(given, corpora, several=True)


def as_corpora(given: Any) -> Mapping[str, Any]:
    """The corpora of a plan with weights, by name."""
    corpora = getattr(given, "corpora", given)
    if not isinstance(corpora, Mapping) or "" in corpora:
        raise InvalidValue(
            f"lengths is {given!r:.60}; with weights it must be several corpora by name: a dict, "
            "or Corpora({'name': corpus})"
        )
    if not all(isinstance(name, str) for name in corpora):
        raise InvalidValue(
            f"lengths has corpora with the names {', '.join(map(repr, corpora))}; names must be "
            "text, as the data state stores them"
        )
    return corpora


def begin_of(given: Any, names: Iterable[str]) -> Any:
    """The corpora called `names`, which come first in `given`, in the form of `given`."""
    every = as_corpora(given)
    corpora = {name: every[name] for name in names}
    if hasattr(given, "corpora") and len(corpora) > 1:
        return given.begin(sum(map(len, corpora.values())))
    return corpora
