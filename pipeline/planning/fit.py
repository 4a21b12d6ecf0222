"""The choice of buckets: the few lengths that cost least for a histogram of lengths."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pipeline.errors import InvalidValue, require_one_of, require_whole, suggest_keywords
from pipeline.planning import lengths as lengths_lib
from pipeline.planning.bucket import Bucket
from pipeline.planning.cascade import ATTENTIONS, PACKINGS, Attention, Packing, pack, row_cost
from pipeline.planning.fit_pairs import PairFit
from pipeline.planning.lengths import AnyLengths, Lengths, as_corpora
from pipeline.planning.options import By, Weights, typical_lengths

logger = logging.getLogger(__name__)

# One more bucket means one more compilation, so it must save this share of the cost.
WORTH = 0.001

# Rows may be longer than the longest example by these factors, if that saves this share.
LONGER, WORTH_LONGER = (2, 3, 4, 6, 8), 0.01


@suggest_keywords
def fit_buckets(
    lengths: AnyLengths,
    *,
    tokens_per_batch: int,
    max_buckets: int,
    max_length: int | tuple[int, int] | None = None,
    length_multiple: int = 128,
    row_multiple: int = 1,
    packing: Packing = "best_fit",
    attention: Attention = "dense",
    width: int = 1024,
    weights: Weights | None = None,
    by: By = "tokens",
) -> tuple[Bucket, ...]:
    """Up to `max_buckets` buckets, ascending by length, in which an epoch is cheap to train.

    Dynamic programming over the histogram gives candidate sets. Each is packed, and the smallest
    set within 0.1% of the cheapest is chosen. A row of `L` positions costs `L + L²/(6·width)` with
    `attention="dense"`: scores grow with the square of the row, and cost `L/(6·width)` of the rest
    of a Transformer layer whose MLP is four times as wide. With `attention="segment"`, which skips
    other segments, and with packing "none", it costs `L`.

    >>> lengths = np.repeat([120, 2000], [1000, 10])
    >>> fit_buckets(lengths, tokens_per_batch=8192, max_buckets=2)
    (Bucket(rows=64, length=128), Bucket(rows=4, length=2048))

    For pairs, both lengths count, and the scores of targets by inputs too. Rows of packed pairs may
    be longer than the longest pair, so that both sides can be full:

    >>> fit_buckets(np.array([[120, 40]] * 99), tokens_per_batch=8192, max_buckets=2)
    (Bucket(rows=16, length=(384, 128)),)

    Args:
        lengths: positions of each example: an integer array `[n]`, for pairs `[n, 2]`, or a corpus.
            With `weights`, several of these by name, or `Corpora`.
        tokens_per_batch: the most positions in a batch, for pairs of both sides. A bucket has as
            many rows as fit.
        max_buckets: the most buckets; each is one compilation of the training step.
        max_length: the length of the longest bucket, at most; for pairs `(inputs, targets)`. The
            plan's `overflow` applies to longer examples. Rows of short examples may be longer than
            these, up to `max_length`, if that reduces padding. Default None: the longest bucket
            holds the longest example.
        length_multiple: bucket lengths are multiples of this; default 128.
        row_multiple: numbers of rows are multiples of this, the number of devices that share the
            rows of a batch; default 1.
        packing: "best_fit" (default), "optimal" or "none", as for `Plan`. With "optimal", sets are
            compared by best fit.
        attention: "dense" (default) or "segment", the kind of attention of the model.
        width: the width of the model; default 1024.
        weights: the weights of several corpora, as for `Plan`; default None.
        by: the unit of weights, as for `Plan`; default "tokens".

    Raises:
        ValueError: an argument is not as above, no example has a position, or a batch of
            `row_multiple` rows of the longest bucket exceeds `tokens_per_batch`.
    """
    require_one_of("packing", packing, PACKINGS)
    require_one_of("attention", attention, ATTENTIONS)
    if weights is not None:
        each = {name: Lengths.of(one) for name, one in as_corpora(lengths).items()}
        lengths = typical_lengths(each, weights, by)
    array = lengths_lib.as_lengths(lengths)
    given = max_length.tolist() if isinstance(max_length, np.ndarray) else max_length
    several = given if isinstance(given, list | tuple) else [given]
    limits = [require_whole("max_length", limit, 1) for limit in several if given is not None]
    tokens_per_batch = require_whole("tokens_per_batch", tokens_per_batch, 1)
    max_buckets = require_whole("max_buckets", max_buckets, 1)
    length_multiple = require_whole("length_multiple", length_multiple, 1)
    row_multiple = require_whole("row_multiple", row_multiple, 1)
    require_whole("width", width, 1)
    if max_length is not None and len(limits) != array.ndim:
        raise InvalidValue(
            f"max_length is {max_length!r}; it must be one number for lengths of shape [n], and "
            "(inputs, targets) for pairs"
        )
    if not array.any() or (array.ndim == 2 and not array[:, 1].any()):
        raise InvalidValue(
            f"none of the {len(array):,} lengths is above 0, so there is nothing to fit buckets to"
        )
    limit = array.max(axis=0)
    if max_length is not None:
        limit = np.minimum(limit, limits if array.ndim == 2 else limits[0])
    longest = _round_up(np.maximum(limit, 1).astype(np.int64), length_multiple)
    if row_multiple * int(longest.sum()) > tokens_per_batch:
        shown = " + ".join(f"{each:,}" for each in longest.ravel().tolist())
        raise InvalidValue(
            f"{row_multiple} rows (row_multiple) of {shown} positions are "
            f"{row_multiple * int(longest.sum()):,}, more than "
            f"tokens_per_batch={tokens_per_batch:,}; raise tokens_per_batch, or set a smaller "
            "max_length (the plan's overflow then applies to longer examples)"
        )

    def as_buckets(lengths: Sequence[Any]) -> tuple[Bucket, ...]:
        units = [tokens_per_batch // (int(np.sum(each)) * row_multiple) for each in lengths]
        return tuple(Bucket(n * row_multiple, each) for n, each in zip(units, lengths, strict=True))

    if array.ndim == 2:
        fit = PairFit(
            np.minimum(array, limit),
            multiple=length_multiple,
            most=tokens_per_batch // row_multiple,
            packing=packing,
            dense=attention == "dense",
            width=width,
        )
        return as_buckets(_find_cheapest(fit.sets(max_buckets), fit.cost))
    counts = _split(*lengths_lib.histogram(array), int(longest))
    counts[0] = 0

    def price(length: int) -> float:
        counted = "segment" if packing == "none" else attention
        return row_cost(length, attention=counted, width=width)

    def cost(lengths: list[int]) -> float:
        # Batches of one row: `lengths` may be a sample, so the last batch of each bucket, which is
        # not full, must not count.
        packed = pack(counts, [Bucket(1, length) for length in lengths], packing=packing)
        rows = sum(packed.rows(index) * price(length) for index, length in enumerate(lengths))
        return rows / tokens

    tokens = float(counts @ np.arange(len(counts)))
    sets = _candidate_sets(counts, max_buckets, length_multiple, packing, price)
    cheapest = _find_cheapest(sets, cost)
    if packing != "none":
        most = tokens_per_batch // row_multiple
        most = min([most, *_round_up(np.array(limits), length_multiple).tolist()])
        cheapest = _lengthen_rows(cheapest, most, cost)
    return as_buckets(cheapest)


def _lengthen_rows(lengths: list[int], most: int, cost: Callable) -> list[int]:
    """The lengths, or longer ones if cheaper: rows of a few short examples are seldom full."""
    longest, before = lengths[-1], cost(lengths)
    longer = [length for times in LONGER if (length := longest * times) <= most]
    sets = [each for length in longer for each in ([length], [*lengths[:-1], length])]
    costs = [cost(each) for each in sets]
    if min(costs, default=before) > before * (1 - WORTH_LONGER):
        return lengths
    best = sets[next(i for i, value in enumerate(costs) if value <= min(costs) * (1 + WORTH))]
    logger.info("buckets %s: rows longer than any example leave less padding", best)
    return best


def _find_cheapest(sets: Sequence[Any], cost: Callable) -> Any:
    """The first of the sets whose cost is nearly the least."""
    costs = [cost(each) for each in sets]
    best = next(i for i, value in enumerate(costs) if value <= min(costs) * (1 + WORTH))
    logger.info(
        "buckets %s; cost of an epoch per token, by number of buckets: %s%s",
        sets[best],
        ", ".join(f"{len(each)}: {cost:.3f}" for each, cost in zip(sets, costs, strict=True)),
        "; one bucket is enough" if best == 0 and len(sets) > 1 else "",
    )
    return sets[best]


def _candidate_sets(
    counts: np.ndarray, most: int, multiple: int, packing: Packing, price: Callable
) -> list[list[int]]:
    """The cheapest sets of 1, 2, … `most` bucket lengths, by dynamic programming.

    A bucket takes the lengths between the next shorter bucket and its own. Without packing, each
    example takes a row. With packing, rows are assumed to be full, so that an example takes
    `length / L` of a row of `L` positions.
    """
    size = np.arange(len(counts))
    weight = counts if packing == "none" else counts * size
    ends = np.unique(_round_up(np.flatnonzero(counts), multiple))
    below = np.zeros(len(ends) + 1)
    np.add.at(below, np.searchsorted(ends, size) + 1, weight)
    below = np.cumsum(below)  # the weight of all lengths up to each end
    each = np.array([price(int(end)) / (1 if packing == "none" else end) for end in ends])
    best = np.full(len(ends) + 1, np.inf)
    best[0] = 0
    origins: list[np.ndarray] = []  # for each number of buckets and end, the end of the one before
    sets = []
    for _ in range(min(most, len(ends))):
        after = np.full(len(ends) + 1, np.inf)
        origin = np.zeros(len(ends) + 1, np.int64)
        for j in range(1, len(ends) + 1):
            total = best[:j] + (below[j] - below[:j]) * each[j - 1]
            origin[j] = np.argmin(total)
            after[j] = total[origin[j]]
        best = after
        origins.append(origin)
        at, lengths = len(ends), []
        for origin in reversed(origins):
            lengths.append(int(ends[at - 1]))
            at = origin[at]
        sets.append(lengths[::-1])
    return sets


def _round_up(value: np.ndarray, multiple: int) -> np.ndarray:
    return -(-value // multiple) * multiple


def _split(sizes: np.ndarray, counts: np.ndarray, longest: int) -> np.ndarray:
    """A histogram after splitting all examples longer than `longest`: int64 [≤ longest + 1].

    >>> _split(np.array([1, 5]), np.array([1, 2]), 2).tolist()  # 5 = 2 + 2 + 1
    [0, 3, 4]
    """
    found = np.zeros(min(int(sizes[-1]), longest) + 1, np.int64)
    is_over = sizes > longest
    found[sizes[~is_over]] = counts[~is_over]
    if is_over.any():
        found[longest] += counts[is_over] @ (sizes[is_over] // longest)
        np.add.at(found, sizes[is_over] % longest, counts[is_over])
    return found
