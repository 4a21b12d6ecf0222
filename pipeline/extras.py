"""Optional dependencies: imported where they are needed, with the command that installs them."""

import importlib
from typing import Any


def require(module: str, *, extra: str, purpose: str) -> Any:
    """A module that one of the package's extras installs.

    Raises:
        ImportError: it is not installed; `purpose` says what needs it, as the beginning of a
            sentence that names the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{purpose} needs {module.partition('.')[0]}, which is not installed: "
            f"pip install 'lockstep-pipeline[{extra}]'"
        ) from error
