"""Planned batches: the content of one global batch, as integers."""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.planning.bucket import Bucket
from pipeline.planning.layout import row_starts
from pipeline.planning.options import by_side, unify


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedBatch:
    """One global batch, as integers.

    Attributes:
        bucket: the shape of the batch.
        segments: int64 `[n, 4]`, one line for each segment, in row order: row, example, first
            position in the example, number of positions. With several sides `[n, 3 + sides]`: the
            last columns are the positions of each side, for pairs of the inputs and the targets.
        epoch: the epoch of the batch, from 0.
        epochs: with several corpora int64 [n], the epoch of each segment in its own corpus, from 0.
            None with one corpus, where all have `epoch`.
        sources: with several corpora, the real positions of each in the batch, by name; those of
            a side count with its cost.
        align: every segment begins at a column that is a multiple of this, for each side.
    """

    bucket: Bucket
    segments: np.ndarray
    epoch: int = 0
    epochs: np.ndarray | None = None
    sources: Mapping[str, float] = dataclasses.field(default_factory=dict)
    align: Any = 1  # one number stands for all sides

    def __post_init__(self) -> None:
        object.__setattr__(self, "align", by_side("align", self.align, self.bucket.names))

    @property
    def num_tokens(self) -> int:
        """Real positions in a batch of text or pairs; for pairs, inputs plus targets."""
        return int(self.segments[:, 3:].sum())

    @functools.cached_property
    def _starts(self) -> np.ndarray:
        """The number of the first segment in each segment's row: int64 [n]."""
        return row_starts(self.segments[:, 0])

    @functools.cached_property
    def numbers(self) -> np.ndarray:
        """The number of each segment in its row, from 0: int64 [n]."""
        return np.arange(len(self.segments)) - self._starts

    @functools.cached_property
    def columns(self) -> np.ndarray:
        """The first column of each segment in its row: int64 [n]; with several sides [n, sides].

        With `align`, padding may follow every segment, not only the last one of a row.
        """
        places = self.segments[:, 3:]
        if max(self.align) > 1:
            places = -(-places // np.array(self.align)) * self.align
        before = places.cumsum(axis=0) - places
        columns = before - before[self._starts]
        return columns if len(self.align) > 1 else columns[:, 0]

    @property
    def epoch_of_segments(self) -> np.ndarray:
        """The epoch of each segment in its own corpus: int64 [n]."""
        if self.epochs is None:
            return np.full(len(self.segments), self.epoch)
        return self.epochs

    @property
    def sides(self) -> tuple["PlannedBatch", ...]:
        """One batch for each side; the batch itself if it has one."""
        if len(self.bucket.lengths) == 1:
            return (self,)
        return tuple(
            dataclasses.replace(
                self, bucket=bucket, segments=self.segments[:, [0, 1, 2, 3 + side]], align=align
            )
            for side, (bucket, align) in enumerate(zip(self.bucket.sides, self.align, strict=True))
        )

    @property
    def digest(self) -> str:
        """A short hash of the bucket, the segments and their columns."""
        sha = hashlib.sha256(f"{self.bucket}".encode())
        align = unify(self.align)
        sha.update(f" align={align}".encode() if align != 1 else b"")
        sha.update(self.segments.astype("<i8").tobytes())
        return sha.hexdigest()[:16]
