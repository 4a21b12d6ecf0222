"""Checkpoints: a model's state, and the data state that says which batch comes next.

The data state is a step and the fingerprint of what it counts steps of. It is small JSON, the same
on every host and for any number of hosts:

    {"step": 12, "plans": [{"from": 0, "fingerprint": "plan=2;lengths=…", "corpus": "tokens=…"}]}

A plan that changes on the way (`Plan.after`) has an entry for each of its plans, those after the
first with their "changes"; and where other corpora join, the fingerprint of all there are then.
"""

from typing import Any

from etils import epath

from pipeline.planning.lengths import take_first
from pipeline.planning.plan import Plan
from pipeline.storage.interface import AnyCorpus


def data_state(step: int, plan: Plan, corpus: AnyCorpus | None = None) -> dict[str, Any]:
    """The state after `step` batches of `plan`, of the tokens of `corpus`."""
    entries = [dict(entry) for entry in plan.entries_at(int(step))]
    for entry, count, before in zip(entries, plan.counts, (0, *plan.counts), strict=False):
        if count != before and corpus is not None:
            known = corpus if count == len(corpus) else take_first(corpus, count)
            entry["corpus"] = known.fingerprint
    return {"step": int(step), "plans": entries}


def check_data_state(state: Any, plan: Plan, corpus: AnyCorpus | None = None) -> int:
    """The step of `state`, after checking that it counts steps of this plan and corpus.

    Up to that step the plan must be the same. From there on it may be another: what is past stands,
    and what is to come may change.

    Raises:
        ValueError: `state` is no data state, or is that of another plan or corpus; the message
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
    now = data_state(step, plan, corpus)["plans"]
    if changes := _changes(step, then, now):
        raise ValueError(
            f"the state of step {step:,} belongs to another plan or corpus: {'; '.join(changes)}. "
            "Restore it with what it was saved with, or start anew in another directory"
        )
    return step


def _is_state(state: Any) -> bool:
    """Whether something has the form of a data state, whatever its step is."""
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
    """What keeps a state with the entries `then` from going on under the entries `now`."""
    sides = [[entry for entry in some if entry["from"] < max(step, 1)] for some in (then, now)]
    for number in range(max(map(len, sides))):
        # Where one side has no change that the other has, what held before holds on.
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
    """What differs between two fingerprints, in words.

    >>> differences("plan=1;seed=3;shuffle=yes", "plan=1;seed=4;shuffle=yes")
    ['seed was 3 and is now 4']
    """
    old, new = (dict(p.partition("=")[::2] for p in text.split(";")) for text in (then, now))
    return [
        f"{name} was {old.get(name, 'not given')} and is now {new.get(name, 'not given')}"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    ]


class Checkpoints:
    """A directory of checkpoints, written by orbax in the background, the latest ones kept.

    Each has three items: `state` (any pytree of arrays; reshards on restore), `data` (the data
    state) and `run` (any JSON). Read one without Lockstep:

        orbax.checkpoint.CheckpointManager(directory).restore(
            step, args=orbax.checkpoint.args.Composite(
                state=orbax.checkpoint.args.StandardRestore()))["state"]

    Args:
        directory: local, or object storage that orbax can write (`gs://…`).
        keep: how many of the latest checkpoints stay.
    """

    def __init__(self, directory: epath.PathLike, *, keep: int = 3):
        import orbax.checkpoint as ocp

        self._args = ocp.args
        self._manager = ocp.CheckpointManager(
            epath.Path(directory).absolute() if "://" not in str(directory) else directory,
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=True),
        )

    @property
    def latest(self) -> int | None:
        """The step of the latest whole checkpoint; None when there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, *, data: dict[str, Any], run: dict[str, Any]):
        """Starts to save; returns once the arrays are copied and may be donated."""
        args = self._args
        self._manager.save(
            step,
            args=args.Composite(
                state=args.StandardSave(state), data=args.JsonSave(data), run=args.JsonSave(run)
            ),
        )

    def restore_json(self, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The `data` and `run` items of `step`."""
        args = self._args
        items = self._manager.restore(
            step, args=args.Composite(data=args.JsonRestore(), run=args.JsonRestore())
        )
        return items["data"], items["run"]

    def restore_state(self, step: int, like: Any) -> Any:
        """The `state` item of `step`, with the shapes, dtypes and shardings of `like`."""
        args = self._args
        items = self._manager.restore(step, args=args.Composite(state=args.StandardRestore(like)))
        return items["state"]

    def close(self):
        """Waits and lets go of the directory."""
        self._manager.close()
