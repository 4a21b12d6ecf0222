"""Options: how to fit buckets and plan, from a config or from the command line."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from pipeline.packing.bucket import Bucket
from pipeline.planning.checks import list_keywords, select_options, suggest_option
from pipeline.planning.fit import fit_buckets
from pipeline.planning.lengths import as_lengths
from pipeline.planning.plan import Plan

FITTING, PLANNING = list_keywords(fit_buckets), list_keywords(Plan)

DEFAULTS: dict[str, Any] = {
    "tokens_per_batch": 16_384,
    "max_buckets": 4,
    "max_length": None,
    "length_multiple": 128,
    "row_multiple": 1,
    "packing": "best_fit",
    "overflow": "split",
    "attention": "dense",
    "width": 1024,
    "seed": 0,
}


@dataclasses.dataclass(frozen=True)
class Options:
    """What `pipeline.load` takes: options of `fit_buckets` and `Plan`; and `buckets`.

    None stands for the default.

    >>> Options({"max_buckets": 1}).fit([100, 30])
    (Bucket(rows=128, length=128),)

    Raises:
        ValueError: an option is of none of these.
    """

    chosen: Mapping[str, Any]

    def __post_init__(self):
        known = {"buckets", *FITTING, *PLANNING}
        for name in self.chosen:
            if name not in known:
                raise ValueError(f"there is no option {suggest_option(name, known)}")
        given = {name: value for name, value in self.chosen.items() if value is not None}
        object.__setattr__(self, "chosen", {**DEFAULTS, **given})

    def __getitem__(self, name: str) -> Any:
        return self.chosen[name]

    def but(self, **changes) -> "Options":
        """A copy with other values."""
        return Options({**self.chosen, **changes})

    def for_lengths(self, lengths) -> "Options":
        """A copy in which a batch holds the longest row.

        Where no `max_length` is given and the longest example is longer than a whole batch, rows
        are as long as a batch at most, and the plan's `overflow` cuts what is longer.
        """
        if as_lengths(lengths).ndim == 2:
            pairs = self["overflow"] == "split"  # by default; a pair cannot be split
            return self.but(overflow="error") if pairs else self
        most = self["tokens_per_batch"] // self["row_multiple"]
        most -= most % self["length_multiple"]
        longest = int(as_lengths(lengths).max(initial=0))
        if self["max_length"] is None and longest > most > 0:
            return self.but(max_length=most)
        return self

    def fit(self, lengths) -> tuple[Bucket, ...]:
        """The buckets given, or those that `fit_buckets` chooses for `lengths`."""
        if self.chosen.get("buckets"):
            return tuple(self.chosen["buckets"])
        return fit_buckets(lengths, **self._given(FITTING))

    def _given(self, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: v for name, v in select_options(names, self.chosen).items() if v is not None}

    @property
    def unmixed(self) -> "Options":
        """A copy without weights, under which each example comes once an epoch."""
        return self.but(weights=None, by=None, ending=None)

    def plan(self, lengths, buckets: tuple[Bucket, ...] | None = None) -> Plan:
        """The plan of `lengths` over `buckets`, or over those of `fit`.

        With weights, `lengths` are several corpora.
        """
        return Plan(lengths, buckets or self.fit(lengths), **self._given(PLANNING))
