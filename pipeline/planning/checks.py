"""Checks of single arguments, and the sentences that refuse them."""

import difflib
import numbers
from collections.abc import Collection
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


def unknown(name: str, known: Collection[str]) -> str:
    """The end of a sentence about an option that there is not.

    >>> unknown("sed", ["packing", "seed"])
    "'sed'; did you mean 'seed'? The options are packing, seed"
    """
    near = difflib.get_close_matches(name, sorted(known), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"{name!r}{hint} The options are {', '.join(sorted(known))}"
