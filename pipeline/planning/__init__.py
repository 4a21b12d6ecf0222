"""Planning: from lengths to the segments of every step. Needs NumPy only.

`fit_buckets` chooses the shapes of batches, and `Plan` what each batch holds. Terms, in the order
in which the modules build on each other:

- piece: an example, or a part of one that is longer than the longest bucket (`pieces`).
- pattern: the sizes of the pieces in a row; packing finds patterns (`patterns`, `cascade`).
- layout: the pieces in windows, each packed for itself, and their rows (`layout`).
- pass: the rows of a layout, window by window, in a seeded order (`stream`).
- stream: one corpus under given options: its passes, one after another (`stream`).
- schedule: the bucket of each step, and how many rows it takes of each stream (`schedule`).
- assembly: these rows as batches (`assembly`).
- stage: options, streams and a schedule, from a step on. A plan is a list of stages (`plan`).
"""

from pipeline.planning.bucket import Bucket
from pipeline.planning.cascade import Attention, Packing
from pipeline.planning.fit import fit_buckets
from pipeline.planning.lengths import AnyLengths, Exclude
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
    "Overflow",
    "Packing",
    "Plan",
    "PlannedBatch",
    "Weights",
    "fit_buckets",
]
