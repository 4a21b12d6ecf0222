"""Solutions: the patterns that packing="optimal" found, stored and then an input of a plan."""

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pipeline.errors import InvalidValue
from pipeline.planning.bucket import Bucket
from pipeline.planning.cascade import pack, row_cost
from pipeline.planning.columns import Columns, round_rows
from pipeline.planning.patterns import Packed, Pattern

# The version of the search and of its file. A plan does not use the file of another version.
VERSION = 1

# With more lengths than this, linear programs take minutes, and best fit is within a ten-thousandth
# of the optimum. The search then takes best fit.
SIZES = 2048


class Solution:
    """The patterns of each histogram of a plan, and a proven bound on the positions in use.

    The file is JSON: `{"name": …, "bound": 0.9988, "patterns": {DIGEST: [[[3, [[120, 4], [32,
    1]]]]]}}`. For the digest of each histogram, each bucket has a list of patterns: the number of
    rows, and each length in the row with its number of occurrences.
    """

    def __init__(self, content: bytes, name: str):
        self._name = name
        self.digest = hashlib.sha256(content).hexdigest()[:16]
        try:
            stored = json.loads(content)
            self.bound = float(stored["bound"])
            self._patterns = stored["patterns"]
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidValue(
                f"{name}, beside the corpus, does not hold the patterns of a plan: {error!r}; "
                "delete it, and the plan makes it again"
            ) from error

    def pack(self, counts: np.ndarray, buckets: Sequence[Bucket], **options: Any) -> Packed:
        """`pipeline.planning.cascade.pack` with the patterns stored for this histogram."""
        stored = self._patterns.get(_digest(counts))
        if stored is None or len(stored) != len(buckets):
            raise InvalidValue(
                f"the patterns in {self._name}, beside the corpus, are for other lengths, buckets "
                "or windows than this plan's; delete the file, and the plan makes it again"
            )
        patterns = [
            [Pattern.of_lengths(pieces, rows) for rows, pieces in of_bucket] for of_bucket in stored
        ]
        return pack(counts, buckets, packing="optimal", patterns=patterns, **options)


class Search:
    """Searches the patterns of a plan's histograms by column generation."""

    def __init__(self) -> None:
        self._patterns: dict[str, list] = {}
        self._positions: Columns | None = None
        self.counts: np.ndarray | None = None  # of all segments, to which the bound applies

    def pack(
        self,
        counts: np.ndarray,
        buckets: Sequence[Bucket],
        *,
        max_segments: int | None = None,
        whole: bool = False,
    ) -> Packed:
        """Packs a histogram and records its patterns; arguments as for `cascade.pack`."""
        best = pack(counts, buckets, packing="best_fit", max_segments=max_segments)
        optimal = functools.partial(
            pack, counts, buckets, packing="optimal", max_segments=max_segments
        )
        if 0 < np.count_nonzero(counts) <= SIZES:
            other = optimal(patterns=self._generate(counts, best, max_segments))
            best = min(best, other, key=_cost)
        self._patterns[_digest(counts)] = [
            [[pattern.rows, pattern.pieces] for pattern in of_bucket] for of_bucket in best.patterns
        ]
        return optimal(whole=whole, patterns=best.patterns)

    def _generate(
        self, counts: np.ndarray, start: Packed, max_segments: int | None
    ) -> list[list[Pattern]]:
        """The rows that column generation finds, beginning with the patterns of `start`."""
        rooms = np.array([bucket.length for bucket in start.buckets])
        # The bound counts positions. The rows minimise the model's cost: with positions alone,
        # short buckets would stay empty.
        costs = [rooms.astype(float), row_cost(rooms)] if len(rooms) > 1 else [rooms.astype(float)]
        programs = [Columns(counts, rooms, cost, max_segments) for cost in costs]
        for program in programs:
            program.add(start.patterns)
            program.solve(program.demand(counts))
        self._positions = self._positions or programs[0]
        return round_rows(programs[-1], counts)

    def content(self, name: str) -> bytes:
        """The content of the file `name`, as `Solution` reads it."""
        assert self.counts is not None, "a plan has a histogram"
        tokens = int(self.counts @ np.arange(len(self.counts)))
        least = self._positions.bound(self.counts) if self._positions else tokens
        bound = min(tokens / least, 1.0)
        return json.dumps({"name": name, "bound": bound, "patterns": self._patterns}).encode()


def _cost(packed: Packed) -> float:
    return sum(
        packed.rows(index) * row_cost(bucket.length) for index, bucket in enumerate(packed.buckets)
    )


def load_solution(
    store: Callable[[str, Callable[[], bytes]], bytes], inputs: Any, search: Callable[[], Search]
) -> Solution:
    """The stored solution for some inputs, whose text names its file; searched if it is missing."""
    name = f"packing-{hashlib.sha256(f'{VERSION};{inputs}'.encode()).hexdigest()[:16]}.json"
    return Solution(store(name, lambda: search().content(name)), name)


def _digest(counts: np.ndarray) -> str:
    trimmed = np.trim_zeros(counts.astype("<i8"), "b")
    return hashlib.sha256(trimmed.tobytes()).hexdigest()[:16]
