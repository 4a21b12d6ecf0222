"""The planned batch: what a plan says of one step, as integers."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from pipeline.packing.bucket import Bucket
from pipeline.planning.order import balanced


@dataclasses.dataclass(frozen=True)
class PlannedBatch:
    """One global batch, as integers.

    Attributes:
        bucket: the shape of the batch.
        segments: int64 `[n, 4]`, a line for each segment, in row order: row, example, first
            position in the example, number of positions; of pairs `[n, 5]`, positions of the
            inputs and of the targets.
        epoch: the epoch that the batch belongs to, from 0.
        epochs: the epoch of its own corpus that each segment belongs to, from 0: int64 [n]. None
            for one corpus: `epoch`, for all.
        sources: of several corpora, the real positions of each in the batch, by name.
    """

    bucket: Bucket
    segments: np.ndarray
    epoch: int = 0
    epochs: np.ndarray | None = None
    sources: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Real positions in the batch, of both sides of pairs."""
        return int(self.segments[:, 3:].sum())

    @property
    def epoch_of_segments(self) -> np.ndarray:
        """`epochs`, also where it is None: int64 [n]."""
        if self.epochs is None:
            return np.full(len(self.segments), self.epoch)
        return self.epochs

    @property
    def sides(self) -> tuple["PlannedBatch", ...]:
        """The batch itself; of pairs, one for the inputs and one for the targets."""
        return tuple(
            dataclasses.replace(self, bucket=bucket, segments=self.segments[:, [0, 1, 2, 3 + side]])
            for side, bucket in enumerate(self.bucket.sides)
        )

    @property
    def digest(self) -> str:
        """A short hash of the batch: equal for equal buckets and segments."""
        sha = hashlib.sha256(f"{self.bucket}".encode())
        sha.update(self.segments.astype("<i8").tobytes())
        return sha.hexdigest()[:16]


def assemble(
    bucket: Bucket,
    parts: Sequence[tuple[str, np.ndarray, np.ndarray]],
    epoch: int,
) -> PlannedBatch:
    """The batch of some rows, in an order that gives every host an even share of the work.

    Args:
        bucket: the shape of the batch, with at least as many rows.
        parts: of each source its name, empty for the only one, and the segments and epochs of its
            rows, as `Source.rows` gives them; overwritten.
        epoch: the epoch of the batch.
    """
    name, segments, epochs = parts[0]
    height = int(segments[-1, 0]) + 1
    if len(parts) > 1:
        every = []
        height = 0
        for _, more, _ in parts:
            more[:, 0] += height
            height = int(more[-1, 0]) + 1
            every.append(more)
        segments = np.concatenate(every)
        epochs = np.concatenate([each for _, _, each in parts])
    sources = {name: int(each[:, 3:].sum()) for name, each, _ in parts} if name else {}
    sizes = segments[:, 3:]
    squares = (sizes * sizes).sum(axis=1) if sizes.shape[1] > 1 else sizes[:, 0] * sizes[:, 0]
    cost = np.bincount(segments[:, 0], squares, height)
    rows, places = balanced(np.arange(height), cost, bucket.rows)
    place = np.empty(height, np.int64)
    place[rows] = places
    row = place[segments[:, 0]]
    order = np.argsort(row, kind="stable")
    segments = segments[order]
    segments[:, 0] = row[order]
    return PlannedBatch(bucket, segments, epoch, epochs[order] if name else None, sources)
