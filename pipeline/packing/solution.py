"""Solutions: a linear program's rows made whole; stored, and from then on an input of a plan."""

import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pipeline.packing.bucket import Bucket
from pipeline.packing.cascade import pack, row_cost
from pipeline.packing.columns import Columns
from pipeline.packing.patterns import Packed, Pattern

# After each round of whole rows the program is solved again for what is left. A round takes at
# least this share of the rows, and may ask for new patterns this often.
SHARE = 0.2
ITERATIONS = 2
ROUNDS = 60

# A row may end up with this many more positions of padding than its pattern has; patterns that
# would lose more, because their segments are used up, wait for the next round. When none is left
# that loses so little, the figure is multiplied by four.
LOSS = 2

# Once this share of the rows is all that is left, best fit does as well.
ENOUGH = 1e-4


class Stock:
    """The segments that are still to be placed, and the rows made so far."""

    def __init__(self, counts: np.ndarray, rooms: np.ndarray, most: int | None):
        self.left = counts.tolist()
        self.left[0] = 0
        self.patterns: list[list[Pattern]] = [[] for _ in rooms]
        self._rooms, self._most = rooms.tolist(), most
        # Bit n says that there are segments of length n.
        self._there = sum(1 << size for size, count in enumerate(self.left) if count)

    def place(self, places: list[tuple[int, int]], index: int, rows: int, loss: int) -> int:
        """Fills up to `rows` rows of bucket number `index`; returns how many it filled.

        Args:
            places: lengths, from the longest, and how many places a row has for each. A place
                takes the longest segment that it can hold, and what room is left more of them.
            index: number of the bucket.
            rows: how many rows to fill.
            loss: no row may have this many positions of padding more than the places leave.
        """
        padding = max(self._rooms[index] - sum(size * times for size, times in places), 0)
        done = 0
        while done < rows:
            row, room = self._row(places, self._rooms[index])
            if not row or room > padding + loss:
                break
            times = min(rows - done, min(self.left[size] // many for size, many in row.items()))
            for size, many in row.items():
                self.left[size] -= times * many
                if not self.left[size]:
                    self._there &= ~(1 << size)
            fill = sum(size * many for size, many in row.items())
            self.patterns[index].append(Pattern(tuple(row.items()), times, fill))
            done += times
        return done

    def _row(self, places: list[tuple[int, int]], room: int) -> tuple[dict[int, int], int]:
        """The segments of one row, and the room that they leave."""
        row: dict[int, int] = {}
        segments = self._most or room
        for size, times in [*places, (room, segments)]:
            for _ in range(min(times, segments)):
                longest = self._longest(min(size, room), row)
                if not longest:
                    break
                row[longest] = row.get(longest, 0) + 1
                room -= longest
                segments -= 1
        return row, room

    def _longest(self, size: int, row: dict[int, int]) -> int:
        """The longest segment of at most `size` that is left beside those in `row`; 0: none."""
        there = self._there & ((1 << (size + 1)) - 1)
        while there:
            longest = there.bit_length() - 1
            if self.left[longest] > row.get(longest, 0):
                return longest
            there &= ~(1 << longest)
        return 0


def whole_rows(columns: Columns, counts: np.ndarray) -> tuple[list[list[Pattern]], np.ndarray]:
    """Patterns for each bucket, near the cost of `columns`' program, and the counts left over.

    Rounds the rows of the program down, then the largest fractions up, and solves it again for the
    segments that are left.

    Args:
        columns: the program, with the patterns that solve it.
        counts: int64 [longest + 1], segments of each length.
    """
    stock = Stock(counts, columns.rooms, columns.most)
    loss, total = LOSS, 0.0
    for _ in range(ROUNDS):
        demand = columns.demand(np.array(stock.left))
        if not demand.any():
            break
        rows = columns.solve(demand, ITERATIONS)
        total = max(total, rows.sum())
        if rows.sum() < ENOUGH * total:
            break
        done = 0
        whole = np.floor(rows + 1e-6).astype(np.int64)
        for column in np.flatnonzero(whole)[::-1]:
            done += stock.place(*columns.places(column), int(whole[column]), loss)
        part = rows - whole
        for column in np.argsort(-part, kind="stable"):
            if done >= max(SHARE * rows.sum(), 1) or part[column] <= 1e-6:
                break
            done += stock.place(*columns.places(column), 1, loss)
        if not done:
            loss *= 4
            if loss > columns.rooms[-1]:
                break
    return stock.patterns, np.array(stock.left)


Keep = Callable[[str, Callable[[], bytes]], bytes]

# The version of what is stored, and of the search. A solution of another one is made anew.
VERSION = 1

# With more lengths than this, linear programs take minutes and best fit has less than a
# ten-thousandth left to gain: it is taken instead.
SIZES = 2048


class Solution:
    """The patterns of each histogram of a plan, and a bound on what any packing could reach.

    As JSON: `{"name": …, "bound": 0.9988, "patterns": {DIGEST: [[[3, [[120, 4], [32, 1]]]]]}}`,
    where for each histogram, by its digest, each bucket has its patterns: rows, lengths, how often.

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
        """`pipeline.packing.cascade.pack` with the patterns that are stored for this histogram.

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
            [
                Pattern(tuple(map(tuple, pieces)), rows, sum(size * many for size, many in pieces))
                for rows, pieces in of_bucket
            ]
            for of_bucket in stored
        ]
        return pack(counts, buckets, packing="optimal", found=found, **options)


class Search:
    """Finds the patterns of the histograms of one plan, to be stored as a `Solution`."""

    def __init__(self):
        self._patterns: dict[str, list] = {}
        self._positions: Columns | None = None
        #: The histogram of all segments, which the bound is about.
        self.counts: np.ndarray | None = None

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

    def text(self, name: str) -> bytes:
        """What is to be stored, under this name."""
        assert self.counts is not None, "a plan has a histogram"
        tokens = int(self.counts @ np.arange(len(self.counts)))
        least = self._positions.bound(self.counts) if self._positions else tokens
        bound = min(tokens / least, 1.0)
        return json.dumps({"name": name, "bound": bound, "patterns": self._patterns}).encode()


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


def solution(
    keep: Keep, about: Any, solve: Callable[[], Search], place: str | None = None
) -> Solution:
    """The solution of the histograms that `about` describes, as it is stored, or found now.

    Args:
        keep: stores it, as `Keeps.keep`.
        about: what the solution depends on.
        solve: searches, if it is not stored yet.
        place: where it is stored, for errors; None: the name that it is stored under.
    """
    name = f"packing-{hashlib.sha256(f'{VERSION};{about}'.encode()).hexdigest()[:16]}.json"
    return Solution(keep(name, lambda: solve().text(name)), place or name)


def keep_in_file(path: str | os.PathLike, *, others: bool) -> Keep:
    """Stores a solution in the file `path`.

    Args:
        path: the file; made if it is not there.
        others: where the file holds another solution, use a file of its own beside it.
    """

    def keep(name: str, make: Callable[[], bytes]) -> bytes:
        file = pathlib.Path(path)
        if others and file.exists() and name.encode() not in file.read_bytes():
            file = file.with_name(f"{file.stem}-{name}")
        if not file.exists():
            temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
            temporary.write_bytes(make())
            temporary.replace(file)
        return file.read_bytes()

    return keep


def _digest(counts: np.ndarray) -> str:
    trimmed = np.trim_zeros(counts.astype("<i8"), "b")
    return hashlib.sha256(trimmed.tobytes()).hexdigest()[:16]
