"""Examples: a corpus in memory, for data that is used once, such as new rollouts."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.corpus.interface import AnyCorpus, SingleCorpus, computed
from pipeline.corpus.renumbered import Renumbered
from pipeline.corpus.sides import Sides
from pipeline.corpus.stored.reader import Reader
from pipeline.corpus.tasks import CAUSAL, GROUPS, Task, is_single, read_columns
from pipeline.corpus.views.groups import Groups
from pipeline.corpus.views.trees import divide_groups
from pipeline.errors import InvalidValue
from pipeline.text.features import WEIGHTS, Feature
from pipeline.text.ragged import Ragged


class Examples(Renumbered):
    """A corpus in memory: planned, loaded and scored like any other, and never written.

    >>> rollouts = Examples(
    ...     {"tokens": [[5, 6, 7], [8, 9]], "advantage": [0.5, -1.0]},
    ...     features={"advantage": Feature("example")},
    ... )
    >>> rollouts.lengths.tolist(), rollouts[0]["targets"].tolist(), float(rollouts[1]["advantage"])
    ([2, 1], [6, 7], -1.0)

    Args:
        columns: a list of 1-D arrays (or lists) of token ids, marks included; or a dict with a list
            for each column: "tokens", optionally "weights" (of the loss, a number from 0 up for
            each token), and each of `features` by its name. A causal example of n ids has length
            n - 1. With features of sides, "tokens" may be missing, and the examples have several
            sides; see `Sides`.
        features: the schemas of the other columns, by name.
        vocab_size: if given, ids must be below it.
        task: decides the fields and the lengths; see `pipeline.corpus.tasks`.
        loss: the side of arrays that carries the loss, if one does; see `Sides`.

    Raises:
        ValueError: there is no example, a column does not match its feature or the tokens, or an id
            is not allowed.
    """

    def __init__(
        self,
        columns: Any,
        *,
        features: Mapping[str, Feature] | None = None,
        vocab_size: int | None = None,
        task: Task = CAUSAL,
        loss: str | None = None,
    ):
        tasks, vocab_size, parts = read_columns(columns, features, vocab_size, task)
        chunks: dict[str, list[Ragged]] = {name: [] for name in tasks}
        for side, chunk in parts:
            chunks[side].append(chunk)
        if not all(chunks.values()):
            raise InvalidValue("examples are empty; give at least one example")
        corpora: dict[str, AnyCorpus] = {
            name: InMemory(Ragged.concatenate(of_side), tasks[name], vocab_size)
            for name, of_side in chunks.items()
        }
        self._hold(corpora[task.side] if is_single(tasks, loss) else Sides(corpora, loss=loss))

    def _hold(self, corpus: AnyCorpus) -> None:
        super().__init__([corpus])
        self.sides = corpus.sides

    def arguments(self) -> dict[str, Any]:
        """See `AnyCorpus`."""
        return {"corpus": self.members[0]}

    @classmethod
    def make(cls, **arguments: Any) -> "Examples":
        """See `AnyCorpus`."""
        examples = cls.__new__(cls)
        examples._hold(arguments["corpus"])
        return examples

    @classmethod
    def from_groups(
        cls,
        groups: Any,
        *,
        features: Mapping[str, Feature] | None = None,
        vocab_size: int | None = None,
    ) -> Groups:
        """Groups in memory: prefixes with several continuations; see `Corpus.from_groups`.

        >>> samples = Examples.from_groups([([1, 5, 2], [[7, 3], [8, 9, 3]])])
        >>> samples.lengths.tolist(), samples[0]["inputs"].tolist(), samples[0]["targets"].tolist()
        ([7], [1, 5, 2, 7, 2, 8, 9], [5, 2, 7, 3, 8, 9, 3])
        """
        columns, schemas = divide_groups(groups, features, vocab_size)
        nodes = Examples(columns, features=schemas, vocab_size=vocab_size, task=GROUPS)
        return Groups(nodes.members[0])

    def __repr__(self) -> str:
        return f"Examples of {len(self):,} examples, {self.fingerprint}"


class InMemory(SingleCorpus):
    """The examples of one side in memory.

    Attributes:
        examples: their tokens, weights and features.
    """

    def __init__(self, examples: Ragged, task: Task, vocab_size: int | None):
        self.examples, self.task = examples, task
        self.vocab_size = vocab_size if task.has_tokens else None
        self.features = examples.features
        self.weighted = self.features.pop(WEIGHTS, None) is not None
        self.lengths = task.lengths(examples.counts)
        self.lengths.flags.writeable = False
        self.num_learnt = task.count_learnt(examples.counts, examples.weights)

    @computed
    def silent(self) -> np.ndarray:
        """See `AnyCorpus`."""
        examples = self.examples
        return self.task.find_silent(examples.counts, examples.weights, examples.columns)

    @computed
    def reader(self) -> Reader:
        """Reads the columns of the examples."""
        return Reader.of(self.task, self.examples)

    @computed
    def identity(self) -> Mapping[str, Any]:
        """A digest of the tokens and features, and the task."""
        digest = self.examples.digest[:12]
        return {"tokens": digest, "tokenizer": "none", "task": self.task.name}

    def arguments(self) -> dict[str, Any]:
        """See `AnyCorpus`; they hold the content."""
        return {"examples": self.examples, "task": self.task, "vocab_size": self.vocab_size}

    def __repr__(self) -> str:
        return f"Examples of {len(self):,} examples, {self.fingerprint}"
