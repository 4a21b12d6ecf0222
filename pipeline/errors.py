"""Errors that a command prints as a sentence, and the checks of arguments that raise them."""

import difflib
import functools
import importlib
import inspect
import itertools
import numbers
import operator
import sys
import traceback
from collections.abc import Callable, Collection
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable)


class UserError(Exception):
    """A mistake of the user, or of the machine: what was seen, what is allowed, what to do.

    A command prints it as a sentence, and any other error as a traceback. Each subclass is also the
    built-in exception that Python programs catch.
    """


class InvalidValue(UserError, ValueError):
    """A value, a file or data that is not valid."""


class InvalidType(UserError, TypeError):
    """An argument of the wrong type, or one that the function does not have."""


class OutOfRange(UserError, IndexError):
    """The number of an example, a record or a step that does not exist."""


class InvalidState(UserError, RuntimeError):
    """An operation that is not possible now: a process died, or another one is at work."""


class Missing(UserError, FileNotFoundError):
    """A file or a directory that does not exist."""


class Late(UserError, TimeoutError):
    """A batch, or an answer of another process, that did not come within the time limit."""


class Exists(UserError, FileExistsError):
    """A file that must not exist, but does."""


class NotAllowed(UserError, PermissionError):
    """A place that the credentials, if there are any, do not allow to read or write."""


class StorageError(UserError, OSError):
    """A disk or an object storage that cannot be read or written."""

    def __str__(self) -> str:
        return self.strerror or super().__str__()  # without the number


class NotInstalled(UserError, ImportError):
    """A library, or a module of the user, that cannot be imported."""


class DoesNotFit(UserError, MemoryError):
    """A program that needs more memory than a device has."""


class NotFinite(UserError, FloatingPointError):
    """A loss or a gradient that is not a number."""


def describe(error: BaseException, *, command: str) -> int:
    """Prints an error to stderr, a `UserError` as a sentence; returns the exit code: 2, or 1."""
    if isinstance(error, UserError):
        print(f"{command}: {error}", file=sys.stderr)
        return 2
    traceback.print_exception(error)
    return 1


def counted(number: int, thing: str) -> str:
    """A number of things, for a message.

    >>> counted(1, "example"), counted(1234, "example"), counted(2, "batch")
    ('1 example', '1,234 examples', '2 batches')
    """
    plural = "es" if thing.endswith("ch") else "s"
    return f"{number:,} {thing}{plural * (number != 1)}"


def name_some(values: Collection[Any], most: int = 10) -> str:
    """The first of some values, and the number of all if there are more, for a message.

    >>> name_some([7, 8, 9], most=2)
    '7, 8, … (3 in all)'
    """
    first = ", ".join(map(str, itertools.islice(values, most)))
    return first if len(values) <= most else f"{first}, … ({len(values):,} in all)"


def require_whole(name: str, value: Any, least: int) -> int:
    """`value` as an int.

    Raises:
        ValueError: `value` is not a whole number of at least `least`.
    """
    is_number = issubclass(type(value), numbers.Real) and not isinstance(value, bool)
    if not is_number or value != value or not least <= value < 1 << 63 or int(value) != value:
        raise InvalidValue(f"{name} is {value!r}; it must be a whole number from {least:,} up")
    return int(value)


def require_type(name: str, value: Any, kind: Any, wanted: str) -> None:
    """Checks that `value` is of `kind`: a type, several, or the name of an attribute that it has.

    Raises:
        TypeError: it is not; `wanted` says what it must be.
    """
    fits = hasattr(value, kind) if isinstance(kind, str) else isinstance(value, kind)
    fits &= not isinstance(kind, str) or getattr(value, "ndim", 1) > 0  # an array of one number
    if not fits or isinstance(value, type):
        raise InvalidType(f"{name} is {value!r:.80}, a {type(value).__name__}; it must be {wanted}")


def require_index(step: Any) -> int:
    """`step` as an int.

    Raises:
        TypeError: `step` is not of an integer type.
    """
    if isinstance(step, bool):
        raise InvalidType(f"step is {step!r}; it must be a whole number")
    return operator.index(step)


def require_share(name: str, value: Any) -> float:
    """`value` as a float.

    Raises:
        ValueError: `value` is not a number above 0 and below 1.
    """
    if not issubclass(type(value), numbers.Real) or not 0 < value < 1:
        raise InvalidValue(f"{name} is {value!r}; it must be a number above 0 and below 1")
    return float(value)


def require_one_of(name: str, value: Any, allowed: Collection[str]) -> None:
    """Checks that `value` is one of the allowed strings.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, str) or value not in allowed:
        known = ", ".join(each or "''" for each in allowed)
        raise InvalidValue(f"{name} is {value!r}; it must be one of {known}")


def require(module: str, *, extra: str, purpose: str) -> Any:
    """A module that one of the package's extras installs.

    Raises:
        ImportError: it is not installed. The message begins with `purpose`, which needs the module,
            and names the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise NotInstalled(
            f"{purpose} needs {module.partition('.')[0]}, which is not installed: "
            f"pip install 'lockstep-pipeline[{extra}]'"
        ) from error


def suggest_option(name: str, options: Collection[str]) -> str:
    """The end of an error message about an unknown option.

    >>> suggest_option("sed", ["packing", "seed"])
    "'sed'; did you mean 'seed'? The options are packing, seed"
    """
    if not options:
        return f"{name!r}; there is none to choose"
    near = difflib.get_close_matches(name, sorted(options), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"{name!r}{hint} The options are {', '.join(sorted(options))}"


def suggest_keywords(function: F) -> F:
    """The function or class; given an unknown keyword, it raises a `TypeError` with the nearest.

    >>> @suggest_keywords
    ... def f(*, seed=0): ...
    >>> f(sed=1)
    Traceback (most recent call last):
    pipeline.errors.InvalidType: f() has no option 'sed'; did you mean 'seed'? The options are seed
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
                raise InvalidType(f"{name}() has no option {suggest_option(option, known)}")
        return function(*arguments, **options)

    return cast(F, call)
