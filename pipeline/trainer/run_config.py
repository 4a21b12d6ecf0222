"""The config of a run: its file, checks of its fields, and the fields that may change."""

import os
import pathlib
import runpy
import sys
from collections.abc import Mapping
from typing import Any

from pipeline.errors import InvalidValue, Missing, UserError, require_one_of, require_whole
from pipeline.loading.sharding import CONTEXT_ORDERS

NONE = "not there"

# The clone that holds this package, whose configs import each other; or the installed packages.
HERE = pathlib.Path(__file__).resolve().parents[2]

DECAY = "optimizer.decay_steps"

# A run may resume with other values of these fields; any other change makes it another run. The
# schedule decides how `batches`, `seed` and `schedule` may change.
MAY_CHANGE = {
    *("steps", "mesh", "context_order", "microbatches", "memory_budget", "skip_steps", "cache"),
    *("on_nonfinite", "eval_every", "checkpoint_every", "keep", "peak_flops"),
    *(DECAY, "mixture", "sources", "added", "batches", "seed", "schedule"),
    "segment_losses",
}


def list_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config and of the configs in it, by names with dots.

    >>> list_fields({"steps": 5, "model": {"width": 8}})
    {'steps': 5, 'model.width': 8}
    """
    fields: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            fields |= {f"{name}.{field}": inner for field, inner in list_fields(value).items()}
        else:
            fields[name] = value
    return fields


def load_config(file: str) -> Any:
    """The result of `get_config()` in FILE.py, or in FILE.py:ARGUMENT of `get_config(ARGUMENT)`.

    The file may import modules beside it, and the configs of the clone that holds this package.
    Errors inside it are raised as they are; sentences are the cause of a RuntimeError.
    """
    from ml_collections import ConfigDict

    path, *argument = file.split(":", 1)
    if not os.path.isfile(path):
        raise Missing(f"there is no file {path}; check the path")
    for place in (os.path.dirname(os.path.abspath(path)), os.fspath(HERE)):
        if place not in sys.path:
            sys.path.append(place)
    try:
        module = runpy.run_path(path, run_name=pathlib.Path(path).stem)
        config = module["get_config"](*argument) if "get_config" in module else None
    except UserError as error:  # a defect of the file, whose place a traceback shows
        raise RuntimeError(f"{path} failed") from error
    if not isinstance(config, ConfigDict):
        raise InvalidValue(
            f"{path} has no function get_config() that returns a ConfigDict; a config must have one"
        )
    return config


def default_workdir(file: str) -> str:
    """The work directory of a config without --workdir: `runs/NAME`, in the current directory.

    >>> default_workdir("configs/exclude.py:runs/clean")
    'runs/exclude'
    """
    return f"runs/{pathlib.Path(file.split(':', 1)[0]).stem}"


def check_config(config: Any) -> None:
    """Refuses values that the loop cannot have."""
    for name in ("steps", "accumulate", "eval_every", "checkpoint_every", "keep"):
        require_whole(f"config.{name}", config[name], 1)
    if config.steps % config.accumulate:
        raise InvalidValue(
            f"config.steps is {config.steps}, but config.accumulate={config.accumulate} steps make "
            "an update; give a multiple of that"
        )
    for step in config.skip_steps:
        require_whole("a step of config.skip_steps", step, 0)
    numbers = list_fields(config.to_dict())
    for name in ("optimizer.warmup_steps", DECAY):  # stored configs do not know the type of None
        if (steps := numbers.get(name)) is not None:
            require_whole(f"config.{name}", steps, 0)
    for name in ("peak_flops", "optimizer.learning_rate", "optimizer.final"):
        if not numbers.get(name, 0.0) >= 0:
            raise InvalidValue(f"config.{name} is {numbers[name]}; it must be at least 0")
    if not (clip := numbers.get("optimizer.clip", 1.0)) > 0:
        raise InvalidValue(
            f"config.optimizer.clip is {clip}; gradients are scaled down to this norm, so it must "
            "be above 0; for no clipping, give --config.optimizer.clip=inf"
        )
    require_one_of("config.context_order", config.context_order, CONTEXT_ORDERS)
    require_one_of("config.on_nonfinite", config.on_nonfinite, ("stop", "skip"))


def show_field(fields: Mapping[str, Any], name: str, missing: str = NONE) -> str:
    """The value of a field for a message, with strings in quotes."""
    return repr(fields[name]) if name in fields else missing


def require_same(run: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The run's values for fields of a config that are None, if it can resume under this config.

    `run` is the item of its checkpoint, and `now` the config, as JSON. None has a meaning of its
    own in fields that may change, except the length of the decay.

    >>> run = {"config": {"task": {"rate": 0.5}, "keep": 3}, "schedule": {}, "record": {}}
    >>> require_same(run, {"task": {"rate": None}, "keep": None})
    {'task.rate': 0.5}
    """
    if missing := [name for name in ("config", "schedule", "record") if name not in run]:
        raise InvalidValue(
            f"the checkpoint holds no {' and no '.join(missing)}: another version of train.py "
            "wrote it. Continue with that version, or begin another run with its parameters, with "
            "another --workdir and --config.start_from"
        )
    old, new = list_fields(run["config"]), list_fields(now)
    fixed = [each for each in {**old, **new} if not {each, each.split(".")[0]} & MAY_CHANGE]
    wrong = [
        f"config.{name} was {show_field(old, name)} and is now {show_field(new, name)}"
        for name in fixed
        if new.get(name, NONE) not in (None, old.get(name, NONE))
    ]
    if wrong:
        raise InvalidValue(
            f"the work directory holds a run of another configuration: {'; '.join(wrong)}. Restore "
            "these values, or begin another run with another --workdir"
        )
    empty = [name for name in (*fixed, DECAY) if name in new and new[name] is None]
    values = {name: old[name] for name in empty if old.get(name) is not None}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
