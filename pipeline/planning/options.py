"""Options: what may be said of buckets and of a plan, by name, and what they make of lengths."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pipeline.planning.bucket import Bucket
from pipeline.planning.fit import fit_buckets
from pipeline.planning.mixture import Mixture
from pipeline.planning.plan import Plan
from pipeline.planning.weights import typical_lengths


def keywords(function: Callable) -> tuple[str, ...]:
    """The names of the arguments that a function takes by keyword alone."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)


FITTING, PLANNING, MIXING = keywords(fit_buckets), keywords(Plan), keywords(Mixture)


def chosen(names: Iterable[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of some options that have one of these names."""
    return {name: options[name] for name in names if name in options}


def fitted(lengths: Any, options: Mapping[str, Any]) -> tuple[Bucket, ...]:
    """The buckets that `fit_buckets` chooses; with weights, for a mixture of `lengths`, joined."""
    if weights := options.get("weights"):
        lengths = typical_lengths(lengths, weights, options.get("by", "tokens"))
    return fit_buckets(lengths, **chosen(FITTING, options))


def planned(lengths: Any, buckets: Iterable[Bucket], options: Mapping[str, Any]) -> Plan:
    """The plan of `lengths`; with weights, a mixture of them, joined."""
    if options.get("weights"):
        return Mixture(lengths, buckets, **chosen(MIXING, options))
    return Plan(lengths, buckets, **chosen(PLANNING, options))
