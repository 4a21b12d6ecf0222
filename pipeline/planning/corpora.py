"""Corpora: several corpora by name, of which one plan with weights is made."""

from collections.abc import Iterable, Mapping
from typing import Any

from pipeline.errors import InvalidValue
from pipeline.planning.lengths import HasCorpora


def as_corpora(given: Any) -> Mapping[str, Any]:
    """The corpora of a plan with weights, by name.

    Raises:
        ValueError: `given` is not several corpora by name.
    """
    if isinstance(given, HasCorpora):
        return given.corpora
    if not isinstance(given, Mapping) or "" in given:
        raise InvalidValue(
            f"lengths is {given!r:.60}; with weights it must be several corpora by name: a dict, "
            "or Corpora({'name': corpus})"
        )
    return given


def select_corpora(given: Any, names: Iterable[str]) -> Any:
    """The first of several corpora, up to the last of `names`, in the form of `given`."""
    every = as_corpora(given)
    found = {name: every[name] for name in names}
    if isinstance(given, HasCorpora) and len(found) > 1:
        return given.begin(sum(map(len, found.values())))
    return found
