"""Pairs: two corpora side by side, the inputs and the targets of the same examples."""

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from etils import epath

from pipeline import tokenizers
from pipeline.storage.corpus import Corpus
from pipeline.storage.writer import MANIFEST
from pipeline.tasks import INPUTS, TARGETS


class Pairs:
    """Examples of inputs and targets, for sequence to sequence; made by `prepare_pairs`.

    In a directory they are the corpora `inputs` and `targets`. The targets' tokens begin with a
    mark, so that with tokens `b t1 … tn` the decoder's inputs are `b t1 … tn-1`.

    Args:
        inputs: a corpus of the task "inputs".
        targets: a corpus of the task "targets", of as many examples.

    Attributes:
        lengths: positions of inputs and targets of each example; uint32, [examples, 2].

    Raises:
        ValueError: a corpus is of another task, or they have not as many examples.
    """

    def __init__(self, inputs: Corpus, targets: Corpus):
        inputs.require_task(INPUTS)
        targets.require_task(TARGETS)
        if len(inputs) != len(targets):
            raise ValueError(
                f"there are {len(inputs):,} inputs and {len(targets):,} targets; pairs need as "
                "many of both, in the same order"
            )
        self.inputs, self.targets = inputs, targets
        self.lengths = np.stack([inputs.lengths, targets.lengths], axis=1)
        self.lengths.flags.writeable = False

    @classmethod
    def open(cls, directory: epath.PathLike, **options: Any) -> "Pairs":
        """The pairs in `directory`; options and errors are those of `Corpus.open`."""
        sides = (epath.Path(directory).expanduser() / task.name for task in (INPUTS, TARGETS))
        return cls(*(Corpus.open(side, **options) for side in sides))

    @classmethod
    def from_arrays(
        cls,
        inputs: Iterable[Any],
        targets: Iterable[Any],
        directory: epath.PathLike,
        *,
        vocab_size: int | None = None,
    ) -> "Pairs":
        """Pairs that are tokenised already.

        Args:
            inputs: 1-D integer arrays of token ids.
            targets: as many, each with a mark first that the decoder begins with.
            directory: where to write, as for `Corpus.from_arrays`.
            vocab_size: if given, ids must be below it.

        Raises:
            ValueError: as `Pairs` and `Corpus.from_arrays`.
        """
        return cls(
            *(
                Corpus.from_arrays(
                    examples, epath.Path(directory) / task.name, vocab_size=vocab_size, task=task
                )
                for examples, task in ((inputs, INPUTS), (targets, TARGETS))
            )
        )

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """One example: 1-D int32 arrays `inputs`, `decoder_inputs` and `targets`."""
        return self.inputs[index] | self.targets[index]

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return (self[index] for index in range(len(self)))

    @property
    def directory(self) -> epath.Path:
        """Where both corpora are, one beside the other."""
        return self.targets.directory.parent

    @property
    def sides(self) -> tuple[Corpus, Corpus]:
        """See `AnyCorpus`."""
        return self.inputs, self.targets

    def keep(self, name: str, make: Callable[[], bytes]) -> bytes:
        """See `AnyCorpus`."""
        return self.targets.keep(name, make)

    @property
    def in_memory(self) -> bool:
        """See `Corpus`."""
        return self.inputs.in_memory and self.targets.in_memory

    @property
    def fingerprint(self) -> str:
        """Those of both corpora, part by part."""
        return ";".join(
            f"{corpus.task.name}_{part}"
            for corpus in (self.inputs, self.targets)
            for part in corpus.fingerprint.split(";")
        )

    @property
    def num_tokens(self) -> int:
        """Positions of both sides."""
        return self.inputs.num_tokens + self.targets.num_tokens

    @property
    def text_bytes(self) -> int | None:
        """UTF-8 bytes of the targets' text, which is what the loss is about."""
        return self.targets.text_bytes

    @property
    def vocab_size(self) -> int | None:
        """Token ids of both sides are below this; None if nobody said."""
        sizes = self.inputs.vocab_size, self.targets.vocab_size
        return None if None in sizes else max(size for size in sizes if size)

    @property
    def tokenizer(self) -> tokenizers.Tokenizer | None:
        """The tokenizer of the targets; None if they were made from arrays."""
        return self.targets.tokenizer

    def verify(self) -> None:
        """Reads everything and compares digests; see `Corpus.verify`."""
        self.inputs.verify()
        self.targets.verify()

    def __reduce__(self):
        return Pairs, (self.inputs, self.targets)

    def __repr__(self) -> str:
        return f"Pairs({self.inputs!r}, {self.targets!r})"

    def __str__(self) -> str:
        return f"{self.inputs}\n{self.targets}"


def open_corpus(directory: epath.PathLike) -> Corpus | Pairs:
    """The corpus in `directory`, or the pairs."""
    directory = epath.Path(directory).expanduser()
    if (directory / TARGETS.name / MANIFEST).exists() and not (directory / MANIFEST).exists():
        return Pairs.open(directory)
    return Corpus.open(os.fspath(directory))
