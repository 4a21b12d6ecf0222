"""The choice of buckets: the few lengths that cost least for a histogram of lengths."""

import logging
import math
from fractions import Fraction
from typing import Any

import numpy as np

from pipeline.errors import InvalidValue, require_one_of, require_whole, suggest_keywords
from pipeline.planning.bucket import Bucket
from pipeline.planning.cascade import ATTENTIONS, PACKINGS, Attention, Packing, row_cost
from pipeline.planning.gaps import check_fill
from pipeline.planning.lengths import AnyLengths, Exclude, Lengths, as_corpora, exclude_from, select
from pipeline.planning.options import By, Weights, as_phases
from pipeline.planning.pieces import OVERFLOWS, Overflow
from pipeline.planning.search import BucketSet, Price, Search, choose
from pipeline.planning.stock import Stock, round_up

logger = logging.getLogger(__name__)

# One more bucket means one more compilation, so it must save this share of the positions and of a
# part of the attention. Positions cost much the same on all machines; the cost of attention is an
# estimate, of which it was seen to be a third to all. With packing "none", only positions count.
WORTH, WORTH_UNPACKED, SURE = 0.01, 0.001, 1 / 3

# The values tried for `length_multiple=None`. A smaller one must save this share of the cost.
MULTIPLES, WORTH_FINER = (128, 64, 32, 16), 0.02

# The number of examples in a sample of several corpora, to which buckets are fitted.
TYPICAL = 1 << 20


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
    cheapest set of each number of buckets is found. Each further bucket, which is one more
    compilation, must save 1% of the positions and a third of the attention (the formula does not
    know the machine; `pipeline.tune` measures it); with packing "none", 0.1% of the positions.

    >>> lengths = np.repeat([120, 2000], [1000, 12])
    >>> fit_buckets(lengths, tokens_per_batch=8192, max_buckets=2)
    (Bucket(rows=64, length=128), Bucket(rows=4, length=2048))

    For pairs, both lengths count, and cross-attention too. Rows of packed pairs may be longer than
    the longest pair, so that both sides can be full:

    >>> fit_buckets(np.array([[120, 40]] * 96), tokens_per_batch=8192, max_buckets=2)
    (Bucket(rows=16, length=(384, 128)),)

    Args:
        lengths: positions of each example: an integer array `[n]`, for pairs `[n, 2]`, or a corpus.
            With `weights`, several of these by name, or `Corpora`.
        tokens_per_batch: the most positions in a batch, for pairs on both sides together. A bucket
            has as many rows as fit.
        max_buckets: the most buckets; each is one compilation of the training step.
        max_length: the most positions in a row; for pairs `(inputs, targets)`. `overflow` applies
            to longer examples. If all examples are shorter, rows may still be up to `max_length`
            long if that reduces padding. Default None: the longest bucket holds the longest
            example.
        length_multiple: bucket lengths are multiples of this; default 128. None: 128, or 64, 32 or
            16 if that saves 2% of the cost, as with short examples.
        row_multiple: numbers of rows are multiples of this; give the number of devices that share
            the rows of a batch; default 1.
        align: segments begin at multiples of this, as for `Plan`, and bucket lengths are multiples
            of it; default 1.
        packing: "best_fit" (default), "fill", "optimal" or "none", as for `Plan`. With
            "optimal", sets are compared by best fit.
        overflow: as for `Plan`; default None.
        max_segments: as for `Plan`; default None.
        exclude: examples to leave out, as for `Plan`; default: none.
        attention: "dense" (default) or "segment", the kind of attention of the model.
        width: the width of the model; default 1024.
        weights: the weights of several corpora, as for `Plan`; default None.
        by: the unit of weights, as for `Plan`; default "tokens".

    Raises:
        ValueError: an argument is not as above, no example has a position, or a batch of
            `row_multiple` rows of the longest bucket exceeds `tokens_per_batch`.
    """
    require_one_of("attention", attention, ATTENTIONS)
    width = require_whole("width", width, 1)
    max_buckets = require_whole("max_buckets", max_buckets, 1)
    dense = attention == "dense" and packing != "none"

    def price(bucket: Bucket) -> tuple[float, float]:
        kind: Attention = "dense" if dense else "segment"
        cost = bucket.rows * row_cost(*bucket.lengths, attention=kind, width=width)
        return cost, bucket.positions + SURE * (cost - bucket.positions)

    worth = WORTH_UNPACKED if packing == "none" else WORTH
    fit = Fit(
        lengths,
        tokens_per_batch=tokens_per_batch,
        max_length=max_length,
        row_multiple=row_multiple,
        align=align,
        packing=packing,
        overflow=overflow,
        max_segments=max_segments,
        exclude=exclude,
        weights=weights,
        by=by,
    )
    found: list[tuple[BucketSet, dict[int, BucketSet]]] = []
    for multiple in fit.multiples(length_multiple):
        sets = fit.search(multiple, price, worth=worth * SURE).find(max_buckets)
        found.append((choose(sets, worth), sets))
        if found[-1][0].padding <= WORTH_FINER:
            break  # finer multiples have little to save
    least = min(chosen.cost for chosen, _ in found) / (1 - WORTH_FINER)
    chosen, sets = next(each for each in found if each[0].cost <= least)
    tokens = chosen.positions * (1 - chosen.padding)
    costs = ", ".join(f"{number}: {each.cost / tokens:.3f}" for number, each in sets.items())
    enough = "; one bucket is enough" * (len(chosen.buckets) == 1 < max_buckets)
    shapes = ", ".join(map(str, chosen.buckets))
    logger.info(f"buckets {shapes}; cost per token, by number of buckets: {costs}{enough}")
    return chosen.buckets


class Fit:
    """Lengths, and the checked arguments of `fit_buckets` that limit the buckets for them."""

    def __init__(
        self,
        lengths: AnyLengths,
        *,
        tokens_per_batch: int,
        max_length: int | tuple[int, int] | None = None,
        row_multiple: int = 1,
        align: int = 1,
        packing: Packing = "best_fit",
        overflow: Overflow | None = None,
        max_segments: int | None = None,
        exclude: Exclude = (),
        weights: Weights | None = None,
        by: By = "tokens",
    ):
        require_one_of("packing", packing, PACKINGS)
        if overflow is not None:
            require_one_of("overflow", overflow, OVERFLOWS)
        if max_segments is not None:
            max_segments = require_whole("max_segments", max_segments, 1)
        members = _exclude(lengths, exclude, several=weights is not None)
        array = members[""].included if weights is None else typical_lengths(members, weights, by)
        limits: Any = () if max_length is None else np.array(max_length, object).ravel().tolist()
        limits = tuple(require_whole("max_length", limit, 1) for limit in limits)
        self._tokens = require_whole("tokens_per_batch", tokens_per_batch, 1)
        self._align = require_whole("align", align, 1)
        if packing == "fill":
            groups = getattr(lengths, "trees", None) is not None
            check_fill(vectors=array.ndim == 2, align=align, groups=groups)
        self._row_multiple = require_whole("row_multiple", row_multiple, 1)
        if max_length is not None and len(limits) != (array.shape[1] if array.ndim == 2 else 1):
            raise InvalidValue(
                f"max_length is {max_length!r}; it must be one number for lengths of shape [n], "
                "and (inputs, targets) for pairs"
            )
        if not array.any():
            raise InvalidValue(
                "none of the lengths is above 0, so there is nothing to fit buckets to"
            )
        self._array, self._limits = array, limits
        self._stocks: dict[int, Stock | None] = {}
        self._options: Any = {
            "align": align,
            "packing": packing,
            "overflow": overflow,
            "max_segments": max_segments,
        }

    def multiples(self, length_multiple: int | None) -> list[int]:
        """The values of `length_multiple` to try: the given one, or several."""
        if length_multiple is not None:
            return [require_whole("length_multiple", length_multiple, 1)]
        room = self._tokens // self._row_multiple
        longest = self._array.reshape(len(self._array), -1).max(axis=0).astype(np.int64)
        if self._limits:
            longest = np.minimum(longest, self._limits)
        found = [each for each in MULTIPLES if round_up(longest, each).sum() <= room]
        return found or [MULTIPLES[-1]]

    def search(self, multiple: int, price: Price, **options: Any) -> Search:
        """The search for buckets whose lengths are multiples of `multiple` and of `align`.

        `price` and `options` are arguments of `Search`.
        """
        multiple = math.lcm(multiple, self._align)
        if multiple not in self._stocks:
            self._stocks[multiple] = Stock.of(
                self._array, limit=self._limits or None, multiple=multiple, **self._options
            )
        if (stock := self._stocks[multiple]) is None:
            raise InvalidValue(
                f"every example is longer than max_length={self._limits}, and overflow is 'drop', "
                "so there is nothing to fit buckets to; raise max_length, or split the examples"
            )
        longest, most = stock.longest, self._tokens // self._row_multiple
        if sum(longest) > most:
            shown = " + ".join(f"{each:,}" for each in longest)
            raise InvalidValue(
                f"{self._row_multiple} rows (row_multiple) of {shown} positions are "
                f"{self._row_multiple * sum(longest):,}, more than "
                f"tokens_per_batch={self._tokens:,}; raise tokens_per_batch, or set a smaller "
                "max_length (the plan's overflow then applies to longer examples)"
            )
        if self._limits and len(longest) == 1:
            most = min(most, int(round_up(np.array(self._limits), multiple)[0]))
        options = {"shape": self.bucket, **options}
        return Search(stock, price=price, multiple=multiple, most=most, **options)

    def bucket(self, lengths: tuple[int, ...], tile: int = 1) -> Bucket:
        """The bucket of some lengths with all rows that `tokens_per_batch` allows.

        With `tile`, rows are a multiple of it, too, where a batch keeps nine tenths of its rows.
        """
        rows = self._tokens // (sum(lengths) * self._row_multiple) * self._row_multiple
        multiple = math.lcm(tile, self._row_multiple)
        if (fewer := rows // multiple * multiple) >= 0.9 * rows:
            rows = fewer
        return Bucket(rows, lengths)


def _exclude(given: Any, exclude: Exclude, *, several: bool) -> dict[str, Lengths]:
    """The lengths of each corpus by name, "" for the only one, without the examples left out."""
    corpora = as_corpora(given) if several else {"": given}
    members = {name: Lengths.of(each) for name, each in corpora.items()}
    excluded = select(exclude, given, sum(map(len, members.values())))
    return exclude_from(members, excluded)


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
            mean = int(each.included.sum(dtype=np.int64)) / max(len(each.included), 1)
        mean *= float(each.loss_share) if by == "loss" else 1
        shares = sum(phase.get(name, Fraction(0)) for _, phase in phases)
        counts[name] = float(shares) / max(mean, 1e-9)
    parts = []
    for name, count in counts.items():
        if not len(lengths := corpora[name].included):
            continue
        number = round(TYPICAL * count / sum(counts.values()))
        parts.append(lengths[np.arange(number) * len(lengths) // max(number, 1)])
        if count:
            total = lengths if lengths.ndim == 1 else lengths.sum(axis=1)
            parts.append(lengths[np.argmax(total)][None])
            if lengths.ndim == 2:  # the longest inputs, and the longest targets
                parts.append(lengths[lengths.argmax(axis=0)])
    return np.concatenate(parts)
