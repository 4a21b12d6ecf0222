"""The search for the cheapest sets of buckets, each of which is really packed.

Sets grow by one bucket at a time. A bound says which sets need not be packed: the cost of full
rows, with each example in the bucket where it costs least. Where examples are cut, and for vectors
of lengths, packing takes longer: the bound stands in for the cost, and only the best sets are
packed.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from pipeline.planning.bucket import Bucket
from pipeline.planning.lengths import weigh
from pipeline.planning.stock import Stock, round_up

# The numbers below were tried beside all sets of up to three buckets, each of them planned, of 80
# kinds of lengths and options: the chosen set cost at most 1.01 times the best of as many buckets.

# All multiples are candidates if they are at most EVERY; else some quantiles and geometric lengths.
EVERY, QUANTILES, GEOMETRIC = 24, 11, 13

# Rows may be longer than the longest example by these factors, if one up to SOME saves a share of
# all positions, or if an epoch is of fewer than MANY batches, of which the last may lack rows.
LONGER, SOME, WORTH_LONGER, MANY = (1.25, 1.5, 2, 3, 4, 6, 8), 2, 0.005, 16

# A side that costs nothing has this many times the room that full rows of the others need.
ROOM = 1.25

# The most sets that are packed in a round of extensions, exchanges or moves; the best sets of a
# number of buckets that are extended, and those that are packed where a bound stands in; the most
# rounds.
PACKED, EXTENDED, FINALISTS, ROUNDS = 24, 3, 6, 12

# Members of a set move by these shares of their length.
MOVES = (1 / 4, 1 / 8, 1 / 16, 1 / 32)

# Exact programmes for packing "none" have at most this many lengths.
EDGES = 1024

Room = tuple[int, ...]  # the length of a row on each side

# The share of the cost beyond positions that is sure, for the number of buckets: see `fit_buckets`.
SURE = 1 / 3


@dataclasses.dataclass(frozen=True)
class BucketSet:
    """A set of buckets, and what an epoch in batches of them costs."""

    buckets: tuple[Bucket, ...]  # ascending by length
    batches: tuple[float, ...]  # of each bucket in an epoch; an estimate, if it is not whole
    positions: float  # of all batches, padding included; those of a side times its cost
    padding: float  # the share of these that hold no token; columns that `align` adds are none
    cost: float  # of all batches, by `Options.price`
    sure: float  # the part of `cost` that counts for the number of buckets


class Search:
    """A search for the best sets of buckets of a stock.

    Args:
        stock: what is packed.
        shape: from the lengths of a row to the bucket that has such rows.
        multiple: lengths are multiples of these, one for each side.
        most: the most positions of a row, those of a side times its cost.
        limit: the greatest length of each side; None: no limit.
        worth: a set of one bucket more is not packed if it cannot save this share.
        also: more lengths to try, multiples as well.
    """

    def __init__(
        self,
        stock: Stock,
        shape: Callable[[Room], Bucket],
        *,
        multiple: np.ndarray,
        most: float,
        limit: np.ndarray | None,
        worth: float,
        also: Iterable[Room] = (),
    ):
        self._stock, self._shape = stock, shape
        self._multiple, self._most, self._worth = multiple, most, worth
        self._limit: Any = np.inf if limit is None else limit
        self._costs = stock.options.cost
        self._paid = np.array(self._costs) > 0  # the sides that cost something
        self._sizes, self._counts = stock.examples
        longest = round_up(np.maximum(stock.longest, 1), multiple)
        # For each side, the least length of the last bucket of a set.
        self._longest: Room = tuple(longest.tolist())
        self._is_unpacked = stock.options.packing == "none"
        cap = stock.options.most_in_row
        # Segments are a side of size 1, if their number is limited.
        ones = np.ones((len(self._sizes), int(cap is not None)), np.int64)
        self._loads = np.concatenate([self._sizes, ones], axis=1)
        self._caps = () if cap is None else (cap,)
        self._columns: dict[Room, np.ndarray] = {}
        self._bounds: dict[tuple[Room, ...], float] = {}
        self._stands_in = stock.options.cuts or len(longest) > 1
        self._finalists = FINALISTS if self._stands_in else EXTENDED
        self._last: Room | None = None  # of all sets, if longer rows save no padding
        # The lengths that sets are made of, before members move.
        self._candidates = sorted(self._make_candidates() | {*also})

    # ---- the cost of a set

    def measure(self, rooms: Sequence[Room]) -> BucketSet:
        """Packs a set, which ascends by length."""
        buckets = tuple(map(self._shape, rooms))
        batches = self._stock.count_batches(buckets)
        rows = [(n * bucket.rows, bucket) for n, bucket in zip(batches, buckets, strict=True) if n]
        cost = sum(n * self._stock.options.price(bucket) for n, bucket in rows)
        positions = sum(n * float(weigh(bucket.lengths, self._costs)) for n, bucket in rows)
        padding = 1 - self._stock.positions / positions
        sure = positions + SURE * (cost - positions)
        return BucketSet(buckets, batches, positions, padding, cost, sure)

    def bound(self, rooms: Sequence[Room]) -> float:
        """The cost of a set in full rows, which is a lower bound for one side."""
        key = tuple(rooms)
        if (cached := self._bounds.get(key)) is not None:
            return cached
        member = np.argmin([self._column(room) for room in key], axis=0)
        total = 0.0
        for index, room in enumerate(key):
            if not (mine := member == index).any():
                continue
            loads = self._stock.scale * (self._counts[mine] @ self._loads[mine])
            total += float((loads / [*room, *self._caps]).max()) * self._row_price(room)
        self._bounds[key] = total
        return total

    def _column(self, room: Room) -> np.ndarray:
        """The cost of an example of each size in full rows of these lengths; infinite if longer."""
        if (column := self._columns.get(room)) is None:
            share = (self._loads / [*room, *self._caps]).max(axis=1)
            holds = (self._sizes <= room).all(axis=1)
            column = np.where(holds, share * self._row_price(room), np.inf)
            self._columns[room] = column
        return column

    def _row_price(self, room: Room) -> float:
        return self._stock.options.price(Bucket(1, room, self._stock.options.names))

    # ---- the search

    def find(self, most: int) -> dict[int, BucketSet]:
        """The best set of each number of buckets up to `most`, by that number."""
        best_sets: dict[int, BucketSet] = {}
        best: list[tuple[Room, ...]] = [()]
        exact = self._cut_exactly(most) if self._is_unpacked else {}
        for number in range(1, most + 1):
            tried = {rooms for fewer in best for rooms in self._sets_with(fewer)}
            tried |= {*exact.get(number, ())}
            limit = best_sets[number - 1].cost * (1 - self._worth) if best_sets else np.inf
            costs = self._try(tried, limit, PACKED if best_sets else len(tried))
            if not costs:
                break
            costs = self._improve(costs)
            best = sorted(costs, key=costs.__getitem__)[: self._finalists]
            sets = [measured for measured in map(self.measure, best) if all(measured.batches[:-1])]
            if not sets:
                break
            best_sets[number] = min(sets, key=lambda chosen: chosen.cost)
        return best_sets

    def _sets_with(self, rooms: tuple[Room, ...]) -> set[tuple[Room, ...]]:
        """The sets of some rooms and one of the candidates."""
        more = (room for room in self._candidates if room not in rooms)
        return {tuple(sorted((*rooms, room), key=_order)) for room in more}

    def _cost(self, rooms: tuple[Room, ...]) -> float:
        """The cost of a set; infinite if a bucket has no batch (but the last, which holds all)."""
        if self._stands_in:
            return self.bound(rooms)
        packed = self.measure(rooms)
        return packed.cost if all(packed.batches[:-1]) else np.inf

    def _is_valid(self, rooms: tuple[Room, ...]) -> bool:
        last = np.array(rooms[-1])
        return bool(
            (last >= self._longest).all()
            and (last <= self._limit).all()
            and weigh(rooms[-1], self._costs) <= self._most
            and self._last in (None, rooms[-1])
            and (np.array(rooms) <= last).all()
        )

    def _try(
        self, sets: Iterable[tuple[Room, ...]], limit: float, most: int
    ) -> dict[tuple[Room, ...], float]:
        """The costs of up to `most` sets whose bounds are below `limit`, lowest bounds first."""
        costs: dict[tuple[Room, ...], float] = {}
        every = sorted((self.bound(rooms), rooms) for rooms in sets if self._is_valid(rooms))
        for bound, rooms in every[:most]:
            if len(costs) >= self._finalists and bound >= min(costs.values()):
                break
            if bound < limit and (cost := self._cost(rooms)) < np.inf:
                costs[rooms] = cost
        return costs

    def _improve(self, costs: dict[tuple[Room, ...], float]) -> dict:
        """Adds sets in which a member of the best set is another one, as long as that helps."""
        for _ in range(ROUNDS):
            best = min(costs, key=costs.__getitem__)
            least = costs[best]
            costs |= self._try({*self._neighbours(best)} - costs.keys(), least, PACKED)
            if min(costs.values()) >= least:
                break
        return costs

    def _neighbours(self, rooms: tuple[Room, ...]) -> Iterable[tuple[Room, ...]]:
        """The sets in which a candidate, or rooms near a member, take the place of the member."""
        for index, member in enumerate(rooms):
            others = rooms[:index] + rooms[index + 1 :]
            near = {moved for share in MOVES for moved in self._move(member, share)}
            for more in near.union(self._candidates).difference(others):
                yield tuple(sorted((*others, more), key=_order))

    def _move(self, room: Room, share: float) -> Iterable[Room]:
        """Rooms of which a side is longer or shorter by a share."""
        for side, sign in itertools.product(np.flatnonzero(self._paid).tolist(), (1, -1)):
            multiple = int(self._multiple[side])
            by = max(round(room[side] * share / multiple), 1) * multiple
            if (length := room[side] + sign * by) > 0:
                yield self._complete((*room[:side], length, *room[side + 1 :]))

    def _cut_exactly(self, most: int) -> dict[int, list[tuple[Room, ...]]]:
        """For rows of one example, the best sets of each number of lengths, without empty rows."""
        if len(self._longest) > 1:
            return {}
        lengths, multiple = self._sizes[:, 0], self._multiple
        ends = np.unique(np.append(round_up(lengths, multiple), self._longest))
        if len(ends) > EDGES:
            ends = ends[np.linspace(0, len(ends) - 1, EDGES).astype(int)]
        below = np.searchsorted(lengths, ends, side="right")
        examples = np.append(0, np.cumsum(self._counts)[below - 1])
        price = np.array([self._row_price((end,)) for end in ends.tolist()])
        if not np.isfinite(price).all():
            return {}
        least, begins = np.append(0, np.full(len(ends), np.inf)), []
        sets = {}
        for number in range(1, min(most, len(ends)) + 1):
            sums = [
                least[: n + 1] + (examples[n + 1] - examples[: n + 1]) * price[n]
                for n in range(len(ends))
            ]
            begins.append([int(costs.argmin()) for costs in sums])
            least = np.append(np.inf, [costs.min() for costs in sums])
            end, chosen = len(ends) - 1, list[Room]()
            for begin in reversed(begins):
                chosen.append((int(ends[end]),))
                end = begin[end] - 1
            sets[number] = [tuple(reversed(chosen))]
        return sets

    # ---- candidates

    def _make_candidates(self) -> set[Room]:
        longest, multiple = np.array(self._longest), self._multiple
        positions = weigh(self._sizes, self._costs) * self._counts
        if len(longest) > 1:
            lengths = self._make_vectors(positions)
        elif longest[0] <= EVERY * multiple[0]:
            lengths = np.arange(multiple[0], longest[0] + 1, multiple[0])[:, None]
        else:
            least = min(round_up(self._sizes.min(), int(multiple[0])), longest[0])
            quantiles = _quantiles(self._sizes[:, 0], positions, QUANTILES)
            geometric = np.geomspace(least, longest[0], GEOMETRIC)
            lengths = np.concatenate([quantiles, geometric])[:, None]
        every = {*map(tuple, round_up(np.ceil(lengths).astype(np.int64), multiple).tolist())}
        every = set(map(self._complete, every | {self._longest})) | self._make_longer()
        return {room for room in every if weigh(room, self._costs) <= self._most}

    def _make_longer(self) -> set[Room]:
        """Rows that are longer than any example, if that saves padding."""
        if self._is_unpacked:
            return set()
        base = self._balance(np.array(self._longest))
        room = self._most / weigh(base, self._costs)
        room = min(room, float((self._limit / np.array(base)).min()))
        factors = [factor for factor in LONGER if factor < room]
        factors += [room] if room <= max(LONGER) else []
        longer = {base}
        for factor in factors:
            length = (np.array(base) * factor).astype(np.int64) // self._multiple * self._multiple
            # Of several sides, each may be rounded down or up.
            ups = itertools.product(*[(0, multiple) for multiple in self._multiple.tolist()])
            for up in ups if len(base) > 1 else [(0,)]:
                longer.add(self._complete(tuple((length + up).tolist())))
        if len(base) > 1 and np.isfinite(self._limit).all():
            longer.add(self._complete(tuple(self._limit.tolist())))
        longer = {room for room in longer if self._is_valid((room,))}
        if len(base) == 1 and 3 * base[0] <= EVERY * self._multiple[0]:
            last = min(int(max(LONGER) * base[0]), EVERY * int(self._multiple[0]))
            every = range(base[0], last + 1, int(self._multiple[0]))
            return longer | {(length,) for length in every if self._is_valid(((length,),))}
        if self._stands_in:
            return longer
        limit = SOME * max(base)
        few = [self.measure((room,)) for room in sorted(longer) if max(room) <= limit]
        saved = 1 - min(measured.positions for measured in few) / few[0].positions
        if saved < WORTH_LONGER and few[0].batches[0] >= MANY:
            self._last = base
            return {base}
        return longer

    def _make_vectors(self, positions: np.ndarray) -> np.ndarray:
        """Lengths that hold the shorter examples: each the longest of them, and balanced."""
        vectors = list[Room]()
        share = (self._sizes / np.array(self._longest))[:, self._paid].max(axis=1)
        for limit in _quantiles(share, positions, QUANTILES):
            longest = self._sizes[share <= limit].max(axis=0)
            longest = round_up(np.maximum(longest, 1), self._multiple)
            vectors += [tuple(longest.tolist()), self._balance(longest)]
        return np.array(vectors)

    def _balance(self, lengths: np.ndarray) -> Room:
        """Lengths of which the examples that these hold fill all sides: some are longer."""
        if self._is_unpacked or len(lengths) == 1:
            return tuple(lengths.tolist())
        paid = self._paid
        holds = (self._sizes <= lengths).all(axis=1)
        rows = np.maximum(self._counts[holds] @ self._sizes[holds], 1) / lengths
        wanted = np.where(paid, lengths * rows / rows[paid].min() / self._multiple, 0)
        wanted = np.maximum(np.rint(wanted).astype(np.int64) * self._multiple, lengths)
        wanted = np.minimum(wanted, self._limit).astype(np.int64)
        size, least = weigh(wanted, self._costs), weigh(lengths, self._costs)
        if size > self._most:  # as far as rows may be long
            extra = (wanted - lengths) * max((self._most - least) / (size - least), 0)
            wanted = lengths + extra.astype(np.int64) // self._multiple * self._multiple
        return self._complete(tuple(wanted.tolist()))

    def _complete(self, lengths: Room) -> Room:
        """A room in which the sides that cost nothing have room for what fills the others."""
        paid = self._paid
        if paid.all():
            return lengths
        room = np.array(lengths)
        holds = (self._sizes[:, paid] <= room[paid]).all(axis=1)
        if not holds.any():
            return lengths
        sizes = self._sizes[holds]
        used = self._counts[holds] @ sizes
        rows = max(float((used[paid] / room[paid]).max()), 1.0)
        needed = np.maximum(sizes.max(axis=0), 0 if self._is_unpacked else ROOM * used / rows)
        needed = round_up(np.ceil(np.maximum(needed, 1)).astype(np.int64), self._multiple)
        room[~paid] = np.minimum(needed, self._limit)[~paid]
        return tuple(room.tolist())


def choose(sets: dict[int, BucketSet], worth: float) -> BucketSet:
    """The set for which each further bucket saves the share `worth` of the sure cost."""
    chosen, *others = sets.values()
    for other in others:
        further = len(other.buckets) - len(chosen.buckets)
        if other.sure < chosen.sure * (1 - worth * further):
            chosen = other
    return chosen


def _quantiles(values: np.ndarray, weights: np.ndarray, number: int) -> np.ndarray:
    """`number` values below which are equal shares of the weights; the last is the greatest."""
    order = np.argsort(values, kind="stable")
    total = np.cumsum(weights[order])
    wanted = np.arange(1, number + 1) / number * total[-1]
    return values[order[np.minimum(np.searchsorted(total, wanted), len(values) - 1)]]


def _order(lengths: Room) -> tuple[int, ...]:
    return (sum(lengths), *lengths)
