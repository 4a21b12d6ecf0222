"""What a plan says of one step: the bucket, and the segments of its rows."""

import dataclasses
import hashlib
from collections.abc import Mapping

import numpy as np

from pipeline.planning.bucket import Bucket


@dataclasses.dataclass(frozen=True)
class PlannedBatch:
    """One global batch, as integers.

    Attributes:
        bucket: the shape of the batch.
        segments: int64 `[n, 4]`, a line for each segment, in row order: row, example, first
            position in the example, number of positions; of pairs `[n, 5]`, positions of the
            inputs and of the targets.
        epoch: the epoch that the batch belongs to, from 0.
    """

    bucket: Bucket
    segments: np.ndarray
    epoch: int = 0

    @property
    def num_tokens(self) -> int:
        """Real positions in the batch, of both sides of pairs."""
        return int(self.segments[:, 3:].sum())

    @property
    def sides(self) -> tuple["PlannedBatch", ...]:
        """The batch itself; of pairs, one for the inputs and one for the targets."""
        return tuple(
            PlannedBatch(bucket, self.segments[:, [0, 1, 2, 3 + side]], self.epoch)
            for side, bucket in enumerate(self.bucket.sides)
        )

    @property
    def digest(self) -> str:
        """A short hash of the batch: equal for equal buckets and segments."""
        sha = hashlib.sha256(f"{self.bucket}".encode())
        sha.update(self.segments.astype("<i8").tobytes())
        return sha.hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class MixedBatch(PlannedBatch):
    """A planned batch of several sources.

    Attributes:
        sources: real positions of each source in the batch, by name.
        epochs: the epoch of its own source that each segment belongs to, from 0: int64 [n].
    """

    sources: Mapping[str, int] = dataclasses.field(default_factory=dict)
    epochs: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))
