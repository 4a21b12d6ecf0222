"""Tiers: the rows of a block of steps, sorted by cost and dealt to these steps again.

With attention within segments, a row with one long document costs many times a row of short ones,
and every device waits for the one with the costliest row. So the rows of a block are sorted by cost
and cut into batches, called tiers, which come in random order.
"""

import numpy as np

from pipeline.planning.assembly import KEPT, Assembly, Selection
from pipeline.planning.cache import WindowCache
from pipeline.planning.options import Options
from pipeline.planning.order import Purpose, permutation, random_bits, random_key
from pipeline.planning.planned import PlannedBatch
from pipeline.planning.schedule import Schedule


class Tiers:
    """The batches of an assembly with their rows dealt again; a block has the same rows.

    A block is `options.tiers` consecutive steps of the plan, counted from step 0. Blocks are cut
    where the stage begins and where an epoch ends.
    """

    def __init__(self, assembly: Assembly, schedule: Schedule, options: Options):
        self._assembly, self._schedule, self._options = assembly, schedule, options
        self._block = range(0)  # the last block that was looked up
        self._blocks = WindowCache(KEPT)

    def block(self, step: int) -> range:
        """See `Assembly`."""
        if step not in (block := self._block):
            block = self._block = self._schedule.block_around(step, self._options.tiers)
        return block

    def batch(self, step: int) -> PlannedBatch:
        """See `Assembly`."""
        steps = self.block(step)
        if len(steps) == 1:
            return self._assembly.batch(step)
        return self._assembly.make_batch(self._blocks.get(steps, 1, self._deal, steps)[step])

    def _deal(self, steps: range) -> dict[int, Selection]:
        """The rows of each of a block of steps."""
        found = {}
        for bucket, selections in self._assembly.select(steps).items():
            rows = selections[0].rows
            sizes = [len(rows.costs[each.numbers]) for each in selections]
            order = np.arange(len(sizes))
            if self._options.shuffle:
                key = random_key(self._options.seed, "tiers", bucket)
                bits = random_bits(key, Purpose.TIERS, len(sizes), window=steps.start)
                order = permutation(bits)
            # By the cost of attention; the other costs of a row depend only on its static length.
            ranked, first = (-rows.costs).argsort(kind="stable"), 0
            for number in order.tolist():
                numbers = np.sort(ranked[first : first + sizes[number]])
                first += sizes[number]
                found[selections[number].step] = selections[number]._replace(numbers=numbers)
        return found
