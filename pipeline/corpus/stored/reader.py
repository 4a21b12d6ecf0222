"""Reader: the stored tokens, loss weights and features of examples, read as segments of memory."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from etils import epath

from pipeline.corpus.stored.directory import damage
from pipeline.corpus.stored.gather import (
    Fields,
    Pieces,
    address_of,
    copy_memory,
    new_array,
    take_numbers,
)
from pipeline.corpus.stored.manifest import open_part
from pipeline.corpus.stored.memory import HeldPart, Opened, PartStore, find_segments
from pipeline.corpus.stored.parts import Part, PartFile
from pipeline.corpus.tasks import Task
from pipeline.errors import InvalidValue
from pipeline.fs.fork import Handles
from pipeline.text.features import TOKENS, WEIGHTS, Column, Feature
from pipeline.text.ragged import IDS, Ragged, find_lead

# The most parts that are mapped at a time: Linux allows a process 65,530 maps.
MAPPED = 1 << 14

INT64 = np.dtype(np.int64)

T = TypeVar("T")


class LocalParts(PartStore):
    """The files of parts in a local directory, which are mapped."""

    def __init__(self, directory: epath.Path, parts: Sequence[Part]):
        self.source, self._parts = directory, parts

    def read_copy(self, name: str, read: Callable[[epath.Path], T]) -> T:
        """The result of `read` on another file, which is not copied."""
        return read(self.source / name)

    def open(self, numbers: Sequence[int]) -> Sequence[PartFile]:
        """See `PartStore`."""
        return [open_part(self.source, self._parts[number]) for number in numbers]


class _Table:
    """Where the columns of the parts are that are open."""

    def __init__(self, num_parts: int, features: Mapping[str, Feature]):
        self.has, self._features = np.zeros(num_parts, bool), features  # whether each part is open
        # Of each column and part, the address of its values, and of the table `Segments.begins`.
        self.columns = {name: np.zeros((2, num_parts), np.int64) for name in features}
        # What must live as long as this table is read, by part.
        self.opened: dict[int, Sequence[Opened]] = {}

    def add(self, number: int, opened: Sequence[Opened]) -> None:
        """Adds a part; threads may read others meanwhile."""
        self.opened[number] = opened
        segments = {name: column for part in opened for name, column in part.segments.items()}
        for name, column in segments.items():
            begins = column.begins
            if begins is None and not self._features[name].per_example:
                begins = segments[find_lead(self._features) or TOKENS].begins
            address = 0 if begins is None else address_of(begins)
            self.columns[name][:, number] = column.address, address
        self.has[number] = True


class Reader(Handles):
    """The columns of examples in parts, which are opened when they are first read.

    Args:
        task: decides the fields of a column, and how much later than inputs each is read.
        lengths: positions of each example.
        examples: the number of examples of each part: int64 [parts].
        features: what each column holds, by name: `TOKENS`, `WEIGHTS` if tokens have weights,
            and the features of the corpus; of arrays, these alone.
        stores: the parts of the tokens, then of added features; all divide examples alike.
        owner: names the file of another program, whose features are converted, and whose values
            are checked, when they are read; None: all values are as features say.
        vocab_size: ids of another program must be below this.
    """

    handles = ("_table",)

    def __init__(
        self,
        task: Task,
        lengths: np.ndarray,
        examples: np.ndarray,
        features: Mapping[str, Feature],
        stores: Sequence[PartStore],
        owner: str | None = None,
        vocab_size: int = IDS,
    ):
        self.task, self.features, self.owner = task, features, owner
        self.vocab_size = vocab_size
        self._lengths, self._stores = lengths, stores
        self._first = np.cumsum(examples) - examples
        self._shifts = {name: task.fields_of(name, feature) for name, feature in features.items()}
        # Of each column of numbers: their dtype, and the bytes of a unit of its table of places.
        self._kinds: dict[str, tuple[np.dtype, int]] = {}
        super().__init__()

    def restart(self) -> None:
        """See `Handles`."""
        super().restart()
        self._table = _Table(len(self._first), self.features)
        self._evictions = 0

    @classmethod
    def of(cls, task: Task, examples: Ragged) -> "Reader":
        """The reader of examples in memory."""
        offsets = np.cumsum(np.append(0, examples.counts))
        stored = {
            name: Column(feature, feature.as_stored(values))
            for name, (feature, values) in examples.columns.items()
        }
        lengths, features = task.lengths(examples.counts), {n: c.feature for n, c in stored.items()}
        store = HeldPart(find_segments(stored, offsets), (stored, offsets))
        return cls(task, lengths, np.array([len(lengths)]), features, [store])

    def read(self, pieces: Pieces, names: Iterable[str]) -> Fields:
        """The fields of pieces, as `Side.read`: tokens, weights, and features `names`."""
        columns = [*(name for name in (TOKENS, WEIGHTS) if name in self.features), *names]
        return self._read(pieces, columns)

    def read_examples(self, examples: np.ndarray, names: Iterable[str]) -> Fields:
        """The values of some features of whole examples: `[n, *shape]`."""
        ones = np.ones_like(examples)
        return self._read(Pieces(examples, 0 * ones, ones, ones), names)

    def _read(self, pieces: Pieces, names: Iterable[str]) -> Fields:
        part = self._first.searchsorted(pieces.examples, "right") - 1
        number = pieces.examples - self._first.take(part)
        table = self._open(part)
        fields: Fields = {}
        for name in names:
            fields |= self._read_column(name, table.columns[name], part, number, pieces)
        return fields

    def _read_column(
        self, name: str, table: np.ndarray, part: np.ndarray, number: np.ndarray, pieces: Pieces
    ) -> Fields:
        """The fields that are made of a column."""
        _, starts, lengths, reach, _ = pieces
        feature, shifts = self.features[name], self._shifts[name]
        if not len(part):
            return dict.fromkeys(shifts, feature.filled(0))
        address, begins = table.take(part, axis=1)
        begin = take_numbers(begins + 8 * number, INT64) if begins[0] else number
        dtype, scale = self._kinds[name]
        unit = feature.size * dtype.itemsize
        address += scale * begin + unit * starts
        sizes, rooms = unit * lengths, unit * reach
        by_shift: dict[int, np.ndarray] = {}
        for shift in sorted({*shifts.values()}):
            if shift == 1 and 0 in by_shift:
                # Inputs, one later, and the last of each piece: faster than to copy twice.
                values = by_shift[1] = new_array(len(by_shift[0]), by_shift[0].dtype)
                values[:-1] = by_shift[0][1:]
                last = np.cumsum(reach) - reach + lengths - 1
                ends = take_numbers(address + sizes, dtype)
                if name == TOKENS:
                    self._require_ids(ends, pieces.examples, np.ones_like(lengths))
                values[last] = ends
            else:
                stored = copy_memory(address + unit * shift, sizes, rooms).view(dtype)
                if name == TOKENS:
                    self._require_ids(stored, pieces.examples, reach)
                by_shift[shift] = self._restore(name, stored)
        return {field: by_shift[shift] for field, shift in shifts.items()}

    def _require_ids(self, ids: np.ndarray, examples: np.ndarray, counts: np.ndarray) -> None:
        """Refuses ids of another program that are no tokens; each example has `counts` of them."""
        limit = self.vocab_size
        if self.owner is None or not len(ids) or (ids.min() >= 0 and ids.max() < limit):
            return
        at = int(np.argmax((ids < 0) | (ids >= limit)))
        example = examples[np.searchsorted(np.cumsum(counts), at, side="right")]
        raise InvalidValue(
            f"example {example:,} of {self.owner} holds the id {ids[at]}; ids must be from 0 and "
            f"below {limit:,}"
        )

    def _restore(self, name: str, stored: np.ndarray) -> np.ndarray:
        """Stored numbers of a column as its values: `[n, *shape]`."""
        feature = self.features[name]
        if self.owner is None or name == TOKENS:
            return feature.restore(stored)
        return feature.cast(stored.reshape(-1, *feature.shape), f"{name} of {self.owner}")

    def _open(self, part: np.ndarray) -> _Table:
        """The table of open parts, once it has all of `part`."""
        table, evictions = self._table, sum(store.evictions for store in self._stores)
        if evictions == self._evictions and table.has.take(part).all():
            return table
        numbers = np.unique(part).tolist()
        # What is held here stays readable, even if its file is removed meanwhile.
        opened = {number: table.opened[number] for number in numbers if number in table.opened}
        missing = [number for number in numbers if number not in opened]
        files = [store.open(missing) for store in self._stores]
        for number, *of_part in zip(missing, *files, strict=True):
            self._check(number, of_part)
            opened[number] = of_part
        with self._lock:
            table = self._table
            if evictions != self._evictions or len(table.opened) + len(missing) > MAPPED:
                table = _Table(len(self._first), self.features)
                if evictions != self._evictions:  # else all others are unmapped
                    for number, part_files in self._table.opened.items():
                        if all(store.has(number) for store in self._stores):
                            table.add(number, part_files)
                self._table, self._evictions = table, evictions
            for number, part_files in opened.items():
                if not table.has[number]:  # else a thread may be reading what another has opened
                    table.add(number, part_files)
        return table

    def _check(self, number: int, opened: Sequence[Opened]) -> None:
        """Refuses a part that does not have the examples and the columns of the corpus.

        A place outside of a file would end the process.
        """
        missing = {*self.features}
        for part in opened:
            missing -= {*part.segments}
            for name, column in part.segments.items():
                self._kinds.setdefault(name, (column.dtype, column.scale))
        tokens: Any = opened[0]
        for store, part in zip(self._stores, opened, strict=True):
            if isinstance(part, PartFile):
                seen = self._compare(number, part, tokens)
                if missing or seen:
                    seen = f"it has no {min(missing)}" if missing else seen
                    raise damage(store.source / part.part.file, seen)

    def _compare(self, number: int, file: PartFile, tokens: PartFile) -> str:
        """How the file of a part differs from the corpus, or from the file of its tokens."""
        features = {name: self.features.get(name) for name in file.features}
        if features != file.features:
            return f"it has the features {file.features}, and the corpus {features}"
        for name, column in file.segments.items():
            if self._kinds[name] != (column.dtype, column.scale):
                return f"its {name} are {column.dtype}, and not so in other parts"
        if (seen := file.part.tokens) != (due := tokens.part.tokens):
            return f"it has values for {seen:,} tokens, and {tokens.part.file} has {due:,}"
        first = int(self._first[number])
        lengths = self._lengths[first : first + tokens.part.examples]
        if file.part.examples != len(lengths):
            return f"it has {file.part.examples:,} examples, not {len(lengths):,}"
        if file.offsets is None:  # of features of examples alone
            return ""
        counts = tokens.counts
        for at in np.flatnonzero(self.task.lengths(counts) != lengths)[:1]:
            return (
                f"example {first + at:,} has {counts[at]:,} tokens by its offsets, and "
                f"length {lengths[at]:,}"
            )
        return ""
