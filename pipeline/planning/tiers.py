"""Tiers: the rows of a block of steps, sorted by cost and dealt to these steps again.

With attention within segments, a row with one long document costs many times a row of short ones,
and every device waits for the one with the costliest row. So the rows of a block are sorted by cost
and cut into batches, called tiers, which come in random order.
"""

import numpy as np

from pipeline.planning.assembly import Assembly, Blocks, Division
from pipeline.planning.layout import ranges
from pipeline.planning.options import Options
from pipeline.planning.order import Purpose, permutation, random_bits, random_key
from pipeline.planning.schedule import Schedule


class Tiers(Blocks):
    """The batches of an assembly with their rows dealt again; a block has the same rows.

    A block has `options.tiers` steps. Rows stay in their unit, as in `balance`.
    """

    def __init__(self, assembly: Assembly, schedule: Schedule, options: Options):
        super().__init__(assembly, schedule, options, options.tiers)

    def block(self, step: int) -> range:
        """See `StepBatches`: the steps whose rows are dealt together."""
        return self._around(step)

    def _deal(self, shape: int, division: Division, first: int) -> Division:
        """See `Blocks`."""
        rows, of_steps = division
        steps, order = [*of_steps], np.arange(len(of_steps))
        if self._options.shuffle:
            key = random_key(self._options.seed, "tiers", shape)
            bits = random_bits(key, Purpose.TIERS, len(steps), window=first)
            order = permutation(bits)
        units = self._options.count_units(self._options.buckets[shape])
        unit, counts = np.zeros(len(rows), np.int64), dict[int, np.ndarray]()
        for step, numbers in of_steps.items():
            mine = rows.in_order(numbers)
            unit[mine] = np.arange(len(mine)) * units // len(mine)
            counts[step] = np.bincount(unit[mine], minlength=units)
        # By the cost of attention; the other costs of a row depend only on its static length.
        ranked, dealt = np.lexsort((-rows.costs, unit)), dict[int, np.ndarray]()
        of_units = np.bincount(unit, minlength=units)
        begins = of_units.cumsum() - of_units
        for number in order.tolist():
            of_step = counts[steps[number]]
            dealt[steps[number]] = np.sort(ranked[ranges(begins, of_step)])
            begins += of_step
        return rows, dealt
