"""Function: any callable as a template, with a fingerprint that is given."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import InvalidValue


@dataclass(frozen=True)
class Function:
    """A function with a fingerprint that you give it, if none can be computed.

    >>> shout = Function(lambda record: [(record["text"].upper(), 1.0)], fingerprint="shout-1")
    >>> shout({"text": "a"}), fingerprint(shout)
    ([('A', 1.0)], 'shout-1')

    Args:
        function: any callable; workers pickle it.
        fingerprint: change it whenever `function` would return something else.

    Raises:
        ValueError: `fingerprint` is not a string, or is empty.
    """

    function: Callable[..., Any]
    fingerprint: str = field(kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.fingerprint, str) or not self.fingerprint:
            raise InvalidValue(f'fingerprint is {self.fingerprint!r}; give a string, such as "v1"')

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """The result of the function."""
        return self.function(*arguments, **options)
