"""Keywords: an unknown one is answered with the nearest that is known."""

import difflib
import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable)


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
