"""The values of a run's config in its work directory, which decide no code that runs."""

import functools
import importlib
import importlib.metadata
import importlib.util
import json
import operator
import os
import pathlib
import sys
from typing import Any

from etils import epath

from pipeline.errors import InvalidValue, StorageError
from pipeline.fs import as_path, atomic_write
from pipeline.trainer.run_config import HERE, list_fields

NAME = "run_config.json"

# The types of fields that JSON does not tell: those of empty fields, and tuples.
TYPES = {each.__name__: each for each in (bool, int, float, str, tuple, list, dict, object)}

# The errors of JSON that is not what `save_config` writes.
DAMAGE = (AttributeError, KeyError, TypeError, ValueError, RecursionError)


def save_config(workdir: epath.Path, config: Any, types: dict[str, str]) -> None:
    """Stores the values of a config, and the types that `hidden_types` finds."""
    content = {"fields": json.loads(config.to_json()), "types": types}
    with atomic_write(workdir / NAME) as saved:
        saved.write(json.dumps(content).encode())


def hidden_types(config: Any) -> dict[str, str]:
    """The types of fields that JSON does not tell, by names with dots."""
    types: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, type(config)):
            types |= {f"{name}.{field}": kind for field, kind in hidden_types(value).items()}
        elif value is None or isinstance(value, tuple):
            types[name] = config.get_type(name).__name__
    return types


def read_batches(workdir: epath.PathLike) -> dict[str, Any]:
    """The `batches` of the config of the run in a work directory; empty if none is stored."""
    try:
        stored = _read(workdir)["fields"]["batches"]
        return {name: value for name, value in stored.items() if value is not None}
    except FileNotFoundError:  # the run of another loop
        return {}
    except DAMAGE as error:
        raise _damaged(workdir, error) from error


def read_config(workdir: epath.PathLike) -> Any:
    """The config of the run in a work directory, from its values; None if there is none.

    No code runs that the directory names, except that a `source`, MODULE:NAME, is imported and
    later called. So it must be defined in `configs/` of the clone or in an installed package.
    """
    from ml_collections import ConfigDict, config_dict

    try:
        content = _read(workdir)
        fields = content["fields"]
        named = list_fields(fields).items()
        sources = {name: value for name, value in named if name.split(".")[-1] == "source"}
        for name, kind in content["types"].items():
            *groups, last = name.split(".")
            group = functools.reduce(operator.getitem, groups, fields)
            if group[last] is None:
                group[last] = config_dict.placeholder(TYPES.get(kind, object))
            elif kind == "tuple":
                group[last] = tuple(group[last])
        config = ConfigDict(fields)
    except FileNotFoundError:
        return None
    except DAMAGE as error:
        raise _damaged(workdir, error) from error
    for name, source in sources.items():
        if source and not _is_trusted(source, workdir):
            raise InvalidValue(
                f"{name} of the run in {os.fspath(workdir)} is {source!r}, which is defined "
                "neither in configs/ nor in an installed package. A work directory does not decide "
                "which other code runs: give the run's --config"
            )
    return config


def _read(workdir: epath.PathLike) -> Any:
    return json.loads((as_path(workdir) / NAME).read_text())


def _damaged(workdir: epath.PathLike, error: Exception) -> StorageError:
    return StorageError(
        f"{NAME} in {os.fspath(workdir)} is damaged: {error!r}; start the run with --config, which "
        "writes it again"
    )


def _is_trusted(source: Any, workdir: epath.PathLike) -> bool:
    """Whether MODULE:NAME is defined in `configs/` of a clone, or in an installed package."""
    module, _, name = str(source).partition(":")
    package = module.partition(".")[0]
    clones = [HERE / "configs", pathlib.Path(sys.argv[0]).resolve().parent / "configs"]
    if package != "configs" and package not in importlib.metadata.packages_distributions():
        return False
    if (spec := importlib.util.find_spec(package)) is None:
        return False
    places = [*(spec.submodule_search_locations or [spec.origin or ""])]
    resolved = [pathlib.Path(place).resolve() for place in places]
    own = pathlib.Path(os.path.realpath(workdir))
    if any(own in place.parents or own == place for place in resolved):
        return False
    if package == "configs" and not all(place in clones for place in resolved):
        return False
    try:
        made = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):  # the error comes when the source is opened
        return True
    # Not what the module imports, such as a function that calls a shell.
    return str(getattr(made, "__module__", "")).partition(".")[0] == package
