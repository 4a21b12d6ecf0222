"""Rows: a plan of rows that have no batches yet."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from pipeline.planning.bucket import Bucket, as_buckets
from pipeline.planning.dealer import Dealer
from pipeline.planning.plan import Plan


class Rows(Plan):
    """A plan whose rows are taken as they are wanted, to fill batches with those of other plans.

    Each of its own batches is a single row, so it has no empty ones.

    Args:
        lengths: as for `Plan`.
        buckets: as for `Plan`; their number of rows does not matter.
        **options: as for `Plan`.
    """

    def __init__(self, lengths, buckets: Iterable[Bucket], **options):
        single = [dataclasses.replace(bucket, rows=1) for bucket in as_buckets(buckets)]
        super().__init__(lengths, single, **options)
        # Windows differ in how many rows of a bucket they have, so that every bucket may be in a
        # window of its own, and on its way to the next.
        self._dealer = Dealer(self._windows, kept=2 * len(self.buckets) + 1)

    @property
    def rows_in_epoch(self) -> list[int]:
        """Of each bucket, the rows in an epoch."""
        return self._windows.rows

    @property
    def num_trained(self) -> int:
        """Examples that are in any batch."""
        dropped = self.overlong if self.overflow == "drop" else 0
        return self.num_examples - self.num_empty - dropped

    def anew(self, lengths: Any = None, **changes: Any) -> "Rows":
        """As that of `Plan`."""
        options = {**self.options, "buckets": self.buckets, **changes}
        del options["shuffle"]
        return Rows(self.lengths if lengths is None else lengths, **options)

    def rows(self, index: int, first: int, last: int) -> np.ndarray:
        """The segments of rows `first` to `last` of bucket number `index`: int64 [n, 4].

        Rows of a bucket are counted over all epochs, each of which has the same number of them.

        Returns:
            As `PlannedBatch.segments`, rows counted from 0.
        """
        found = [np.zeros((0, 4), np.int64)]
        at = first
        while at < last:
            epoch, within = divmod(at, self._windows.rows[index])
            place, local = self._windows.find_row(epoch, index, within)
            dealt = self._dealt(epoch, place)
            end = min(local + last - at, len(dealt.rows[index]))
            if 2 * end > len(dealt.rows[index]):
                self._prepare(epoch, place + 1)
            row, pieces, sizes = dealt.rows_from(index, local, end)
            found.append(self._segments(row + (at - first), pieces, sizes))
            at += end - local
        return np.concatenate(found)
