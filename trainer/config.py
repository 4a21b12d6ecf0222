"""The config of a run: its file, checks of its fields, and the fields that may change."""

import json
import logging
import os
import pathlib
import runpy
import sys
from collections.abc import Mapping
from typing import Any

from etils import epath
from ml_collections import ConfigDict, config_dict

from pipeline.errors import InvalidValue, Missing, UserError, require_one_of, require_whole
from pipeline.history.run_config import read_config
from pipeline.loading.sharding import CONTEXT_ORDERS
from pipeline.steps import hosts
from trainer.checkpoint import Saved
from trainer.parameters import require_checkpoint

logger = logging.getLogger(__name__)

# The checkout that holds this package, whose configs import each other.
CHECKOUT = pathlib.Path(__file__).resolve().parents[1]

DECAY = "optimizer.decay_steps"
NONE = "not there"  # the value of a missing field, for messages

# A run may resume with other values of these fields; any other change makes it another run. The
# schedule decides how `batches`, `seed` and `schedule` may change.
MAY_CHANGE = {
    *("steps", "mesh", "context_order", "microbatches", "memory_budget", "skip_steps", "cache"),
    *("on_nonfinite", "eval_every", "eval_batches", "checkpoint_every", "keep", "peak_flops"),
    *(DECAY, "mixture", "sources", "added", "batches", "seed", "schedule"),
    *("segment_losses", "num_threads", "dynamic_context", "weights_every"),
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


def load_config(file: str) -> ConfigDict:
    """The result of `get_config()` in FILE.py, or in FILE.py:ARGUMENT of `get_config(ARGUMENT)`.

    The file may import modules beside it, and the configs of the checkout.
    Errors inside it are raised as they are; sentences are the cause of a RuntimeError.
    """
    path, *argument = file.split(":", 1)
    if not os.path.isfile(path):
        raise Missing(f"there is no file {path}; check the path")
    for place in (os.path.dirname(os.path.abspath(path)), os.fspath(CHECKOUT)):
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


def stored_config(workdir: epath.PathLike) -> ConfigDict | None:
    """The config of the run in a work directory, from its values; None if there is none.

    A field that was a list is a tuple, and one that is None takes a value of any type.
    """

    def restore(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: restore(inner) for name, inner in value.items()}
        if value is None:
            return config_dict.placeholder(object)
        return tuple(value) if isinstance(value, list) else value

    values = read_config(workdir)
    return None if values is None else ConfigDict(restore(values))


def default_workdir(file: str) -> str:
    """The work directory of a config without --workdir: `runs/NAME`, in the current directory.

    >>> default_workdir("configs/exclude.py:runs/clean")
    'runs/exclude'
    """
    return f"runs/{pathlib.Path(file.split(':', 1)[0]).stem}"


def as_json(config: ConfigDict) -> dict[str, Any]:
    """The values of a config, as JSON."""
    return json.loads(config.to_json())


def show_field(fields: Mapping[str, Any], name: str) -> str:
    """The value of a field for a message, with strings in quotes."""
    return repr(fields[name]) if name in fields else NONE


def check_config(config: ConfigDict) -> None:
    """Refuses values that the loop cannot have; and on every host, hosts whose configs differ."""
    fields = list_fields(as_json(config))
    hosts.require_agreement({"configuration": fields})
    for name in ("steps", "accumulate", "eval_every", "checkpoint_every", "keep"):
        require_whole(f"config.{name}", fields[name], 1)
    require_whole("config.weights_every", fields["weights_every"], 0)
    # Stored configs do not know the type of None.
    for name, least in {"eval_batches": 1, "optimizer.warmup_steps": 0, DECAY: 0}.items():
        if (steps := fields.get(name)) is not None:
            require_whole(f"config.{name}", steps, least)
    for step in fields["skip_steps"]:
        require_whole("a step of config.skip_steps", step, 0)
    for name in ("peak_flops", "optimizer.learning_rate", "optimizer.final"):
        if not fields.get(name, 0.0) >= 0:
            raise InvalidValue(f"config.{name} is {fields[name]}; it must be at least 0")
    if not (clip := fields.get("optimizer.clip", 1.0)) > 0:
        raise InvalidValue(
            f"config.optimizer.clip is {clip}; gradients are scaled down to this norm, so it must "
            "be above 0; for no clipping, give --config.optimizer.clip=inf"
        )
    require_one_of("config.context_order", fields["context_order"], CONTEXT_ORDERS)
    require_one_of("config.on_nonfinite", fields["on_nonfinite"], ("stop", "skip"))


def check_warmup(warmup: int, decay: int) -> None:
    """Refuses a warm-up that is not shorter than the decay of the learning rate, both in steps."""
    if not 0 <= warmup < decay:
        raise InvalidValue(
            f"config.optimizer.warmup_steps is {warmup} and the learning rate decays over {decay} "
            "steps; warm-up must be shorter, or 0, as in --config.optimizer.warmup_steps=0"
        )


def resume_config(config: ConfigDict, saved: Saved) -> ConfigDict:
    """The config of a run that continues from a checkpoint, or begins.

    Fields that are None have the values that the run began with. Raises if another field differs
    from the run's, but for those that may change.
    """
    if config.start_from and not saved.step:
        require_checkpoint(config.start_from)
    now = config.copy_and_resolve_references()
    values = require_same(saved.run, as_json(now)) if saved.step else {}
    with now.unlocked():
        now.update_from_flattened_dict(values)
        if "decay_steps" in now.optimizer:
            now.optimizer.decay_steps = decay = now.optimizer.decay_steps or now.steps
            if saved.step and now.steps > max(decay, saved.step):
                logger.info(
                    f"from step {decay:,} on, the learning rate stays as it is, since "
                    f"config.optimizer.decay_steps is {decay:,} and config.steps is {now.steps:,}"
                )
    return now


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
