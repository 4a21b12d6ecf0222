"""What a mixture comes to: batches, shares, passes and padding, from its timeline."""

import dataclasses
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from pipeline.planning.bucket import Bucket
from pipeline.planning.packing import Packed
from pipeline.planning.plan import Plan
from pipeline.planning.rows import Rows
from pipeline.planning.summary import mixture_table
from pipeline.planning.supply import Supply
from pipeline.planning.timeline import Stock, Timeline


class MixtureFigures(Plan):
    """The figures of a `Mixture`, which sets what they are taken from.

    Attributes:
        names: the corpora, in order.
        sources: the plan of rows of each corpus, by name.
        supplies: the rows of each corpus as they are taken, by name.
    """

    names: tuple[str, ...]
    sources: dict[str, Rows]
    supplies: dict[str, Supply]
    _phases: Sequence[tuple[int, dict[str, Fraction]]]
    _first: np.ndarray  # the number of each corpus's first example, and of all
    _whole: Stock  # an epoch of each corpus
    _rests: Stock  # what each has before its first whole one
    _timeline: Timeline

    def shares(self, first: int, last: int) -> dict[str, float]:
        """The share of each corpus in the real positions of steps `first` to `last`.

        By the rows that those steps hold, at the mean fill of their kind.
        """
        tokens = self.tokens(last) - self.tokens(first)
        return dict(zip(self.names, (tokens / max(tokens.sum(), 1)).tolist(), strict=True))

    def whole_epochs(self, step: int) -> dict[str, int]:
        """How many epochs of each corpus all its rows have been through before `step`."""
        taken = self.taken(step)
        return {name: supply.whole_epochs(taken[name]) for name, supply in self.supplies.items()}

    def taken(self, step: int) -> dict[str, list[int]]:
        """Of each corpus, the rows of each bucket that the steps before `step` have."""
        return dict(zip(self.names, self._timeline.before(step)[1].T.tolist(), strict=True))

    def passes(self, step: int) -> dict[str, float]:
        """How often each corpus has been through before `step`."""
        _, rows = self._timeline.before(step)
        passes = rows.sum(axis=0) / self._whole.rows.sum(axis=0)
        return dict(zip(self.names, passes.tolist(), strict=True))

    def tokens(self, step: int) -> np.ndarray:
        """Real positions of each corpus before `step`, at the mean fill of its rows: [corpora]."""
        _, rows = self._timeline.before(step)
        first = np.minimum(rows, self._rests.rows)
        parts = ((first, self._rests), (rows - first, self._whole))
        return sum(
            (each * (stock.real / np.maximum(stock.rows, 1))).sum(axis=0) for each, stock in parts
        )

    @property
    def phases(self) -> list[tuple[int, dict[str, float]]]:
        """The first step of each phase, and the share of each corpus from there on."""
        none = dict.fromkeys(self.names, 0.0)
        return [
            (start, none | {name: float(share) for name, share in shares.items()})
            for start, shares in self._phases
        ]

    @property
    def first_examples(self) -> list[int]:
        """The number of each corpus's first example."""
        return self._first[:-1].tolist()

    @property
    def batches_per_bucket(self) -> dict[Bucket, int]:
        """How many batches of each bucket an epoch has; 0 for one that no phase ever needs.

        One that is needed by phases that begin after the first epoch alone counts for 1.
        """
        batches, _ = self._timeline.before(self.num_batches())
        found = np.maximum(batches, self._timeline.needed)
        return dict(zip(self.buckets, found.tolist(), strict=True))

    def packed(self) -> list[tuple[float, Packed]]:  # type: ignore[override]  # parts of epochs
        """The rows of each bucket in each corpus's histograms; how often an epoch has them."""
        times = self._timeline.before(self.num_batches())[1] / np.maximum(self._whole.rows, 1)
        found = []
        for index in range(len(self.buckets)):
            for plan, often in zip(self.sources.values(), times[index].tolist(), strict=True):
                for number, packed in plan.packed():
                    only = [each if i == index else () for i, each in enumerate(packed.patterns)]
                    found.append(
                        (often * number, dataclasses.replace(packed, patterns=tuple(only)))
                    )
        return found

    def most_segments(self) -> dict[Bucket, int]:
        """The most segments that any row of each bucket has; at least 1."""
        most = {bucket.length: 1 for bucket in self.buckets}
        for plan in (plan for supply in self.supplies.values() for plan in supply.plans):
            for bucket, number in plan.most_segments().items():
                most[bucket.length] = max(most[bucket.length], number)
        return {bucket: most[bucket.length] for bucket in self.buckets}

    @property
    def num_tokens(self) -> int:
        """Real positions in an epoch, at the mean fill of rows."""
        return round(self.tokens(self.num_batches()).sum())

    @property
    def overlong(self) -> int:
        """How many examples are longer than the longest bucket."""
        return sum(plan.overlong for plan in self.sources.values())

    @property
    def lost(self) -> int:
        """How many of their positions are in no batch."""
        return sum(plan.lost for plan in self.sources.values())

    def __str__(self) -> str:
        return mixture_table(self)
