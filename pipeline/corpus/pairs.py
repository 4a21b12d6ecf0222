"""Pairs: two corpora side by side, the inputs and the targets of the same examples."""

import os
from collections.abc import Mapping
from typing import Any, Unpack

import numpy as np
from etils import epath

from pipeline.corpus.corpus import Corpus, OpenOptions
from pipeline.corpus.in_place import InPlace
from pipeline.corpus.interface import AnyCorpus
from pipeline.corpus.links import LINK, open_link
from pipeline.corpus.manifest import MANIFEST
from pipeline.corpus.tasks import INPUTS, TARGETS
from pipeline.errors import InvalidValue, require_whole
from pipeline.fs.atomic import as_path
from pipeline.text.features import Feature


class Pairs(AnyCorpus):
    """Examples of inputs and targets, for sequence to sequence; made by `prepare_pairs`.

    In a directory, they are the corpora `inputs` and `targets`. Targets begin with a mark, so that
    with tokens `b t1 … tn` the decoder's inputs are `b t1 … tn-1`.

    Args:
        inputs: a corpus of the task "inputs", which may be in place.
        targets: a corpus of the task "targets", with as many examples.

    Attributes:
        inputs, targets: as given.
        identity, fingerprint: those of both corpora.
        text_bytes, num_learnt: those of the targets, which carry the loss.
        directory: holds the directories of both, if the targets have one.
    """

    def __init__(self, inputs: Corpus | InPlace, targets: Corpus | InPlace):
        inputs.require_task(INPUTS)
        targets.require_task(TARGETS)
        if len(inputs) != len(targets):
            raise InvalidValue(
                f"there are {len(inputs):,} inputs and {len(targets):,} targets; give equally "
                "many, in the same order"
            )
        if both := {*inputs.features} & {*targets.features}:
            raise InvalidValue(
                f"inputs and targets both have a feature {min(both)!r}; give them different names"
            )
        self.inputs, self.targets = self.sides = inputs, targets
        self.members = targets, inputs  # plans are stored with the targets
        self.lengths = np.stack([inputs.lengths, targets.lengths], axis=1)
        origin = getattr(inputs, "origin", None) or {}
        if origin.get("on_error") == "skip":  # others have at least a begin mark
            self.lengths[inputs.lengths == 0] = 0
        self.lengths[targets.lengths == 0] = 0  # nothing to train on, so it is in no batch
        self.lengths.flags.writeable = False
        if (place := getattr(targets, "directory", None)) is not None:
            self.directory = place.parent
        self.text_bytes, self.num_learnt = targets.text_bytes, targets.num_learnt
        if inputs.vocab_size is not None and targets.vocab_size is not None:
            self.vocab_size = max(inputs.vocab_size, targets.vocab_size)
        self.identity = {corpus.task.name: corpus.identity for corpus in (inputs, targets)}

    @classmethod
    def open(cls, directory: epath.PathLike, **options: Unpack[OpenOptions]) -> "Pairs":
        """The pairs in `directory`; options and errors are those of `Corpus.open`.

        Each side gets half of `cache_bytes`. Pairs are read in any order, so all parts are fetched.
        """
        if (room := options.get("cache_bytes")) is not None:
            options["cache_bytes"] = require_whole("cache_bytes", room, 2) // 2
        sides = (as_path(directory) / task.name for task in (INPUTS, TARGETS))
        return cls(*(_open_one(side, **options) for side in sides))

    @classmethod
    def from_arrays(
        cls,
        inputs: Any,
        targets: Any,
        directory: epath.PathLike,
        *,
        features: Mapping[str, Feature] | None = None,
        vocab_size: int | None = None,
    ) -> "Pairs":
        """Pairs of tokenised examples, written into `directory`.

        Args:
            inputs: 1-D integer arrays of token ids, or a dict of columns as for
                `Corpus.from_arrays`.
            targets: as many, each beginning with the mark that the decoder starts from.
            features: the schemas of the other columns of both, by name.
            directory: where to write, as for `Corpus.from_arrays`.
            vocab_size: if given, ids must be below it.
        """
        place = as_path(directory)
        sides = []
        for task, columns in ((INPUTS, inputs), (TARGETS, targets)):
            named = columns if isinstance(columns, Mapping) else {}
            mine = {name: each for name, each in (features or {}).items() if name in named}
            sides.append(
                Corpus.from_arrays(
                    columns, place / task.name, features=mine, vocab_size=vocab_size, task=task
                )
            )
        if missing := [name for name in features or () if name not in cls(*sides).features]:
            raise InvalidValue(f"the feature {missing[0]!r} has no column; give one, or remove it")
        return cls(*sides)

    def _find_silent(self) -> np.ndarray:
        return self.targets.silent

    def verify(self) -> None:
        """Reads everything and compares digests; see `Corpus.verify`."""
        self.inputs.verify()
        self.targets.verify()

    def __reduce__(self) -> tuple[Any, ...]:
        return Pairs, (self.inputs, self.targets)

    def __repr__(self) -> str:
        return f"Pairs({self.inputs!r}, {self.targets!r})"

    def __str__(self) -> str:
        return f"{self.inputs}\n{self.targets}"


def _open_one(directory: epath.Path, **options: Unpack[OpenOptions]) -> Corpus | InPlace:
    if (directory / LINK).exists():
        return open_link(directory)
    return Corpus.open(os.fspath(directory), **options)


def open_corpus(
    directory: epath.PathLike, **options: Unpack[OpenOptions]
) -> Corpus | InPlace | Pairs:
    """The corpus or the pairs in `directory`; options are those of `Corpus.open`.

    A link to token files of another program has no such options, and ignores them.
    """
    directory = as_path(directory)
    if directory.is_file():
        raise InvalidValue(
            f"{os.fspath(directory)} is a file; give the directory of a corpus (to make one from "
            "text: lockstep prepare 'data/*.txt' --into corpus)"
        )
    whole = any((directory / name).exists() for name in (MANIFEST, LINK))
    if not whole and any((directory / TARGETS.name / n).exists() for n in (MANIFEST, LINK)):
        return Pairs.open(directory, **options)
    return _open_one(directory, **options)
