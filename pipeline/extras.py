"""Optional dependencies: imported where they are needed, with the command that installs them."""

import importlib
from typing import Any


def require(module: str, *, extra: str, purpose: str) -> Any:
    """A module that one of the package's extras installs.

    Args:
        module: its name, as in an import.
        extra: the extra of `lockstep-pipeline` that installs it.
        purpose: what needs it, as the beginning of a sentence.

    Raises:
        ImportError: it is not installed; the message names the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{purpose} needs {module.partition('.')[0]}, which is not installed: "
            f"pip install 'lockstep-pipeline[{extra}]'"
        ) from error
