"""Lockstep's own figures: counted over the rows that a plan packed."""

import dataclasses
import functools
import math

import numpy as np

from pipeline.packing.bucket import Bucket
from pipeline.planning import figures
from pipeline.planning.lengths import Lengths
from pipeline.planning.plan import Plan
from pipeline.report.options import Options
from pipeline.report.simulated import Simulated


def simulated(plan: Plan, cut: int) -> Simulated:
    """One epoch of a plan, in the terms of the other strategies; `cut` documents are split."""
    batches = figures.epoch_batches(plan)
    shapes = np.array([(b.rows, *b.lengths, 0)[:3] for b in batches], np.int64)
    rows, lengths, targets = np.repeat(shapes, list(batches.values()), axis=0).T
    return Simulated(
        rows=rows,
        lengths=lengths,
        targets=targets,
        tokens=plan.num_tokens,
        squares=_squares(plan),
        cut=cut,
        reread=0,
    )


def _squares(plan: Plan) -> int:
    """What attention inside segments computes in an epoch of a plan of one corpus."""
    (source,) = plan.stages[-1].sources
    total = 0
    for kind in source.whole.kinds:
        counts = kind.slots.packed.counts
        sides = source.whole.pieces.positions(np.arange(len(counts)))
        scores = sides[:, 0] ** 2
        if sides.shape[1] == 2:
            scores = scores + sides[:, 1] ** 2 + sides[:, 0] * sides[:, 1]
        total += kind.number * int(counts @ scores)
    return total


@dataclasses.dataclass(frozen=True)
class Fitter:
    """Plans with other numbers of buckets or ways of packing than the options have.

    Attributes:
        lengths: what is planned.
        cut: how many documents are in several pieces of these lengths.
        fitted: lengths to fit buckets to: a sample, where there are very many.
        options: the options that stay.
        longest: positions in a row of the longest bucket; of pairs, of inputs and of targets.
    """

    lengths: Lengths
    cut: int
    fitted: np.ndarray
    options: Options
    longest: int | tuple[int, int]

    @functools.cached_property
    def different(self) -> int:
        """How many different lengths there are."""
        return len(np.unique(self.lengths.array, axis=0))

    def plan(self, buckets: tuple[Bucket, ...], packing: str) -> Plan:
        """The plan over these buckets."""
        return self.options.but(packing=packing).plan(self.lengths, buckets)

    def buckets(self, most: int, packing: str, hosts: int = 1) -> tuple[Bucket, ...]:
        """At most `most` buckets, whose rows `hosts` can share."""
        multiple = math.lcm(self.options["row_multiple"], hosts)
        unit = self.options["length_multiple"]
        row = int(np.sum(-(-np.asarray(self.longest) // unit) * unit))
        options = self.options.but(
            buckets=None,
            max_buckets=most,
            max_length=self.longest,
            packing=packing,
            row_multiple=multiple,
            tokens_per_batch=max(self.options["tokens_per_batch"], multiple * row),
        )
        return options.fit(self.fitted)
