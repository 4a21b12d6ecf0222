"""View: another corpus, whose examples are chosen or changed when batches are built."""

from typing import Any, ClassVar

import numpy as np

from pipeline.corpus.interface import AnyCorpus
from pipeline.corpus.renumbered import Renumbered
from pipeline.corpus.tasks import Task
from pipeline.errors import InvalidValue, counted
from pipeline.planning.identity import fingerprint_of


class View(Renumbered):
    """Another corpus, whose examples are chosen or changed when batches are built.

    Attributes:
        corpus: the viewed corpus.
        identity: that of the corpus, and the options of the view.
    """

    def __init__(self, corpus: AnyCorpus, chosen: np.ndarray | None = None):
        super().__init__([corpus], [chosen])
        self.corpus = corpus

    def _describe(self, **options: object) -> None:
        """Sets the identity, from the options of the view."""
        self._given = options
        # An identity goes into each checkpoint, so a digest stands for a long list.
        short = {
            name: value if len(f"{value}") < 100 else fingerprint_of(value)
            for name, value in options.items()
        }
        if (parent := self.corpus.identity.get(self.kind)) is not None:  # a split of a split
            short["parent"] = fingerprint_of(parent)
        self.identity = {**self.corpus.identity, self.kind: short}

    def arguments(self) -> dict[str, Any]:
        """See `AnyCorpus`."""
        return {"corpus": self.corpus, **self._given}

    def __str__(self) -> str:
        options = self.identity[self.kind].items()
        about = ", ".join(f"{name} {value}" for name, value in options if name != "parent")
        text = f"{self.corpus}\nseen as      {type(self).__name__}: {about}"
        if np.array_equal(self.lengths, self.corpus.lengths):
            return text
        tokens = np.atleast_2d(self.lengths.T).sum(axis=1, dtype=np.int64)
        names = self.side_names if len(tokens) > 1 else ["tokens"]
        counts = [f"{count:,} {name}" for count, name in zip(tokens, names, strict=True)]
        return f"{text}\nwhich has    {counted(len(self), 'document')}, {', '.join(counts)}"

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self.corpus!r}"


class ChangedView(View):
    """A view whose examples differ from those of the corpus.

    A class of such views sets `sides`. It has no `text_bytes`: the loss on some tokens gives no
    bits per byte of the text. Where a corpus is taken apart, it stays whole, as what was changed.
    """

    partly_learnt = AnyCorpus.partly_learnt
    num_learnt: int | None = None
    text_bytes: int | None = None

    def map_leaves(self, change: Any) -> AnyCorpus:
        """See `AnyCorpus`."""
        return change(self)

    def _example(self, number: int) -> Any:
        return AnyCorpus._example(self, number)


class DrawnView(ChangedView):
    """A view that makes its fields from a corpus's tokens, by random choices of each epoch.

    A class of such views sets `needs`, the task of the corpora that it takes.

    Attributes:
        side: the only side of the corpus.
    """

    needs: ClassVar[Task]
    silent = AnyCorpus.silent  # the loss differs from epoch to epoch

    def __init__(self, corpus: AnyCorpus):
        super().__init__(corpus)
        needs = self.needs
        name, (side, *others) = type(self).__name__, corpus.sides.values()
        if others or corpus.task != needs or corpus.trees is not None:
            groups = "" if corpus.trees is None else " and groups"
            raise InvalidValue(
                f"{name} needs documents of the task {needs.name!r}, but {corpus!r} has the task "
                f"{getattr(corpus.task, 'name', None)!r}{groups}; prepare it with "
                f"task=pipeline.corpus.{needs.name.upper()}"
            )
        if side.weighted:
            raise InvalidValue(
                f"{corpus!r} has weights, and {name} may hide or move any token, whatever its "
                "weight; open or make the corpus without labels= or weights="
            )
        self.side = side

    @property
    def marks(self) -> tuple[int | None, int | None]:
        """The ids that begin and end each example; None if there is none."""
        tokenizer = self.tokenizer
        return (None, None) if tokenizer is None else (tokenizer.begin_id, tokenizer.end_id)

    def _new_id(self, option: str) -> int:
        """The first id after those of the corpus's vocabulary."""
        if self.corpus.vocab_size is None:
            raise InvalidValue(
                f"{self.corpus!r} has no vocab_size; give {option}=, or write the corpus with "
                "vocab_size="
            )
        return self.corpus.vocab_size
