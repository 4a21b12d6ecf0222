"""Planning: from lengths to the segments of every step. Needs NumPy only.

`fit_buckets` chooses the shapes of batches, and `Plan` their contents. Terms, in the order in which
the modules build on each other:

- members: the corpora of a plan, and which of their examples stay (`lengths`, `members`).
- piece: an example, or a part of one that is longer than the longest bucket (`pieces`).
- key: the number of the columns that a piece takes of a row; packing sees only keys (`pieces`).
- pattern: the keys of the pieces in a row; packers find patterns (`patterns`, `packing`).
- windows: pieces divided into windows, each packed separately (`windows`).
- flat rows: the segments of rows one after another, in arrays (`layout`).
- rows: the rows of windows, one after another in a seeded order, once or for ever (`rows`).
- stream: the rows of one corpus under given options: the rest of an epoch, then whole epochs
  (`stream`).
- schedule: the bucket of each step, and the rows it takes from each stream (`schedule`, of several
  corpora `mixture`).
- assembly: the batches of these rows (`assembly`); `tiers` deal the rows again.
- share: a part of the files of each window, of which a host's rows need some (`shares`).
- stage: the steps from one on, under one set of options (`stage`).
- change: a further stage, with what was said to make it. A plan is a list of changes (`changes`,
  `plan`).
"""

from pipeline.planning.bucket import Bucket
from pipeline.planning.fit import fit_buckets
from pipeline.planning.lengths import AnyLengths, Exclude
from pipeline.planning.options import By, Changes, Curriculum, Weights
from pipeline.planning.packing import Attention, Packing
from pipeline.planning.pieces import Overflow
from pipeline.planning.plan import Plan
from pipeline.planning.planned import PlannedBatch

__all__ = [
    "AnyLengths",
    "Attention",
    "Bucket",
    "By",
    "Changes",
    "Curriculum",
    "Exclude",
    "Overflow",
    "Packing",
    "Plan",
    "PlannedBatch",
    "Weights",
    "fit_buckets",
]
