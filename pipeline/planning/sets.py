"""The search for the set of shapes with which all steps of a job take the fewest seconds.

The caller gives the seconds of a step of each shape, measured or estimated. A set is packed only if
a lower bound of its seconds is below the best so far, so few sets are packed.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pipeline.planning.bucket import Bucket
from pipeline.planning.fit import BucketSearch

# For each number of shapes, the most sets that are extended by a shape, and that are packed.
EXTENDED, PACKED = 300, 64

# Except for pairs, the most lengths of candidates, beside those that `fit_buckets` tries.
LENGTHS = 16

# Devices that work on tiles may be faster if the number of rows is a multiple of this.
TILE = 8

# Tokens of a step stay within this share of `tokens_per_batch`.
WITHIN = 0.1


@dataclasses.dataclass(frozen=True)
class BucketSet:
    """A set of shapes, and the cost of an epoch in batches of them.

    Attributes:
        buckets: the shapes, ascending by length.
        batches: the number of batches of each in an epoch.
        padding: the share of all positions that hold no token.
        seconds: the seconds of all steps of an epoch.
        compiling: the seconds to compile all shapes, once.
    """

    buckets: tuple[Bucket, ...]
    batches: tuple[int, ...]
    padding: float
    seconds: float
    compiling: float


class SetSearch:
    """A search for the best sets of some shapes, for the lengths of examples.

    >>> from pipeline.planning.fit import make_search
    >>> search = make_search(np.repeat([100, 250], [80, 10]), tokens_per_batch=1024)
    >>> search = SetSearch(search, [Bucket(8, 128), Bucket(4, 256)])
    >>> best = search.best([1.0, 1.5], compiling=[3.0, 3.0], max_buckets=2)
    >>> [(each.batches, each.seconds, each.compiling) for each in best.values()]
    [((13,), 19.5, 3.0), ((10, 3), 14.5, 6.0)]

    Args:
        search: the result of `make_search`, with the lengths and the packing.
        candidates: the shapes of which sets are made; None: those of `make_candidates`.

    Attributes:
        candidates: the shapes, ascending by length.
    """

    def __init__(self, search: BucketSearch, candidates: Iterable[Bucket] | None = None):
        self._search = search
        if candidates is None:
            candidates = make_candidates(search)
        self.candidates = tuple(sorted(candidates, key=lambda each: each.order))
        table, counts = search.histogram
        lengths = np.array([bucket.lengths for bucket in self.candidates])
        self._below = np.all(lengths[:, None] <= lengths, axis=-1)  # [i, j]: j is as long as i
        holds = np.all(table[:, None] <= lengths, axis=-1)
        # Examples that the same candidates hold count together.
        holds, group = np.unique(holds[counts > 0], axis=0, return_inverse=True)
        tokens = (counts * table.sum(axis=1))[counts > 0]
        of_group = counts[counts > 0] if search.packing == "none" else tokens
        self._holds, self._amount = holds, np.bincount(group.ravel(), of_group)
        self._tokens = float(tokens.sum())
        self._packed: dict[tuple[Bucket, ...], tuple[int, ...]] = {}

    @property
    def holding_all(self) -> list[int]:
        """The numbers of the candidates that hold every example."""
        return np.flatnonzero(self._holds.all(axis=0)).tolist()

    def bound(self, seconds: Sequence[float] | np.ndarray) -> float:
        """A lower bound on seconds: each token at the best rate of the candidates that hold it."""
        return float(self._full_rows(np.asarray(seconds)).min(axis=1) @ self._amount)

    def best(
        self,
        seconds: Sequence[float] | np.ndarray,
        *,
        compiling: Sequence[float] | np.ndarray,
        max_buckets: int,
        epochs: float = 1,
    ) -> dict[int, BucketSet]:
        """The best set of each number of shapes up to `max_buckets`, by that number.

        Args:
            seconds: the seconds of a step of each candidate; infinite if it cannot be used.
            compiling: the seconds to compile a step of each candidate.
            max_buckets: the most shapes in a set.
            epochs: the epochs of the job, over which the seconds of compiling are spread.
        """
        took, costs = np.asarray(seconds, float), np.asarray(compiling, float)
        rate = self._full_rows(took)
        found: dict[int, BucketSet] = {}
        for count, sets in self._extend(rate, costs / epochs, max_buckets):
            least = np.inf
            for bound, numbers in sets[:PACKED]:
                if bound >= least:
                    break
                tried = self._measure(numbers, took, costs)
                if not all(tried.batches):
                    continue  # in effect a smaller set
                if (total := tried.seconds + tried.compiling / epochs) < least:
                    least, found[count] = total, tried
        return found

    def _full_rows(self, seconds: np.ndarray) -> np.ndarray:
        """Seconds per token of each group in full rows of each candidate: [groups, candidates].

        With packing "none", seconds per example.
        """
        none = self._search.packing == "none"
        each = [bucket.rows if none else bucket.positions for bucket in self.candidates]
        return np.where(self._holds, seconds / np.array(each), np.inf)

    def _extend(self, rate: np.ndarray, compiling: np.ndarray, most: int) -> Any:
        """For each number of shapes, sets with lower bounds on their seconds, lowest first."""
        usable = np.isfinite(rate).any(axis=0)
        # A set begins with a shape that holds all, and has at most one shape of each length.
        holds_all = np.flatnonzero(np.isfinite(rate).all(axis=0))
        sets: list[tuple[tuple[int, ...], np.ndarray]]
        sets = [((int(last),), rate[:, last]) for last in holds_all]
        for count in range(1, most + 1):
            ranked = sorted(
                ((float(each @ self._amount) + compiling[list(numbers)].sum(), numbers, each)
                 for numbers, each in sets),
                key=lambda entry: entry[:2],
            )  # fmt: skip
            yield count, [(bound, numbers) for bound, numbers, _ in ranked]
            extended = {}
            for _, numbers, each in ranked[:EXTENDED]:
                shorter = usable & self._below[:, numbers[0]]
                for more in np.flatnonzero(shorter).tolist():
                    both = (numbers[0], *sorted({*numbers[1:], more}))
                    lengths = {self.candidates[number].lengths for number in both}
                    if len(lengths) == count + 1 and both not in extended:
                        extended[both] = np.minimum(each, rate[:, more])
            sets = list(extended.items())

    def _measure(
        self, numbers: tuple[int, ...], seconds: np.ndarray, compiling: np.ndarray
    ) -> BucketSet:
        numbers = tuple(sorted(numbers))
        buckets = tuple(self.candidates[number] for number in numbers)
        if (batches := self._packed.get(buckets)) is None:
            batches = self._packed[buckets] = self._search.batches(buckets)
        positions = sum(n * bucket.positions for n, bucket in zip(batches, buckets, strict=True))
        return BucketSet(
            buckets,
            batches,
            1 - self._tokens / positions,
            float(np.array(batches) @ seconds[list(numbers)]),
            float(compiling[list(numbers)].sum()),
        )


def make_candidates(search: BucketSearch) -> list[Bucket]:
    """Shapes that are worth trying, from short rows to long ones.

    A shape has as many rows as `tokens_per_batch` allows. A second one has the next smaller
    multiple of `TILE`, if that is nearly as many tokens.
    """
    lengths = _candidate_lengths(search)
    found = []
    for each in lengths:
        bucket = search.bucket(each)
        tiles = np.lcm(TILE, search.row_multiple)
        fewer = int(bucket.rows // tiles * tiles)
        found.append(bucket)
        if (1 - WITHIN) * search.tokens_per_batch <= fewer * sum(each) < bucket.positions:
            found.append(dataclasses.replace(bucket, rows=fewer))
    return found


def _candidate_lengths(search: BucketSearch) -> list[tuple[int, ...]]:
    plain = dataclasses.replace(search, attention="segment")
    tried = [each for way in (search, plain) for each in [*way.sets(4), way.find(4)]]
    found = set(itertools.chain.from_iterable(tried))
    if search.lengths.shape[1] == 1:
        shortest, longest = int(search.lengths.min()), max(found)[0]
        steps = longest // search.multiple
        numbers = np.geomspace(1, steps, LENGTHS) if steps > LENGTHS else np.arange(steps) + 1
        every = np.unique(numbers.round().astype(int)) * search.multiple
        found |= {(length,) for length in every.tolist() if length >= shortest}
    return sorted(found)
