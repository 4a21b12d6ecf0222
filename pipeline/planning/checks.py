"""Checks of single arguments, and the error messages that they raise."""

import inspect
import numbers
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any


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
