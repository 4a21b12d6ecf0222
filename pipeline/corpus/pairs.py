"""Pairs: two corpora side by side, the inputs and the targets of the same examples."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from etils import epath

from pipeline.corpus.corpus import Corpus, OpenOptions
from pipeline.corpus.description import DESCRIPTION, read_description
from pipeline.corpus.in_place import InPlace
from pipeline.corpus.interface import AnyCorpus
from pipeline.corpus.links import Linked, open_link
from pipeline.corpus.sides import Sides, read_sides
from pipeline.corpus.stored.directory import MANIFEST
from pipeline.corpus.tasks import INPUTS, OF_PAIRS, TARGETS
from pipeline.corpus.tokens.formats import describe_use, recognise
from pipeline.errors import InvalidValue, Missing, require_whole
from pipeline.fs.atomic import as_path
from pipeline.text.features import Feature


class Pairs(Sides):
    """Examples of inputs and targets, for sequence to sequence; made by `prepare_pairs`.

    In a directory, they are the corpora `inputs` and `targets`. Targets begin with a mark, so that
    with tokens `b t1 … tn` the decoder's inputs are `b t1 … tn-1`.

    Args:
        inputs: a corpus of the task "inputs", which may be in place.
        targets: a corpus of the task "targets", with as many examples.
    """

    kind = "pairs"

    def __init__(self, inputs: AnyCorpus, targets: AnyCorpus):
        self.inputs, self.targets = inputs, targets
        inputs.require_task(INPUTS)
        targets.require_task(TARGETS)
        super().__init__({INPUTS.name: inputs, TARGETS.name: targets})

    def arguments(self) -> dict[str, Any]:
        """See `AnyCorpus`."""
        return {"inputs": self.inputs, "targets": self.targets}

    @classmethod
    def open(cls, directory: epath.PathLike, **options: Unpack[OpenOptions]) -> "Pairs":
        """The pairs in `directory`; options and errors are those of `Corpus.open`.

        Each side gets half of `cache_bytes`. Pairs are read in any order, so all parts are fetched.
        """
        return cls(**_open_each(as_path(directory), [*OF_PAIRS], **options))

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


def as_sides(made: Mapping[str, Any], loss: str | None = None) -> Sides:
    """The corpora of sides as one: of inputs and targets, `Pairs`."""
    return Pairs(**made) if [*made] == [*OF_PAIRS] else Sides(made, loss=loss)


def _open_each(
    directory: epath.Path, names: Sequence[str], **options: Unpack[OpenOptions]
) -> dict[str, Corpus | InPlace]:
    """The corpus of each side, with an equal share of `cache_bytes`."""
    if (room := options.get("cache_bytes")) is not None:
        options["cache_bytes"] = require_whole("cache_bytes", room, len(names)) // len(names)
    return {name: _open_one(directory / name, **options) for name in names}


def _open_one(directory: epath.Path, **options: Unpack[OpenOptions]) -> Corpus | InPlace:
    if (read_description(directory) or {}).get("kind") == Linked.kind:
        return open_link(directory)
    return Corpus.open(os.fspath(directory), **options)


def open_corpus(
    directory: epath.PathLike, **options: Unpack[OpenOptions]
) -> Corpus | InPlace | Sides:
    """The corpus, or the sides or pairs, in `directory`; options are those of `Corpus.open`.

    A link to token files of another program has no such options, and ignores them.
    """
    place, missing = as_path(directory), None
    try:
        if (recorded := read_sides(place)) is not None:
            names, loss = recorded
            return as_sides(_open_each(place, names, **options), loss)
        whole = any((place / name).exists() for name in (MANIFEST, DESCRIPTION))
        if not whole and any((place / TARGETS.name / n).exists() for n in (MANIFEST, DESCRIPTION)):
            return Pairs.open(place, **options)
        if whole or not place.is_file():
            return _open_one(place, **options)
    except Missing as error:
        missing = error
    if found := recognise(directory):
        raise InvalidValue(f"{os.fspath(directory)} {describe_use(directory, found)}")
    raise missing or InvalidValue(
        f"{os.fspath(place)} is a file; give the directory of a corpus (to make one from text: "
        "lockstep prepare 'data/*.txt' --into corpus), or for ids in an Arrow file --tokens arrow "
        "column=NAME"
    )
