"""What any plan can be asked, and what it says of one step: the bucket and its segments."""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any, Protocol

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


class AnyPlan(Protocol):
    """What loads, saves and trains asks of a plan: `Plan`, `Chain`, `Mixture` or `MixtureChain`."""

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Every bucket that a batch may have, the shortest first."""

    @property
    def num_examples(self) -> int:
        """Examples of the corpus, or of all corpora, in the end."""

    @property
    def max_position(self) -> int:
        """The largest position that a batch will hold."""

    @property
    def finite(self) -> bool:
        """Whether the steps end."""

    @property
    def fingerprint(self) -> str:
        """All that its batches depend on, as parts `name=value`."""

    @property
    def counts(self) -> tuple[int, ...]:
        """How many examples each of its entries knows."""

    @property
    def batches_per_bucket(self) -> dict[Bucket, int]:
        """How many batches of each bucket there are; 0 for one that is never needed."""

    @property
    def plans(self) -> tuple[Any, ...]:
        """The plans that it is made of, one after another."""

    def batch(self, step: int) -> PlannedBatch:
        """The batch of global step `step`."""

    def num_batches(self, epoch: int = 0) -> int:
        """Batches in an epoch."""

    def first_step(self, epoch: int) -> int:
        """The step at which an epoch begins."""

    def entries_at(self, step: int) -> tuple[Mapping[str, Any], ...]:
        """What the data state after `step` batches tells of it."""

    def most_segments(self) -> dict[Bucket, int]:
        """The most segments in a row of each bucket."""

    def onward(self, step: int) -> "AnyPlan":
        """The same plan for steps from `step` on only, with the buckets that these need."""
