"""The config of a run: which of its fields may change when the run goes on."""

from collections.abc import Collection, Mapping
from typing import Any

from pipeline.errors import InvalidValue

NONE = "not there"


def show_field(fields: Mapping[str, Any], name: str, missing: str = NONE) -> str:
    """The value of a field in a message: text in quotes."""
    return repr(fields[name]) if name in fields else missing


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The fields of a config and of the configs in it, by names with dots.

    >>> flatten({"steps": 1, "model": {"width": 8}})
    {'steps': 1, 'model.width': 8}
    """
    fields: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            fields |= flatten(value, f"{prefix}{name}.")
        else:
            fields[prefix + name] = value
    return fields


def require_same(
    run: Mapping[str, Any], now: Mapping[str, Any], may_change: Collection[str]
) -> None:
    """Refuses a config under which a run cannot go on.

    Args:
        run: the `run` item of its checkpoint, JSON values: `config`, `schedule` and `record`.
        now: the config that it is given; None stands for the value that the run has.
        may_change: names of fields that may differ, or of configs whose fields may.

    Raises:
        ValueError: another field differs, each of which is named with both values; or the
            checkpoint does not have these items.
    """
    if missing := [name for name in ("config", "schedule", "record") if name not in run]:
        raise InvalidValue(
            f"the checkpoint holds no {' and no '.join(missing)}: another version of train.py "
            "wrote it. Go on with that one, or begin another run with its parameters: another "
            "--workdir, and --config.start_from"
        )
    old, new = flatten(run["config"]), flatten(now)
    wrong = [
        f"config.{name} was {show_field(old, name)} and is now {show_field(new, name)}"
        for name in {**old, **new}
        if not {name, name.split(".")[0]} & {*may_change}
        and new.get(name, NONE) not in (None, old.get(name, NONE))
    ]
    if wrong:
        raise InvalidValue(
            f"the work directory holds a run of another configuration: {'; '.join(wrong)}. Run it "
            "as it was, or start anew with another --workdir"
        )
