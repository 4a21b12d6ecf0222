"""The ledger: each epoch of a plan, counted over its batches, against what it owes.

What a plan promises is not taken from it, but found here: no position twice and, of a whole epoch,
all that are due.
"""

from collections.abc import Callable, Sequence

import numpy as np

from pipeline.planning.chain import Chain
from pipeline.planning.mixture import Mixture
from pipeline.planning.mixture_chain import MixtureChain
from pipeline.planning.plan import Plan
from pipeline.planning.planned import MixedBatch, PlannedBatch
from pipeline.planning.schedule import RunPlan

# Examples and steps that are named one by one.
SHOWN = 10


class NotAsPlanned(ValueError):
    """What a run did is not what was planned; the message names the step."""


class Account:
    """The positions of one corpus that epochs had, and how many epochs each example was in.

    Args:
        name: of the corpus, among several; empty for the only one.
        lengths: int [examples], or of pairs [examples, 2].
        tell: is told of each epoch.
    """

    def __init__(self, name: str, lengths: np.ndarray, tell: Callable[[str], None]):
        self.sizes = np.asarray(lengths).astype(np.int64).reshape(len(lengths), -1)
        self.times = np.zeros(len(lengths), np.int64)
        self._of, self._tell = f" of {name}" if name else "", tell
        self._pieces: dict[int, list[np.ndarray]] = {}
        self._positions: dict[int, int] = {}

    def add(self, epoch: int, pieces: np.ndarray) -> int:
        """Notes some pieces, int64 [n, 3 or 4] without their rows; the epoch's positions so far."""
        self._pieces.setdefault(epoch, []).append(pieces)
        self._positions[epoch] = self._positions.get(epoch, 0) + int(pieces[:, 2:].sum())
        return self._positions[epoch]

    @property
    def open(self) -> list[int]:
        """The epochs that are not closed, ascending."""
        return sorted(self._pieces)

    def close(
        self,
        epoch: int,
        due: np.ndarray | None,
        excused: np.ndarray | None = None,
        known: int | None = None,
        said: Sequence[str] = (),
    ) -> None:
        """Counts an epoch: each position at most once and, if it is whole, all that are due.

        Args:
            epoch: which it is.
            due: positions that it owes of each example, as `sizes`; None if it is not over.
            excused: the examples of which it may have fewer.
            known: how many examples there were; None for all.
            said: what to tell of it beside.

        Raises:
            NotAsPlanned: a position is there twice, or is missing.
        """
        sides = self.sizes.shape[1]
        pieces = np.concatenate(self._pieces.pop(epoch, [np.zeros((0, 2 + sides), np.int64)]))
        self._positions.pop(epoch, None)
        covered = np.stack([self._once(epoch, pieces, side) for side in range(sides)], axis=1)
        self.times += covered.any(axis=1)
        total = int(covered.sum())
        if due is None:
            self._tell(f"epoch {epoch}{self._of}, not over: {total:,} positions, none twice")
            return
        wrong = (covered != due).any(axis=1)
        if excused is not None:
            wrong = np.where(excused, (covered > due).any(axis=1), wrong)
        if wrong.any():
            first = int(wrong.argmax())
            raise NotAsPlanned(
                f"epoch {epoch}{self._of} of the plan has {covered[first].sum():,} of the "
                f"{due[first].sum():,} positions of example {first:,} ({np.count_nonzero(wrong):,} "
                "such examples). This is a defect of Lockstep: please report it"
            )
        there = int(self.sizes[:known].sum())
        self._tell(
            f"epoch {epoch}{self._of}: {total:,} of {there:,} positions, each once"
            + f"; {there - total:,} in no batch" * (total < there)
        )
        for each in dict.fromkeys(said):
            self._tell(f"  {each}")

    def _once(self, epoch: int, pieces: np.ndarray, side: int) -> np.ndarray:
        """Positions of each example on one side that some pieces have, none of them twice."""
        example, start, size = pieces[:, [0, 1, 2 + side]].T
        order = np.lexsort((start, example))
        example, start, size = example[order], start[order], size[order]
        end = start + size
        wrong = end > self.sizes[example, side]
        wrong[:-1] |= (np.diff(example) == 0) & (end[:-1] > start[1:])
        if wrong.any():
            raise NotAsPlanned(
                f"epoch {epoch}{self._of} of the plan has positions of example "
                f"{example[wrong.argmax()]:,} twice, or such as it does not have. This is a defect "
                "of Lockstep: please report it"
            )
        return np.bincount(example, size, len(self.sizes)).astype(np.int64)


class ChainLedger:
    """Counts the epochs of a plan that may change on the way.

    Args:
        plan: which.
        lengths: of all examples that there ever were.
        tell: is told of each epoch.
    """

    def __init__(self, plan: Chain, lengths: np.ndarray, tell: Callable[[str], None]):
        self._plan, self._account, self._epoch = plan, Account("", lengths, tell), 0

    @property
    def times(self) -> np.ndarray:
        """In how many epochs each example was: int64 [examples]."""
        return self._account.times

    def add(self, planned: PlannedBatch) -> None:
        """Counts the next batch."""
        if planned.epoch != self._epoch:
            self._close(whole=True)
            self._epoch = planned.epoch
        self._account.add(planned.epoch, planned.segments[:, 1:])

    def finish(self, steps: int) -> None:
        """Counts what is left, after so many batches."""
        self._close(whole=steps == self._plan.first_step(self._epoch + 1))

    def _close(self, *, whole: bool) -> None:
        if not whole:
            self._account.close(self._epoch, None)
            return
        # The plan with which the epoch began, and those that took over inside it.
        plan, sizes = self._plan, self._account.sizes
        first, after = plan.first_step(self._epoch), plan.first_step(self._epoch + 1)
        begun = [link for link in plan.links if link.step <= first][-1]
        later, before = [], begun
        for link in plan.links:
            # One at whose step the epoch was over by itself has nothing of it.
            if first < link.step <= after and before.first(self._epoch + 1) != link.step:
                later.append(link)
            before = link
        known = max(link.plan.num_examples for link in [begun, *later] if link.step < after)
        due = owed(begun.plan, sizes)
        due[begun.left_out] = 0
        due[begun.plan.num_examples :] = 0
        excused = np.zeros(len(sizes), bool)
        said, count = [], begun.plan.num_examples
        for link in [begun, *later]:
            over = overlong(link.plan, sizes)
            over[link.left_out] = False
            over[link.plan.num_examples :] = False
            if link is not begun:
                excused[link.left_out] = True
                if link.step < after:  # what is new joins the epoch
                    new = slice(count, link.plan.num_examples)
                    due[new] = owed(link.plan, sizes)[new]
                    count = link.plan.num_examples
                excused |= over if link.plan.overflow != "split" else False
            if over.any() and link.step < after and link.plan.overflow != "split":
                how = "cut" if link.plan.overflow == "truncate" else "dropped"
                longest = " and ".join(f"{each:,}" for each in link.plan.buckets[-1].lengths)
                said.append(
                    f"documents longer than {longest} are {how} "
                    f"(overflow={link.plan.overflow!r}): {some(np.flatnonzero(over))}"
                )
        self._account.close(self._epoch, due, excused, known, said)


class MixtureLedger:
    """Counts the epochs that each corpus of a mixture has of its own.

    Args:
        plan: which; it may change on the way.
        lengths: of the examples of all corpora, one after another.
        tell: is told of each epoch.
    """

    def __init__(
        self, plan: Mixture | MixtureChain, lengths: np.ndarray, tell: Callable[[str], None]
    ):
        self._plan, self._ends = plan, np.append(plan.first_examples[1:], len(lengths))
        parts = np.split(np.asarray(lengths), self._ends[:-1])
        self._accounts = {
            name: Account(name, part, tell) for name, part in zip(plan.names, parts, strict=True)
        }
        self._dues: dict[tuple[str, int], tuple[np.ndarray, np.ndarray | None]] = {}

    @property
    def times(self) -> np.ndarray:
        """In how many epochs of its corpus each example was: int64 [examples]."""
        return np.concatenate([account.times for account in self._accounts.values()])

    def add(self, planned: PlannedBatch) -> None:
        """Counts the next batch."""
        assert isinstance(planned, MixedBatch)
        source = np.searchsorted(self._ends, planned.segments[:, 1], side="right")
        for number in np.unique(source).tolist():
            mine, name = source == number, self._plan.names[number]
            pieces = planned.segments[mine, 1:]
            pieces[:, 0] -= self._plan.first_examples[number]
            epochs, account = planned.epochs[mine], self._accounts[name]
            for epoch in np.unique(epochs).tolist():
                positions = account.add(epoch, pieces[epochs == epoch])
                due, excused = self._due(name, epoch)
                if excused is None and positions == due.sum():
                    account.close(epoch, due)
                    del self._dues[name, epoch]

    def finish(self, steps: int) -> None:
        """Counts what is left, after so many batches."""
        whole = self._plan.whole_epochs(steps)
        for name, account in self._accounts.items():
            for epoch in account.open:
                due, excused = self._due(name, epoch)
                account.close(epoch, due if epoch < whole[name] else None, excused)

    def _due(self, name: str, epoch: int) -> tuple[np.ndarray, np.ndarray | None]:
        """What an epoch of a corpus owes, and of which examples it may have less; None: of none."""
        if (name, epoch) not in self._dues:
            stages = [stage for stage in self._plan.plans if name in stage.supplies]
            at = max(n for n, stage in enumerate(stages) if stage.supplies[name].epoch <= epoch)
            sizes = self._accounts[name].sizes
            due = owed(stages[at].supplies[name].whole, sizes)
            due[stages[at].left_out[name]] = 0
            later = [each for each in stages[at + 1 :] if epoch in each.supplies[name].begun]
            excused = np.zeros(len(sizes), bool)
            for stage in later:
                excused[stage.left_out[name]] = True
                if stage.overflow != "split":
                    excused |= overlong(stage.supplies[name].whole, sizes)
            self._dues[name, epoch] = due, excused if later else None
        return self._dues[name, epoch]


def ledger(plan: RunPlan, lengths: np.ndarray, tell: Callable[[str], None]):
    """The ledger for a plan, to be told of one batch after another."""
    if isinstance(plan, Chain):
        return ChainLedger(plan, lengths, tell)
    return MixtureLedger(plan, lengths, tell)


def overlong(plan: Plan, sizes: np.ndarray) -> np.ndarray:
    """Which examples, of int64 [n, sides], the plan's longest bucket does not hold; bool [n]."""
    return (sizes > plan.buckets[-1].lengths).any(axis=1) & (sizes[:, -1] > 0)


def owed(plan: Plan, sizes: np.ndarray) -> np.ndarray:
    """The positions of each example that a whole epoch of a plan has: as `sizes`."""
    due = np.where(sizes[:, -1:] > 0, sizes, 0)  # pairs without targets are in no batch
    if plan.overflow == "truncate":
        return np.minimum(due, plan.buckets[-1].lengths)
    if plan.overflow == "drop":
        due[overlong(plan, sizes)] = 0
    return due


def some(numbers: np.ndarray) -> str:
    """The first of some numbers, and how many there are if that is more."""
    shown = ", ".join(map(str, numbers[:SHOWN].tolist()))
    return shown if len(numbers) <= SHOWN else f"{shown}, … ({len(numbers):,} in all)"
