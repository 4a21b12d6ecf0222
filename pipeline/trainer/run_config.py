"""The config of a run: checks of its fields, the fields that may change, and its stored copy."""

import argparse
import contextlib
import functools
import json
import os
import runpy
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath
from flax.traverse_util import flatten_dict

from pipeline.errors import InvalidValue, StorageError, UserError, require_one_of, require_whole
from pipeline.fs import as_path, atomic_write
from pipeline.loading.sharding import CONTEXT_ORDERS

NAME = "run_config.json"  # in a work directory

NONE = "not there"

# The fields of a config and of the configs in it, by names with dots, such as "model.width".
flatten = functools.partial(flatten_dict, sep=".")

DECAY = "optimizer.decay_steps"

# A run may resume with other values of these fields; any other change makes it another run. The
# schedule decides how `batches`, `seed` and `schedule` may change.
MAY_CHANGE = {
    *("steps", "mesh", "context_order", "microbatches", "memory_budget", "skip_steps", "cache"),
    *("on_nonfinite", "eval_every", "checkpoint_every", "keep", "peak_flops"),
    *(DECAY, "mixture", "sources", "added", "batches", "seed", "schedule"),
    *("segment_losses", "train.wait_seconds"),
}


def check_config(config: Any) -> None:
    """Refuses values that the loop cannot have.

    Raises:
        InvalidValue: a number of steps is not a whole number from 1 up, another number is too
            small, or a choice is unknown.
    """
    for name in ("steps", "accumulate", "eval_every", "checkpoint_every", "keep"):
        require_whole(f"config.{name}", config[name], 1)
    if config.steps % config.accumulate:
        raise InvalidValue(
            f"config.steps is {config.steps}, but config.accumulate={config.accumulate} steps make "
            "an update; give a multiple of that"
        )
    for step in config.skip_steps:
        require_whole("a step of config.skip_steps", step, 0)
    numbers: dict[str, Any] = flatten(config.to_dict())
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

    None has a meaning of its own in fields that may change, except the length of the decay.

    >>> run = {"config": {"task": {"rate": 0.5}, "keep": 3}, "schedule": {}, "record": {}}
    >>> require_same(run, {"task": {"rate": None}, "keep": None})
    {'task.rate': 0.5}

    Args:
        run: the item of its checkpoint, JSON values: `config`, `schedule` and `record`.
        now: the config as JSON.

    Raises:
        InvalidValue: names each other field that differs, with both values.
    """
    if missing := [name for name in ("config", "schedule", "record") if name not in run]:
        raise InvalidValue(
            f"the checkpoint holds no {' and no '.join(missing)}: another version of train.py "
            "wrote it. Continue with that version, or begin another run with its parameters, with "
            "another --workdir and --config.start_from"
        )
    old, new = flatten(run["config"]), flatten(now)
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


def save_config(workdir: epath.Path, config: Any, file: str) -> None:
    """Stores a config, and the name of its file, for `find_config`."""
    path, *argument = file.split(":", 1)
    if path == __file__:  # the config was read from the run
        file = json.loads((workdir / NAME).read_text())["file"]
    else:
        file = ":".join([os.path.abspath(path), *argument])
    with atomic_write(workdir / NAME, shared=True) as saved:
        saved.write(json.dumps({"file": file, "fields": json.loads(config.to_json())}).encode())


def find_config(arguments: Sequence[str], default: str) -> str:
    """The default of `--config`: the config of the run in `--workdir`, or `default`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--workdir", "-workdir")
    with contextlib.suppress(argparse.ArgumentError, UserError):  # the program raises these later
        workdir = parser.parse_known_args(arguments)[0].workdir
        if workdir and (as_path(workdir) / NAME).exists():
            return f"{__file__}:{workdir}"
    return default


def get_config(workdir: str) -> Any:
    """The config of the run in a work directory, as in any config file."""
    try:
        saved = json.loads((as_path(workdir) / NAME).read_text())
        fields, (path, *argument) = saved["fields"], saved["file"].split(":", 1)
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(f"{NAME} in {workdir} is damaged: {error!r}; give --config") from error
    config = runpy.run_path(path)["get_config"](*argument)
    config.update(fields)
    return config
