"""Checkpoints: a model's state, and the data state that says which batch comes next.

The data state is a step and the fingerprint of what it counts steps of. It is small JSON, the same
on every host and for any number of hosts:

    {"step": 12, "plans": [{"from": 0, "fingerprint": "plan=2;lengths=…", "corpus": "tokens=…"}]}
"""

from typing import Any

from etils import epath

from pipeline.plan import Plan


def data_state(step: int, plan: Plan, corpus=None) -> dict[str, Any]:
    """The state after `step` batches of `plan`, of the tokens of `corpus`."""
    entry = {"from": 0, "fingerprint": plan.fingerprint}
    if fingerprint := getattr(corpus, "fingerprint", None):
        entry["corpus"] = fingerprint
    return {"step": int(step), "plans": [entry]}


def check_data_state(state: Any, plan: Plan, corpus=None) -> int:
    """The step of `state`, after checking that it counts steps of this plan and corpus.

    Raises:
        ValueError: `state` is no data state, or is that of another plan or corpus; the message
            names each part that differs, with both values.
    """
    now = data_state(0, plan, corpus)["plans"][0]
    try:
        step, (then,) = state["step"], state["plans"]
        parts = [(then.get(key, ""), now.get(key, "")) for key in ("fingerprint", "corpus")]
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{str(state)[:200]!r} is not a data state; one looks like "
            f"{data_state(0, plan)}, and comes from get_state() or a checkpoint's 'data' item"
        ) from error
    if not isinstance(step, int) or step < 0:
        raise ValueError(f"the state's step is {step!r}; it must be a whole number from 0")
    changes = [change for pair in parts if all(pair) for change in differences(*pair)]
    if changes:
        raise ValueError(
            f"the state of step {step:,} belongs to another plan or corpus: {'; '.join(changes)}. "
            "Restore it with what it was saved with, or start anew in another directory"
        )
    return step


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
