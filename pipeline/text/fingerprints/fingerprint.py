"""Fingerprint: tells apart the functions and objects that shape data."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from pipeline.errors import InvalidValue
from pipeline.text.fingerprints import names
from pipeline.text.fingerprints.description import Description, is_dataclass


@dataclasses.dataclass(frozen=True)
class Function:
    """A function with a fingerprint that you give it, where none can be computed.

    >>> shout = Function(lambda record: [(record["text"].upper(), 1.0)], fingerprint="shout-1")
    >>> shout({"text": "a"}), fingerprint(shout)
    ([('A', 1.0)], 'shout-1')

    Args:
        function: anything that can be called; for workers it must pickle.
        fingerprint: change it whenever `function` would return something else.

    Raises:
        ValueError: `fingerprint` is not text, or empty.
    """

    function: Callable[..., Any]
    fingerprint: str = dataclasses.field(kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.fingerprint, str) or not self.fingerprint:
            raise InvalidValue(f'fingerprint is {self.fingerprint!r}; give a text, such as "v1"')

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """What the function returns."""
        return self.function(*arguments, **options)


def fingerprint(value: Any) -> str:
    """The name of a function or an object's class, and a hash of all that decides what it does.

    A function counts with its code, its defaults, what it captured, and the functions, classes and
    values that it names, and so on from there; an object of a dataclass with the code of its class
    and with its fields. Installed packages count by their names and versions, Python and Lockstep
    by names alone. Code counts as its syntax tree, without annotations and docstrings.

    >>> import json
    >>> fingerprint(json.loads)
    'json.loads'

    Args:
        value: a function, an object of a dataclass, a `functools.partial` of such, or anything with
            an attribute `fingerprint`, which is returned.

    Raises:
        ValueError: it depends on something that has no fingerprint; names that.
    """
    if isinstance(given := getattr(value, "fingerprint", None), str):
        return given
    name = names.name_of(value)
    description = Description(name)
    description.add(value, name)
    module = names.module_of(value)
    if is_dataclass(value) and names.is_of_lockstep(module):
        return repr(value)
    if (inspect.isroutine(value) or isinstance(value, type)) and not names.is_own(module):
        return "-".join([name, *filter(None, [names.version_of(module)])])
    return f"{name}-{description.digest}"
