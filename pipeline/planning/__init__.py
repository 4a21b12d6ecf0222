"""Planning: from lengths to the segments of every step. Needs NumPy only.

`fit_buckets` chooses the shapes of batches, and `Plan` what each batch holds. Terms, in the order
in which the modules build on each other:

- piece: an example, or a part of one that is longer than the longest bucket (`pieces`).
- pattern: the sizes of the pieces in a row; packing finds patterns (`patterns`, `cascade`).
- slot: the place of one piece in a row. An assignment puts a piece into each slot (`assignment`).
- window: the pieces that are packed together; a large corpus has several (`partition`, `windows`).
- source: one corpus under given options, as an endless stream of rows per bucket (`source`).
- remainder: the positions that a source has not used of its epochs when another takes over.
- timetable: the bucket of each step, and its rows of each source (`timetable`).
- stage: options, sources and a timetable, from a step on (`stage`).
- plan: a list of stages (`stages`, `plan`).
"""

from pipeline.planning.bucket import Bucket
from pipeline.planning.cascade import Attention, Packing
from pipeline.planning.fit import fit_buckets
from pipeline.planning.lengths import AnyLengths, Exclude, HasCorpora
from pipeline.planning.options import By, Changes, Ending, Weights
from pipeline.planning.pieces import Overflow
from pipeline.planning.plan import Plan
from pipeline.planning.planned import PlannedBatch

__all__ = [
    "AnyLengths",
    "Attention",
    "Bucket",
    "By",
    "Changes",
    "Ending",
    "Exclude",
    "HasCorpora",
    "Overflow",
    "Packing",
    "Plan",
    "PlannedBatch",
    "Weights",
    "fit_buckets",
]
