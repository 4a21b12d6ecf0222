"""The ledger: each epoch of each corpus, counted over batches, against what it owes.

A source says what is due in an epoch; whether batches have it is not taken from the plan, but found
here: no position twice and, of an epoch that is over, all that are due.
"""

from collections.abc import Callable

import numpy as np

from pipeline.errors import InvalidValue
from pipeline.planning import figures
from pipeline.planning.lengths import as_lengths
from pipeline.planning.plan import Plan
from pipeline.planning.planned import PlannedBatch
from pipeline.planning.source import Source

# Examples and steps that are named one by one.
SHOWN = 10


class NotAsPlanned(InvalidValue):
    """What a run did is not what was planned; the message names the step."""


class Account:
    """The positions of one corpus that epochs had, and how many epochs each example was in.

    Args:
        source: the corpus, as the last stage of the plan has it.
        report: is called with a line for each epoch.
    """

    def __init__(self, source: Source, report: Callable[[str], None]):
        self.times = np.zeros(len(source.lengths), np.int64)
        self._of = f" of {source.name}" if source.name else ""
        self._source, self._report = source, report
        self._pieces: dict[int, list[np.ndarray]] = {}
        self._left: dict[int, int] = {}
        self._closed: set[int] = set()

    def add(self, epoch: int, pieces: np.ndarray) -> None:
        """Counts some pieces, int64 [n, 3 or 4] without their rows; closes the epoch if it is over.

        Raises:
            NotAsPlanned: as `close`.
        """
        if epoch not in self._pieces:
            self._pieces[epoch], self._left[epoch] = (
                [],
                int(self._source.expected_positions(epoch).sum()),
            )
        self._pieces[epoch].append(pieces)
        self._left[epoch] -= int(pieces[:, 2:].sum())
        if not self._left[epoch]:
            self.close(epoch, over=True)

    def open(self, first: int, over: int) -> list[int]:
        """The epochs that are not closed, those from `first` on that are over included."""
        unseen = [epoch for epoch in range(first, over) if epoch not in self._closed]
        return sorted(
            {
                *self._pieces,
                *(each for each in unseen if self._source.expected_positions(each).any()),
            }
        )

    def close(self, epoch: int, *, over: bool) -> None:
        """Checks an epoch: each position at most once and, if it is over, all that are due.

        Raises:
            NotAsPlanned: a position is there twice, or is missing.
        """
        due = self._source.expected_positions(epoch)
        sides = due.shape[1]
        none = np.zeros((0, 2 + sides), np.int64)
        pieces = np.concatenate([none, *self._pieces.pop(epoch, [])])
        self._left.pop(epoch, None)
        self._closed.add(epoch)
        lengths = as_lengths(self._source.lengths.given).reshape(due.shape)
        covered = np.stack(
            [self._once(epoch, pieces, side, lengths[:, side]) for side in range(sides)],
            axis=1,
        )
        self.times += covered.any(axis=1)
        total = int(covered.sum())
        wrong = (covered != due if over else covered > due).any(axis=1)
        if wrong.any():
            first = int(wrong.argmax())
            raise NotAsPlanned(
                f"epoch {epoch}{self._of} of the plan has {covered[first].sum():,} of the "
                f"{due[first].sum():,} positions of example {first:,} ({np.count_nonzero(wrong):,} "
                "such examples). This is a defect of Lockstep: please report it"
            )
        if not over:
            self._report(f"epoch {epoch}{self._of}, not over: {total:,} positions, none twice")
            return
        there = int(lengths[: self._source.count_examples(epoch)].sum(dtype=np.int64))
        lost = f"; {there - total:,} in no batch" * (total < there)
        self._report(f"epoch {epoch}{self._of}: {total:,} positions, each once{lost}")

    def _once(self, epoch: int, pieces: np.ndarray, side: int, lengths: np.ndarray) -> np.ndarray:
        """Positions of each example on one side that some pieces have, none of them twice."""
        example, start, size = pieces[:, [0, 1, 2 + side]].T
        order = np.lexsort((start, example))
        example, start, size = example[order], start[order], size[order]
        end = start + size
        wrong = end > lengths[example]
        wrong[:-1] |= (np.diff(example) == 0) & (end[:-1] > start[1:])
        if wrong.any():
            raise NotAsPlanned(
                f"epoch {epoch}{self._of} of the plan has positions of example "
                f"{example[wrong.argmax()]:,} twice, or some that it does not have. This is a "
                "defect of Lockstep: please report it"
            )
        return np.bincount(example, size, len(lengths)).astype(np.int64)


class Ledger:
    """Counts the epochs of every corpus of a plan.

    Args:
        plan: which; it may change on the way.
        report: is called with a line for each epoch.
        first_epoch: the first epoch of which batches are counted.
    """

    def __init__(self, plan: Plan, report: Callable[[str], None], first_epoch: int = 0):
        self._plan, self._first_epoch = plan, first_epoch
        sources = plan.stages[-1].sources
        self._ends = np.array([source.first + len(source.lengths) for source in sources])
        self._first = [source.first for source in sources]
        self._accounts = [Account(source, report) for source in sources]

    @property
    def times(self) -> np.ndarray:
        """In how many epochs of its corpus each example was: int64 [examples]."""
        return np.concatenate([account.times for account in self._accounts])

    def add(self, planned: PlannedBatch) -> None:
        """Counts the next batch.

        Raises:
            NotAsPlanned: an epoch has a position twice, or not all that are due.
        """
        source = np.searchsorted(self._ends, planned.segments[:, 1], side="right")
        epochs = planned.epoch_of_segments
        for number in np.unique(source).tolist():
            for epoch in np.unique(epochs[source == number]).tolist():
                pieces = planned.segments[(source == number) & (epochs == epoch), 1:]
                pieces[:, 0] -= self._first[number]
                self._accounts[number].add(epoch, pieces)

    def finish(self, steps: int) -> None:
        """Checks the epochs in progress, after so many batches.

        Raises:
            NotAsPlanned: as `add`.
        """
        over = figures.whole_epochs(self._plan, steps)
        for account, whole in zip(self._accounts, over.values(), strict=True):
            for epoch in account.open(self._first_epoch, whole):
                account.close(epoch, over=epoch < whole)


def some(numbers: np.ndarray) -> str:
    """The first of some numbers, and how many there are if that is more."""
    shown = ", ".join(map(str, numbers[:SHOWN].tolist()))
    return shown if len(numbers) <= SHOWN else f"{shown}, … ({len(numbers):,} in all)"
