"""The account: what a history must show, told by actors, by code that it shares with no one."""

import collections
import hashlib
from typing import Any

import numpy as np

from tests.simulation.scheduler import Process, Scheduler, Wrong


def join(inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Positions: each the id that is read there, and the one that is learnt: int64."""
    return np.asarray(inputs, np.int64) << 32 | np.asarray(targets, np.int64)


class Account:
    """What actors saw.

    Attributes:
        acknowledged: by corpus, the number of examples that its writer was told are sealed.
        finished: the corpora whose writers were told that they are finished.
        steps: by reader, how many batches there are, once one saw the end.
        counts: figures of what happened.
    """

    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler
        self.acknowledged: dict[str, int] = collections.defaultdict(int)
        self.finished: set[str] = set()
        self.steps: dict[str, int] = {}
        self.counts: collections.Counter[str] = collections.Counter()
        self._rows: dict[tuple[str, int], dict[int, tuple[str, np.ndarray]]] = {}
        self._buckets: dict[tuple[str, int], str] = {}
        self._states: dict[tuple[str, int], Any] = {}
        self._holders: dict[str, Process] = {}

    def require(self, holds: Any, what: str) -> None:
        """Ends the history with `what` if something does not hold."""
        if not holds:
            self._scheduler.fail(what)
            raise Wrong(what)

    # ---- writers

    def begin(self, corpus: str, due: int, cursor: int, examples: int) -> None:
        """A writer begins with this cursor and so many examples; `due` were acknowledged."""
        self.require(
            due <= cursor == examples,
            f"{corpus}: {due} examples were acknowledged; the cursor is {cursor}, and {examples} "
            "examples are there",
        )

    def seal(self, corpus: str, examples: int) -> None:
        """A writer was told that so many examples are sealed."""
        self._scheduler.note(f"{examples} examples of {corpus} are acknowledged")
        self.acknowledged[corpus] = max(examples, self.acknowledged[corpus])
        self.counts["seals"] += 1

    # ---- locks

    def enter(self, lock: str) -> None:
        """The running process was given a lock that ends with its holder."""
        me = self._me
        holder = self._holders.get(lock)
        both = holder is not None and holder is not me and holder.alive
        self.require(not both, f"{lock}: {holder and holder.name} and {me.name} hold it")
        self._holders[lock] = me

    def leave(self, lock: str) -> None:
        """The running process ends its hold."""
        self._holders.pop(lock, None)

    @property
    def _me(self) -> Process:
        return self._scheduler.me.process

    # ---- readers

    def see(self, reader: str, step: int, planned: Any, first: int, batch: Any, state: Any) -> None:
        """A host sees its rows of a batch, from row `first` on, and the state after it."""
        at, names = (reader, step), sorted(batch)
        bucket, what = f"{planned.bucket}", f"{reader}, step {step}"
        self.require(self._buckets.setdefault(at, bucket) == bucket, f"{what}: shapes differ")
        self.require(self._states.setdefault(at, state) == state, f"{what}: states differ")
        epochs = np.full(planned.bucket.rows, -1)
        epochs[planned.segments[:, 0]] = planned.epoch_of_segments
        rows = self._rows.setdefault(at, {})
        for row in range(len(batch[names[0]])):
            sha = hashlib.sha256()
            for name in names:
                sha.update(name.encode() + np.asarray(batch[name][row]).tobytes())
            learns = (batch["loss_weights"][row] > 0) & (epochs[first + row] == 0)
            ids = join(batch["inputs"][row][learns], batch["targets"][row][learns])
            there = rows.setdefault(first + row, (sha.hexdigest(), ids))
            self.require(there[0] == sha.hexdigest(), f"{what}: row {first + row} differs")
        self.counts["batches"] += 1

    def end(self, reader: str, steps: int) -> None:
        """A host sees the end of the batches."""
        self.require(
            self.steps.setdefault(reader, steps) == steps,
            f"{reader}: {self.steps[reader]} batches, and then {steps}",
        )

    def forget(self, reader: str, step: int) -> None:
        """The reader changes its plan from a step on."""
        self.steps.pop(reader, None)
        for seen in (self._rows, self._buckets, self._states):
            for at in [at for at in seen if at[0] == reader and at[1] >= step]:
                del seen[at]

    def require_each_once(
        self,
        reader: str,
        due: list[np.ndarray],
        held_out: list[np.ndarray],
        limit: int,
        *,
        cut: bool,
    ) -> None:
        """Refuses batches that do not have each position once in the first epoch.

        Those `held_out` have no batch, and ids from `limit` on do not count. Unless examples may be
        `cut`, the positions of each are in one row.
        """
        steps, every = self.steps[reader], list[np.ndarray]()
        for step in range(steps):
            rows = self._rows.get((reader, step), {})
            self.require(len(rows), f"{reader}: step {step} of {steps} was seen by no one")
            every += [row[1] for row in rows.values()]
        none = np.zeros(0, np.int64)
        row = np.arange(len(every)).repeat([*map(len, every)])
        learnt = np.concatenate([none, *every])
        learnt, row = learnt[learnt < limit << 32], row[learnt < limit << 32]
        found = np.sort(np.concatenate([learnt, *held_out]))
        wanted = np.sort(np.concatenate([none, *due]))
        if not np.array_equal(found, wanted):
            twice = found[1:][found[1:] == found[:-1]][:5] & 0xFFFFFFFF
            never = np.setdiff1d(wanted, found)[:5] & 0xFFFFFFFF
            other = np.setdiff1d(found, wanted)[:5] & 0xFFFFFFFF
            what = f"ids {twice} come twice, {never} never, {other} are of no sealed example"
            self.require(False, f"{reader}: {what}")
        where = dict(zip(learnt.tolist(), row.tolist(), strict=True))
        for example in [] if cut or len(where) < len(learnt) else due:
            rows = {where.get(position) for position in example.tolist()}
            what = f"{reader}: the example of {example & 0xFFFFFFFF} is cut"
            self.require(len(rows) < 2, what)
