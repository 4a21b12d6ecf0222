"""Joined: several corpora read as one, their examples numbered one after another."""

import functools
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from pipeline import tokenizers
from pipeline.planning import lengths as lengths_lib
from pipeline.storage.corpus import Corpus
from pipeline.storage.pieces import as_pieces


class Joined:
    """Several corpora as one: the examples of the first, then those of the second, and so on.

    It is read like a corpus, and planned like one too, each example once an epoch; `Mixture` plans
    it by weights.

    Args:
        corpora: at least one, by name; of one task and one tokenizer.

    Attributes:
        corpora: as given.
        first: the number of the first example of each, and of all: int64 [corpora + 1].

    Raises:
        ValueError: there is none, or they differ in task, tokenizer or vocabulary.
    """

    def __init__(self, corpora: Mapping[str, Corpus]):
        if not corpora:
            raise ValueError("corpora is empty; give at least one, as {'name': corpus}")
        self.corpora = dict(corpora)
        self._all = list(self.corpora.values())
        self.first = np.cumsum([0, *map(len, self._all)])
        for name, corpus in self.corpora.items():
            for what, seen, wanted in (
                ("task", corpus.task.name, self._all[0].task.name),
                ("tokenizer", corpus.origin["tokenizer"], self._all[0].origin["tokenizer"]),
                ("vocabulary", corpus.vocab_size, self._all[0].vocab_size),
            ):
                if seen != wanted:
                    raise ValueError(
                        f"{name} has {what} {seen} and {next(iter(self.corpora))} has {wanted}; "
                        "corpora that are read as one must agree: prepare both with the same one"
                    )

    def __len__(self) -> int:
        return int(self.first[-1])

    def source_of(self, examples: np.ndarray) -> np.ndarray:
        """Which of the corpora, counted from 0, each example is of: int64 [n]."""
        return np.searchsorted(self.first, examples, side="right") - 1

    def begin(self, examples: int) -> "Joined | Corpus":
        """Those of the corpora that together have the first `examples` examples.

        Raises:
            ValueError: so many examples end in the middle of a corpus.
        """
        count = int(np.searchsorted(self.first, examples))
        if self.first[count] != examples:
            raise ValueError(
                f"the first {examples:,} examples are no whole corpora; these end after "
                f"{', '.join(f'{end:,}' for end in self.first[1:].tolist())}"
            )
        return self._all[0] if count == 1 else Joined(dict(list(self.corpora.items())[:count]))

    def read(
        self, examples: Any, starts: Any, lengths: Any, reach: Any = None
    ) -> dict[str, np.ndarray]:
        """Pieces of examples, one after another: see `Corpus.read`."""
        examples, starts, lengths, reach = as_pieces(examples, starts, lengths, reach, len(self))
        source = self.source_of(examples)
        if not len(source) or (source == source[0]).all():
            which = int(source[0]) if len(source) else 0
            found = self._all[which].read(examples - self.first[which], starts, lengths, reach)
            return self._weighted(found)
        # Each corpus gives its pieces at once; then runs of pieces of one corpus, rows above all,
        # are put where they belong.
        heads = np.flatnonzero(np.diff(source, prepend=-1))
        sizes = np.add.reduceat(reach, heads)
        runs: dict[str, list[np.ndarray]] = {}
        reads: dict[int, dict[str, np.ndarray]] = {}
        for which in np.unique(source).tolist():
            mine = source == which
            reads[which] = self._weighted(
                self._all[which].read(
                    examples[mine] - self.first[which], starts[mine], lengths[mine], reach[mine]
                )
            )
        for which, found in reads.items():
            here = np.flatnonzero(source[heads] == which)
            ends = np.cumsum(sizes[here]).tolist()
            for field, values in found.items():
                places = runs.setdefault(field, [values] * len(heads))
                for run, size, end in zip(here.tolist(), sizes[here].tolist(), ends, strict=True):
                    places[run] = values[end - size : end]
        return {field: np.concatenate(places) for field, places in runs.items()}

    def _weighted(self, found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """With weights, 1 for tokens that have none, if those of any corpus have some."""
        if "loss_weights" not in found and any(corpus.weighted for corpus in self._all):
            size = len(next(iter(found.values())))
            found["loss_weights"] = np.ones(size, np.float32)
        return found

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """One example, a 1-D array for each field, all of its length."""
        number = operator.index(index)
        number += len(self) if number < 0 else 0
        if not 0 <= number < len(self):
            raise IndexError(f"example {index} of corpora of {len(self):,}")
        which = int(self.source_of(np.array([number]))[0])
        return self._all[which][number - int(self.first[which])]

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return (example for corpus in self._all for example in corpus)

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """Positions of each example, a copy of those of all corpora: uint32 [examples]."""
        return np.concatenate([corpus.lengths for corpus in self._all])

    @functools.cached_property
    def lengths_digest(self) -> str:
        """`pipeline.planning.lengths.digest` of the lengths."""
        return lengths_lib.digest(self.lengths)

    @property
    def in_memory(self) -> bool:
        """See `Corpus`; whether all are."""
        return all(corpus.in_memory for corpus in self.corpora.values())

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
                shared = what in ("tokenizer", "task")
                parts[what if shared else f"{what} of {name}"] = value
        return ";".join(f"{name}={value}" for name, value in parts.items())

    @property
    def task(self):
        """What the model is asked, of all corpora."""
        return self._all[0].task

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
        return f"Joined({self.corpora!r})"

    def __str__(self) -> str:
        return "\n\n".join(f"{name}\n{corpus}" for name, corpus in self.corpora.items())
