"""Lockstep's own figures: counted over the rows that a plan packed."""

import dataclasses
import math

import numpy as np

from pipeline.planning import lengths as lengths_lib
from pipeline.planning.bucket import Bucket
from pipeline.planning.plan import Plan
from pipeline.report.options import Options
from pipeline.report.simulated import Simulated
from pipeline.report.stream import Stream


def simulated(plan: Plan, cut: int) -> Simulated:
    """One epoch of a plan, in the terms of the other strategies; `cut` documents are split."""
    batches = plan.batches_per_bucket
    segments = segment_counts(plan)
    sizes = np.arange(len(segments), dtype=np.int64)
    return Simulated(
        rows=np.repeat([b.rows for b in batches], list(batches.values())).astype(np.int64),
        lengths=np.repeat([b.length for b in batches], list(batches.values())).astype(np.int64),
        tokens=plan.num_tokens,
        squares=int(segments @ sizes**2),
        cut=cut,
        reread=0,
    )


def segment_counts(plan: Plan) -> np.ndarray:
    """How many segments of each length an epoch has: int64 [longest + 1]."""
    counts = np.zeros(plan.buckets[-1].length + 1, np.int64)
    for number, packed in plan.packed():
        for pattern in (pattern for patterns in packed.patterns for pattern in patterns):
            for length, times in pattern.pieces:
                counts[length] += number * times * pattern.rows
    return counts


class Pieces:
    """What a stream puts into rows, as lengths that `Plan` takes; digested once for many plans."""

    def __init__(self, stream: Stream):
        self.lengths, self.cut = stream.pieces, stream.cut
        self.different = int(np.count_nonzero(lengths_lib.histogram(stream.pieces)))
        self.lengths_digest = lengths_lib.digest(stream.pieces)


@dataclasses.dataclass(frozen=True)
class Fitter:
    """Plans with other numbers of buckets or ways of packing than the options have.

    Attributes:
        pieces: what is planned.
        fitted: lengths to fit buckets to: a sample, where there are very many.
        options: the options that stay.
        longest: positions in a row of the longest bucket.
    """

    pieces: Pieces
    fitted: np.ndarray
    options: Options
    longest: int

    def plan(self, buckets: tuple[Bucket, ...], packing: str) -> Plan:
        """The plan over these buckets."""
        return self.options.but(packing=packing).plan(self.pieces, buckets)

    def buckets(self, most: int, packing: str, hosts: int = 1) -> tuple[Bucket, ...]:
        """At most `most` buckets, whose rows `hosts` can share."""
        multiple = math.lcm(self.options["row_multiple"], hosts)
        options = self.options.but(
            buckets=None,
            max_buckets=most,
            max_length=self.longest,
            packing=packing,
            row_multiple=multiple,
            tokens_per_batch=max(self.options["tokens_per_batch"], multiple * self.longest),
        )
        return options.fit(self.fitted)
