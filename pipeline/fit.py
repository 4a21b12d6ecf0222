"""Choosing buckets: which few lengths cost least on a histogram of lengths."""

import logging
from collections.abc import Callable

import numpy as np

from pipeline import lengths as lengths_lib
from pipeline.bucket import Bucket
from pipeline.overflow import split_counts
from pipeline.packing import check_packing, pack, row_cost

log = logging.getLogger(__name__)

# A further bucket costs a compilation and a little mixing; it must save this share of the cost.
WORTH = 0.001


def fit_buckets(
    lengths,
    *,
    tokens_per_batch: int,
    max_buckets: int,
    max_length: int | None = None,
    length_multiple: int = 128,
    row_multiple: int = 1,
    packing: str = "best_fit",
    attention: str = "dense",
    width: int = 1024,
) -> tuple[Bucket, ...]:
    """At most `max_buckets` buckets, ascending by length, that make an epoch cheap to train on.

    Candidate sets come from dynamic programming over the histogram; each is then packed, and the
    smallest set within 0.1% of the cheapest wins. The cost of a row of `L` positions is `L` for
    packing "none". For packed rows it is `L + L²/(6·width)` with `attention="dense"`, whose scores
    are as many as the square of the row (in a Transformer layer with an MLP four times as wide,
    scores cost `L/(6·width)` of the rest); with `attention="segment"`, which skips other segments,
    it is `L`, and one bucket is often best.

    >>> lengths = np.repeat([120, 2000], [1000, 10])
    >>> fit_buckets(lengths, tokens_per_batch=8192, max_buckets=2)
    (Bucket(rows=64, length=128), Bucket(rows=4, length=2048))

    Args:
        lengths: positions of each example, an integer array `[n]`, or a corpus.
        tokens_per_batch: positions in a batch, at most; rows are as many as fit.
        max_buckets: the most buckets; each is one compilation of the training step.
        max_length: longer examples do not count towards the longest bucket; the plan's `overflow`
            says what becomes of them. None: the longest bucket holds the longest example.
        length_multiple: bucket lengths are multiples of this.
        row_multiple: rows are multiples of this; the number of devices that share a batch's rows.
        packing: "best_fit", "optimal" or "none", as the plan's; sets of buckets are compared by
            best fit for both of the first.
        attention: "dense" or "segment", what attention costs the model.
        width: the model's width.

    Raises:
        ValueError: an argument is not as above, no example has a position, or a batch of
            `row_multiple` rows of the longest bucket exceeds `tokens_per_batch`.
    """
    check_packing(packing)
    if attention not in ("dense", "segment"):
        raise ValueError(f"attention is {attention!r}; it must be 'dense' or 'segment'")
    numbers = {
        "tokens_per_batch": tokens_per_batch,
        "max_buckets": max_buckets,
        "max_length": 1 if max_length is None else max_length,
        "length_multiple": length_multiple,
        "row_multiple": row_multiple,
        "width": width,
    }
    for name, value in numbers.items():
        if int(value) != value or value < 1:
            raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1")
    array = lengths_lib.as_lengths(lengths)
    if not array.any():
        raise ValueError(
            f"none of the {len(array):,} lengths is above 0, so there is nothing to fit buckets to"
        )
    longest = _round_up(int(min(array.max(), max_length or array.max())), length_multiple)
    if row_multiple * longest > tokens_per_batch:
        raise ValueError(
            f"{row_multiple} rows (row_multiple) of {longest:,} positions are "
            f"{row_multiple * longest:,}, more than tokens_per_batch={tokens_per_batch:,}; raise "
            "tokens_per_batch, or set a smaller max_length (longer examples are then split, or "
            "what the plan's overflow says)"
        )
    counts = split_counts(lengths_lib.histogram(array), longest)
    counts[0] = 0

    def buckets_of(chosen: list[int]) -> tuple[Bucket, ...]:
        rows = [tokens_per_batch // (length * row_multiple) * row_multiple for length in chosen]
        return tuple(map(Bucket, rows, chosen))

    def price(length: int) -> float:
        counted = "segment" if packing == "none" else attention
        return row_cost(length, attention=counted, width=width)

    def cost(chosen: list[int]) -> float:
        # One row a batch: what is left over at the end of an epoch must not count here, where
        # `lengths` may be a sample.
        packed = pack(counts, [Bucket(1, length) for length in chosen], packing=packing)
        return sum(packed.rows(index) * price(length) for index, length in enumerate(chosen))

    sets = _candidates(counts, max_buckets, length_multiple, packing, price)
    costs = [cost(chosen) for chosen in sets]
    best = next(i for i, value in enumerate(costs) if value <= min(costs) * (1 + WORTH))
    log.info(
        "buckets %s: cost of an epoch with 1, 2, … buckets, as a multiple of its tokens: %s%s",
        sets[best],
        ", ".join(f"{value / float(counts @ np.arange(len(counts))):.3f}" for value in costs),
        "; one bucket is enough" if best == 0 and max_buckets > 1 else "",
    )
    return buckets_of(sets[best])


def _candidates(
    counts: np.ndarray, most: int, multiple: int, packing: str, price: Callable
) -> list[list[int]]:
    """The cheapest set of 1, 2, … `most` bucket lengths, by dynamic programming.

    A bucket of length L takes the lengths between the next shorter bucket and its own. Unpacked,
    each takes a row of its own; packed, rows are taken to be full, so each takes `length / L`.
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
    came: list[np.ndarray] = []
    sets = []
    for _ in range(min(most, len(ends))):
        after = np.full(len(ends) + 1, np.inf)
        origin = np.zeros(len(ends) + 1, np.int64)
        for j in range(1, len(ends) + 1):
            total = best[:j] + (below[j] - below[:j]) * each[j - 1]
            origin[j] = np.argmin(total)
            after[j] = total[origin[j]]
        best = after
        came.append(origin)
        at, chosen = len(ends), []
        for origin in reversed(came):
            chosen.append(int(ends[at - 1]))
            at = origin[at]
        sets.append(chosen[::-1])
    return sets


def _round_up(value, multiple: int):
    return -(-value // multiple) * multiple
