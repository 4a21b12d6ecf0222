"""Examples: a corpus in memory, for data that is used once, such as new rollouts."""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.corpus.groups import Groups, divide_groups
from pipeline.corpus.interface import SingleCorpus
from pipeline.corpus.sides import Sides
from pipeline.corpus.stored.reader import Reader
from pipeline.corpus.tasks import A_TASK, ARRAYS, CAUSAL, GROUPS, Task
from pipeline.errors import InvalidValue, require_type, require_whole
from pipeline.text.features import WEIGHTS, Feature
from pipeline.text.ragged import Ragged, divide_arrays


class Examples(SingleCorpus):
    """A corpus in memory: planned, loaded and scored like any other, and never written.

    >>> rollouts = Examples(
    ...     {"tokens": [[5, 6, 7], [8, 9]], "advantage": [0.5, -1.0]},
    ...     features={"advantage": Feature("example")},
    ... )
    >>> rollouts.lengths.tolist(), rollouts[0]["targets"].tolist(), float(rollouts[1]["advantage"])
    ([2, 1], [6, 7], -1.0)

    Attributes:
        identity, fingerprint: digests of the content.
    """

    _ragged: Ragged

    def __new__(
        cls,
        columns: Any,
        *,
        features: Mapping[str, Feature] | None = None,
        vocab_size: int | None = None,
        task: Task = CAUSAL,
        loss: str | None = None,
    ) -> Any:
        """The examples, or if they have several sides, `Sides` of such examples.

        Args:
            columns: a list of 1-D arrays (or lists) of token ids, marks included; or a dict with a
                list for each column: "tokens", optionally "weights" (of the loss, a number from 0
                up for each token), and each of `features` by its name. A causal example of n ids
                has length n - 1. With features of sides, "tokens" may be missing, and `Sides` are
                returned.
            features: the schemas of the other columns, by name.
            vocab_size: if given, ids must be below it.
            task: decides the fields and the lengths; see `pipeline.corpus.tasks`.
            loss: the side of arrays that carries the loss, if one does; see `Sides`.

        Raises:
            ValueError: there is no example, a column does not match its feature or the tokens, or
                an id is not allowed.
        """
        require_type("task", task, Task, A_TASK)
        sides = task.divide(columns, features)
        vocab_size = None if vocab_size is None else require_whole("vocab_size", vocab_size, 1)
        parts: dict[str, list[Ragged]] = {name: [] for name in sides}
        for side, part in divide_arrays(columns, sides, vocab_size, task.lookahead):
            parts[side].append(part)
        if not all(parts.values()):
            raise InvalidValue("examples are empty; give at least one example")
        made: dict[str, Examples] = {}
        for name, some in parts.items():
            of = (task, vocab_size) if name == task.side else (ARRAYS, None)
            made[name] = cls._of(Ragged.concatenate(some), *of)
        single = [*made] == [task.side] and loss is None
        return made[task.side] if single else Sides(made, loss=loss)

    @classmethod
    def _of(cls, examples: Ragged, task: Task, vocab_size: int | None) -> "Examples":
        """The examples of one side."""
        made = super().__new__(cls)
        made.task, made._ragged, made.vocab_size = task, examples, vocab_size
        made.features = examples.features
        made.weighted = made.features.pop(WEIGHTS, None) is not None
        made.lengths = task.lengths(examples.counts)
        made.lengths.flags.writeable = False
        made.num_learnt = task.count_learnt(examples.counts, examples.weights)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        own = self._ragged, self.task, self.vocab_size
        return type(self)._of, own, {"covers_all": self.covers_all}

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
        columns, known = divide_groups(groups, features, vocab_size)
        return Groups(cls(columns, features=known, vocab_size=vocab_size, task=GROUPS))

    def _find_silent(self) -> np.ndarray:
        examples = self._ragged
        return self.task.find_silent(examples.counts, examples.weights, examples.columns)

    @functools.cached_property
    def reader(self) -> Reader:  # type: ignore[override]  # others have an attribute
        """Reads the columns of the examples."""
        return Reader.of(self.task, self._ragged)

    @functools.cached_property
    def identity(self) -> Mapping[str, Any]:  # type: ignore[override]  # others have an attribute
        """A digest of the tokens and features, and the task."""
        digest = self._ragged.digest[:12]
        return {"tokens": digest, "tokenizer": "none", "task": self.task.name}

    def __repr__(self) -> str:
        return f"Examples of {len(self):,} examples, {self.fingerprint}"
