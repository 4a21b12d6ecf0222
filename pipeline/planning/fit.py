"""The choice of buckets: the few lengths that cost least for a histogram of lengths."""

import dataclasses
import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from pipeline.errors import InvalidValue, require_one_of, require_whole, suggest_keywords
from pipeline.planning import lengths as lengths_lib
from pipeline.planning.bucket import Bucket
from pipeline.planning.cascade import ATTENTIONS, PACKINGS, Attention, Packing, pack, row_cost
from pipeline.planning.gaps import check_fill
from pipeline.planning.lengths import AnyLengths, Lengths, as_corpora
from pipeline.planning.options import By, Weights, as_phases
from pipeline.planning.pieces import Pieces

logger = logging.getLogger(__name__)

# One more bucket means one more compilation, so it must save this share of the cost.
WORTH = 0.001

# With packed rows, one more bucket saves hardly any padding, only attention. `row_cost` estimates
# that without regard to the machine: for functions in rows of 512, it says that three buckets are
# 2% faster than one; measured, they were 8% slower on one machine and 8% faster on another. So each
# bucket must save this share.
WORTH_PACKED = 0.05

# The values tried for `length_multiple=None`. A smaller one must save this share of the cost.
MULTIPLES, WORTH_FINER = (128, 64, 32, 16), 0.02

# Rows may be longer than the longest example by these factors, if that saves this share.
LONGER, WORTH_LONGER = (2, 3, 4, 6, 8), 0.01

# Estimates for pairs use a grid of lengths, of which up to CELLS cells have pairs. Sets of buckets
# are then compared by packing about SAMPLE evenly spaced pairs.
CELLS, SAMPLE = 256, 5_000

# The changes of a side of a bucket that the search tries, in multiples of `length_multiple`.
MOVES = (8, -8, 4, -4, 2, -2, 1, -1)

# The number of examples in a sample of several corpora, to which buckets are fitted.
TYPICAL = 1 << 20

Shapes = tuple[tuple[int, ...], ...]  # for each bucket of a set: its length, or inputs and targets


@suggest_keywords
def fit_buckets(
    lengths: AnyLengths,
    *,
    tokens_per_batch: int,
    max_buckets: int,
    max_length: int | tuple[int, int] | None = None,
    length_multiple: int | None = 128,
    row_multiple: int = 1,
    align: int = 1,
    packing: Packing = "best_fit",
    attention: Attention = "dense",
    width: int = 1024,
    weights: Weights | None = None,
    by: By = "tokens",
) -> tuple[Bucket, ...]:
    """Up to `max_buckets` buckets, ascending by length, in which an epoch is cheap to train.

    Dynamic programming over the histogram gives candidate sets, and each is packed. With packing
    "none", the smallest set within 0.1% of the cheapest is chosen. Packed rows have hardly any
    padding to save, so each further bucket must save 5% of the cost, as estimates of the cost were
    seen to err by that much; `pipeline.tune` measures it. With `attention="dense"`, a row of `L`
    positions costs `L + L²/(6·width)`: attention scores cost `L/(6·width)` times the rest of a
    Transformer layer whose MLP is four times as wide. With `attention="segment"`, which skips other
    segments, and with packing "none", it costs `L`.

    >>> lengths = np.repeat([120, 2000], [1000, 10])
    >>> fit_buckets(lengths, tokens_per_batch=8192, max_buckets=2)
    (Bucket(rows=64, length=128), Bucket(rows=4, length=2048))

    For pairs, both lengths count, and cross-attention too. Rows of packed pairs may be longer than
    the longest pair, so that both sides can be full:

    >>> fit_buckets(np.array([[120, 40]] * 99), tokens_per_batch=8192, max_buckets=2)
    (Bucket(rows=16, length=(384, 128)),)

    Args:
        lengths: positions of each example: an integer array `[n]`, for pairs `[n, 2]`, or a corpus.
            With `weights`, several of these by name, or `Corpora`.
        tokens_per_batch: the most positions in a batch, for pairs on both sides together. A bucket
            has as many rows as fit.
        max_buckets: the most buckets; each is one compilation of the training step.
        max_length: the most positions in a row; for pairs `(inputs, targets)`. The plan's
            `overflow` applies to longer examples. If all examples are shorter, rows may still be up
            to `max_length` long if that reduces padding. Default None: the longest bucket holds the
            longest example.
        length_multiple: bucket lengths are multiples of this; default 128. None: 128, or 64, 32 or
            16 if that saves 2% of the cost, as with short examples.
        row_multiple: numbers of rows are multiples of this; give the number of devices that share
            the rows of a batch; default 1.
        align: segments begin at multiples of this, as for `Plan`, and bucket lengths are multiples
            of it; default 1.
        packing: "best_fit" (default), "fill", "optimal" or "none", as for `Plan`. With
            "optimal", sets are compared by best fit.
        attention: "dense" (default) or "segment", the kind of attention of the model.
        width: the width of the model; default 1024.
        weights: the weights of several corpora, as for `Plan`; default None.
        by: the unit of weights, as for `Plan`; default "tokens".

    Raises:
        ValueError: an argument is not as above, no example has a position, or a batch of
            `row_multiple` rows of the longest bucket exceeds `tokens_per_batch`.
    """
    search = make_search(
        lengths if weights is None else typical_lengths(lengths, weights, by),
        tokens_per_batch=tokens_per_batch,
        max_buckets=max_buckets,
        max_length=max_length,
        length_multiple=length_multiple,
        row_multiple=row_multiple,
        align=align,
        packing=packing,
        attention="segment" if packing == "none" else attention,
        width=width,
    )
    found = search.find(max_buckets)
    costs = ", ".join(f"{len(each)}: {cost:.3f}" for each, cost in search.costs.items())
    enough = "; one bucket is enough" * (len(found) == 1 < len(search.costs))
    shapes = ", ".join(map(str, found))
    logger.info(f"buckets {shapes}; cost per token, by number of buckets: {costs}{enough}")
    return tuple(search.bucket(each) for each in found)


def make_search(
    lengths: AnyLengths,
    *,
    tokens_per_batch: int,
    max_buckets: int = 4,
    max_length: int | tuple[int, int] | None = None,
    length_multiple: int | None = 128,
    row_multiple: int = 1,
    align: int = 1,
    packing: Packing = "best_fit",
    **others: Any,
) -> "BucketSearch":
    """The search for buckets for some lengths, after checking the arguments of `fit_buckets`.

    `others` are further attributes of `BucketSearch`.
    """
    require_one_of("packing", packing, PACKINGS)
    require_one_of("attention", others.get("attention", "dense"), ATTENTIONS)
    require_whole("width", others.get("width", 1), 1)
    max_buckets = require_whole("max_buckets", max_buckets, 1)
    array = lengths_lib.as_lengths(lengths)
    given = [] if max_length is None else np.array(max_length, object).ravel().tolist()
    limits = [require_whole("max_length", limit, 1) for limit in given]
    tokens_per_batch = require_whole("tokens_per_batch", tokens_per_batch, 1)
    align = require_whole("align", align, 1)
    if packing == "fill":
        groups = getattr(lengths, "trees", None) is not None
        check_fill(pairs=array.ndim == 2, align=align, groups=groups)
    row_multiple = require_whole("row_multiple", row_multiple, 1)
    if max_length is not None and len(limits) != array.ndim:
        raise InvalidValue(
            f"max_length is {max_length!r}; it must be one number for lengths of shape [n], and "
            "(inputs, targets) for pairs"
        )
    if array.ndim == 2:  # pairs without targets are in no batch
        array = array[array[:, 1] > 0]
    if not array.any():
        raise InvalidValue("none of the lengths is above 0, so there is nothing to fit buckets to")
    limit = np.maximum(np.array(array.max(axis=0), np.int64).reshape(-1), 1)
    if limits:
        limit = np.minimum(limit, limits)
    if array.ndim == 2:
        sizes = _round_up(np.minimum(array, limit).astype(np.int64), align)
        counts = np.ones(len(sizes), np.int64)
    else:
        sizes, counts = lengths_lib.histogram(array)

    def make(multiple: int) -> BucketSearch:
        multiple = math.lcm(require_whole("length_multiple", multiple, 1), align)
        longest = _round_up(limit, multiple)
        most = tokens_per_batch // row_multiple
        if longest.sum() > most:
            shown = " + ".join(f"{each:,}" for each in longest.tolist())
            raise InvalidValue(
                f"{row_multiple} rows (row_multiple) of {shown} positions are "
                f"{row_multiple * int(longest.sum()):,}, more than "
                f"tokens_per_batch={tokens_per_batch:,}; raise tokens_per_batch, or set a smaller "
                "max_length (the plan's overflow then applies to longer examples)"
            )
        found = sizes, counts
        if array.ndim == 1:
            found = _split(_round_up(sizes, align), counts, int(longest[0]))
            if limits:
                most = min(most, int(_round_up(np.array(limits), multiple)[0]))
        return BucketSearch(
            *found, multiple, most, packing, tokens_per_batch, row_multiple, **others
        )

    if length_multiple is not None:
        return make(length_multiple)
    room = tokens_per_batch // row_multiple
    multiples = [each for each in MULTIPLES if _round_up(limit, each).sum() <= room]
    searches, costs = [], []
    for multiple in multiples or MULTIPLES[-1:]:
        searches.append(make(multiple))
        found = searches[-1].find(max_buckets)
        costs.append(searches[-1].cost(found))
        if searches[-1].padding(found) <= WORTH_FINER:
            break  # finer multiples have little to save
    least = min(costs) / (1 - WORTH_FINER)
    return searches[next(number for number, cost in enumerate(costs) if cost <= least)]


@dataclasses.dataclass
class BucketSearch:
    """A search for the cheapest buckets for examples or pairs.

    First, all examples are sorted from short to long and cut into a few groups, each with a bucket
    that holds it. For pairs, the lengths of the buckets then change as long as the estimated cost
    falls. Last, packing gives the cost of each set. A row of packed pairs may be longer than the
    longest pair: its sides can then have the ratio of the group's totals, so that both can be full.
    """

    lengths: np.ndarray  # int64 [n, sides], lengths of examples; for pairs, of inputs and targets
    counts: np.ndarray  # int64 [n], the number of examples of each length
    multiple: int  # bucket lengths are multiples of this
    most: int  # the most positions in a row, for pairs on both sides together
    packing: Packing
    tokens_per_batch: int
    row_multiple: int = 1
    max_segments: int | None = None
    attention: Attention = "dense"
    width: int = 1024
    # For each set packed so far, the cost of an epoch per position; for pairs, of a sample.
    costs: dict[Shapes, float] = dataclasses.field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        lengths, counts = self.lengths, self.counts
        self._most_segments = 1 if self.packing == "none" else self.max_segments
        self._scale = 1.0  # the number of pairs, divided by that in the sample
        self._make_cells(lengths, counts)
        if lengths.shape[1] == 1:
            self._counts = np.zeros(int(lengths.max()) + 1, np.int64)
            self._counts[lengths[:, 0]] = counts
            self._table = np.arange(len(self._counts))[:, None]
        else:
            sample = lengths[:: max(len(lengths) // SAMPLE, 1)]
            pieces = Pieces(sample, tuple(lengths.max(axis=0).tolist()), "truncate")
            self._table, self._counts = pieces.table, pieces.count()
            self._scale = len(lengths) / len(sample)

    def _make_cells(self, lengths: np.ndarray, counts: np.ndarray) -> None:
        """Computes the examples, total positions and longest lengths of each cell with examples.

        Cells ascend by their lengths as shares of the longest, for pairs by the greater share.
        """
        ends, step = -(-np.maximum(lengths, 1) // self.multiple), 1
        while True:
            cells = (ends - 1) // step
            key = np.ravel_multi_index(tuple(cells.T), tuple(cells.max(axis=0) + 1))
            found, cell = np.unique(key, return_inverse=True)
            if len(found) <= CELLS or lengths.shape[1] == 1:
                break
            step *= 2
        longest = np.zeros((len(found), lengths.shape[1]), np.int64)
        np.maximum.at(longest, cell, ends * self.multiple)
        order = np.argsort((longest / longest.max(axis=0)).max(axis=1), kind="stable")
        self._longest, self._examples = longest[order], np.bincount(cell, counts)[order]
        total = [np.bincount(cell, counts * side) for side in lengths.T]
        self._total = np.stack(total, axis=1)[order]

    def price(self, lengths: np.ndarray) -> np.ndarray:
        """The cost of a row of each of some lengths [..., sides], in positions."""
        sides = np.moveaxis(lengths, -1, 0)
        return row_cost(*sides, attention=self.attention, width=self.width)

    def bucket(self, lengths: tuple[int, ...], rows: int | None = None) -> Bucket:
        """The bucket of some lengths, by default with all rows that `tokens_per_batch` allows."""
        if rows is None:
            rows = self.tokens_per_batch // (sum(lengths) * self.row_multiple) * self.row_multiple
        return Bucket(rows, lengths if len(lengths) == 2 else lengths[0])

    def _best_buckets(
        self, examples: np.ndarray, total: np.ndarray, longest: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The best bucket for each of some groups, [n, sides], and the cost of its rows, [n].

        A group has a number of examples, and total and longest lengths, [n, sides].
        """
        if self.packing == "none":
            return longest, examples * self.price(longest)
        best, cost = longest, self._full_rows(total, longest)
        # Lengthen the side that needs more rows, so that both sides are full together.
        for side, other in itertools.permutations(range(longest.shape[1]), 2):
            wanted = longest[:, other] * total[:, side] / np.maximum(total[:, other], 1)
            for rounded in (np.floor, np.ceil):
                length = (rounded(wanted / self.multiple) * self.multiple).astype(np.int64)
                length = np.minimum(length, self.most - longest[:, other])
                tried = longest.copy()
                tried[:, side] = np.maximum(
                    length // self.multiple * self.multiple, longest[:, side]
                )
                costs = self._full_rows(total, tried)
                better = costs < cost
                best, cost = np.where(better[:, None], tried, best), np.minimum(costs, cost)
        return best, cost

    def _full_rows(self, total: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """The cost of rows of some lengths for `total` positions, if the fuller side is full."""
        return (total * (self.price(lengths)[:, None] / lengths)).max(axis=1)

    def find(self, most: int) -> Shapes:
        """The smallest set of up to `most` buckets whose cost is nearly the least.

        Rows with few examples are seldom full, so longer rows are tried too.
        """
        cheapest = self._choose(self.sets(most))
        if self.packing == "none" or len(cheapest[0]) == 2:
            return cheapest
        ((longest,),) = cheapest[-1:]
        longer = [(length,) for times in LONGER if (length := longest * times) <= self.most]
        sets = [each for length in longer for each in ((length,), (*cheapest[:-1], length))]
        least = min(map(self.cost, sets), default=math.inf)
        worth = least <= self.cost(cheapest) * (1 - WORTH_LONGER)
        return self._choose(sets) if worth else cheapest

    def _choose(self, sets: Sequence[Shapes]) -> Shapes:
        """The best of some sets, which come in the order of their numbers of buckets.

        A larger set must save a share of the cost; with packed rows, one for each further bucket.
        """
        by_number: dict[int, list[Shapes]] = {}
        for each in sets:
            by_number.setdefault(len(each), []).append(each)
        chosen, *others = (min(every, key=self.cost) for every in by_number.values())
        for other in others:
            further = len(other) - len(chosen)
            worth = WORTH if self.packing == "none" else WORTH_PACKED * further
            if self.cost(other) < self.cost(chosen) * (1 - worth):
                chosen = other
        return chosen

    def sets(self, most: int) -> list[Shapes]:
        """Good sets of up to `most` buckets, small sets first; their last bucket holds all."""
        found: dict[Shapes, None] = {}
        for buckets in self._cut_groups(most):
            for lengths in self._add_longest(buckets):
                for each in (lengths, self._improve(lengths)):
                    if len(each) <= most:
                        found[each] = None
        return sorted(found, key=len)

    def _cut_groups(self, most: int) -> Iterator[np.ndarray]:
        """The best buckets [k, sides] for k = 1 … `most` groups of cells, by dynamic programming.

        Rows are assumed to be full; with packing "none", each example takes one.
        """
        count = len(self._longest)
        most = min(most, count)
        examples = np.append(0, np.cumsum(self._examples))
        total = np.pad(np.cumsum(self._total, axis=0), ((1, 0), (0, 0)))
        longest = np.maximum.accumulate(self._longest, axis=0)

        def best_buckets(begin: np.ndarray, end: int) -> tuple[np.ndarray, np.ndarray]:
            return self._best_buckets(
                examples[end] - examples[begin],
                total[end] - total[begin],
                np.repeat(longest[end - 1 : end], len(begin), axis=0),
            )

        # The cost of the first cells in each number of groups, and where the last group begins.
        least, begins = np.full((most + 1, count + 1), np.inf), np.zeros((most, count + 1), int)
        least[0, 0] = 0
        for end in range(1, count + 1):
            sums = least[:-1, :end] + best_buckets(np.arange(end), end)[1]
            begins[:, end], least[1:, end] = sums.argmin(axis=1), sums.min(axis=1)
        for groups in range(most):
            end, buckets = count, []
            for number in reversed(range(groups + 1)):
                begin = begins[number, end]
                buckets.append(best_buckets(np.array([begin]), end)[0][0])
                end = int(begin)
            yield np.array(buckets)

    def _add_longest(self, buckets: np.ndarray) -> Iterator[Shapes]:
        """Sets with a bucket that holds all examples: instead of the last bucket, or after it."""
        longest = buckets.max(axis=0)
        if longest.sum() > self.most:
            longest = self._longest.max(axis=0)
        every = {tuple(each) for each in np.minimum(buckets, longest).tolist()}
        ordered = sorted(every, key=lambda each: (sum(each), each))
        last = tuple(longest.tolist())
        yield (*ordered[:-1], last)
        if last != ordered[-1]:
            yield (*ordered, last)

    def _improve(self, lengths: Shapes) -> Shapes:
        """Changes one side of one bucket at a time, as long as the estimated cost falls."""
        best, least = np.array(lengths), self._estimate(np.array(lengths))
        moves = list(itertools.product(range(len(best)), range(best.shape[1]), MOVES))
        improved = best.shape[1] == 2  # the cuts are optimal for one length
        while improved:
            improved = False
            for index, side, by in moves:
                tried = best.copy()
                tried[index, side] += by * self.multiple
                tried = tried[np.lexsort((tried[:, 0], tried.sum(axis=1)))]
                if (cost := self._estimate(tried)) < least * (1 - 1e-6):
                    best, least, improved = tried, cost, True
        return tuple(map(tuple, best.tolist()))

    def _estimate(self, lengths: np.ndarray) -> float:
        """The cost of all cells in buckets [k, sides], in full rows; infinite if invalid."""
        holds = np.all(self._longest[:, None] <= lengths, axis=-1)
        valid = (
            lengths.min() > 0
            and np.all(lengths <= lengths[-1])
            and np.all(holds[:, -1])
            and lengths[-1].sum() <= self.most
            and len(np.unique(lengths, axis=0)) == len(lengths)
        )
        if not valid:
            return np.inf
        bucket = holds.argmax(axis=1)
        if self.packing == "none":
            return float(self._examples @ self.price(lengths)[bucket])
        totals = [np.bincount(bucket, side, len(lengths)) for side in self._total.T]
        return float(self._full_rows(np.stack(totals, axis=1), lengths).sum())

    def cost(self, lengths: Shapes) -> float:
        """The cost of an epoch per position; for pairs, of a sample."""
        if lengths not in self.costs:
            cost = self._count_rows(lengths) @ self.price(np.array(lengths))
            self.costs[lengths] = float(cost / (self._counts @ self._table).sum())
        return self.costs[lengths]

    def padding(self, lengths: Shapes) -> float:
        """The share of padding in an epoch, from 0 to 1; for pairs, in a sample."""
        positions = self._count_rows(lengths) @ np.array(lengths).sum(axis=1)
        return float(1 - (self._counts @ self._table).sum() / positions)

    def _count_rows(self, lengths: Shapes) -> np.ndarray:
        # Batches of one row, so that the empty rows of last batches do not count.
        return np.array(self._pack_rows([self.bucket(each, 1) for each in lengths]))

    def batches(self, buckets: Sequence[Bucket]) -> tuple[int, ...]:
        """The batches of each of some buckets in an epoch; for many pairs, scaled from a sample."""
        packed = buckets
        if self._scale > 1:  # in a sample, more of the batches are not full
            packed = [dataclasses.replace(bucket, rows=1) for bucket in buckets]
        every = zip(buckets, self._pack_rows(packed), strict=True)
        return tuple(math.ceil(rows * self._scale / bucket.rows) for bucket, rows in every)

    def _pack_rows(self, buckets: Sequence[Bucket]) -> list[int]:
        most, fill = self._most_segments, self.packing == "fill"
        packed = pack(self._counts, buckets, sizes=self._table, max_segments=most, fill=fill)
        return [packed.rows(index) for index in range(len(buckets))]

    @property
    def histogram(self) -> tuple[np.ndarray, np.ndarray]:
        """Sizes of examples, int64 [sizes, sides], and the number of examples of each, [sizes]."""
        return self._table, self._counts * self._scale


def _round_up(value: np.ndarray, multiple: int) -> np.ndarray:
    return -(-value // multiple) * multiple


def _split(sizes: np.ndarray, counts: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """The lengths of a histogram and their counts after splitting examples longer than `longest`.

    >>> [each.tolist() for each in _split(np.array([1, 5]), np.array([1, 2]), 2)]  # 5 = 2 + 2 + 1
    [[[1], [2]], [3, 4]]
    """
    found = np.zeros(min(int(sizes[-1]), longest) + 1, np.int64)
    times, rest = np.divmod(sizes, longest)
    np.add.at(found, rest, counts)
    found[-1] += counts @ times
    found[0] = 0
    sizes = np.flatnonzero(found)
    return sizes[:, None], found[sizes]


def typical_lengths(given: Any, weights: Weights, by: By) -> np.ndarray:
    """About a million lengths, in the same proportions as in batches of several corpora.

    Each corpus contributes its share over all phases, as examples spread evenly over it (perhaps
    repeated), and its longest examples.
    """
    corpora = {name: Lengths.of(each) for name, each in as_corpora(given).items()}
    phases, counts = as_phases(weights, tuple(corpora)), {}
    for name, each in corpora.items():  # relative numbers of examples
        mean = 1.0
        if by != "examples":
            mean = int(each.array.sum(dtype=np.int64)) / max(len(each), 1)
        mean *= float(each.loss_share) if by == "loss" else 1
        shares = sum(phase.get(name, Fraction(0)) for _, phase in phases)
        counts[name] = float(shares) / max(mean, 1e-9)
    parts = []
    for name, count in counts.items():
        lengths = corpora[name].array
        number = round(TYPICAL * count / sum(counts.values()))
        parts.append(lengths[np.arange(number) * len(lengths) // max(number, 1)])
        if count:
            total = lengths if lengths.ndim == 1 else lengths.sum(axis=1)
            parts.append(lengths[np.argmax(total)][None])
            if lengths.ndim == 2:  # the longest inputs, and the longest targets
                parts.append(lengths[lengths.argmax(axis=0)])
    return np.concatenate(parts)
