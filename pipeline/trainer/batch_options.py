"""The options of a run's batches: which there are, and what several changes of them come to."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from pipeline.errors import InvalidValue, suggest_option
from pipeline.planning.fit import fit_buckets
from pipeline.planning.options import list_keywords
from pipeline.planning.plan import PLANNING as PLAN_OPTIONS

# The weights of a mixture change by phases of their own.
MIXTURE = ("weights", "by", "ending")

FITTING = tuple(name for name in list_keywords(fit_buckets) if name not in MIXTURE)
PLANNING = tuple(name for name in PLAN_OPTIONS if name not in MIXTURE)

# An entry adds to these lists; it does not replace them.
LISTS = {"exclude": (int, "numbers of examples"), "add": (str, "names of corpora")}
KNOWN = sorted({*FITTING, *PLANNING, *LISTS, "buckets"})


def parse_change(change: str) -> dict[str, Any]:
    """The options in the JSON of a `--change`.

    Raises:
        ValueError: it is not a JSON object, or names an unknown option.
    """
    try:
        asked = json.loads(change or "{}")
    except (ValueError, RecursionError):
        asked = None
    if not isinstance(asked, dict):
        raise InvalidValue(
            f"--change is {change!r}; it must be a JSON object of options, as in "
            """--change='{"tokens_per_batch": 8192, "exclude": [17]}'"""
        )
    check_options(asked)
    return asked


def list_changes(changes: Any) -> list[tuple[int, dict[str, Any]]]:
    """The entries of a config's `schedule`: each a step, and the options that change there.

    Raises:
        ValueError: they are not such pairs, by ascending steps.
    """
    found: list[tuple[int, dict[str, Any]]] = []
    seen = changes
    try:
        for seen in changes:
            step, options = seen
            if int(step) != step or step < (found[-1][0] if found else 0):
                raise ValueError
            found.append((int(step), dict(options)))
    except (TypeError, ValueError, OverflowError):
        raise InvalidValue(
            f"schedule holds {seen!r}; each entry is a step and the options that change "
            'there, by ascending steps, as in ((0, {"tokens_per_batch": 2048}), '
            '(500, {"seed": 1}))'
        ) from None
    return found


def check_options(options: Mapping[str, Any]) -> None:
    """Refuses unknown options, naming the nearest known one, and values of lists that are no lists.

    Raises:
        ValueError: as above.
    """
    for name in options:
        if name not in KNOWN:
            raise InvalidValue(f"batches have no option {suggest_option(name, KNOWN)}")
    for name, (kind, what) in LISTS.items():
        given = options.get(name, [])
        if not isinstance(given, list | tuple) or not all(isinstance(n, kind) for n in given):
            raise InvalidValue(f"{name} is {given!r}; it must be a list of {what}")


def merge_options(options: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The options after several entries."""
    merged: dict[str, Any] = {}
    for each in options:
        lists = {name: [*merged.get(name, ()), *each.get(name, ())] for name in LISTS}
        merged |= dict(each) | {name: every for name, every in lists.items() if every}
    return merged
