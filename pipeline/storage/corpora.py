"""Corpora: several corpora read as one, their examples numbered one after another."""

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline import tokenizers
from pipeline.storage.interface import AnyCorpus, Readable
from pipeline.storage.pieces import as_pieces


class Corpora:
    """Several corpora as one: the examples of the first, then those of the second, and so on.

    It is read and planned like a corpus, each example once an epoch; with weights, `Plan` gives
    each corpus a share of every batch.

    Args:
        corpora: at least one, by name: corpora, pairs or views, of one task and one tokenizer.

    Attributes:
        corpora: as given.
        first: the number of the first example of each, and of all: int64 [corpora + 1].

    Raises:
        ValueError: there is none, or they differ in task, tokenizer or vocabulary.
    """

    def __init__(self, corpora: Mapping[str, AnyCorpus]):
        if not corpora:
            raise ValueError("corpora is empty; give at least one, as {'name': corpus}")
        self.corpora = dict(corpora)
        self._all = list(self.corpora.values())
        self.first = np.cumsum([0, *map(len, self._all)])
        first, shared = next(iter(self.corpora)), _shared(self._all[0])
        for name, corpus in self.corpora.items():
            own = _shared(corpus)
            for what in {**shared, **own}:
                if own.get(what) != shared.get(what):
                    raise ValueError(
                        f"{name} has {what} {own.get(what)} and {first} has {what} "
                        f"{shared.get(what)}; corpora that are read as one must agree: prepare "
                        "both with the same one"
                    )
        #: Where batches read tokens; see `AnyCorpus`.
        self.sides = tuple(
            CorporaSide([corpus.sides[number] for corpus in self._all])
            for number in range(len(self._all[0].sides))
        )

    def __len__(self) -> int:
        return int(self.first[-1])

    def begin(self, examples: int) -> AnyCorpus:
        """Those of the corpora that together have the first `examples` examples.

        Raises:
            ValueError: so many examples end in the middle of a corpus.
        """
        count = int(np.searchsorted(self.first, examples))
        if count > len(self._all) or self.first[count] != examples:
            raise ValueError(
                f"the first {examples:,} examples are no whole corpora; these end after "
                f"{', '.join(f'{end:,}' for end in self.first[1:].tolist())}"
            )
        if count == len(self._all):
            return self if count > 1 else self._all[0]
        return self._all[0] if count == 1 else Corpora(dict(list(self.corpora.items())[:count]))

    def read(
        self, examples: Any, starts: Any, lengths: Any, reach: Any = None, epoch: Any = 0
    ) -> dict[str, np.ndarray]:
        """Pieces of examples, one after another: see `Corpus.read`; not of pairs."""
        (side,) = self.sides
        return side.read(examples, starts, lengths, reach, epoch)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """One example, a 1-D array for each field, all of its length."""
        number = operator.index(index)
        number += len(self) if number < 0 else 0
        if not 0 <= number < len(self):
            raise IndexError(f"example {index} of corpora of {len(self):,}")
        which = int(np.searchsorted(self.first, number, side="right")) - 1
        return self._all[which][number - int(self.first[which])]

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return (example for corpus in self._all for example in corpus)

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """Positions of each example, a copy of those of all corpora: uint32 [n] or [n, 2]."""
        return np.concatenate([corpus.lengths for corpus in self._all])

    def keep(self, name: str, make: Callable[[], bytes]) -> bytes:
        """See `AnyCorpus`; stored beside the first of the corpora."""
        return self._all[0].keep(name, make)

    @property
    def in_memory(self) -> bool:
        """See `AnyCorpus`; whether all are."""
        return all(corpus.in_memory for corpus in self._all)

    @property
    def fingerprint(self) -> str:
        """What the tokens are: a part `name=value` for each part of each corpus's own.

        That of a single corpus is the corpus's own.
        """
        if len(self._all) == 1:
            return self._all[0].fingerprint
        parts = {}
        for name, corpus in self.corpora.items():
            for part in corpus.fingerprint.split(";"):
                what, _, value = part.partition("=")
                parts[what if what.endswith(SHARED) else f"{what} of {name}"] = value
        return ";".join(f"{name}={value}" for name, value in parts.items())

    @property
    def num_tokens(self) -> int:
        """Positions to train on: the sum of the lengths."""
        return sum(corpus.num_tokens for corpus in self._all)

    @property
    def text_bytes(self) -> int | None:
        """UTF-8 bytes of the text of all; None if one was made from arrays."""
        each = [corpus.text_bytes for corpus in self._all]
        known = [size for size in each if size is not None]
        return sum(known) if len(known) == len(each) else None

    @property
    def vocab_size(self) -> int | None:
        """Token ids are below this; None if nobody said."""
        return self._all[0].vocab_size

    @property
    def tokenizer(self) -> tokenizers.Tokenizer | None:
        """The tokenizer that made the tokens; None if they were made from arrays."""
        return self._all[0].tokenizer

    def __repr__(self) -> str:
        return f"Corpora({self.corpora!r})"

    def __str__(self) -> str:
        return "\n\n".join(f"{name}\n{corpus}" for name, corpus in self.corpora.items())


# Parts of a fingerprint that corpora read as one have in common.
SHARED = "task", "tokenizer"


def _shared(corpus: AnyCorpus) -> dict[str, Any]:
    parts = dict(part.partition("=")[::2] for part in corpus.fingerprint.split(";"))
    found: dict[str, Any] = {name: parts[name] for name in parts if name.endswith(SHARED)}
    # Corpora, pairs and views of a kind are described by the same names.
    return found | {"vocabulary": corpus.vocab_size, "a fingerprint of": ", ".join(parts)}


class CorporaSide:
    """One side of several corpora, read as one.

    Args:
        sides: that of each corpus, in order.
    """

    def __init__(self, sides: Sequence[Readable]):
        self._sides = sides
        self._first = np.cumsum([0, *map(len, sides)])
        self.weighted = any(side.weighted for side in sides)

    def __len__(self) -> int:
        return int(self._first[-1])

    def read(
        self, examples: Any, starts: Any, lengths: Any, reach: Any = None, epoch: Any = 0
    ) -> dict[str, np.ndarray]:
        """Pieces of examples, one after another: see `Corpus.read`.

        Tokens of a corpus without weights have the weight 1 where others have weights.
        """
        epochs = None if np.ndim(epoch) == 0 else np.asarray(epoch)[np.asarray(lengths) != 0]
        examples, starts, lengths, reach = as_pieces(examples, starts, lengths, reach, len(self))
        source = np.searchsorted(self._first, examples, side="right") - 1
        if not len(source):
            none = self._sides[0].read(examples, starts, lengths, reach)
            if self.weighted:
                none.setdefault("loss_weights", np.zeros(0, np.float32))
            return none
        # Each corpus and epoch gives its pieces at once; then runs of such pieces, rows above all,
        # are put where they belong.
        key = source if epochs is None else source + len(self._sides) * epochs
        heads = np.flatnonzero(np.diff(key, prepend=-1))
        sizes = np.add.reduceat(reach, heads)
        runs: dict[str, list[np.ndarray]] = {}
        for one in np.unique(key).tolist():
            later, which = divmod(one, len(self._sides))
            mine = key == one if len(heads) > 1 else slice(None)
            found = self._sides[which].read(
                examples[mine] - self._first[which],
                starts[mine],
                lengths[mine],
                reach[mine],
                epoch if epochs is None else later,
            )
            if self.weighted and "loss_weights" not in found:
                found["loss_weights"] = np.ones(int(reach[mine].sum()), np.float32)
            if len(heads) == 1:
                return found
            here = np.flatnonzero(key[heads] == one)
            ends = np.cumsum(sizes[here]).tolist()
            for field, values in found.items():
                places = runs.setdefault(field, [values] * len(heads))
                for run, size, end in zip(here.tolist(), sizes[here].tolist(), ends, strict=True):
                    places[run] = values[end - size : end]
        return {field: np.concatenate(places) for field, places in runs.items()}
