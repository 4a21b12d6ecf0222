"""Tasks: the fields that a model takes from an example, and so the length of an example."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.errors import InvalidValue, require_type, require_whole
from pipeline.fields.batch import fields_of_side
from pipeline.text.features import TOKENS, WEIGHTS, Feature, check_features
from pipeline.text.ragged import Ragged, divide_arrays

# The stored feature of a node of a group that says how many nodes back its parent is; 0: a prefix.
ABOVE = "_above"
PARENTS = Feature("example", dtype=np.int32)


@dataclass(frozen=True, kw_only=True)
class Task:
    """Fields of a batch, each the same tokens read `shift` later.

    With tokens `t0 … tn` and `shifts={"inputs": 0, "targets": 1}`, position `k` of the example
    has input `tk` and target `tk+1`. So the shift happens inside the example, before packing.
    If tokens have weights, the weight of `tk+1` is the loss weight of position `k`.
    """

    name: str
    shifts: Mapping[str, int]

    @property
    def lookahead(self) -> int:
        """The number of tokens beyond its length that an example needs."""
        return max(self.shifts.values(), default=0)

    @property
    def side(self) -> str:
        """The name of the side that these tokens are, if examples have several."""
        return next((of for of in ("inputs", "targets") if of in self.shifts), self.name)

    def fields_of(self, name: str, feature: Feature) -> Mapping[str, int]:
        """The fields that are made of a column, and the shift of each."""
        if name == TOKENS:
            return self.shifts
        field = "loss_weights" if name == WEIGHTS else name
        return {field: self.lookahead if feature.of == "targets" else 0}

    def check(self, features: Mapping[str, Feature] | None) -> dict[str, Feature]:
        """`features` as a dict; refuses those that examples of this task alone cannot have."""
        for side, schemas in divide_features([self], features).items():
            for name, feature in schemas.items():
                beside = side != self.side and self.has_tokens
                if beside or feature.to is not None:
                    what = f"is of the side {side!r}" if beside else "is a pointer"
                    raise InvalidValue(
                        f"{'groups' if self.name == GROUPS.name else 'these examples'} have one "
                        f"side, and {name!r} {what}; Examples, Corpus.from_arrays and prepare make "
                        "examples of several sides"
                    )
        return dict(features or {})

    @property
    def has_tokens(self) -> bool:
        """Whether positions have tokens; if not, they have features alone, as those of arrays."""
        return bool(self.shifts)

    @property
    def has_targets(self) -> bool:
        """Whether a loss, which may be weighted, is computed for each token."""
        return "targets" in self.shifts

    def lengths(self, counts: np.ndarray) -> np.ndarray:
        """Positions to train on, from the number of tokens of each example: uint32, [n].

        >>> CAUSAL.lengths(np.array([5, 1, 0])).tolist()
        [4, 0, 0]
        >>> INPUTS.lengths(np.array([5, 1, 0])).tolist()
        [5, 1, 0]
        """
        return np.maximum(np.asarray(counts, np.int64) - self.lookahead, 0).astype(np.uint32)

    def count_learnt(self, counts: np.ndarray, weights: np.ndarray | None) -> int:
        """Positions that carry loss, from the weights of all tokens, one example after another.

        >>> CAUSAL.count_learnt(np.array([3, 1, 0]), np.array([1, 0, 0.5, 1]))
        1
        """
        if weights is None:
            return int(self.lengths(counts).sum(dtype=np.int64))
        first = (np.cumsum(counts) - counts)[np.asarray(counts) > 0]
        unseen = weights[first] if self.lookahead else ()  # no target
        return int(np.count_nonzero(weights) - np.count_nonzero(unseen))

    def find_silent(
        self,
        counts: np.ndarray,
        weights: np.ndarray | None,
        columns: Mapping[str, Any] | None = None,
    ) -> np.ndarray:
        """The examples with positions to train on, and no loss on any of them: int64, ascending.

        With the `columns` of nodes of groups, continuations alone count.

        >>> CAUSAL.find_silent(np.array([2, 2, 1, 0]), np.array([1, 0, 0, 1, 0])).tolist()
        [0]
        """
        lengths, ends = self.lengths(counts), np.cumsum(counts, dtype=np.int64)
        nonempty = np.flatnonzero(lengths)
        if weights is None or not len(nonempty):
            return np.zeros(0, np.int64)
        # Between the first targets and the ends are the first tokens of the next examples.
        edges = np.stack([ends[nonempty] - lengths[nonempty], ends[nonempty]], axis=1).reshape(-1)
        edges = edges[:-1] if edges[-1] == len(weights) else edges
        learnt = np.add.reduceat(weights != 0, edges, dtype=np.int64)[::2]
        silent = nonempty[learnt == 0]
        if not columns or ABOVE not in columns:
            return silent
        return silent[columns[ABOVE].values[silent] > 0]


CAUSAL = Task(name="causal", shifts={"inputs": 0, "targets": 1})

# The two sides of pairs (sequence to sequence). Encoders see every token. Decoders predict each
# token from those before it, the first of them from the begin mark.
INPUTS = Task(name="inputs", shifts={"inputs": 0})
TARGETS = Task(name="targets", shifts={"decoder_inputs": 0, "targets": 1})

# The tasks of inputs and targets that are sides of their own.
OF_PAIRS = {task.side: task for task in (INPUTS, TARGETS)}

# The nodes of groups, each stored as an example of its unshifted tokens; see `corpus.views.groups`.
GROUPS = Task(name="groups", shifts={"inputs": 0, "targets": 0})

# A side of arrays: features without tokens.
ARRAYS = Task(name="arrays", shifts={})

A_TASK = "one of pipeline.corpus.tasks, such as CAUSAL"

TASKS = {task.name: task for task in (CAUSAL, INPUTS, TARGETS, GROUPS, ARRAYS)}


def divide_features(
    tasks: Sequence[Task], features: Mapping[str, Feature] | None
) -> dict[str, dict[str, Feature]]:
    """The features of each side of examples by name, those of tokens first; checked.

    Values of whole examples are stored with the first side.

    Args:
        tasks: those of the sides of tokens.
        features: by name; names of sides of arrays, in `of`, are theirs.
    """
    schemas, sides = check_features(features), {task.side: dict[str, Feature]() for task in tasks}
    # The side that a feature is stored with, by `of`.
    stored = {of: task.side for task in tasks for of in ("inputs", "targets") if of in task.shifts}
    stored |= {"continuation": GROUPS.side} if GROUPS in tasks else {}
    for feature in schemas.values():
        if feature.of_arrays:
            sides.setdefault(stored.setdefault(feature.of, feature.of), {})
    stored["example"] = next(iter(sides), ARRAYS.side)
    for name, feature in schemas.items():
        if feature.of == "continuation" and feature.of not in stored:
            raise InvalidValue(
                f"the feature {name!r} is of continuations, but these examples are not groups; "
                "make them with from_groups, or give it of='example'"
            )
        if feature.of not in stored:
            names = " and ".join(of for of in stored if of != "example") or "no tokens"
            raise InvalidValue(
                f"the feature {name!r} is of {feature.of}, but these examples have {names}; give "
                "it to the other side of the pairs, or give another task="
            )
        sides[stored[feature.of]][name] = feature
        if feature.to is not None and feature.to not in sides:
            raise InvalidValue(
                f"the feature {name!r} points to the side {feature.to!r}; there are "
                f"{', '.join(sides)}"
            )
        for side in sides:
            if name in fields_of_side(side):
                raise InvalidValue(
                    f"a feature is named {name!r}, as a field of the side {side!r}; give it "
                    "another name"
                )
    return sides


def read_columns(
    columns: Any, features: Mapping[str, Feature] | None, vocab_size: int | None, task: Task
) -> tuple[dict[str, Task], int | None, Iterator[tuple[str, Ragged]]]:
    """The task of each side of examples in columns, `vocab_size`, and their parts; all checked.

    Arguments are those of `Examples`; parts are those of `divide_arrays`, which checks entries as
    they are read.
    """
    require_type("task", task, Task, A_TASK)
    with_tokens = not isinstance(columns, Mapping) or TOKENS in columns
    arrays = any(feature.of_arrays for feature in check_features(features).values())
    sides = divide_features([task] if with_tokens or not arrays else [], features)
    if vocab_size is not None:
        vocab_size = require_whole("vocab_size", vocab_size, 1)
    parts = divide_arrays(columns, sides, vocab_size, task.lookahead)
    return tasks_of(sides, [task]), vocab_size, parts


def tasks_of(sides: Iterable[str], tasks: Sequence[Task]) -> dict[str, Task]:
    """The task of each side, by name: that of its tokens, or `ARRAYS`.

    >>> {side: task.name for side, task in tasks_of(["inputs", "patches"], [CAUSAL]).items()}
    {'inputs': 'causal', 'patches': 'arrays'}
    """
    named = {task.side: task for task in tasks}
    return {side: named.get(side, ARRAYS) for side in sides}


def is_single(tasks: Mapping[str, Task], loss: str | None) -> bool:
    """Whether examples with these sides are one corpus: they have one side, of tokens.

    `loss` is the side of arrays that carries the loss, if one does.
    """
    return loss is None and [task.has_tokens for task in tasks.values()] == [True]


def add_parents(features: Mapping[str, Feature]) -> dict[str, Feature]:
    """The features of nodes: those of their groups, and the place of the parent."""
    if ABOVE in features:
        raise InvalidValue(f"a feature is named {ABOVE!r}, a name that Lockstep uses; rename it")
    return {**features, ABOVE: PARENTS}
