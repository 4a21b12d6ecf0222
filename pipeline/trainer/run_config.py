"""The config of a run: its file, checks of its fields, those that may change, its stored values."""

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import runpy
import sys
import sysconfig
from collections.abc import Mapping
from typing import Any

from etils import epath

from pipeline.errors import InvalidValue, Missing, StorageError, require_one_of, require_whole
from pipeline.fs import as_path, atomic_write
from pipeline.loading.sharding import CONTEXT_ORDERS

NAME = "run_config.json"  # in a work directory

NONE = "not there"

# The types of fields that JSON does not tell: those of empty fields, and tuples.
TYPES = {each.__name__: each for each in (bool, int, float, str, tuple, list, dict, object)}

# The clone that holds this package, whose configs import each other; or the installed packages.
HERE = pathlib.Path(__file__).resolve().parents[2]

DECAY = "optimizer.decay_steps"

# A run may resume with other values of these fields; any other change makes it another run. The
# schedule decides how `batches`, `seed` and `schedule` may change.
MAY_CHANGE = {
    *("steps", "mesh", "context_order", "microbatches", "memory_budget", "skip_steps", "cache"),
    *("on_nonfinite", "eval_every", "checkpoint_every", "keep", "peak_flops"),
    *(DECAY, "mixture", "sources", "added", "batches", "seed", "schedule"),
    *("segment_losses", "train.wait_seconds"),
}


def list_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config and of the configs in it, by names with dots.

    >>> list_fields({"steps": 5, "model": {"width": 8}})
    {'steps': 5, 'model.width': 8}
    """
    fields: dict[str, Any] = {}
    for name, value in values.items():
        inside = list_fields(value) if isinstance(value, Mapping) else {"": value}
        fields |= {f"{name}.{field}".rstrip("."): each for field, each in inside.items()}
    return fields


def load_config(file: str) -> Any:
    """The config that a file makes: the result of its `get_config()`.

    The file may import modules beside it, and the configs of the clone that holds this package.

    Args:
        file: FILE.py, or FILE.py:ARGUMENT for `get_config(ARGUMENT)`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it has no function `get_config`. Errors inside the file are raised as they are.
    """
    path, *argument = file.split(":", 1)
    if not os.path.isfile(path):
        raise Missing(f"there is no file {path}; check the path")
    for place in (os.path.dirname(os.path.abspath(path)), os.fspath(HERE)):
        if place not in sys.path:
            sys.path.append(place)
    module = runpy.run_path(path, run_name=pathlib.Path(path).stem)
    if "get_config" not in module:
        raise InvalidValue(f"{path} has no function get_config(); a config must have one")
    return module["get_config"](*argument)


def default_workdir(file: str) -> str:
    """The work directory of a config without --workdir: `runs/NAME`, in the current directory.

    >>> default_workdir("configs/exclude.py:runs/clean")
    'runs/exclude'
    """
    return f"runs/{pathlib.Path(file.split(':', 1)[0]).stem}"


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
    numbers = list_fields(config.to_dict())
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


def save_config(workdir: epath.Path, config: Any) -> None:
    """Stores the values of a config, for `read_config`."""
    content = {"fields": json.loads(config.to_json()), "types": _hidden_types(config)}
    with atomic_write(workdir / NAME, shared=True) as saved:
        saved.write(json.dumps(content).encode())


def _hidden_types(config: Any) -> dict[str, str]:
    """The types of fields that JSON does not tell, by names with dots."""
    types: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, type(config)):
            types |= {f"{name}.{field}": kind for field, kind in _hidden_types(value).items()}
        elif value is None or isinstance(value, tuple):
            types[name] = config.get_type(name).__name__
    return types


def read_batches(workdir: epath.PathLike) -> dict[str, Any]:
    """The `batches` of the config of the run in a work directory; empty if none is stored."""
    stored = {} if (content := _read(workdir)) is None else content["fields"].get("batches", {})
    return {name: value for name, value in stored.items() if value is not None}


def read_config(workdir: epath.PathLike) -> Any:
    """The config of the run in a work directory, from its values; None if there is none.

    It runs no code that the directory names, except that a `source`, MODULE:NAME, is called later.
    So its module must be in `configs/` of the clone, or in an installed package.

    Raises:
        OSError: the file is damaged.
        ValueError: a source is in another module.
    """
    from ml_collections import ConfigDict, config_dict

    if (content := _read(workdir)) is None:
        return None
    fields = content["fields"]
    for name, value in list_fields(fields).items():
        if name.split(".")[-1] == "source" and value:
            _require_trusted(f"{name} of the run in {os.fspath(workdir)}", value, workdir)
    for name, kind in content["types"].items():
        *groups, last = name.split(".")
        place = fields
        for group in groups:
            place = place[group]
        if place[last] is None:
            place[last] = config_dict.placeholder(TYPES.get(kind, object))
        else:
            place[last] = tuple(place[last])
    return ConfigDict(fields)


def _read(workdir: epath.PathLike) -> dict[str, Any] | None:
    path = as_path(workdir) / NAME
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
        return {name: dict(content[name]) for name in ("fields", "types")}
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(
            f"{os.fspath(path)} is damaged: {error!r}; start the run with --config, which writes it"
        ) from error


def _require_trusted(name: str, source: str, workdir: epath.PathLike) -> None:
    """Refuses a module that is neither in `configs/` of a clone nor in an installed package."""
    package = source.partition(":")[0].partition(".")[0]
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    origins = [] if spec is None else [*(spec.submodule_search_locations or [spec.origin or ""])]
    places = [pathlib.Path(origin).resolve() for origin in origins if origin]
    clones = [HERE, pathlib.Path(sys.argv[0]).resolve().parent]
    packages = [pathlib.Path(sysconfig.get_path(each)).resolve() for each in ("purelib", "platlib")]
    own = pathlib.Path(os.path.realpath(workdir))
    trusted = all(
        place in [clone / "configs" for clone in clones]
        or any(each in place.parents for each in packages)
        or package in importlib.metadata.packages_distributions()
        for place in places
    )
    if not places or not trusted or any(own in place.parents for place in places):
        raise InvalidValue(
            f"{name} is {source!r}, which is neither in configs/ nor in an installed package; a "
            "work directory does not decide which other code runs, so give the run's --config"
        )
