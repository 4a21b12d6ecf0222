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
from pipeline.planning.bucket import Bucket, as_buckets, as_shapes
from pipeline.planning.figures import Counts
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
    groups = group_tails(buckets)
    # Of each length, batches can lack multiples of so many rows.
    units = [math.gcd(*(bucket.rows for bucket in group)) for group in groups]
    shapes = [dataclasses.replace(g[0], rows=n) for g, n in zip(groups, units, strict=True)]
    plan = Plan(lengths, shapes, shuffle=False, tiers=ALL_STEPS, **options)
    return plan if all(len(group) == 1 for group in groups) else Tailed.of(plan, groups)


def group_tails(buckets: Iterable[Bucket]) -> tuple[Group, ...]:
    """The buckets of each length.

    >>> [len(group) for group in group_tails([Bucket(4, 16), Bucket(2, 16), Bucket(2, 32)])]
    [2, 1]
    """
    shapes = as_shapes(buckets)
    groups = tuple(tuple(g) for _, g in itertools.groupby(shapes, lambda each: each.lengths))
    as_buckets(group[0] for group in groups)
    if any(more.rows <= fewer.rows for g in groups for more, fewer in itertools.pairwise(g)):
        raise InvalidValue(
            f"buckets are {', '.join(map(str, shapes))}; those of one length must descend by rows: "
            "the first holds full batches, the others the last rows"
        )
    return groups


class Tailed(Plan):
    """The first epoch of a plan, with its rows sorted by cost and dealt to the buckets of `groups`.

    Attributes:
        groups: the buckets of each length, in the order of the plan's buckets.
    """

    groups: Sequence[Group]

    @classmethod
    def of(cls, plan: Plan, groups: Sequence[Group]) -> "Tailed":
        """The batches of `groups` with the rows of `plan`."""
        tailed = cls.__new__(cls)
        tailed._set(plan._history)
        tailed.groups = groups
        return tailed

    @functools.cached_property
    def _batches(self) -> list[PlannedBatch]:
        (stage,), found = self.stages, list[PlannedBatch]()
        (stream,), assembly = stage.streams, stage.plain
        for index, (group, count) in enumerate(zip(self.groups, stream.whole.counts, strict=True)):
            if not count:
                continue
            rows = assembly.take(index, [(0, 0, int(count))])
            order = (-rows.costs).argsort(kind="stable")
            for bucket, number in zip(group, count_batches(len(order), group), strict=True):
                for _ in range(number):
                    mine, order = order[: bucket.rows], order[bucket.rows :]
                    found.append(assembly.make_batch(bucket, rows, mine, epoch=0))
        return found

    def batch(self, step: int) -> PlannedBatch:
        """See `Plan`."""
        return self._batches[step]

    def first_step(self, epoch: int) -> int:
        """See `Plan`; there is one epoch."""
        return len(self._batches) * (epoch > 0)

    @functools.cached_property
    def identity(self) -> Any:
        """See `Plan`."""
        return {**super().identity, "buckets": "+".join(map(str, self.buckets))}

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """See `Plan`; also those that no step has."""
        return tuple(itertools.chain.from_iterable(self.groups))

    @property
    def batches_per_bucket(self) -> dict[Bucket, int]:
        """See `Plan`."""
        return self.count(0, len(self._batches)).batches

    def _most_in_row(self, name: str) -> dict[Bucket, int]:
        most = {bucket.lengths: number for bucket, number in super()._most_in_row(name).items()}
        return {bucket: most[bucket.lengths] for bucket in self.buckets}

    def count(self, first: int, last: int) -> Counts:
        """See `Plan`."""
        costs, tokens = self.options.cost, 0.0
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
    sizes = [bucket.rows for bucket in group]
    whole, last = divmod(rows, sizes[0])
    if last <= sizes[-1]:  # also where buckets are huge, for which the table below would be
        found = [whole, *[0] * (len(sizes) - 1)]
        found[-1] += last > 0
        return found
    # By the number of rows that batches can fill, how many of each bucket are the fewest.
    ways = {0: [0] * len(sizes)}
    for count in range(1, last + sizes[-1]):
        before = [(sum(ways[count - n]), i) for i, n in enumerate(sizes) if count - n in ways]
        if before:
            _, used = min(before)
            ways[count] = [n + (i == used) for i, n in enumerate(ways[count - sizes[used]])]
    found = next(ways[count] for count in itertools.count(last) if count in ways)
    return [found[0] + whole, *found[1:]]
