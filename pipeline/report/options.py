"""Options: how to fit buckets and plan, from a config or from the command line."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from pipeline.errors import InvalidValue, suggest_option
from pipeline.planning.bucket import Bucket
from pipeline.planning.fit import fit_buckets
from pipeline.planning.lengths import as_lengths
from pipeline.planning.options import list_keywords, select_options
from pipeline.planning.plan import Plan

FITTING, PLANNING = list_keywords(fit_buckets), list_keywords(Plan)

DEFAULTS: dict[str, Any] = {
    "tokens_per_batch": 16_384,
    "max_buckets": 4,
    "max_length": None,
    "length_multiple": 128,
    "row_multiple": 1,
    "packing": "best_fit",
    "attention": "dense",
    "width": 1024,
    "seed": 0,
}


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of `fit_buckets` and `Plan`, and `buckets`, as `pipeline.load` takes them.

    None stands for the default.

    >>> Options({"max_buckets": 1}).fit([100, 30])
    (Bucket(rows=128, length=128),)

    Raises:
        ValueError: there is no such option.
    """

    values: Mapping[str, Any]

    def __post_init__(self):
        known = {"buckets", *FITTING, *PLANNING}
        for name in self.values:
            if name not in known:
                raise InvalidValue(f"there is no option {suggest_option(name, known)}")
        given = {name: value for name, value in self.values.items() if value is not None}
        object.__setattr__(self, "values", {**DEFAULTS, **given})

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def replace(self, **changes) -> "Options":
        """A copy with other values."""
        return Options({**self.values, **changes})

    def for_lengths(self, lengths) -> "Options":
        """A copy in which the longest row fits into a batch.

        Without `max_length`, rows are no longer than a batch, and the plan's `overflow` says what
        becomes of longer examples.
        """
        if as_lengths(lengths).ndim == 2:
            return self
        most = self["tokens_per_batch"] // self["row_multiple"]
        most -= most % self["length_multiple"]
        longest = int(as_lengths(lengths).max(initial=0))
        if self["max_length"] is None and longest > most > 0:
            return self.replace(max_length=most)
        return self

    def fit(self, lengths) -> tuple[Bucket, ...]:
        """The `buckets` given, or those that `fit_buckets` chooses for `lengths`."""
        if self.values.get("buckets"):
            return tuple(self.values["buckets"])
        return fit_buckets(lengths, **select_options(FITTING, self.values))

    def plan(self, lengths, buckets: tuple[Bucket, ...] | None = None) -> Plan:
        """The plan of `lengths` over `buckets`, by default those of `fit`.

        With weights, `lengths` are several corpora.
        """
        return Plan(lengths, buckets or self.fit(lengths), **select_options(PLANNING, self.values))
