"""Checks of single arguments, and the sentences that refuse them."""

import difflib
import inspect
import numbers
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any


def require_whole(name: str, value: Any, least: int) -> int:
    """The whole number that `value` is, from `least` up.

    Raises:
        ValueError: it is none.
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or value != value or not least <= value < 1 << 63 or int(value) != value:
        raise ValueError(f"{name} is {value!r}; it must be a whole number from {least:,} up")
    return int(value)


def require_index(step: Any) -> int:
    """The step that `step` is.

    Raises:
        TypeError: it is not a whole number.
    """
    if isinstance(step, bool):
        raise TypeError(f"step is {step!r}; it must be a whole number")
    return operator.index(step)


def require_one_of(name: str, value: Any, known: Collection[str]) -> None:
    """Refuses a value that is none of those known.

    Raises:
        ValueError: it is none.
    """
    if value not in known:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(known)}")


def unknown(name: str, known: Collection[str]) -> str:
    """The end of a sentence about an option that there is not.

    >>> unknown("sed", ["packing", "seed"])
    "'sed'; did you mean 'seed'? The options are packing, seed"
    """
    near = difflib.get_close_matches(name, sorted(known), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"{name!r}{hint} The options are {', '.join(sorted(known))}"


def keywords(function: Callable) -> tuple[str, ...]:
    """The names of the arguments that a function takes by keyword alone."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)


def chosen(names: Iterable[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of some options that have one of these names."""
    return {name: options[name] for name in names if name in options}
