"""Errors as a command shows them, and the checks of arguments that raise them."""

import difflib
import functools
import importlib
import inspect
import numbers
import operator
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable)

# What this package raises for a user's mistake. Any other of its errors is a defect.
RAISED = (ValueError, TypeError, IndexError, RuntimeError, MemoryError, FloatingPointError)


def sentence(error: BaseException, modules: Sequence[ModuleType | str] = ()) -> str | None:
    """What to tell of an error that is a user's mistake; None for a defect.

    A mistake is an error of the operating system or of an import; a `RAISED` error of this package;
    and any error that other code raises, in `modules`.

    `modules` are other packages, and paths of files.
    """
    file = traceback.extract_tb(error.__traceback__)[-1].filename
    places = tuple(each if isinstance(each, str) else each.__path__[0] for each in modules)
    ours = isinstance(error, RAISED) and file.startswith(os.path.dirname(__file__))
    if isinstance(error, OSError | ImportError) or ours or file.startswith(places):
        return str(error.args[0] if isinstance(error, KeyError) else error)
    return None


def describe(error: BaseException, *, command: str, modules: Sequence[ModuleType | str]) -> int:
    """Prints an error to stderr; returns the exit code of `command`, with which a sentence begins.

    It is 2 after a sentence, for a user's mistake; 1 after a traceback, for any other error.
    """
    if (text := sentence(error, modules)) is not None:
        print(f"{command}: {text}", file=sys.stderr)
        return 2
    traceback.print_exception(error)
    return 1


def require_whole(name: str, value: Any, least: int) -> int:
    """`value` as an int.

    Raises:
        ValueError: `value` is not a whole number of at least `least`.
    """
    is_number = issubclass(type(value), numbers.Real) and not isinstance(value, bool)
    if not is_number or value != value or not least <= value < 1 << 63 or int(value) != value:
        raise ValueError(f"{name} is {value!r}; it must be a whole number from {least:,} up")
    return int(value)


def require_index(step: Any) -> int:
    """`step` as an int.

    Raises:
        TypeError: `step` is not of an integer type.
    """
    if isinstance(step, bool):
        raise TypeError(f"step is {step!r}; it must be a whole number")
    return operator.index(step)


def require_share(name: str, value: Any) -> float:
    """`value` as a float.

    Raises:
        ValueError: `value` is not a number above 0 and below 1.
    """
    if not issubclass(type(value), numbers.Real) or not 0 < value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a number above 0 and below 1")
    return float(value)


def require_one_of(name: str, value: Any, allowed: Collection[str]) -> None:
    """Checks that `value` is one of the allowed strings.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")


def list_keywords(function: Callable) -> tuple[str, ...]:
    """The names of a function's keyword-only arguments."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)


def select_options(names: Iterable[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options whose names are in `names`."""
    return {name: options[name] for name in names if name in options}


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


def suggest_option(name: str, options: Collection[str]) -> str:
    """The end of an error message about an unknown option.

    >>> suggest_option("sed", ["packing", "seed"])
    "'sed'; did you mean 'seed'? The options are packing, seed"
    """
    near = difflib.get_close_matches(name, sorted(options), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"{name!r}{hint} The options are {', '.join(sorted(options))}"


def suggest_keywords(function: F) -> F:
    """The function or class, which for an unknown keyword raises a `TypeError` with the nearest.

    >>> @suggest_keywords
    ... def plan(*, seed=0): ...
    >>> plan(sed=1)
    Traceback (most recent call last):
    TypeError: plan() has no option 'sed'; did you mean 'seed'? The options are seed
    """
    if isinstance(function, type):
        function.__init__ = suggest_keywords(function.__init__)  # type: ignore[misc]
        return cast(F, function)
    parameters = list(inspect.signature(function).parameters)
    known = [name for name in parameters if name != "self"]
    name = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        for option in options:
            if option not in known:
                raise TypeError(f"{name}() has no option {suggest_option(option, known)}")
        return function(*arguments, **options)

    return cast(F, call)
