"""Checkpoints: a model's state, and the data state that says which batch comes next.

The data state is a step, and the fingerprint of the plan whose steps it counts. It is small JSON,
the same on every host and for any number of hosts:

    {"step": 12, "plans": [{"from": 0, "fingerprint": "plan=2;lengths=…", "corpus": "tokens=…"}]}

A plan that changes (`Plan.after`) has an entry for each of its stages; entries after the first
have their "changes". Where corpora join, an entry has the fingerprint of all corpora until then.
`"positions": "restart"` is there if batches are built with that option, and `"order"` if they are
sliced, shuffled or stacked by Grain: steps are then counted after that.
"""

import contextlib
import json
import re
from typing import Any

from etils import epath

from pipeline.atomic import name_full_disk
from pipeline.planning.lengths import take_first
from pipeline.planning.plan import Plan
from pipeline.storage.interface import AnyCorpus

# Statuses of storage for files that are missing or damaged.
DAMAGE = ("NOT_FOUND", "OUT_OF_RANGE", "DATA_LOSS", "FAILED_PRECONDITION")


def data_state(
    step: int, plan: Plan, corpus: AnyCorpus | None = None, positions: str = "continue"
) -> dict[str, Any]:
    """The state after `step` batches of `plan`, with tokens of `corpus` and as `positions` says."""
    entries = [dict(entry) for entry in plan.entries_at(int(step))]
    for entry, count, before in zip(entries, plan.counts, (0, *plan.counts), strict=False):
        if count != before and corpus is not None:
            known = corpus if count == len(corpus) else take_first(corpus, count)
            entry["corpus"] = known.fingerprint
    state = {"step": int(step), "plans": entries}
    return state if positions == "continue" else {**state, "positions": positions}


def check_data_state(
    state: Any, plan: Plan, corpus: AnyCorpus | None = None, positions: str = "continue"
) -> int:
    """The step of `state`, if it counts steps of this plan, this corpus and these positions.

    The plan must be the same up to that step. Later stages may differ: a run may change its future.

    Raises:
        ValueError: `state` is no data state, or belongs to another plan or corpus; the message
            names each part that differs, with both values.
    """
    if not _is_state(state):
        raise ValueError(
            f"{str(state)[:200]!r} is not a data state; one looks like "
            f"{data_state(0, plan)}, and comes from get_state() or a checkpoint's 'data' item"
        )
    step, then = state["step"], state["plans"]
    if type(step) is not int or step < 0:
        raise ValueError(f"the state's step is {step!r}; it must be a whole number from 0")
    if corpus is not None and "corpus" not in then[0]:
        raise ValueError(
            f"the state of step {step:,} does not say which corpus it belongs to, so it cannot be "
            "compared; restore it with the plan alone (check_data_state without a corpus)"
        )
    if (saved := state.get("positions", "continue")) != positions:
        raise ValueError(
            f"the state of step {step:,} was saved with positions={saved!r} and is restored with "
            f"positions={positions!r}; load with positions={saved!r} to go on, or start anew"
        )
    now = data_state(step, plan, corpus)["plans"]
    if changes := _changes(step, then, now):
        raise ValueError(
            f"the state of step {step:,} belongs to another plan or corpus: {'; '.join(changes)}. "
            "Restore it with what it was saved with, or start anew in another directory"
        )
    return step


def _is_state(state: Any) -> bool:
    """Whether `state` has the form of a data state; its step is not checked."""
    if not isinstance(state, dict) or not {"step", "plans"} <= {*state}:
        return False
    plans = state["plans"]
    if not isinstance(plans, list | tuple) or not plans:
        return False
    if not all(isinstance(entry, dict) for entry in plans):
        return False
    starts = [entry.get("from") for entry in plans]
    texts = [entry.get("fingerprint") for entry in plans]
    texts += [entry["corpus"] for entry in plans if "corpus" in entry]
    whole = all(type(start) is int for start in starts)
    text = all(isinstance(each, str) for each in texts)
    return whole and text and starts == sorted(starts) and starts[0] == 0


def _changes(step: int, then: list[dict], now: list[dict]) -> list[str]:
    """The first difference, before `step`, of the entries of a state and of a plan, in words.

    Two changes at one step are two entries, so entries are compared one by one.
    """
    sides = [[entry for entry in some if entry["from"] < max(step, 1)] for some in (then, now)]
    for number in range(max(map(len, sides))):
        # A side that has no entry here goes on under its entries before.
        at = min(side[number]["from"] for side in sides if number < len(side))
        there = [number < len(side) and side[number]["from"] == at for side in sides]
        old, new = (
            [entry for entry in side[: number + 1] if entry["from"] <= at] for side in sides
        )
        found = []
        for what in ("corpus", "fingerprint"):
            held = [[entry[what] for entry in some if what in entry][-1:] for some in (old, new)]
            if all(held):
                found += differences(held[0][0], held[1][0])
        if not all(there):
            found = found or [f"its plan changes {'there' if there[0] else 'here'} alone"]
        if found:
            return [f"{change} from step {at:,} on" if at else change for change in found]
    return []


def differences(then: str, now: str) -> list[str]:
    """Each part that differs between two fingerprints, in words.

    >>> differences("plan=1;seed=3;shuffle=yes", "plan=1;seed=4;shuffle=yes")
    ['seed was 3 and is now 4']
    """
    old, new = (
        {name: value for name, _, value in (part.partition("=") for part in text.split(";"))}
        for text in (then, now)
    )
    return [
        f"{name} was {old.get(name, 'not given')} and is now {new.get(name, 'not given')}"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    ]


class Checkpoints:
    """A directory of checkpoints, written by orbax in the background; the latest ones stay.

    A checkpoint has three items: `state` (a pytree of arrays, resharded on restore), `data` (the
    data state) and `run` (any JSON). In a training loop:

        checkpoints = Checkpoints("runs/mine/checkpoints")
        if checkpoints.latest is not None:
            state, data = checkpoints.restore(like=state)
            loader.set_state(data)
        …
        checkpoints.save(step, state, data=loader.get_state())
        …
        checkpoints.close()

    In a `with` statement it closes itself, unless the block ends with an error after which other
    processes may be gone.

    orbax reads one without Lockstep: see docs/reports.md.

    Args:
        directory: local, or object storage that orbax can write (`gs://…`).
        keep: how many of the latest checkpoints stay.
    """

    def __init__(self, directory: epath.PathLike, *, keep: int = 3):
        import orbax.checkpoint as ocp

        self._args, self._orbax = ocp.args, ocp
        self._manager = ocp.CheckpointManager(
            epath.Path(directory).absolute() if "://" not in str(directory) else directory,
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=True),
        )

    @property
    def latest(self) -> int | None:
        """The step of the latest checkpoint; None if there is no checkpoint."""
        return self._manager.latest_step()

    def save(
        self, step: int, state: Any, *, data: dict[str, Any], run: dict[str, Any] | None = None
    ) -> None:
        """Starts to save; returns once the arrays are copied and may be donated.

        Args:
            step: steps that `state` has had, as many as `data` counts.
            state: a pytree of jax.Arrays.
            data: the data state, `loader.get_state()`.
            run: any JSON that the run wants back; None: empty.

        Raises:
            OSError: the disk is full; also for the checkpoint before, which is written meanwhile.
        """
        args = self._args
        items = {"data": args.JsonSave(data), "run": args.JsonSave(run or {})}
        with name_full_disk(self._manager.directory):
            self._manager.save(step, args=args.Composite(state=args.StandardSave(state), **items))

    def restore(self, like: Any, step: int | None = None) -> tuple[Any, dict[str, Any]]:
        """The state and the data state of a checkpoint.

        Args:
            like: a pytree with the shapes, dtypes and shardings of the state: the state that
                training begins with, or its `jax.eval_shape` with shardings.
            step: of the checkpoint; None: the latest.

        Raises:
            ValueError: there is no checkpoint, it is damaged, or its state is not `like` this one.
        """
        if step is None and (step := self.latest) is None:
            raise ValueError(f"there is no checkpoint in {self._manager.directory}")
        data, _ = self.restore_json(step)
        return self.restore_state(step, like), data

    def restore_json(self, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The `data` and `run` items of the checkpoint of `step`.

        Raises:
            ValueError: the checkpoint is damaged.
        """
        args = self._args
        items = self._restore(step, data=args.JsonRestore(), run=args.JsonRestore())
        data, run = items["data"], items["run"]
        if not isinstance(data, dict) or data.get("step") != step:
            directory = self._manager.directory / str(step)
            raise ValueError(
                f"the data state in {directory} is that of step {dict(data or {}).get('step')!r}: "
                "the checkpoint is damaged. Delete that directory to go on from the one before"
            )
        return data, run

    def restore_state(self, step: int, like: Any) -> Any:
        """The `state` item of the checkpoint of `step`, with the shardings of `like`.

        Raises:
            ValueError: the checkpoint is damaged, or its state is not `like` this one.
        """
        return self._restore(step, state=self._args.StandardRestore(like))["state"]

    def close(self) -> None:
        """Waits until everything is saved, and lets go of the directory."""
        with name_full_disk(self._manager.directory):
            self._manager.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A loss that is not finite stops all processes at the same step, so a save that has begun
        # can end. After another error, other processes may be gone, and waiting for them hangs.
        if kind is None or issubclass(kind, FloatingPointError):
            self.close()

    def _restore(self, step: int, **items: Any) -> Any:
        """Items of a checkpoint; errors of orbax become sentences."""
        directory = self._manager.directory / str(step)
        try:
            return self._manager.restore(step, args=self._args.Composite(**items))
        except Exception as error:
            what = str(error).strip("'").partition("\n")[0][:200]
            # Storage errors begin with a status, such as "NOT_FOUND: ".
            status = re.match("([A-Z_]+): ", str(error.__cause__ or error))
            if status[1] in DAMAGE if status else _is_damage(error):
                whole = self._whole_before(step)
                if whole is None:
                    every = self._manager.directory
                    advice = f"no earlier checkpoint is whole: delete {every} to begin anew"
                else:
                    advice = f"delete that directory to go on from step {whole:,}"
                raise ValueError(
                    f"{directory} is a damaged checkpoint, or none ({what}); {advice}"
                ) from error
            if type(error) is ValueError and not status:  # the tree or a shape differs
                raise ValueError(
                    f"the state in {directory} is not like the one to restore: {what}. Use the "
                    "model and optimizer that it was saved with"
                ) from error
            raise

    def _whole_before(self, step: int) -> int | None:
        """The latest earlier step whose JSON items, and description of the state, can be read."""
        for earlier in sorted(self._manager.all_steps(), reverse=True):
            if earlier < step:
                with contextlib.suppress(Exception), self._orbax.StandardCheckpointer() as reader:
                    reader.metadata(self._manager.directory / str(earlier) / "state")
                    self.restore_json(earlier)
                    return earlier
        return None


def _is_damage(error: Exception) -> bool:
    """Whether files are missing or damaged; not if memory or permissions are missing, say."""
    kinds = (FileNotFoundError, NotADirectoryError, KeyError, UnicodeError, json.JSONDecodeError)
    misread = (AttributeError, TypeError)  # orbax takes what JSON holds for what it wrote
    # It raises a plain Exception for an array whose chunks cannot be read, and a ValueError for an
    # index of arrays that cannot be decoded.
    undecodable = type(error) is ValueError and str(error).startswith("Error opening")
    return isinstance(error, kinds + misread) or type(error) is Exception or undecodable
