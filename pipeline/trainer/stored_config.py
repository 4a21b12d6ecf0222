"""The values of a run's config in its work directory, which decide no code that runs."""

import importlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import sys
from typing import Any

from etils import epath

from pipeline.errors import InvalidValue, StorageError
from pipeline.fs import as_path, atomic_write
from pipeline.trainer.run_config import HERE, list_fields

NAME = "run_config.json"

# The errors of JSON that is not what `save_config` writes.
DAMAGE = (AttributeError, KeyError, TypeError, ValueError, RecursionError)

# Fields that may name code, as MODULE:NAME.
CODE = ("source", "corpus", "kind")


def save_config(workdir: epath.Path, config: Any) -> None:
    """Stores the values of a config."""
    with atomic_write(workdir / NAME) as saved:
        saved.write(config.to_json().encode())


def read_batches(workdir: epath.PathLike) -> dict[str, Any]:
    """The `batches` of the config of the run in a work directory; empty if none is stored."""
    try:
        stored = _read(workdir)["batches"]
        return {name: value for name, value in stored.items() if value is not None}
    except FileNotFoundError:  # the run of another loop
        return {}
    except DAMAGE as error:
        raise _damaged(workdir, error) from error


def read_config(workdir: epath.PathLike) -> Any:
    """The config of the run in a work directory, from its values; None if there is none.

    A field that was a list is a tuple, and one that is None takes a value of any type. Code that a
    field names is later imported and called. So it must be defined in `configs/` of the clone or in
    an installed package.
    """
    from ml_collections import ConfigDict

    try:
        fields = _read(workdir)
        named = list_fields(fields).items()
        config = ConfigDict(_restore(fields))
    except FileNotFoundError:
        return None
    except DAMAGE as error:
        raise _damaged(workdir, error) from error
    for name, code in named:
        if name.split(".")[-1] in CODE and ":" in str(code) and not _is_trusted(code, workdir):
            raise InvalidValue(
                f"{name} of the run in {os.fspath(workdir)} is {code!r}, which is defined "
                "neither in configs/ nor in an installed package. A work directory does not decide "
                "which other code runs: give the run's --config"
            )
    return config


def _restore(value: Any) -> Any:
    from ml_collections import config_dict

    if isinstance(value, dict):
        return {name: _restore(each) for name, each in value.items()}
    if value is None:
        return config_dict.placeholder(object)
    return tuple(value) if isinstance(value, list) else value


def _read(workdir: epath.PathLike) -> Any:
    return json.loads((as_path(workdir) / NAME).read_text())


def _damaged(workdir: epath.PathLike, error: Exception) -> StorageError:
    return StorageError(
        f"{NAME} in {os.fspath(workdir)} is damaged: {error!r}; start the run with --config, which "
        "writes it again"
    )


def _is_trusted(code: str, workdir: epath.PathLike) -> bool:
    """Whether MODULE:NAME is defined in `configs/` of a clone, or in an installed package."""
    module, _, name = code.partition(":")
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
