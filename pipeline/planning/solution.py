"""Solutions: the patterns of packing="optimal", found once and then an input of the plan."""

import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pipeline.planning.bucket import Bucket
from pipeline.planning.optimal import Columns
from pipeline.planning.packing import Packed, Pattern, pack, row_cost
from pipeline.planning.rounding import whole_rows

# The version of what is stored, and of the search. A solution of another one is made anew.
VERSION = 1

# With more lengths than this, linear programs take minutes and best fit has less than a
# ten-thousandth left to gain: it is taken instead.
SIZES = 2048


class Solution:
    """The patterns of each histogram of a plan, and a bound on what any packing could reach.

    As JSON: `{"bound": 0.9988, "patterns": {DIGEST: [[[3, [[120, 4], [32, 1]]]]]}}`, where for
    each histogram, by its digest, each bucket has its patterns: rows, lengths, how often.

    Args:
        text: the JSON.
        source: where it comes from, for errors.
    """

    def __init__(self, text: bytes, source: str):
        self._source = source
        self.digest = hashlib.sha256(text).hexdigest()[:16]
        try:
            stored = json.loads(text)
            #: Proven: no packing into these buckets uses a greater share of its positions.
            self.bound = float(stored["bound"])
            self._patterns = stored["patterns"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{source} does not hold the patterns of a plan: {error!r}") from error

    def pack(self, counts: np.ndarray, buckets: Sequence[Bucket], **options: Any) -> Packed:
        """`pipeline.planning.packing.pack` with the patterns that are stored for this histogram.

        Raises:
            ValueError: there are none.
        """
        stored = self._patterns.get(_digest(counts))
        if stored is None or len(stored) != len(buckets):
            raise ValueError(
                f"the patterns in {self._source} are for other lengths, buckets or windows than "
                "this plan's; give another file with patterns=…, which is then made"
            )
        found = [
            [Pattern(tuple(map(tuple, pieces)), rows) for rows, pieces in of_bucket]
            for of_bucket in stored
        ]
        return pack(counts, buckets, packing="optimal", found=found, **options)


class Search:
    """Finds the patterns of the histograms of one plan, to be stored as a `Solution`."""

    def __init__(self):
        self._patterns: dict[str, list] = {}
        self._positions: Columns | None = None

    def pack(
        self,
        counts: np.ndarray,
        buckets: Sequence[Bucket],
        *,
        max_segments: int | None = None,
        whole: bool = False,
    ) -> Packed:
        """As `Solution.pack`."""
        best = pack(counts, buckets, packing="best_fit", max_segments=max_segments)
        if 0 < np.count_nonzero(counts) <= SIZES:
            positions, other = _solve(counts, buckets, best, max_segments)
            self._positions = self._positions or positions
            best = min(best, other, key=_cost)
        self._patterns[_digest(counts)] = [
            [[pattern.rows, pattern.pieces] for pattern in of_bucket] for of_bucket in best.patterns
        ]
        return pack(
            counts,
            buckets,
            packing="optimal",
            max_segments=max_segments,
            whole=whole,
            found=best.patterns,
        )

    def text(self, counts: np.ndarray) -> bytes:
        """What is to be stored for a plan whose segments have the histogram `counts`."""
        tokens = int(counts @ np.arange(len(counts)))
        least = self._positions.bound(counts) if self._positions else tokens
        bound = min(tokens / least, 1.0)
        return json.dumps({"bound": bound, "patterns": self._patterns}).encode()


def _solve(
    counts: np.ndarray, buckets: Sequence[Bucket], known: Packed, max_segments: int | None
) -> tuple[Columns, Packed]:
    """The program that bounds positions, and the rows that column generation finds."""
    rooms = np.array([bucket.length for bucket in buckets])
    # Positions decide the bound. Rows are chosen by what they cost a model: by positions alone,
    # short buckets would stay empty.
    positions, columns = (
        Columns(counts, rooms, costs, max_segments)
        for costs in (rooms.astype(float), row_cost(rooms))
    )
    for program in (positions, columns) if len(buckets) > 1 else (positions,):
        program.add(known.patterns)
        program.solve(program.demand(counts))
    found, _ = whole_rows(columns if len(buckets) > 1 else positions, counts)
    return positions, pack(
        counts, buckets, packing="optimal", max_segments=max_segments, found=found
    )


def _cost(packed: Packed) -> float:
    return sum(
        packed.rows(index) * row_cost(bucket.length) for index, bucket in enumerate(packed.buckets)
    )


def kept(lengths: Any, path: str | os.PathLike | None, about: str, make: Callable[[], bytes]):
    """The solution of the plan that `about` describes, from where it is kept, or made.

    Args:
        lengths: the plan's; a corpus keeps solutions beside itself, for all hosts that share it.
        path: a file to keep it in instead.
        about: what the solution depends on.
        make: makes it, if it is not there yet.
    """
    name = f"packing-{hashlib.sha256(f'{VERSION};{about}'.encode()).hexdigest()[:16]}.json"
    if path is not None:
        file = pathlib.Path(path)
        if not file.exists():
            temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
            temporary.write_bytes(make())
            temporary.replace(file)
        return Solution(file.read_bytes(), str(file))
    keep = getattr(lengths, "kept", None)
    return Solution(make() if keep is None else keep(name, make), name)


def _digest(counts: np.ndarray) -> str:
    trimmed = np.trim_zeros(counts.astype("<i8"), "b")
    return hashlib.sha256(trimmed.tobytes()).hexdigest()[:16]
