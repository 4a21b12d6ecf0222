"""Pairs: two corpora side by side, the inputs and the targets of the same examples."""

from collections.abc import Mapping
from typing import Any, Unpack

import numpy as np
from etils import epath

from pipeline.corpus.corpus import Corpus, OpenOptions
from pipeline.corpus.interface import AnyCorpus
from pipeline.corpus.sides import Sides
from pipeline.corpus.tasks import INPUTS, OF_PAIRS, TARGETS
from pipeline.errors import InvalidValue
from pipeline.fs.atomic import as_path
from pipeline.text.features import Feature


class Pairs(Sides):
    """Examples of inputs and targets, for sequence to sequence; made by `prepare_pairs`.

    In a directory, they are the corpora `inputs` and `targets`. Targets begin with a mark, so that
    with tokens `b t1 … tn` the decoder's inputs are `b t1 … tn-1`. A pair with an empty side has
    nothing to train on, or to attend to: it is in no batch, and plans count it.

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
        unread = (self.lengths[:, 0] == 0) & (self.lengths[:, 1] > 0)
        if unread.any():
            self.lengths = np.where(unread[:, None], np.uint32(0), self.lengths)
            self.lengths.flags.writeable = False
            self.text_bytes = self.num_learnt = None

    def arguments(self) -> dict[str, Any]:
        """See `AnyCorpus`."""
        return {"inputs": self.inputs, "targets": self.targets}

    @classmethod
    def open(cls, directory: epath.PathLike, **options: Unpack[OpenOptions]) -> "Pairs":
        """The pairs in `directory`; options and errors are those of `Corpus.open`.

        Each side gets half of `cache_bytes`. Pairs are read in any order, so all parts are fetched.
        """
        from pipeline.corpus.opening import open_each  # which knows all kinds

        return cls(**open_each(as_path(directory), [*OF_PAIRS], **options))

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
        directory = as_path(directory)
        sides = []
        for task, columns in ((INPUTS, inputs), (TARGETS, targets)):
            named = columns if isinstance(columns, Mapping) else {}
            schemas = {name: feature for name, feature in (features or {}).items() if name in named}
            options: Any = {"features": schemas, "vocab_size": vocab_size, "task": task}
            sides.append(Corpus.from_arrays(columns, directory / task.name, **options))
        if missing := [name for name in features or () if name not in cls(*sides).features]:
            raise InvalidValue(f"the feature {missing[0]!r} has no column; give one, or remove it")
        return cls(*sides)


def as_sides(corpora: Mapping[str, Any], loss: str | None) -> Sides:
    """The corpora of sides as one: of inputs and targets, `Pairs`."""
    return Pairs(**corpora) if [*corpora] == [*OF_PAIRS] else Sides(corpora, loss=loss)
