"""Sides: examples with several lengths, such as text and patches, a corpus for each side."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from pipeline.corpus.description import DESCRIPTION, read_description, write_description
from pipeline.corpus.interface import CLASSES, AnyCorpus, computed
from pipeline.corpus.stored.directory import damage
from pipeline.corpus.view import View
from pipeline.errors import InvalidValue, require_one_of
from pipeline.planning.lengths import NO_EXAMPLES

# Other entries that the identity of such a corpus may have; views have the names of their kinds.
TAKEN = "loss", "features", "corpora"


class Sides(AnyCorpus):
    """Examples with a corpus for each of their sides; all sides of an example share a row.

    A side has token ids, or arrays: features with a value for each of its positions. Pointers
    (`Feature(…, to=side)`) join the sides. Made by `Examples` and `Corpus.from_arrays` from
    features of sides; in a directory, each side has a directory of its name.

    An example whose lengths are all 0 is in no batch. One with nothing to train on has these
    lengths.

    Args:
        sides: the corpus of each side by name, with as many examples in the same order.
        loss: the side that carries the loss, with weight 1 at each of its positions. Default None:
            the one with targets; if none has, there are no loss weights.

    Attributes:
        by_name: the corpora, as given.
        identity, fingerprint: those of all sides.
        text_bytes, num_learnt: those of the side that carries the loss.
        directory: holds the directories of the sides, if they have any.
    """

    kind = "sides"

    def __init__(self, sides: Mapping[str, AnyCorpus], *, loss: str | None = None):
        self.by_name = dict(sides)
        require_names(self.by_name)
        self.sides = {n: next(iter(corpus.sides.values())) for n, corpus in self.by_name.items()}
        arrays = [name for name, side in self.sides.items() if not side.has_tokens]
        self.unpriced = tuple(arrays) if len(self.sides) > 1 else ()
        if len({*map(len, self.by_name.values())}) > 1:
            counts = " and ".join(
                f"{len(corpus):,} {name}" for name, corpus in self.by_name.items()
            )
            raise InvalidValue(f"there are {counts}; give equally many, in the same order")
        names = [name for side in self.sides.values() for name in side.features]
        if both := {name for name in names if names.count(name) > 1}:
            raise InvalidValue(
                f"{' and '.join(self.by_name)} both have a feature {min(both)!r}; give them "
                "different names"
            )
        self.loss = self._find_loss(loss)
        first = self.by_name[self.loss or self.side_names[0]]
        # Plans are stored with the first member.
        self.members = first, *(corpus for corpus in self.by_name.values() if corpus is not first)
        lengths = np.stack([corpus.lengths for corpus in self.by_name.values()], axis=1)
        if self.loss is not None:
            lengths[first.lengths == 0] = 0  # nothing to train on
            self.text_bytes, self.num_learnt = first.text_bytes, first.num_learnt
        self.lengths = lengths if len(self.sides) > 1 else lengths[:, 0]
        self.lengths.flags.writeable = False
        if first.directory is not None:
            self.directory = first.directory.parent
        with_tokens = [corpus for name, corpus in self.by_name.items() if name not in arrays]
        sizes = [corpus.vocab_size for corpus in with_tokens if corpus.vocab_size is not None]
        if sizes and len(sizes) == len(with_tokens):
            self.vocab_size = max(sizes)
        self.identity = {name: corpus.identity for name, corpus in self.by_name.items()}
        if loss is not None:
            self.identity["loss"] = loss

    def _find_loss(self, loss: str | None) -> str | None:
        """The name of the side that carries the loss."""
        tasks = {name: corpus.task for name, corpus in self.by_name.items()}
        learnt = [name for name, task in tasks.items() if task is not None and task.has_targets]
        if loss is not None:
            require_one_of("loss", loss, self.side_names)
            learnt = [*dict.fromkeys([*learnt, loss])]
        if len(learnt) > 1:
            raise InvalidValue(f"{' and '.join(learnt)} both carry the loss; one side may")
        return learnt[0] if learnt else None

    @computed
    def silent(self) -> np.ndarray:
        """The examples without loss on the side that carries it."""
        return NO_EXAMPLES if self.loss is None else self.members[0].silent

    def arguments(self) -> dict[str, Any]:
        """See `AnyCorpus`."""
        return {"sides": self.by_name, "loss": self.identity.get("loss")}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.by_name!r})"

    def __str__(self) -> str:
        return "\n".join(map(str, self.by_name.values()))


def require_names(names: Iterable[str]) -> None:
    """Refuses sides with names that other entries of their corpus's identity have."""
    for name in names:
        if name in TAKEN or issubclass(CLASSES.get(name, Sides), View):
            raise InvalidValue(
                f"a side is named {name!r}, which has another meaning in the identity of a corpus; "
                "give the side another name"
            )


def read_sides(directory: epath.Path) -> tuple[list[str], str | None] | None:
    """The names of the sides in a directory, and the one given as `loss`; None if there are none.

    Raises:
        ValueError: they are damaged.
    """
    entries, path = read_description(directory), directory / DESCRIPTION
    if entries is None or entries["kind"] != Sides.kind:
        return None
    names, loss = entries.get("sides"), entries.get("loss")
    if not isinstance(names, list) or not names:
        raise damage(path, f"its sides are {names!r}, no list of names")
    for name in names:
        if not isinstance(name, str) or not name.isidentifier():
            # Each is the name of a directory, which must be inside this one.
            raise damage(path, f"a side is named {name!r}; a name has letters, digits and _")
    return names, loss


def record_sides(directory: epath.Path, names: Sequence[str], loss: str | None) -> None:
    """Records the sides of the corpora in a directory; refuses others that are recorded there."""
    require_names(names)
    old = read_sides(directory)
    if old is None:
        write_description(directory, {"kind": Sides.kind, "sides": [*names], "loss": loss})
    elif old != ([*names], loss):
        raise InvalidValue(
            f"{os.fspath(directory)} holds the sides {', '.join(old[0])} with loss={old[1]!r}, "
            f"not {', '.join(names)} with loss={loss!r}; choose another directory"
        )
