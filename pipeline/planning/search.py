"""The search for the cheapest sets of buckets, each of which is really packed.

Sets grow by one bucket at a time. A bound says which sets need not be packed: the cost of full
rows, with each example in the bucket where it costs least. With packing "fill" and for vectors of
lengths, whose packing takes longer, the bound stands in for the cost, and only the best sets are
packed.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from pipeline.planning.bucket import Bucket
from pipeline.planning.lengths import weigh
from pipeline.planning.stock import Stock, round_up

# The numbers below were tried beside all sets of up to three buckets, each of them packed, of 353
# kinds of lengths and options: the chosen set cost at most 1.04 times the best of as many buckets,
# and 1.003 times in 95 of 100 cases.

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

Lengths = tuple[int, ...]

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
        shape: Callable[[Lengths], Bucket],
        *,
        multiple: np.ndarray,
        most: float,
        limit: np.ndarray | None,
        worth: float,
        also: Iterable[Lengths] = (),
    ):
        self._stock, self._shape = stock, shape
        self._multiple, self._most, self._worth = multiple, most, worth
        self._limit: Any = np.inf if limit is None else limit
        self._costs = stock.options.cost
        self._paid = np.array(self._costs) > 0  # the sides that cost something
        self._sizes, self._counts = stock.examples
        longest = round_up(np.maximum(stock.longest, 1), multiple)
        # For each side, the least length of the last bucket of a set.
        self._longest: Lengths = tuple(longest.tolist())
        self._is_unpacked = stock.options.packing == "none"
        cap = stock.options.most_in_row
        # Segments are a side of size 1, if their number is limited.
        ones = np.ones((len(self._sizes), int(cap is not None)), np.int64)
        self._loads = np.concatenate([self._sizes, ones], axis=1)
        self._caps = () if cap is None else (cap,)
        self._columns: dict[Lengths, np.ndarray] = {}
        self._bounds: dict[tuple[Lengths, ...], float] = {}
        self._stands_in = stock.options.packing == "fill" or len(longest) > 1
        self._finalists = FINALISTS if self._stands_in else EXTENDED
        self._last: Lengths | None = None  # of all sets, if longer rows save no padding
        # The lengths that sets are made of, before members move.
        self._candidates = sorted(self._make_candidates() | {*also})

    # ---- the cost of a set

    def measure(self, lengths: Sequence[Lengths]) -> BucketSet:
        """Packs a set, which ascends by length."""
        buckets = tuple(map(self._shape, lengths))
        batches = self._stock.count_batches(buckets)
        rows = [(n * each.rows, each) for n, each in zip(batches, buckets, strict=True) if n]
        cost = sum(n * self._stock.options.price(bucket) for n, bucket in rows)
        positions = sum(n * float(weigh(bucket.lengths, self._costs)) for n, bucket in rows)
        padding = 1 - self._stock.positions / positions
        sure = positions + SURE * (cost - positions)
        return BucketSet(buckets, batches, positions, padding, cost, sure)

    def bound(self, lengths: Sequence[Lengths]) -> float:
        """The cost of a set in full rows, which is a lower bound for one side."""
        key = tuple(lengths)
        if (known := self._bounds.get(key)) is not None:
            return known
        member = np.argmin([self._column(each) for each in key], axis=0)
        total = 0.0
        for index, member_lengths in enumerate(key):
            if not (mine := member == index).any():
                continue
            loads = self._stock.scale * (self._counts[mine] @ self._loads[mine])
            total += float((loads / [*member_lengths, *self._caps]).max()) * self._row_price(
                member_lengths
            )
        if self._stands_in:
            total *= self._handicap(key[-1])
        self._bounds[key] = total
        return total

    def _handicap(self, last: Lengths) -> float:
        """A factor by which longer rows are less attractive, if they are not packed to see."""
        doublings = math.log2(weigh(last, self._costs) / weigh(self._longest, self._costs))
        return 1 + WORTH_LONGER * doublings * self._stands_in

    def _column(self, lengths: Lengths) -> np.ndarray:
        """The cost of an example of each size in full rows of these lengths; infinite if longer."""
        if (found := self._columns.get(lengths)) is None:
            share = (self._loads / [*lengths, *self._caps]).max(axis=1)
            holds = (self._sizes <= lengths).all(axis=1)
            found = np.where(holds, share * self._row_price(lengths), np.inf)
            self._columns[lengths] = found
        return found

    def _row_price(self, lengths: Lengths) -> float:
        return self._stock.options.price(Bucket(1, lengths, self._stock.options.names))

    # ---- the search

    def find(self, most: int) -> dict[int, BucketSet]:
        """The best set of each number of buckets up to `most`, by that number."""
        found: dict[int, BucketSet] = {}
        best: list[tuple[Lengths, ...]] = [()]
        exact = self._cut_exactly(most) if self._is_unpacked else {}
        for number in range(1, most + 1):
            tried = {each for fewer in best for each in self._sets_with(fewer)}
            tried |= {*exact.get(number, ())}
            limit = found[number - 1].cost * (1 - self._worth) if found else np.inf
            costs = self._try(tried, limit, PACKED if found else len(tried))
            if not costs:
                break
            costs = self._improve(costs)
            best = sorted(costs, key=costs.__getitem__)[: self._finalists]
            sets = [each for each in map(self.measure, best) if all(each.batches[:-1])]
            if not sets:
                break
            found[number] = min(
                sets, key=lambda each: each.cost * self._handicap(each.buckets[-1].lengths)
            )
        return found

    def _sets_with(self, lengths: tuple[Lengths, ...]) -> set[tuple[Lengths, ...]]:
        """The sets of some lengths and one of the candidates."""
        every = {tuple(sorted({*lengths, more}, key=_order)) for more in self._candidates}
        return {each for each in every if len(each) > len(lengths)}

    def _cost(self, lengths: tuple[Lengths, ...]) -> float:
        """The cost of a set; infinite if a bucket has no batch (but the last, which holds all)."""
        if self._stands_in:
            return self.bound(lengths)
        packed = self.measure(lengths)
        return packed.cost if all(packed.batches[:-1]) else np.inf

    def _is_valid(self, lengths: tuple[Lengths, ...]) -> bool:
        last = np.array(lengths[-1])
        return bool(
            (last >= self._longest).all()
            and (last <= self._limit).all()
            and weigh(lengths[-1], self._costs) <= self._most
            and self._last in (None, lengths[-1])
            and (np.array(lengths) <= last).all()
        )

    def _try(
        self, sets: Iterable[tuple[Lengths, ...]], limit: float, most: int
    ) -> dict[tuple[Lengths, ...], float]:
        """The costs of up to `most` sets whose bounds are below `limit`, lowest bounds first."""
        costs: dict[tuple[Lengths, ...], float] = {}
        every = sorted((self.bound(each), each) for each in sets if self._is_valid(each))
        for bound, each in every[:most]:
            if len(costs) >= self._finalists and bound >= min(costs.values()):
                break
            if bound < limit and (cost := self._cost(each)) < np.inf:
                costs[each] = cost
        return costs

    def _improve(self, costs: dict[tuple[Lengths, ...], float]) -> dict:
        """Adds sets in which members of the best set are exchanged, and then moved."""
        changes: list[Callable[..., Iterable[tuple[Lengths, ...]]]] = [self._exchange]
        changes += [functools.partial(self._move, share=share) for share in MOVES]
        for change in changes:
            for _ in range(ROUNDS):
                best = min(costs, key=costs.__getitem__)
                least = costs[best]
                costs |= self._try({*change(best)} - costs.keys(), least, PACKED)
                if min(costs.values()) >= least:
                    break
        return costs

    def _exchange(self, lengths: tuple[Lengths, ...]) -> Iterable[tuple[Lengths, ...]]:
        """The sets in which a candidate takes the place of a member."""
        for index in range(len(lengths)):
            yield from self._sets_with(lengths[:index] + lengths[index + 1 :])

    def _move(self, lengths: tuple[Lengths, ...], share: float) -> Iterable[tuple[Lengths, ...]]:
        """The sets in which a side of a bucket is longer or shorter by a share of its length."""
        for index, each in enumerate(lengths):
            for side, sign in itertools.product(np.flatnonzero(self._paid).tolist(), (1, -1)):
                multiple = int(self._multiple[side])
                by = max(round(each[side] * share / multiple), 1) * multiple
                if (length := each[side] + sign * by) > 0:
                    other = self._complete((*each[:side], length, *each[side + 1 :]))
                    members = {*lengths[:index], other, *lengths[index + 1 :]}
                    if len(members) == len(lengths):
                        yield tuple(sorted(members, key=_order))

    def _cut_exactly(self, most: int) -> dict[int, list[tuple[Lengths, ...]]]:
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
        found = {}
        for number in range(1, min(most, len(ends)) + 1):
            sums = [
                least[: n + 1] + (examples[n + 1] - examples[: n + 1]) * price[n]
                for n in range(len(ends))
            ]
            begins.append([int(each.argmin()) for each in sums])
            least = np.append(np.inf, [each.min() for each in sums])
            end, chosen = len(ends) - 1, list[Lengths]()
            for begin in reversed(begins):
                chosen.append((int(ends[end]),))
                end = begin[end] - 1
            found[number] = [tuple(reversed(chosen))]
        return found

    # ---- candidates

    def _make_candidates(self) -> set[Lengths]:
        longest, multiple = np.array(self._longest), self._multiple
        positions = weigh(self._sizes, self._costs) * self._counts
        if len(longest) > 1:
            found = self._make_vectors(positions)
        elif longest[0] <= EVERY * multiple[0]:
            found = np.arange(multiple[0], longest[0] + 1, multiple[0])[:, None]
        else:
            least = min(round_up(self._sizes.min(), int(multiple[0])), longest[0])
            quantiles = _quantiles(self._sizes[:, 0], positions, QUANTILES)
            geometric = np.geomspace(least, longest[0], GEOMETRIC)
            found = np.concatenate([quantiles, geometric])[:, None]
        every = {*map(tuple, round_up(np.ceil(found).astype(np.int64), multiple).tolist())}
        every = set(map(self._complete, every | {self._longest})) | self._make_longer()
        return {each for each in every if weigh(each, self._costs) <= self._most}

    def _make_longer(self) -> set[Lengths]:
        """Rows that are longer than any example, if that saves padding."""
        if self._is_unpacked:
            return set()
        base = self._balance(np.array(self._longest))
        room = self._most / weigh(base, self._costs)
        room = min(room, float((self._limit / np.array(base)).min()))
        factors = [factor for factor in LONGER if factor < room]
        factors += [room] if room <= max(LONGER) else []
        found = {base}
        for factor in factors:
            length = (np.array(base) * factor).astype(np.int64) // self._multiple * self._multiple
            # Of several sides, each may be rounded down or up.
            ups = itertools.product(*[(0, multiple) for multiple in self._multiple.tolist()])
            for up in ups if len(base) > 1 else [(0,)]:
                found.add(self._complete(tuple((length + up).tolist())))
        if len(base) > 1 and np.isfinite(self._limit).all():
            found.add(self._complete(tuple(self._limit.tolist())))
        found = {each for each in found if self._is_valid((each,))}
        if len(base) == 1 and 3 * base[0] <= EVERY * self._multiple[0]:
            last = min(int(max(LONGER) * base[0]), EVERY * int(self._multiple[0]))
            every = range(base[0], last + 1, int(self._multiple[0]))
            return found | {(each,) for each in every if self._is_valid(((each,),))}
        if self._stands_in:
            return found
        limit = SOME * max(base)
        few = [self.measure((each,)) for each in sorted(found) if max(each) <= limit]
        saved = 1 - min(each.positions for each in few) / few[0].positions
        if saved < WORTH_LONGER and few[0].batches[0] >= MANY:
            self._last = base
            return {base}
        return found

    def _make_vectors(self, positions: np.ndarray) -> np.ndarray:
        """Lengths that hold the shorter examples: each the longest of them, and balanced."""
        found = list[Lengths]()
        share = (self._sizes / np.array(self._longest))[:, self._paid].max(axis=1)
        for limit in _quantiles(share, positions, QUANTILES):
            longest = self._sizes[share <= limit].max(axis=0)
            longest = round_up(np.maximum(longest, 1), self._multiple)
            found += [tuple(longest.tolist()), self._balance(longest)]
        return np.array(found)

    def _balance(self, lengths: np.ndarray) -> Lengths:
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

    def _complete(self, lengths: Lengths) -> Lengths:
        """Lengths in which the sides that cost nothing have room for what fills the others."""
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


def _order(lengths: Lengths) -> tuple[int, ...]:
    return (sum(lengths), *lengths)
