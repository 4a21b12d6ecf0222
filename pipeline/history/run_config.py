"""The config of a run, as JSON in its work directory."""

import json
import os
from collections.abc import Mapping
from typing import Any

from etils import epath

from pipeline.errors import StorageError
from pipeline.fs.atomic import as_path, atomic_write

NAME = "run_config.json"


def save_config(workdir: epath.PathLike, config: Mapping[str, Any]) -> None:
    """Stores the values of a config, which are JSON; `batches` among them are options of `load`."""
    with atomic_write(as_path(workdir) / NAME) as file:
        file.write(json.dumps(config).encode())


def read_config(workdir: epath.PathLike) -> dict[str, Any] | None:
    """The values of the config of the run in a work directory; None if none are stored there."""
    path = as_path(workdir) / NAME
    seen: Any
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        config, seen = None, error
    else:
        seen = f"it is {config!r:.80}"
    if not isinstance(config, dict) or not isinstance(config.get("batches", {}), dict):
        raise StorageError(
            f"{NAME} in {os.fspath(workdir)} is damaged: {seen}; start the run with --config, "
            "which writes it again"
        )
    return config
