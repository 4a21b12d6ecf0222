"""Growing: the sealed parts of a corpus that is still written, read like a finished one."""

import contextlib
import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath

from pipeline.corpus.cache import PartCache, default_directory
from pipeline.corpus.gather import Fields
from pipeline.corpus.interface import Split
from pipeline.corpus.log import Damaged, Entry, Log
from pipeline.corpus.parts import PartTable
from pipeline.corpus.prng import is_held_out
from pipeline.corpus.reader import LocalParts, PartStore, Reader
from pipeline.corpus.stored import Stored
from pipeline.corpus.tasks import GROUPS, TASKS
from pipeline.errors import InvalidState, InvalidValue, Missing, require_share
from pipeline.fs.atomic import is_local
from pipeline.fs.fork import Handles


def open_growing(directory: epath.PathLike, wait_seconds: float | None = None) -> "Growing":
    """The corpus that grows in `directory`, once something is sealed there.

    Raises:
        NotSealed: nothing was sealed within `wait_seconds`.
    """
    for _ in Log(directory, wait_seconds).looks(0):
        with contextlib.suppress(Missing):
            return Growing(directory, wait_seconds=wait_seconds)
    raise AssertionError("looks() ends only with an error")


class Growing(Handles, Stored):
    """A corpus that gains parts; made by `Corpus.open(directory, follow=True)`.

    Examples are numbered as in the finished corpus. Those of `entries` can be read. The first use
    of `refresh` or `lengths` opens all that is sealed; later, `refresh` adds new parts, and `hold`
    drops those that are no longer needed, so that only parts in use take memory. Nothing else about
    this object depends on what is sealed now.

    Attributes:
        directory: where it is.
        log: the sealed parts in order; `Plan(corpus.log, …)` plans them.
        hold_out: the share of examples that its plans leave out; see `split`.
        identity: describes the corpus by its first part, tokenizer and task. The digests of the log
            cover what was read of it.
        num_learnt, text_bytes: None: unknown until it is finished.
    """

    grows = True

    def __init__(
        self,
        directory: epath.PathLike,
        entries: Sequence[Entry] = (),
        wait_seconds: float | None = None,
        hold_out: float = 0.0,
    ):
        self.log, self.hold_out = Log(directory, wait_seconds, hold_out), hold_out
        place, about = self.log.directory, self.log.about()
        if TASKS[about.task] == GROUPS:
            raise InvalidValue(
                f"{os.fspath(directory)} holds groups, which cannot be followed; open it without "
                "follow=True once it is finished"
            )
        first = self.log.begin
        super().__init__(place, about, f"those of a log that begins with {first}")
        self._cache = None if is_local(place) else default_directory() / first
        if hold_out:
            split = {"hold_out": hold_out, "held_out": False}
            self.identity = {**self.identity, Split.kind: split}
        self._held = range(0)
        self._run = _Run(self, list(entries)) if entries else None
        self.__setstate__({})

    @property
    def entries(self) -> Sequence[Entry]:
        """The entries whose examples can be read, in order."""
        return () if self._run is None else self._run.entries

    def refresh(self, start: int | None = None) -> list[Entry]:
        """Opens what was sealed meanwhile; returns the new entries.

        Args:
            start: if given, the parts from this number on replace all that can be read.

        Raises:
            ValueError: see `Log.entries`; or a part is missing or changed.
        """
        with self._lock:
            known = [] if start is not None else list(self.entries)
            new = self.log.entries(known[-1].number + 1 if known else start or 0)
            if new:
                self._run = _Run(self, [*known, *new], self._run)
            elif start is not None:
                self._run = None
            return new

    def split(self, hold_out: float = 0.01) -> tuple["Growing", Split]:
        """The corpus to train on, and the examples held out of what is sealed so far.

        As in `AnyCorpus.split`, examples that are held out stay so as the corpus grows. They keep
        their numbers in the first corpus, whose plans leave them out. The second does not grow.

        Args:
            hold_out: the share of examples that are held out, above 0 and below 1.
        """
        if self.hold_out:
            raise InvalidValue(f"{self!r} is split already; split the corpus itself")
        hold_out = require_share("hold_out", hold_out)
        train = Growing(self.directory, (), self.log.wait_seconds, hold_out)
        return train, Split(Growing(self.directory), hold_out=hold_out, held_out=True)

    def hold(self, parts: range) -> None:
        """Makes only these parts readable, and those held before if they are adjacent.

        For a finished corpus, an empty range means all parts.
        """
        if not parts:
            first = self.log.first()
            parts = range(first, first + len(self.log.entries(first)))
        with self._lock:
            here = (
                range(self.entries[0].number, self.entries[-1].number + 1) if self._run else parts
            )
            if self._run and here.start <= parts.start and parts.stop <= here.stop:
                return
            last, self._held = self._held, parts
            if last.start <= parts.stop and parts.start <= last.stop:
                parts = range(min(last.start, parts.start), max(last.stop, parts.stop))
            found = [self.log.find(number) for number in parts]
            entries = [entry for entry in found if entry is not None]
            self._run = _Run(self, entries, self._run)

    def _of(self, examples: Any) -> tuple["_Run", np.ndarray]:
        """The parts that have these examples, and the numbers of the examples there."""
        numbers = np.asarray(examples, np.int64)
        if not numbers.size and self._run is None:  # any part has all columns
            last = None
            with contextlib.suppress(Damaged):  # records are removed when it is finished
                last = self.log.tail()
            last = last or self.log.wait(0)
            assert last is not None, "a finished corpus has a part"
            self._run = _Run(self, [last])
        least, most = int(numbers.min(initial=1 << 62)), int(numbers.max(initial=-1))
        if most >= len(self):
            self.refresh()
        run = self._run
        if run is None or least < run.first or most >= len(self):
            wrong = most if most >= len(self) else least
            raise InvalidState(
                f"example {wrong:,} of {self!r} is in a part that is not sealed yet, or no longer "
                "held; refresh(start=…) opens parts from a number on"
            )
        return run, numbers - run.first

    def __len__(self) -> int:
        if self._run is None:
            self.refresh()
        return 0 if self._run is None else self._run.first + len(self._run)

    def read(self, examples: Any, *place: Any, **options: Any) -> Fields:
        """Pieces of examples; see `Readable.read`."""
        run, numbers = self._of(examples)
        return run.read(numbers, *place, **options)

    def read_examples(self, examples: Any, features: Any = None) -> Fields:
        """The features of whole examples; see `Readable.read_examples`."""
        run, numbers = self._of(examples)
        return run.read_examples(numbers, features)

    @property
    def lengths(self) -> np.ndarray:  # type: ignore[override]  # others have an attribute
        """Positions of each example sealed so far; 0 if held out: uint32 [examples]."""
        if self._run is None:
            self.refresh()
        if self._run is None or self._run.first:
            raise InvalidState(
                f"the lengths of the first parts of {self!r} are not read; refresh(start=0) reads "
                "them, if its writer has kept the parts"
            )
        return self._run.planned

    @property
    def files(self) -> np.ndarray:  # type: ignore[override]  # others have an attribute
        """The number of examples in each part that can be read, in order: int64 [parts]."""
        return np.array([entry.examples for entry in self.entries], np.int64)

    @property
    def num_tokens(self) -> int:  # pyright: ignore
        """Positions of the examples that are sealed so far."""
        return int(self.lengths.sum(dtype=np.int64))

    def __reduce__(self) -> tuple[Any, ...]:
        place = os.fspath(self.directory)
        own = self.log.wait_seconds, self.hold_out
        return Growing, (place, tuple(self.entries), *own)

    def __str__(self) -> str:
        vocabulary = "unknown" if self.vocab_size is None else f"{self.vocab_size:,} ids"
        return f"corpus       {os.fspath(self.directory)}, which grows\nvocabulary   {vocabulary}"

    def __repr__(self) -> str:
        return f"Corpus.open({os.fspath(self.directory)!r}, follow=True)"


class _Run(Stored):
    """Consecutive parts, whose examples are numbered from 0.

    Attributes:
        first: the number of their first example in the corpus.
    """

    _lengths: dict[str, np.ndarray]

    def __init__(self, corpus: Growing, entries: list[Entry], before: "_Run | None" = None):
        super().__init__(corpus.directory, corpus._manifest, "")
        self.entries, self.first, self._hold_out = entries, entries[0].first, corpus.hold_out
        known: dict[str, np.ndarray] = {} if before is None else dict(before._lengths)
        new = [entry.part for entry in entries if entry.part.file not in known]
        corpus.log.require_files(new)
        names = [part.file for part in new]
        known |= dict(zip(names, corpus.log.read_lengths(new), strict=True))
        self._lengths = {entry.part.file: known[entry.part.file] for entry in entries}
        self.lengths = np.concatenate([*self._lengths.values()])
        parts = [entry.part for entry in entries]
        store: PartStore = LocalParts(self.directory, parts)
        if corpus._cache is not None:
            store = PartCache(self.directory, PartTable(parts), corpus._cache)
        examples = np.array([part.examples for part in parts], np.int64)
        features = {**self._manifest.of_tokens, **self.features}
        self._stored = Reader(self.task, self.lengths, examples, features, [store])

    @functools.cached_property
    def planned(self) -> np.ndarray:
        """The lengths, with 0 for examples that are held out."""
        if not self._hold_out:
            return self.lengths
        numbers = self.first + np.arange(len(self.lengths))
        return np.where(is_held_out(numbers, self._hold_out), np.uint32(0), self.lengths)
