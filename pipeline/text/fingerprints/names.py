"""Names: where functions and classes come from, and which of them are a user's own."""

import functools
import importlib.util
import sys
from importlib import metadata
from pathlib import PurePath
from typing import Any

MAIN = ("__main__", "__mp_main__")  # of the script that runs, here and in a worker


def name_of(value: Any) -> str:
    """The module and the name of a function or class, or of the class of an object.

    >>> import json
    >>> name_of(str.upper), name_of(functools.partial(json.loads, strict=False))
    ('builtins.str.upper', 'json.loads')
    """
    if isinstance(value, functools.partial):
        return name_of(value.func)
    module = module_of(value)
    if module in MAIN:  # as when it is imported
        main = sys.modules["__main__"]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", "__main__")
        module = spec.name if spec else PurePath(file).stem
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{module}.{named.__qualname__}"


def module_of(value: Any) -> str:
    """The name of the module that defines a function or class, or the class of an object."""
    if isinstance(value, functools.partial):
        return module_of(value.func)
    owner = getattr(value, "__objclass__", None)
    return getattr(value, "__module__", None) or getattr(owner, "__module__", None) or "builtins"


def is_of_lockstep(module: str) -> bool:
    """Whether a module belongs to this package."""
    return module.partition(".")[0] == "pipeline"


def is_own(module: str) -> bool:
    """Whether a module is a user's, rather than of Python, of Lockstep or installed."""
    package = module.partition(".")[0]
    if package in MAIN:
        return True
    if package in sys.stdlib_module_names or is_of_lockstep(module):
        return False
    known: Any = sys.modules.get(module) or importlib.util.find_spec(package)
    file = getattr(known, "__file__", None) or getattr(known, "origin", None) or ""
    return not {"site-packages", "dist-packages"} & set(PurePath(file).parts)


@functools.cache
def version_of(module: str) -> str:
    """The version of the installed package that a module belongs to; "" where it is of Python."""
    package = module.partition(".")[0]
    if package in sys.stdlib_module_names or is_of_lockstep(module):
        return ""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        several = metadata.packages_distributions().get(package, [])
        return "+".join(map(metadata.version, sorted(set(several))))
