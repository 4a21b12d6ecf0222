"""Sides: examples with several lengths, such as text and patches, a corpus for each side."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from pipeline.corpus.interface import AnyCorpus, Readable, SingleCorpus, View
from pipeline.corpus.stored.directory import damage, read_entries, write_entries
from pipeline.corpus.stored.gather import Fields
from pipeline.corpus.stored.reader import Pieces
from pipeline.corpus.tasks import ARRAYS
from pipeline.errors import InvalidValue, require_one_of
from pipeline.fs.atomic import make_directory

# The file that makes a directory one of sides: their names in order, and which carries the loss.
SIDES = "sides.json"


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
        by_name: as `sides`.
        loss: as given.
        identity, fingerprint: those of all sides.
        text_bytes, num_learnt: those of the side that carries the loss.
        directory: holds the directories of the sides, if they have any.
    """

    def __init__(self, sides: Mapping[str, SingleCorpus], *, loss: str | None = None):
        self.by_name, self.loss = dict(sides), loss
        self.sides, self.side_names = tuple(self.by_name.values()), tuple(self.by_name)
        arrays = [name for name, each in self.by_name.items() if each.task == ARRAYS]
        self.unpriced = tuple(arrays) if len(self.sides) > 1 else ()
        if len({*map(len, self.sides)}) > 1:
            counts = " and ".join(f"{len(each):,} {name}" for name, each in self.by_name.items())
            raise InvalidValue(f"there are {counts}; give equally many, in the same order")
        every = [name for side in self.sides for name in side.features]
        if both := {name for name in every if every.count(name) > 1}:
            raise InvalidValue(
                f"{' and '.join(self.by_name)} both have a feature {min(both)!r}; give them "
                "different names"
            )
        self.loss_side = self._find_loss()
        first = self.by_name[self.side_names[self.loss_side or 0]]
        # Plans are stored with the first member.
        self.members = first, *(each for each in self.by_name.values() if each is not first)
        lengths = np.stack([side.lengths for side in self.sides], axis=1)
        if self.loss_side is not None:
            lengths[lengths[:, self.loss_side] == 0] = 0  # nothing to train on
        self.lengths = lengths if len(self.sides) > 1 else lengths[:, 0]
        self.lengths.flags.writeable = False
        if first.directory is not None:
            self.directory = first.directory.parent
        if self.loss_side is not None:
            self.text_bytes, self.num_learnt = first.text_bytes, first.num_learnt
        with_tokens = [each for each in self.by_name.values() if each.task != ARRAYS]
        known = [each.vocab_size for each in with_tokens if each.vocab_size is not None]
        if known and len(known) == len(with_tokens):
            self.vocab_size = max(known)
        self.identity = {name: each.identity for name, each in self.by_name.items()}
        if loss is not None:
            self.identity["loss"] = loss

    def _find_loss(self) -> int | None:
        """The number of the side that carries the loss."""
        learnt = [name for name, each in self.by_name.items() if each.task.has_targets]
        if self.loss is not None:
            require_one_of("loss", self.loss, self.side_names)
            learnt = [*dict.fromkeys([*learnt, self.loss])]
        if len(learnt) > 1:
            raise InvalidValue(f"{' and '.join(learnt)} both carry the loss; one side may")
        return self.side_names.index(learnt[0]) if learnt else None

    def _find_silent(self) -> np.ndarray:
        return super()._find_silent() if self.loss_side is None else self.members[0].silent

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(Sides, loss=self.loss), (self.by_name,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.by_name!r})"

    def __str__(self) -> str:
        return "\n".join(map(str, self.by_name.values()))


class WithSides(View):
    """Examples of a corpus that lack some sides, and have length 0 there.

    Args:
        corpus: a corpus of one of the sides, or of several.
        names: the names of all sides, in order.
    """

    def __init__(self, corpus: AnyCorpus, names: Sequence[str]):
        super().__init__(corpus)
        there = dict(zip(corpus.side_names, corpus.sides, strict=True))
        nothing = _Nothing(len(corpus))
        self.side_names, self.unpriced = tuple(names), ()
        self.sides = tuple(there.get(name, nothing) for name in names)
        self.lengths = np.zeros((len(corpus), len(names)), np.uint32)
        places = [names.index(name) for name in corpus.side_names]
        self.lengths[:, places] = corpus.lengths.reshape(len(corpus), -1)
        self.lengths.flags.writeable = False
        self.loss_side = None if corpus.loss_side is None else places[corpus.loss_side]
        self.text_bytes, self.num_learnt = corpus.text_bytes, corpus.num_learnt
        self.identity, self.description = corpus.identity, corpus.description
        if len(corpus.sides) == 1:
            self.identity = {corpus.side_names[0]: corpus.identity}

    def split(self, hold_out: float = 0.01) -> tuple[AnyCorpus, AnyCorpus]:
        """See `AnyCorpus`; the corpus itself is split."""
        train, held_out = self.corpus.split(hold_out)
        return WithSides(train, self.side_names), WithSides(held_out, self.side_names)

    def with_each(self, change: Callable[[AnyCorpus], AnyCorpus]) -> "WithSides":
        """See `AnyCorpus`."""
        return WithSides(self.corpus.with_each(change), self.side_names)

    def __reduce__(self) -> tuple[Any, ...]:
        return WithSides, (self.corpus, self.side_names)

    def __repr__(self) -> str:
        return repr(self.corpus)

    def __str__(self) -> str:
        return str(self.corpus)


class _Nothing(Readable):
    """A side on which all examples have length 0."""

    def __init__(self, examples: int):
        self.lengths = np.zeros(examples, np.uint32)

    def _read(self, pieces: Pieces, names: Sequence[str]) -> Fields:
        return {}


def read_sides(directory: epath.Path) -> tuple[list[str], str | None] | None:
    """The names of the sides in a directory, and the one given as `loss`; None if there are none.

    Raises:
        ValueError: they are damaged.
    """
    try:
        entries = read_entries(directory / SIDES, (directory / SIDES).read_bytes())
        return entries["sides"], entries["loss"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except KeyError as error:
        raise damage(directory / SIDES, f"it has no {error}") from error


def record_sides(directory: epath.Path, names: Sequence[str], loss: str | None) -> None:
    """Records the sides of the corpora in a directory; refuses others that are recorded there."""
    there, mine = read_sides(directory), ([*names], loss)
    if there is None:
        write_entries(make_directory(directory) / SIDES, {"sides": mine[0], "loss": loss})
    elif there != mine:
        raise InvalidValue(
            f"{os.fspath(directory)} holds the sides {', '.join(there[0])} with loss={there[1]!r}, "
            f"not {', '.join(names)} with loss={loss!r}; choose another directory"
        )
