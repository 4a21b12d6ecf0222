"""Solutions: the patterns that packing="optimal" found, stored as an input of later plans."""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pipeline.errors import InvalidValue
from pipeline.planning.bucket import Bucket
from pipeline.planning.cascade import pack, row_cost
from pipeline.planning.columns import Columns, round_rows
from pipeline.planning.identity import fingerprint_of
from pipeline.planning.patterns import Packed, Pattern
from pipeline.planning.tails import group_tails

# The version of the search and of its file. A plan does not use the file of another version.
VERSION = 5

# With more lengths than this, linear programs take minutes, and best fit is within a ten-thousandth
# of the optimum. The search then uses best fit.
SIZES = 2048


class Solution:
    """The patterns of a histogram, and a proven upper bound on the share of real positions.

    The file is JSON: `{"bound": 0.9988, "patterns": [[[3, [[120, 4], [32, 1]]]]]}`. Each bucket has
    a list of patterns: the number of rows, and each length in the row with its number of
    occurrences. The name of the file has a digest of the histogram.
    """

    def __init__(self, content: bytes, name: str):
        self.digest = hashlib.sha256(content).hexdigest()[:16]
        try:
            stored = json.loads(content)
            self.bound = float(stored["bound"])
            self._patterns = [
                [Pattern.of_lengths(pieces, rows) for rows, pieces in of_bucket]
                for of_bucket in stored["patterns"]
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidValue(
                f"{name}, beside the corpus, does not hold the patterns of a plan: {error!r}; "
                "delete it, and the plan makes it again"
            ) from error
        self._total = sum(p.rows * p.segments for patterns in self._patterns for p in patterns)

    def pack(
        self,
        counts: np.ndarray,
        buckets: Sequence[Bucket],
        *,
        used: Sequence[int] | None = None,
        **options: Any,
    ) -> Packed:
        """Packs a part of the histogram by its share of each pattern, and the rest by best fit.

        The solution is for the lengths `used` of the buckets; `options` are those of `pack`.
        """
        share, left = int(counts.sum()), counts.tolist()
        patterns: list[list[Pattern]] = [[] for _ in group_tails(buckets)]
        for index, of_bucket in zip(used or range(len(patterns)), self._patterns, strict=True):
            for pattern in of_bucket:
                rows = -(-pattern.rows * share // self._total)
                rows = min([rows, *(left[size] // times for size, times in pattern.pieces)])
                if rows:
                    patterns[index].append(pattern._replace(rows=rows))
                    for size, times in pattern.pieces:
                        left[size] -= rows * times
        return pack(counts, buckets, patterns=patterns, used=used, **options)


def load_solution(
    store: Callable[[str, Callable[[], bytes]], bytes],
    counts: np.ndarray,
    buckets: Sequence[Bucket],
    max_segments: int | None,
) -> Solution:
    """The stored solution for some buckets, without tails, and a histogram; computed if missing."""
    shapes = [bucket.as_json for bucket in buckets]
    of = fingerprint_of([VERSION, counts.tolist(), shapes, max_segments])
    name = f"packing-{of}.json"
    return Solution(store(name, lambda: _search(counts, buckets, max_segments)), name)


def _search(counts: np.ndarray, buckets: Sequence[Bucket], max_segments: int | None) -> bytes:
    """The content of the file of a solution, by column generation."""
    best = pack(counts, buckets, max_segments=max_segments)
    tokens = int(counts @ np.arange(len(counts)))
    least: float = tokens

    prices = [row_cost(bucket.length) for bucket in buckets]
    if 0 < np.count_nonzero(counts) <= SIZES:
        rooms = np.array([bucket.length for bucket in buckets])
        # The bound counts positions. The rows minimise the model's cost: with positions alone,
        # short buckets would stay empty.
        costs = [rooms.astype(float), row_cost(rooms)] if len(rooms) > 1 else [rooms.astype(float)]
        programs = [Columns(counts, rooms, cost, max_segments) for cost in costs]
        for program in programs:
            program.add(best.patterns)
        bounds = [program.solve(program.demand(counts))[1] for program in programs]
        least = bounds[0]
        found = round_rows(programs[-1], counts)
        other = pack(counts, buckets, max_segments=max_segments, patterns=found)
        best = min(best, other, key=lambda each: each.cost(prices))
    patterns = [[[each.rows, each.pieces] for each in of_bucket] for of_bucket in best.patterns]
    return json.dumps({"bound": min(tokens / least, 1.0), "patterns": patterns}).encode()
