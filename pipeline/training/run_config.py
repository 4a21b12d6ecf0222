"""The config of a run: which of its fields may change when the run goes on."""

from collections.abc import Collection, Mapping
from typing import Any

NONE = "not there"


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
    then: Mapping[str, Any], now: Mapping[str, Any], may_change: Collection[str]
) -> None:
    """Refuses a config under which a run cannot go on.

    Args:
        then: the config that the run began with, as JSON values.
        now: the config that it is given; None stands for the value of `then`.
        may_change: names of fields that may differ, or of configs whose fields may.

    Raises:
        ValueError: another field differs; names each with both values.
    """
    old, new = flatten(then), flatten(now)
    wrong = [
        f"config.{name} was {old.get(name, NONE)} and is now {new.get(name, NONE)}"
        for name in {**old, **new}
        if not {name, name.split(".")[0]} & {*may_change}
        and new.get(name, NONE) not in (None, old.get(name, NONE))
    ]
    if wrong:
        raise ValueError(
            f"the work directory holds a run of another configuration: {'; '.join(wrong)}. Run it "
            "as it was, or start anew with another --workdir"
        )
