"""The search for the cheapest sets of buckets, each of which is really packed.

Sets grow by one bucket at a time. A bound says which sets need not be packed: the cost of full
rows, with each example in the bucket where it costs least. With packing "fill" and for vectors of
lengths, whose packing takes longer, the bound stands in for the cost, and only the best sets are
packed.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from pipeline.planning.bucket import Bucket
from pipeline.planning.stock import Stock, round_up

# All multiples are candidates if they are at most EVERY; else some quantiles and geometric lengths.
EVERY, QUANTILES, GEOMETRIC = 24, 11, 13

# Rows may be longer than the longest example by these factors, if one up to SOME saves a share of
# all positions, or if an epoch is of fewer than MANY batches, of which the last may lack rows.
LONGER, SOME, WORTH_LONGER, MANY = (1.25, 1.5, 2, 3, 4, 6, 8), 2, 0.005, 16

# Vectors: about this many combinations of quantiles of the sides are candidates.
COMBINATIONS = 16

# The best sets of a number of buckets that are extended; the most sets that are packed in a round
# of extensions or exchanges; the sets that are packed where a bound stands in; the most rounds.
EXTENDED, PACKED, FINALISTS, ROUNDS = 3, 24, 6, 4

# Members of a set move by these shares of their length.
MOVES = (1 / 4, 1 / 8, 1 / 16, 1 / 32)

# Exact programmes for packing "none" have at most this many lengths.
EDGES = 1024

Lengths = tuple[int, ...]

# From a bucket to the cost of a batch, and to the part of it that is sure; see `BucketSet`.
Price = Callable[[Bucket], tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class BucketSet:
    """A set of buckets, and what an epoch in batches of them costs.

    Attributes:
        buckets: the buckets, ascending by length.
        batches: the number of batches of each in an epoch; an estimate, if it is not whole.
        padding: the share of all positions that hold no token; columns that `align` adds are none.
        cost: the cost of all batches, in the unit of the search's price.
        sure: the part of `cost` that counts for the number of buckets; see `fit_buckets`.
    """

    buckets: tuple[Bucket, ...]
    batches: tuple[float, ...]
    padding: float
    cost: float
    sure: float

    @property
    def positions(self) -> float:
        """The positions of all batches, padding included."""
        return sum(n * each.positions for n, each in zip(self.batches, self.buckets, strict=True))


class Search:
    """A search for the best sets of buckets of a stock.

    Args:
        stock: what is packed.
        shape: from the lengths of a row to the bucket that has such rows.
        price: from a bucket to the cost of a batch, and the part of it that is sure.
        multiple: lengths are multiples of this.
        most: the most positions of a row, on all sides.
        candidates: the lengths that sets are made of; None: chosen from the lengths of examples,
            and changed where that helps.
        worth: a set of one bucket more is not packed if it cannot save this share.

    Attributes:
        stock: as given.
        candidates: the lengths of rows that sets are made of at first, ascending.
    """

    def __init__(
        self,
        stock: Stock,
        shape: Callable[[Lengths], Bucket],
        price: Price,
        *,
        multiple: int,
        most: int,
        candidates: Iterable[Lengths] | None = None,
        worth: float = 0.0,
    ):
        self.stock, self._shape, self._price = stock, shape, price
        self._multiple, self._most, self._worth = multiple, most, worth
        self._sizes, self._counts = stock.examples
        cap = stock.most_segments
        # Segments are a side of size 1, if their number is limited.
        ones = np.ones((len(self._sizes), int(cap is not None)))
        self._loads = np.concatenate([self._sizes, ones], axis=1)
        self._caps = () if cap is None else (cap,)
        self._columns: dict[Lengths, np.ndarray] = {}
        self._packed: dict[tuple[Lengths, ...], BucketSet] = {}
        self._bounds: dict[tuple[Lengths, ...], float] = {}
        self._stands_in = stock.packing == "fill" or len(stock.longest) > 1
        self._moves = candidates is None
        self._longest: Lengths | None = None  # of all rows, if longer ones save no padding
        self.candidates = sorted(set(self._make_candidates() if candidates is None else candidates))

    # ---- the cost of a set

    def measure(self, lengths: Sequence[Lengths]) -> BucketSet:
        """Packs a set, which ascends by length."""
        key = tuple(lengths)
        if (found := self._packed.get(key)) is None:
            buckets = tuple(map(self._shape, key))
            batches = self.stock.count_batches(buckets)
            pairs = list(zip(batches, buckets, strict=True))
            costs = [np.multiply(n, self._price(bucket)) for n, bucket in pairs if n]
            cost, sure = np.sum(costs, axis=0).tolist()
            found = BucketSet(buckets, batches, 0.0, cost, sure)
            padding = 1 - float(self.stock.positions.sum()) / found.positions
            found = self._packed[key] = dataclasses.replace(found, padding=padding)
        return found

    def bound(self, lengths: Sequence[Lengths]) -> float:
        """The cost of a set in full rows, which is a lower bound for one side."""
        key = tuple(lengths)
        if (known := self._bounds.get(key)) is not None:
            return known
        member = np.argmin([self._column(each) for each in key], axis=0)
        total = 0.0
        for index, each in enumerate(key):
            if not (mine := member == index).any():
                continue
            loads = self._counts[mine] @ self._loads[mine]
            total += float((loads / [*each, *self._caps]).max()) * self._row_price(each)
        if self._stands_in:
            total *= self._handicap(key[-1])
        self._bounds[key] = total
        return total

    def _handicap(self, last: Lengths) -> float:
        """A factor by which longer rows are less attractive, if they are not packed to see."""
        doublings = math.log2(sum(last) / sum(self.stock.longest))
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
        bucket = self._shape(lengths)
        return self._price(bucket)[0] / bucket.rows

    # ---- the search

    def find(self, most: int) -> dict[int, BucketSet]:
        """The best set of each number of buckets up to `most`, by that number."""
        found: dict[int, BucketSet] = {}
        extended: list[tuple[Lengths, ...]] = []
        exact = self._cut_exactly(most) if self._moves and self.stock.packing == "none" else {}
        for number in range(1, most + 1):
            if number == 1:
                tried: list[tuple[Lengths, ...]] = [(each,) for each in self.candidates]
            else:
                pairs = itertools.product(extended, self.candidates)
                tried = [tuple(sorted({*each, more}, key=_order)) for each, more in pairs]
            tried = [each for each in {*tried, *exact.get(number, ())} if len(each) == number]
            limit = np.inf if number == 1 else found[number - 1].cost * (1 - self._worth)
            costs = self._try(tried, limit, len(tried) if number == 1 else PACKED)
            if not costs:
                break
            costs = self._improve(costs)
            extended = sorted(costs, key=costs.__getitem__)[:EXTENDED]
            finalists = extended[:1]
            if self._stands_in:
                finalists = sorted(costs, key=costs.__getitem__)[:FINALISTS]
            sets = [each for each in map(self.measure, finalists) if all(each.batches[:-1])]
            if not sets:
                break
            found[number] = min(
                sets, key=lambda each: each.cost * self._handicap(each.buckets[-1].lengths)
            )
        return found

    def _cost(self, lengths: tuple[Lengths, ...]) -> float:
        """The cost of a set; infinite if a bucket has no batch (but the last, which holds all)."""
        if self._stands_in:
            return self.bound(lengths)
        packed = self.measure(lengths)
        return packed.cost if all(packed.batches[:-1]) else np.inf

    def _is_valid(self, lengths: tuple[Lengths, ...]) -> bool:
        last = lengths[-1]
        return (
            all(long >= least for long, least in zip(last, self.stock.longest, strict=True))
            and sum(last) <= self._most
            and self._longest in (None, last)
            and all(a <= b for each in lengths[:-1] for a, b in zip(each, last, strict=True))
        )

    def _try(
        self, sets: Iterable[tuple[Lengths, ...]], limit: float, most: int
    ) -> dict[tuple[Lengths, ...], float]:
        """The costs of up to `most` sets whose bounds are below `limit`, lowest bounds first."""
        costs: dict[tuple[Lengths, ...], float] = {}
        every = sorted((self.bound(each), each) for each in sets if self._is_valid(each))
        for bound, each in every[:most]:
            enough = FINALISTS if self._stands_in else EXTENDED
            if len(costs) >= enough and bound >= min(costs.values()):
                break
            if bound < limit and (cost := self._cost(each)) < np.inf:
                costs[each] = cost
        return costs

    def _improve(self, costs: dict[tuple[Lengths, ...], float]) -> dict:
        """Adds sets in which members of the best set are exchanged, and then moved."""
        for _ in range(ROUNDS):
            best = min(costs, key=costs.__getitem__)
            least = costs[best]
            others = set()
            for index, more in itertools.product(range(len(best)), self.candidates):
                other = {*best[:index], *best[index + 1 :], more}
                others.add(tuple(sorted(other, key=_order)))
            others = {each for each in others if len(each) == len(best)} - costs.keys()
            costs |= self._try(others, least, PACKED)
            if min(costs.values()) >= least:
                break
        rounds = ROUNDS * (4 if self._stands_in else 1)  # bounds are fast
        for share in MOVES if self._moves else ():
            for _ in range(rounds):
                best = min(costs, key=costs.__getitem__)
                least = costs[best]
                moved = set(self._move(best, share)) - costs.keys()
                costs |= self._try(moved, least, PACKED)
                if min(costs.values()) >= least:
                    break
        return costs

    def _move(self, lengths: tuple[Lengths, ...], share: float) -> Iterable[tuple[Lengths, ...]]:
        """The sets in which a side of a bucket is longer or shorter by a share of its length."""
        for index, each in enumerate(lengths):
            for side, sign in itertools.product(range(len(each)), (1, -1)):
                by = max(round(each[side] * share / self._multiple), 1) * self._multiple
                if (length := each[side] + sign * by) > 0:
                    other = (*each[:side], length, *each[side + 1 :])
                    members = {*lengths[:index], other, *lengths[index + 1 :]}
                    if len(members) == len(lengths):
                        yield tuple(sorted(members, key=_order))

    def _cut_exactly(self, most: int) -> dict[int, list[tuple[Lengths, ...]]]:
        """For rows of one example, the best sets of each number of lengths, without empty rows."""
        if len(self.stock.longest) > 1:
            return {}
        lengths, multiple = self._sizes[:, 0], self._multiple
        ends = np.unique(np.append(round_up(lengths, multiple), self.stock.longest))
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
        longest, multiple = np.array(self.stock.longest), self._multiple
        positions = self._sizes * self._counts[:, None]
        if len(longest) > 1:
            found = self._make_vectors(positions)
        elif longest[0] <= EVERY * multiple:
            found = np.arange(multiple, longest[0] + 1, multiple)[:, None]
        else:
            least = min(round_up(self._sizes.min(), multiple), longest[0])
            quantiles = _quantiles(self._sizes[:, 0], positions[:, 0], QUANTILES)
            geometric = np.geomspace(least, longest[0], GEOMETRIC)
            found = np.concatenate([quantiles, geometric])[:, None]
        every = {*map(tuple, round_up(np.ceil(found).astype(np.int64), multiple).tolist())}
        every = {each for each in every if sum(each) <= self._most} | {self.stock.longest}
        return every | self._make_longer()

    def _make_longer(self) -> set[Lengths]:
        """Rows that are longer than any example, if that saves padding."""
        if self.stock.packing == "none":
            return set()
        base, most, multiple = self.stock.longest, self._most, self._multiple
        if len(base) > 1:
            base = self._balance(np.array(base))

        factors = [each for each in LONGER if sum(base) * each < most] + [most / sum(base)]
        found = {
            tuple(int(length * factor) // multiple * multiple for length in base)
            for factor in factors
            if factor <= max(LONGER)
        } | {base}
        found = {each for each in found if self._is_valid((each,))}
        if len(base) == 1 and 3 * base[0] <= EVERY * multiple:
            last = min(most, int(max(LONGER)) * base[0], EVERY * multiple)
            return found | {(length,) for length in range(base[0], last + 1, multiple)}
        if self._stands_in:
            return found
        limit = SOME * max(base)
        few = [self.measure((each,)) for each in sorted(found) if max(each) <= limit]
        saved = 1 - min(each.positions for each in few) / few[0].positions
        if saved < WORTH_LONGER and few[0].batches[0] >= MANY:
            self._longest = base
            return {base}
        return found

    def _make_vectors(self, positions: np.ndarray) -> np.ndarray:
        """Combinations of quantiles of the sides, and lengths that hold the shorter examples."""
        sides = self._sizes.shape[1]
        number = max(round(COMBINATIONS ** (1 / sides)), 2)
        of_example = positions.sum(axis=1)
        every = [_quantiles(np.maximum(side, 1), of_example, number) for side in self._sizes.T]
        found = [*itertools.product(*every)]
        share = (self._sizes / np.maximum(self.stock.longest, 1)).max(axis=1)
        for limit in _quantiles(share, of_example, QUANTILES):
            longest = self._sizes[share <= limit].max(axis=0)
            longest = round_up(np.maximum(longest, 1), self._multiple)
            found += [tuple(longest.tolist()), self._balance(longest)]
        return np.array(found)

    def _balance(self, lengths: np.ndarray) -> Lengths:
        """Lengths of which the examples that these hold fill all sides: some are longer."""
        if self.stock.packing == "none":
            return tuple(lengths.tolist())
        holds = (self._sizes <= lengths).all(axis=1)
        rows = np.maximum(self._counts[holds] @ self._sizes[holds], 1) / lengths
        wanted = np.rint(lengths * rows / rows.min() / self._multiple).astype(np.int64)
        wanted = np.maximum(wanted * self._multiple, lengths)
        if wanted.sum() > self._most:  # as far as rows may be long
            more = (self._most - lengths.sum()) / max((wanted - lengths).sum(), 1)
            extra = ((wanted - lengths) * more).astype(np.int64)
            wanted = lengths + extra // self._multiple * self._multiple
        return tuple(wanted.tolist())


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
