"""Columns: the one reader of the stored tokens, loss weights and features of examples."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from pipeline.corpus.gather import Fields, gather, join_memory, new_array
from pipeline.corpus.tasks import Task
from pipeline.text.features import TOKENS, WEIGHTS, Feature
from pipeline.text.ragged import Ragged

# The numbers of some lists, where each list begins in them, and the size of each.
Lists: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]


class Pieces(NamedTuple):
    """Pieces of examples to read, each of at least one position: int64 [pieces].

    Attributes:
        examples: the example of each.
        starts: the first position, within the example.
        lengths: the positions.
        reach: the places that it takes in the result.
        epoch: an int, or one for each piece; see `Readable.read`.
    """

    examples: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    reach: np.ndarray
    epoch: Any = 0

    def take(self, which: np.ndarray) -> "Pieces":
        """Some of the pieces, by a mask or by their places."""
        epoch = np.asarray(self.epoch)[which] if np.ndim(self.epoch) else self.epoch
        return Pieces._make([*(each[which] for each in self[:4]), epoch])


class Entries(NamedTuple):
    """Where the numbers of a column are in memory, for some pieces of examples.

    Attributes:
        values: flat, as they are stored; bits as a byte each.
        first: the place of the first number of each piece: int64 [pieces].
        ends: where the readable memory of each piece ends: int64 [pieces].
        held: objects that must live as long as `values` are read.
    """

    values: np.ndarray
    first: np.ndarray
    ends: np.ndarray
    held: Any


class Columns:
    """The columns of examples. A subclass locates their entries; all else is here.

    Attributes:
        task: decides the fields of a column, and how much later than inputs each is read.
        features: what each column holds, by name: `TOKENS`, `WEIGHTS` if tokens have weights,
            and the features of the corpus.
    """

    task: Task
    features: Mapping[str, Feature]

    def locate(self, examples: np.ndarray, *, by_token: bool) -> Any:
        """The places of examples, for `entries`; `by_token` if entries of tokens are read."""
        return examples

    def entries(self, name: str, at: Any, starts: Any, counts: np.ndarray) -> Entries:
        """`counts` entries of a column, from each of `starts` in located examples."""
        raise NotImplementedError

    def restore(self, name: str, stored: np.ndarray) -> np.ndarray:
        """Stored numbers of a column as its values: `[n, *shape]`."""
        return self.features[name].restore(stored)

    def read(self, pieces: Pieces, names: Iterable[str]) -> Fields:
        """The fields of pieces, as `Readable.read`: tokens, weights, and features `names`."""
        columns = [*(name for name in (TOKENS, WEIGHTS) if name in self.features), *names]
        return self._read(self.locate(pieces.examples, by_token=True), pieces, columns)

    def read_examples(self, examples: np.ndarray, names: Iterable[str]) -> Fields:
        """The values of some features of whole examples: `[n, *shape]`."""
        ones = np.ones_like(examples)
        whole = Pieces(examples, 0 * ones, ones, ones)
        return self._read(self.locate(examples, by_token=False), whole, names)

    def _read(self, at: Any, pieces: Pieces, names: Iterable[str]) -> Fields:
        _, starts, lengths, reach, _ = pieces
        fields: Fields = {}
        for name in names:
            size, shifts = self.features[name].size, self.task.fields_of(name, self.features[name])
            span = max(shifts.values())
            values, first, ends, _held = self.entries(name, at, starts, lengths + span)
            found: dict[int, np.ndarray] = {}
            for shift in sorted({*shifts.values()}):
                if shift == 1 and len(plain := found.get(0, values[:0])):
                    # `plain`, one later, and the last of each piece: faster than a gather.
                    later = found[1] = new_array(len(plain), plain.dtype)
                    later[:-1] = plain[1:]
                    last = np.cumsum(reach) - reach + lengths - 1
                    later[last] = values.take(first + lengths, mode="wrap")
                else:
                    found[shift] = gather(values, first + size * shift, size * reach, ends)
            fields |= {field: self.restore(name, found[shift]) for field, shift in shifts.items()}
        return fields


class Memory(Columns):
    """Columns in memory: for each, its feature, and lists with the numbers of each example.

    `owner` names the file of another program, whose features are converted and checked when read.
    """

    def __init__(
        self,
        task: Task,
        columns: Mapping[str, tuple[Feature, Sequence[Lists]]],
        owner: str | None = None,
    ):
        self.task, self._columns, self._owner = task, {}, owner
        self.features = {name: feature for name, (feature, _) in columns.items()}
        for name, (_, lists) in columns.items():
            held, in_list, counts = zip(*lists, strict=True)
            values, places = join_memory(held)
            ends = places + [len(each) for each in held]
            begins = np.concatenate([at + each for at, each in zip(places, in_list, strict=True)])
            last = np.cumsum([len(each) for each in counts])
            self._columns[name] = values, begins, last, ends, held

    @classmethod
    def of(cls, task: Task, examples: Ragged) -> "Memory":
        """The columns of examples in memory."""
        columns = {}
        for name, (feature, values) in examples.columns.items():
            counts = np.ones_like(examples.counts) if feature.per_example else examples.counts
            begins = feature.size * (np.cumsum(counts) - counts)
            columns[name] = feature, [(values.reshape(-1), begins, counts)]
        return cls(task, columns)

    def restore(self, name: str, stored: np.ndarray) -> np.ndarray:
        """See `Columns`."""
        feature = self.features[name]
        if self._owner is None or name == TOKENS:
            return super().restore(name, stored)
        return feature.cast(stored.reshape(-1, *feature.shape), f"{name} of {self._owner}")

    def entries(self, name: str, at: Any, starts: Any, counts: np.ndarray) -> Entries:
        """See `Columns`."""
        values, begins, last, ends, held = self._columns[name]
        first = begins[at] + self.features[name].size * starts
        return Entries(values, first, ends[np.searchsorted(last, at, side="right")], held)
