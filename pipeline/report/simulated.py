"""Simulated: what a way to make batches made of a stream."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulated:
    """Batches, as their shapes, and what the data lost on its way into them.

    Attributes:
        rows: rows of each batch, int64 [batches].
        lengths: positions in each of its rows, int64 [batches].
        tokens: real positions in all of them.
        squares: what attention inside segments computes, pairs of positions: the sum of the
            squares of the segments' lengths.
        cut: documents that lie in more than one segment.
        reread: examples that must be read again to go on after an interruption, at most.
        targets: of pairs, positions of the targets in each row, int64 [batches]; `lengths` are
            then those of the inputs. Targets attend to inputs as well.
    """

    rows: np.ndarray
    lengths: np.ndarray
    tokens: int
    squares: int
    cut: int
    reread: int
    targets: np.ndarray | int = 0

    @property
    def positions(self) -> int:
        """All positions, real and padding."""
        return int(self.rows @ (self.lengths + self.targets))

    @property
    def scores(self) -> int:
        """Pairs of positions in a row: what attention over whole rows computes."""
        scores = self.lengths**2 + self.lengths * self.targets + np.square(self.targets)
        return int(self.rows @ scores)

    @property
    def shapes(self) -> int:
        """How many different shapes the batches have; each is one compilation."""
        targets = np.broadcast_to(self.targets, self.rows.shape)
        return len(np.unique(np.stack([self.rows, self.lengths, targets]), axis=1).T)


def total(lengths: np.ndarray) -> int:
    """The sum of lengths."""
    return int(lengths.sum(dtype=np.int64))


def sum_of_squares(lengths: np.ndarray) -> int:
    """The sum of squared lengths, counted over the histogram so that nothing large is copied."""
    counts = np.bincount(lengths)
    return int(counts @ np.arange(len(counts), dtype=np.int64) ** 2)


def dealt(units: int, rows: int) -> np.ndarray:
    """The rows of each batch when `units` rows are dealt out `rows` at a time.

    >>> dealt(7, 3).tolist()
    [3, 3, 1]
    """
    sizes = np.full(-(-units // rows), rows, np.int64)
    if units % rows:
        sizes[-1] = units % rows
    return sizes
