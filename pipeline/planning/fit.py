"""The choice of buckets: the few lengths that cost least for a histogram of lengths."""

import logging
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Unpack

import numpy as np

from pipeline.errors import InvalidValue, require_one_of, require_whole, suggest_keywords
from pipeline.planning.bucket import PAIR, Bucket, Fitted
from pipeline.planning.lengths import (
    AnyLengths,
    Exclude,
    weigh,
)
from pipeline.planning.members import Members
from pipeline.planning.options import (
    By,
    BySide,
    Options,
    PackingOptions,
    Weights,
    as_costs,
    as_phases,
    whole_by_side,
)
from pipeline.planning.packing import PACKINGS, Attention, Packing
from pipeline.planning.pieces import Overflow
from pipeline.planning.search import SURE, BucketSet, Search, choose
from pipeline.planning.stock import Stock, round_up

logger = logging.getLogger(__name__)

# One more bucket means one more compilation, so it must save this share of the positions and of a
# part of the attention. Positions cost much the same on all machines; the cost of attention is an
# estimate, of which it was seen to be a third to all. With packing "none", only positions count.
WORTH, WORTH_UNPACKED = 0.01, 0.001

# The values tried for `length_multiple=None`. A smaller one must save this share of the cost.
MULTIPLES, WORTH_FINER = (128, 64, 32, 16), 0.02

# The share of a token budget that batches may leave unused in the mean without a warning.
UNUSED = 0.15

# The number of examples in a sample of several corpora, to which buckets are fitted.
TYPICAL = 1 << 20

MaxLength = int | tuple[int, ...] | Mapping[str, int] | None


@suggest_keywords
def fit_buckets(
    lengths: AnyLengths,
    *,
    tokens_per_batch: int,
    max_buckets: int,
    max_length: MaxLength = None,
    length_multiple: BySide | None = 128,
    row_multiple: int = 1,
    devices: int | None = None,
    align: BySide = 1,
    cost: BySide = 1,
    packing: Packing = "best_fit",
    overflow: Overflow | None = None,
    max_segments: int | None = None,
    exclude: Exclude = (),
    attention: Attention = "dense",
    width: int = 1024,
    weights: Weights | None = None,
    by: By = "tokens",
) -> tuple[Bucket, ...]:
    """Up to `max_buckets` buckets, ascending by length, in which an epoch is cheap to train.

    Sets of buckets are packed, and their batches counted, as `Plan` does. With
    `attention="dense"`, a row of `L` positions costs `L + L²/(6·width)`: attention scores cost
    `L/(6·width)` times the rest of a Transformer layer whose MLP is four times as wide. With
    `attention="segment"`, which skips other segments, and with packing "none", it costs `L`. The
    cheapest set of each number of buckets is searched for: with one side, sets were within 2% of
    the cheapest in tests; with several, the search may miss some percent. Each further bucket,
    which is one more compilation, must save 1% of the positions and a third of the attention, since
    the formula does not know the machine; with packing "none", 0.1% of the positions.

    >>> lengths = np.repeat([120, 2000], [1000, 12])
    >>> fit_buckets(lengths, tokens_per_batch=8192, max_buckets=2)
    (Bucket(rows=64, length=128), Bucket(rows=4, length=2048))

    With several sides, all lengths count, and for pairs cross-attention too. Rows of packed
    examples may be longer than the longest example, so that all sides can be full:

    >>> fit_buckets(np.array([[120, 40]] * 96), tokens_per_batch=8192, max_buckets=2)
    (Bucket(rows=16, length=(384, 128)),)

    Args:
        lengths: as for `Plan`.
        tokens_per_batch: the most positions in a batch, those of each side times its cost. A bucket
            has as many rows as fit.
        max_buckets: the most buckets; each is one compilation of the training step.
        max_length: the most positions in a row, rounded up to `length_multiple`; one number for all
            sides, `(inputs, targets)` for pairs, or numbers by name. `overflow` applies to longer
            examples. If all examples are shorter, rows may still be that long if that reduces
            padding. Default None: the longest bucket holds the longest example.
        length_multiple: bucket lengths are multiples of this; default 128. None: 128, or 64, 32 or
            16 if that saves 2% of the cost, as with short examples. One number is for all sides
            that cost something; or numbers for all sides by name.
        row_multiple: numbers of rows are multiples of this; give the number of devices that share
            the rows of a batch; default 1.
        devices: the number of devices that share a batch, for `DynamicContext`: numbers of rows
            divide it, or are multiples of it. Default None: any numbers.
        align: as for `Plan`; bucket lengths are multiples of it, too.
        cost: as for `Plan`. A side that costs nothing gets a quarter more room than full rows of
            the other sides need.
        packing: as for `Plan`.
        overflow: as for `Plan`.
        max_segments: as for `Plan`.
        exclude: as for `Plan`.
        attention: "dense" (default) or "segment", the kind of attention of the model.
        width: the width of the model; default 1024. A plan of the buckets has this attention and
            width, unless it is given others.
        weights: as for `Plan`.
        by: as for `Plan`.

    Raises:
        ValueError: an argument is not as above, no example has a position, or a batch of
            `row_multiple` rows of the longest bucket exceeds `tokens_per_batch`.
    """
    require_one_of("packing", packing, PACKINGS)
    max_buckets = require_whole("max_buckets", max_buckets, 1)
    members = Members.of_one(lengths) if weights is None else Members.of_several(lengths)
    fit = Fit(
        members.without(members.select(exclude)),
        tokens_per_batch=tokens_per_batch,
        max_length=max_length,
        row_multiple=row_multiple,
        devices=devices,
        weights=weights,
        by=by,
        packing=packing,
        overflow=overflow,
        max_segments=max_segments,
        align=align,
        cost=cost,
        attention=attention,
        width=width,
    )

    worth = WORTH_UNPACKED if packing == "none" else WORTH
    choices: list[tuple[BucketSet, dict[int, BucketSet]]] = []
    for multiples in fit.multiples(length_multiple):
        sets = fit.search(multiples, worth * SURE).find(max_buckets)
        choices.append((choose(sets, worth), sets))
        if choices[-1][0].padding <= WORTH_FINER:
            break  # finer multiples have little to save
    least = min(chosen.cost for chosen, _ in choices) / (1 - WORTH_FINER)
    chosen, sets = next(choice for choice in choices if choice[0].cost <= least)
    tokens = chosen.positions * (1 - chosen.padding)
    costs = ", ".join(
        f"{number}: {chosen_set.cost / tokens:.3f}" for number, chosen_set in sets.items()
    )
    enough = "; one bucket is enough" * (len(chosen.buckets) == 1 < max_buckets)
    shapes = ", ".join(map(str, chosen.buckets))
    logger.info(f"buckets {shapes}; cost per token, by number of buckets: {costs}{enough}")
    mean = chosen.positions / sum(chosen.batches)
    if mean < (1 - UNUSED) * tokens_per_batch:
        logger.warning(
            f"batches have {mean:,.0f} positions of tokens_per_batch={tokens_per_batch:,} in the "
            f"mean ({shapes}): numbers of rows are {fit.rows_allowed}, and more rows would be too "
            f"many; tokens_per_batch={fit.more_rows(chosen.buckets):,} has room for them"
        )
    return Fitted.of(chosen.buckets, {"attention": attention, "width": width})


class Fit:
    """Lengths, and the checked arguments of `fit_buckets` that limit the buckets for them.

    `members` are those of its lengths; `options` are those of `Plan` that it has, too; `costs` is
    what a position of each side costs.
    """

    def __init__(
        self,
        members: Members,
        *,
        tokens_per_batch: int,
        max_length: MaxLength,
        row_multiple: int,
        devices: int | None,
        weights: Weights | None,
        by: By,
        **options: Unpack[PackingOptions],
    ):
        first, *_ = members.corpora.values()
        self._names = names = first.names or PAIR[: first.num_sides]
        if len(names) != first.num_sides:
            raise InvalidValue(
                f"lengths has shape {first.array.shape}; give more than two sides by name, as in "
                "{'inputs': […], 'patches': […], 'images': […]}"
            )
        cost, unpriced = options.get("cost", 1), getattr(first.given, "unpriced", ())
        if unpriced and not isinstance(cost, Mapping):
            cost = {name: cost for name in names if name not in unpriced}
        self.costs = as_costs(cost, names)
        self._aligns = whole_by_side("align", options.get("align", 1), names, 1)
        self._tokens = require_whole("tokens_per_batch", tokens_per_batch, 1)
        self._row_multiple = require_whole("row_multiple", row_multiple, 1)
        self._devices = None if devices is None else require_whole("devices", devices, 1)
        self.rows_allowed = f"multiples of row_multiple={row_multiple}"
        if self._devices is not None:
            self.rows_allowed += f", which divide devices={devices} or are multiples of it"
            if self._devices % self._row_multiple:
                raise InvalidValue(
                    f"row_multiple is {row_multiple}, but devices={devices} is no multiple of it, "
                    "so no number of rows divides the devices; omit one of the two"
                )
        array = first.included
        if weights is not None:
            array = typical_lengths(members, weights, by, self.costs)
        if not array.any():
            raise InvalidValue(
                "none of the lengths is above 0, or no example has loss, so there is nothing to "
                "fit buckets to"
            )
        self._array, self._options = array, options
        self._longest = np.maximum(array.max(axis=0), 1).astype(np.int64)
        self._limits: np.ndarray | None = None
        if max_length is not None:
            self._limits = np.array(whole_by_side("max_length", max_length, names))

    def _by_side(self, multiple: BySide) -> tuple[int, ...]:
        """The multiple of each side's lengths; one number is not for sides that cost nothing."""
        multiples = whole_by_side("length_multiple", multiple, self._names)
        if not isinstance(multiple, Mapping):
            multiples = tuple(
                n if cost else 1 for n, cost in zip(multiples, self.costs, strict=True)
            )
        return tuple(map(math.lcm, multiples, self._aligns))

    def multiples(self, length_multiple: BySide | None) -> list[tuple[int, ...]]:
        """The multiples of each side's lengths to try: the given ones, or several."""
        if length_multiple is not None:
            return [self._by_side(length_multiple)]
        longest, room = self._longest, self._tokens // self._row_multiple
        if self._limits is not None:
            longest = np.minimum(longest, self._limits)
        every = list(dict.fromkeys(map(self._by_side, MULTIPLES)))
        sizes = (weigh(round_up(longest, np.array(multiples)), self.costs) for multiples in every)
        return [
            multiples for multiples, size in zip(every, sizes, strict=True) if size <= room
        ] or every[-1:]

    def search(self, multiples: tuple[int, ...], worth: float) -> Search:
        """The search for buckets of such lengths; `worth` is its argument."""
        limits = self._longest if self._limits is None else self._limits
        room = round_up(limits, np.array(multiples))
        if (stock := Stock.of(self._array, self._rules(room))) is None:
            raise InvalidValue(
                f"every example is longer than max_length={limits.tolist()}, and overflow is "
                "'drop', so there is nothing to fit buckets to; raise max_length, or split the "
                "examples"
            )
        longest = round_up(np.maximum(stock.longest, 1), np.array(multiples))
        size = weigh(longest, self.costs)
        if size > self._tokens / self._row_multiple:
            shown = " + ".join(f"{length:,}" for length in longest.tolist())
            raise InvalidValue(
                f"{self._row_multiple} rows (row_multiple) of {shown} positions are "
                f"{self._row_multiple * size:,}, more than tokens_per_batch={self._tokens:,}; "
                "raise tokens_per_batch, or set a smaller max_length (the plan's overflow then "
                "applies to longer examples)"
            )
        return Search(
            stock,
            self._bucket,
            multiple=np.array(multiples),
            most=self._tokens / self._row_multiple,
            limit=None if self._limits is None else room,
            worth=worth,
            also=self._full_lengths(multiples) if len(longest) == 1 else (),
        )

    def _full_lengths(self, multiples: tuple[int, ...]) -> set[tuple[int, ...]]:
        """The lengths with which a number of rows that divides the devices fills a batch."""
        rows = [n for n in range(1, (self._devices or 0) + 1) if self._round_rows(n) == n]
        lengths = (int(self._tokens // (n * self.costs[0])) // multiples[0] for n in rows)
        return {(length * multiples[0],) for length in lengths if length}

    def _round_rows(self, rows: int) -> int:
        """The most rows, up to a number, that a bucket may have."""
        rows -= rows % self._row_multiple
        while self._devices and rows and rows % self._devices and self._devices % rows:
            rows -= self._row_multiple
        return rows

    def more_rows(self, buckets: Sequence[Bucket]) -> int:
        """The least budget with which each of some buckets has more rows."""
        budgets = []
        for bucket in buckets:
            rows = bucket.rows + 1
            while self._round_rows(rows) != rows:
                rows += 1
            budgets.append(rows * weigh(bucket.lengths, self.costs))
        return math.ceil(max(budgets))

    def _rules(self, room: np.ndarray) -> Options:
        """The options of a plan whose longest bucket is `room`, which cuts longer examples."""
        bucket = Bucket(1, tuple(room.tolist()), self._names)
        rule = self._options.get("overflow")
        if rule is None or (isinstance(rule, str) and rule == "error"):
            rule = "split" if rule is None and len(room) == 1 else "truncate"
        options: Any = {**self._options, "overflow": rule}
        return Options(buckets=(bucket,), **options)

    def _bucket(self, lengths: tuple[int, ...]) -> Bucket:
        """The bucket of some lengths with all rows that `tokens_per_batch` allows."""
        size = weigh(lengths, self.costs)
        return Bucket(self._round_rows(int(self._tokens // size)), lengths, self._names)


def typical_lengths(
    members: Members, weights: Weights, by: By, costs: Sequence[float] = (1,)
) -> np.ndarray:
    """About a million lengths, in the same proportions as in batches of several corpora.

    Each corpus has its share over all phases, by the rule of `mixture.find_rates`: examples spread
    evenly over it, and its longest.
    """
    corpora = members.corpora
    phases, counts = as_phases(weights, tuple(corpora)), {}
    for name, lengths in corpora.items():  # relative numbers of examples
        examples = len(lengths.included)
        positions = lengths.included.sum(axis=0, dtype=np.int64)
        size = lengths.count_by(by, positions.tolist(), costs, examples)
        shares = sum(phase.get(name, Fraction(0)) for _, phase in phases)
        counts[name] = float(shares) * examples / max(size, 1)
    samples = []
    for name, count in counts.items():
        if not len(array := corpora[name].included):
            continue
        number = round(TYPICAL * count / sum(counts.values()))
        samples.append(array[np.arange(number) * len(array) // max(number, 1)])
        if count:  # the longest of each side
            samples.append(array[array.argmax(axis=0)])
    return np.concatenate(samples)
