"""The planned batch: what a plan says of one step, as integers."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from pipeline.packing.bucket import Bucket
from pipeline.planning.dealing import Taken
from pipeline.planning.order import balance


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


def assemble(bucket: Bucket, parts: Sequence[tuple[str, Taken]], epoch: int) -> PlannedBatch:
    """The batch of some rows, in an order that gives every host an even share of the work.

    Args:
        bucket: the shape of the batch, with at least as many rows.
        parts: the name of each source, empty for the only one, and rows of it.
        epoch: the epoch of the batch.
    """
    if len(parts) == 1 and not parts[0][0]:
        _, taken = parts[0]
        order, places = balance(taken.rows.costs, bucket.rows)
        segments, _ = taken.segments(order, places)
        return PlannedBatch(bucket, segments, epoch)
    costs = np.concatenate([taken.rows.costs for _, taken in parts])
    order, places = balance(costs, bucket.rows)
    place = np.empty(len(costs), np.int64)
    place[order] = places
    found, epochs, before = [], [], 0
    sources: dict[str, int] = {}
    for name, taken in parts:
        count = len(taken.rows)
        segments, of = taken.segments(np.arange(count), place[before : before + count])
        found.append(segments)
        epochs.append(np.broadcast_to(of, len(segments)))
        before += count
        if name:
            sources[name] = sources.get(name, 0) + int(segments[:, 3:].sum())
    segments = np.concatenate(found)
    order = segments[:, 0].argsort(kind="stable")
    every = np.concatenate(epochs)[order] if sources else None
    return PlannedBatch(bucket, segments[order], epoch, every, sources)
