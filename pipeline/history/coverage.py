"""Coverage: whether the batches of a plan have each position of an epoch once, by counting."""

from collections.abc import Callable
from typing import NoReturn

import numpy as np

from pipeline.errors import InvalidValue, counted
from pipeline.history.plans import find_corpora
from pipeline.planning.plan import Plan
from pipeline.planning.planned import PlannedBatch
from pipeline.planning.stream import expected_positions


class NotAsPlanned(InvalidValue):
    """The batches of a run are not those that were planned; the message says what is wrong."""


class Coverage:
    """Checks that the batches of a plan have each position of an epoch once.

    An epoch has each position at most once and, if it is over, each position that is due. The plan
    may have changes and mix corpora. `report` is called with a line for each epoch. The check of a
    single corpus may begin with a later `epoch`.
    """

    def __init__(self, plan: Plan, report: Callable[[str], None], epoch: int = 0):
        self._plan, self._report = plan, report
        self._step = plan.first_step(epoch) if epoch else 0
        self._over = [epoch] * len(plan.names)  # the number of epochs of each corpus that are over
        # By epoch and corpus, until the epoch is over: example, first position, and sizes by side.
        self._pieces: dict[tuple[int, int], list[np.ndarray]] = {}

    def add(self, planned: PlannedBatch) -> None:
        """Takes the next batch; raises `NotAsPlanned` if an epoch that is over is wrong."""
        owner, several = find_corpora(self._plan, planned.segments[:, 1]), len(self._plan.names)
        key = planned.epoch_of_segments * several + owner
        for each in np.unique(key).tolist():
            epoch, which = divmod(each, several)
            pieces = planned.segments[key == each, 1:]
            pieces[:, 0] -= self._plan.stages[-1].streams[which].first
            if (epoch, which) not in self._pieces:
                self._close()
                if epoch < self._over[which]:
                    self._fail(epoch, which, f"is over, but has example {pieces[0, 0]:,} again")
            self._pieces.setdefault((epoch, which), []).append(pieces)
        self._step += 1

    def finish(self) -> None:
        """Checks all epochs after the last batch; raises like `add`."""
        self._close()
        for epoch, which in sorted(self._pieces):
            self._check(epoch, which)

    def _close(self) -> None:
        """Checks the epochs that are over before the next step, and drops their pieces."""
        if not self._step:
            return
        before, over = self._over, self._plan.whole_epochs(self._step).values()
        self._over = [*map(max, before, over)]
        for which, (first, last) in enumerate(zip(before, self._over, strict=True)):
            for epoch in range(first, last):
                self._check(epoch, which)
                self._pieces.pop((epoch, which), None)

    def _check(self, epoch: int, which: int) -> None:
        """Checks the pieces of an epoch so far."""
        over = epoch < self._over[which]
        due, lost = expected_positions(self._plan.streams_of(which, self._step), epoch)
        taken = self._pieces.get((epoch, which), [])
        if not taken and not due.any():  # the corpus joins later
            return
        # Pieces and what a change of the plan has lost make up each example. Of pairs, pieces may
        # follow what is lost on one side.
        limit, lost_positions = due.copy(), int(lost[:, 2:].sum())
        np.add.at(limit, lost[:, 0], lost[:, 2:])
        if due.shape[1] == 1:
            due = limit
        else:
            lost, lost_positions = lost[:0], 0
        pieces = np.concatenate([np.zeros((0, 2 + due.shape[1]), np.int64), *taken, lost])
        pieces = pieces[np.lexsort((pieces[:, 1], pieces[:, 0]))]
        example, start, size = pieces[:, 0], pieces[:, 1:2], pieces[:, 2:]
        beyond = max(int(example.max(initial=-1)) + 1 - len(due), 0)  # examples that do not exist
        due, limit = (np.pad(each, ((0, beyond), (0, 0))) for each in (due, limit))
        covered, wrong, end = np.zeros_like(due), np.zeros(len(due), bool), start + size
        np.add.at(covered, example, size)
        outside = (end > limit[example]).any(axis=1)
        overlaps = (example[1:] == example[:-1]) & (end[:-1] > start[1:]).any(axis=1)
        wrong[example[outside]] = wrong[example[1:][overlaps]] = True
        wrong |= (covered > due).any(axis=1)
        if over:
            wrong |= (covered < due).any(axis=1)
        if wrong.any():
            first = int(wrong.argmax())
            self._fail(
                epoch,
                which,
                f"does not have each of the {due[first].sum():,} positions of example {first:,} "
                f"once ({counted(int(wrong.sum()), 'such example')})",
            )
        total, name = int(covered.sum()) - lost_positions, self._name(epoch, which)
        if over:
            self._report(f"{name}: {total:,} positions, each once")
        else:
            self._report(f"{name}, not over: {total:,} positions, none twice")

    def _name(self, epoch: int, which: int) -> str:
        name = self._plan.names[which]
        return f"epoch {epoch} of {name}" if name else f"epoch {epoch}"

    def _fail(self, epoch: int, which: int, what: str) -> NoReturn:
        raise NotAsPlanned(
            f"{self._name(epoch, which)} of the plan {what}. This is a defect of Lockstep: please "
            "report it"
        )
