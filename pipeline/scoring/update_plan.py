"""The plan of an update: one pass, whose rows are sorted by cost and dealt to all its steps.

Of several buckets of one length, full batches use the one with the most rows. The last rows would
fill only a part of such a batch, and its empty rows would cost as much as others. The buckets with
fewer rows, its tails, hold them.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pipeline.errors import InvalidValue
from pipeline.planning.balance import balance
from pipeline.planning.bucket import Bucket, as_buckets, as_shapes
from pipeline.planning.figures import Counts
from pipeline.planning.layout import ranges
from pipeline.planning.lengths import AnyLengths, weigh
from pipeline.planning.plan import Plan
from pipeline.planning.planned import PlannedBatch

# More steps than any update has: the rows of all its steps are sorted by cost and dealt together.
ALL_STEPS = 1 << 40

Group = tuple[Bucket, ...]  # the buckets of one length, the one with the most rows first


def plan_update(lengths: AnyLengths, buckets: Iterable[Bucket], **options: Any) -> Plan:
    """The plan of one pass through examples of these lengths; `options` are those of `Plan`.

    >>> plan = plan_update([4] * 7, [Bucket(4, 4), Bucket(2, 4), Bucket(1, 4)])
    >>> [str(plan.batch(step).bucket) for step in range(plan.num_batches())]
    ['4x4', '2x4', '1x4']
    """
    groups, units = group_tails(buckets)
    plan = Plan(lengths, units, shuffle=False, tiers=ALL_STEPS, **options)
    return plan if all(len(group) == 1 for group in groups) else Tailed.of(plan, groups)


def group_tails(buckets: Iterable[Bucket]) -> tuple[tuple[Group, ...], tuple[Bucket, ...]]:
    """The buckets of each length; and buckets of as many rows as batches of the length can lack.

    >>> group_tails([Bucket(4, 16), Bucket(2, 16), Bucket(2, 32)])[1]
    (Bucket(rows=2, length=16), Bucket(rows=2, length=32))
    """
    shapes = as_shapes(buckets)
    groups = [tuple(g) for _, g in itertools.groupby(shapes, lambda each: each.lengths)]
    first = as_buckets([group[0] for group in groups])
    if any(more.rows <= fewer.rows for g in groups for more, fewer in itertools.pairwise(g)):
        raise InvalidValue(
            f"buckets are {', '.join(map(str, shapes))}; those of one length must descend by rows: "
            "the first holds full batches, the others the last rows"
        )
    units = [math.gcd(*(bucket.rows for bucket in group)) for group in groups]
    return tuple(groups), tuple(
        dataclasses.replace(bucket, rows=rows) for bucket, rows in zip(first, units, strict=True)
    )


class Tailed(Plan):
    """The first epoch of a plan, with its rows sorted by cost and dealt to the buckets of `groups`.

    Attributes:
        groups: the buckets of each length, whose batches have multiples of the plan's rows.
    """

    groups: Sequence[Group]

    @classmethod
    def of(cls, plan: Plan, groups: Sequence[Group]) -> "Tailed":
        """The batches of `groups` with the rows of `plan`."""
        tailed = cls.__new__(cls)
        tailed._set(plan.stages)
        tailed.groups = groups
        return tailed

    @functools.cached_property
    def _batches(self) -> list[PlannedBatch]:
        (stage,) = self.stages
        every = [stage.assembly.batch(step) for step in range(super().first_step(1))]
        trees, found = stage.members[""].trees, list[PlannedBatch]()
        for group in self.groups:
            mine = [batch for batch in every if batch.bucket.lengths == group[0].lengths]
            if not mine:
                continue
            segments = np.concatenate([batch.segments for batch in mine])
            costs = weigh(segments[:, 3:] ** 2, self.options.costs).astype(np.int64)
            if trees is not None:
                _, branches, of_groups = trees[segments[:, 1]].T
                costs = np.where(branches > 0, of_groups, costs)
            new = [np.diff(batch.segments[:, 0], prepend=-1) > 0 for batch in mine]
            starts = np.flatnonzero(np.concatenate(new))
            sizes, costs = np.diff(starts, append=len(segments)), np.add.reduceat(costs, starts)
            sorted_rows, first = (-costs).argsort(kind="stable"), 0
            for bucket, number in zip(group, count_batches(len(starts), group), strict=True):
                for _ in range(number):
                    rows = sorted_rows[first : first + bucket.rows]
                    first += bucket.rows
                    order, places = balance(costs[rows], bucket.rows)
                    rows = rows[order]
                    taken = segments[ranges(starts[rows], sizes[rows])]
                    taken[:, 0] = places.repeat(sizes[rows])
                    found.append(PlannedBatch(bucket, taken, align=self.options.align))
        return found

    def batch(self, step: int) -> PlannedBatch:
        """See `Plan`."""
        return self._batches[step]

    def first_step(self, epoch: int) -> int:
        """See `Plan`; there is one epoch."""
        return len(self._batches) * (epoch > 0)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """See `Plan`; also those that no step has."""
        return tuple(itertools.chain.from_iterable(self.groups))

    def _most_in_row(self, name: str) -> dict[Bucket, int]:
        most = {bucket.lengths: number for bucket, number in super()._most_in_row(name).items()}
        return {bucket: most[bucket.lengths] for bucket in self.buckets}

    def count(self, first: int, last: int) -> Counts:
        """See `Plan`."""
        costs, tokens = self.options.costs, 0.0
        buckets = {bucket: np.zeros(2 + len(costs)) for bucket in self.buckets}
        for batch in self._batches[first:last]:
            real = batch.segments[:, 3:].sum(axis=0)
            rows = len(np.unique(batch.segments[:, 0]))
            buckets[batch.bucket] += np.array([1, rows, *real])
            tokens += float(weigh(real, costs))
        passes = {"": (last - first) / max(len(self._batches), 1)}
        return Counts(buckets, {"": tokens}, passes, costs)


def count_batches(rows: int, group: Group) -> list[int]:
    """The number of batches of each bucket of a group that hold `rows` rows.

    The last ones, too few for another batch of the first bucket, use the buckets that leave the
    fewest rows empty, and then the fewest batches.

    >>> count_batches(77, (Bucket(32, 9), Bucket(8, 9), Bucket(4, 9)))  # 13 as 8 + 8
    [2, 2, 0]
    """
    unit = math.gcd(*(bucket.rows for bucket in group))
    sizes = [bucket.rows // unit for bucket in group]
    whole, last = divmod(-(-rows // unit), sizes[0])
    # For each number of units of rows, the batches of each bucket of the fewest that they fill.
    ways: list[list[int] | None] = [[0] * len(sizes)]
    for count in range(1, last + sizes[-1]):
        before = [
            (sum(way) + 1, number, way)
            for number, size in enumerate(sizes)
            if size <= count and (way := ways[count - size]) is not None
        ]
        fewest = min(before, default=None)
        ways.append(fewest and [n + (i == fewest[1]) for i, n in enumerate(fewest[2])])
    found = next(way for way in ways[last:] if way is not None)
    return [found[0] + whole, *found[1:]]
