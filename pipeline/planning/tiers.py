"""Tiers: the rows of a block of steps, sorted by cost and dealt to these steps again.

With attention within segments, a row with one long document costs many times a row of short ones,
and every device waits for the one with the costliest row. So the rows of a block are sorted by cost
and cut into batches, called tiers, which come in random order.
"""

import numpy as np

from pipeline.planning.assembly import Assembly, Blocks, Division
from pipeline.planning.options import Options
from pipeline.planning.order import Purpose, permutation, random_bits, random_key
from pipeline.planning.schedule import Schedule


class Tiers(Blocks):
    """The batches of an assembly with their rows dealt again; a block has the same rows.

    A block has `options.tiers` steps.
    """

    def __init__(self, assembly: Assembly, schedule: Schedule, options: Options):
        super().__init__(assembly, schedule, options, options.tiers)

    def block(self, step: int) -> range:
        """See `Batches`: the steps whose rows are dealt together."""
        return self._around(step)

    def _deal(self, shape: int, division: Division, first: int) -> Division:
        """See `Blocks`."""
        rows, of_steps = division
        steps, order = [*of_steps], np.arange(len(of_steps))
        if self._options.shuffle:
            key = random_key(self._options.seed, "tiers", shape)
            bits = random_bits(key, Purpose.TIERS, len(steps), window=first)
            order = permutation(bits)
        # By the cost of attention; the other costs of a row depend only on its static length.
        ranked, dealt = (-rows.costs).argsort(kind="stable"), dict[int, np.ndarray]()
        for number in order.tolist():
            count = len(of_steps[steps[number]])
            dealt[steps[number]], ranked = np.sort(ranked[:count]), ranked[count:]
        return rows, dealt
