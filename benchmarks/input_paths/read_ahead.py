"""infinibatch."""

import numpy as np
from infinibatch import iterators

from benchmarks.input_paths import FIELDS, InputPath, split


class Infinibatch(InputPath):
    """Batches of like lengths whose positions stay below a budget, padded to their longest."""

    packages = ("infinibatch",)

    def start(self, rows, host, hosts):
        order = np.random.default_rng(0).permutation(len(self.documents)).tolist()
        numbers = iterators.ChunkedSourceIterator(order, hosts, host)
        pieces = iterators.SelectManyIterator(
            numbers, lambda number: split(self.documents[number], self.length)
        )
        budget = rows // hosts * self.length
        return iterators.BucketedReadaheadBatchIterator(
            pieces,
            read_ahead=1000,
            key=len,
            batch_size=lambda longest: budget // (len(longest) - 1),
            seed=0,
        )

    def convert(self, element):
        width = max(map(len, element)) - 1
        batch = {name: np.zeros((len(element), width), np.int32) for name in FIELDS}
        for row, piece in enumerate(element):
            size = len(piece) - 1
            values = (piece[:-1], piece[1:], 1, np.arange(size), 1)
            for name, value in zip(FIELDS, values, strict=True):
                batch[name][row, :size] = value
        return batch

    def state(self, iterator, steps):
        return iterator.getstate()

    def resume(self, rows, states):
        iterator = self.start(rows, 0, 1)
        iterator.setstate(states[0])
        return iterator
