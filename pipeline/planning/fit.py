"""Choosing buckets: which few lengths cost least on a histogram of lengths."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pipeline.packing.bucket import Bucket
from pipeline.packing.cascade import PACKINGS, pack, row_cost
from pipeline.planning import lengths as lengths_lib
from pipeline.planning.checks import require_one_of, require_whole
from pipeline.planning.fit_pairs import PairFit
from pipeline.planning.options import Weights, typical_lengths
from pipeline.planning.stage import corpora

log = logging.getLogger(__name__)

# A further bucket costs a compilation and a little mixing; it must save this share of the cost.
WORTH = 0.001

# Rows may be so many times as long as the longest example, if that saves this share of the cost.
LONGER, WORTH_LONGER = (2, 3, 4, 6, 8), 0.01


def fit_buckets(
    lengths,
    *,
    tokens_per_batch: int,
    max_buckets: int,
    max_length: int | tuple[int, int] | None = None,
    length_multiple: int = 128,
    row_multiple: int = 1,
    packing: str = "best_fit",
    attention: str = "dense",
    width: int = 1024,
    weights: Weights | None = None,
    by: str = "tokens",
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

    Of pairs both lengths count, and the scores of targets by inputs as well; see `pair_fit`. Rows
    of packed pairs may be longer than the longest pair, so that both sides can be full:

    >>> fit_buckets(np.array([[120, 40]] * 99), tokens_per_batch=8192, max_buckets=2)
    (Bucket(rows=16, length=(384, 128)),)

    Args:
        lengths: positions of each example, an integer array `[n]`, of pairs `[n, 2]`, or a corpus;
            with weights, several of these by name, or `Corpora`.
        tokens_per_batch: positions in a batch, at most, of both sides of pairs; rows are as many
            as fit.
        max_buckets: the most buckets; each is one compilation of the training step.
        max_length: longer examples do not count towards the longest bucket; the plan's `overflow`
            says what becomes of them. None: the longest bucket holds the longest example. Rows of
            short examples may be longer than these, up to `max_length`, where that leaves less
            padding. Of pairs, (inputs, targets).
        length_multiple: bucket lengths are multiples of this.
        row_multiple: rows are multiples of this; the number of devices that share a batch's rows.
        packing: "best_fit", "optimal" or "none", as the plan's; sets of buckets are compared by
            best fit for both of the first.
        attention: "dense" or "segment", what attention costs the model.
        width: the model's width.
        weights: of several corpora, as for `Plan`.
        by: what weights count, as for `Plan`.

    Raises:
        ValueError: an argument is not as above, no example has a position, or a batch of
            `row_multiple` rows of the longest bucket exceeds `tokens_per_batch`.
    """
    require_one_of("packing", packing, PACKINGS)
    require_one_of("attention", attention, ("dense", "segment"))
    if weights is not None:
        each = {name: lengths_lib.Lengths.of(one) for name, one in corpora(lengths).items()}
        lengths = typical_lengths(each, weights, by)
    array = lengths_lib.as_lengths(lengths)
    limits = () if max_length is None else np.ravel(max_length).tolist()
    numbers = [
        ("tokens_per_batch", tokens_per_batch),
        ("max_buckets", max_buckets),
        *(("max_length", each) for each in limits),
        ("length_multiple", length_multiple),
        ("row_multiple", row_multiple),
        ("width", width),
    ]
    for name, value in numbers:
        require_whole(name, value, 1)
    tokens_per_batch, row_multiple = int(tokens_per_batch), int(row_multiple)
    max_buckets, length_multiple = int(max_buckets), int(length_multiple)
    if len(limits) not in (0, array.ndim):
        raise ValueError(
            f"max_length is {max_length!r}; it must be one number for lengths of shape [n], and "
            "(inputs, targets) for pairs"
        )
    if not array.any() or (array.ndim == 2 and not array[:, 1].any()):
        raise ValueError(
            f"none of the {len(array):,} lengths is above 0, so there is nothing to fit buckets to"
        )
    limit = array.max(axis=0)
    limit = limit if max_length is None else np.minimum(limit, max_length)
    longest = _round_up(np.maximum(limit, 1).astype(np.int64), length_multiple)
    if row_multiple * int(longest.sum()) > tokens_per_batch:
        shown = " + ".join(f"{each:,}" for each in longest.ravel().tolist())
        raise ValueError(
            f"{row_multiple} rows (row_multiple) of {shown} positions are "
            f"{row_multiple * int(longest.sum()):,}, more than "
            f"tokens_per_batch={tokens_per_batch:,}; raise tokens_per_batch, or set a smaller "
            "max_length (longer examples are then split, or what the plan's overflow says)"
        )

    def buckets_of(chosen: Sequence[Any]) -> tuple[Bucket, ...]:
        rows = [
            tokens_per_batch // (int(np.sum(length)) * row_multiple) * row_multiple
            for length in chosen
        ]
        return tuple(map(Bucket, rows, chosen))

    if array.ndim == 2:
        fit = PairFit(
            np.minimum(array, limit),
            multiple=length_multiple,
            most=tokens_per_batch // row_multiple,
            packing=packing,
            dense=attention == "dense",
            width=width,
        )
        return buckets_of(_cheapest(fit.sets(max_buckets), fit.cost))
    counts = _split(lengths_lib.histogram(array), int(longest))
    counts[0] = 0

    def price(length: int) -> float:
        counted = "segment" if packing == "none" else attention
        return row_cost(length, attention=counted, width=width)

    def cost(chosen: list[int]) -> float:
        # One row a batch: what is left over at the end of an epoch must not count here, where
        # `lengths` may be a sample.
        packed = pack(counts, [Bucket(1, length) for length in chosen], packing=packing)
        rows = sum(packed.rows(index) * price(length) for index, length in enumerate(chosen))
        return rows / tokens

    tokens = float(counts @ np.arange(len(counts)))
    chosen = _cheapest(_candidates(counts, max_buckets, length_multiple, packing, price), cost)
    if packing != "none":
        most = tokens_per_batch // row_multiple
        most = min([most, *_round_up(np.array(limits), length_multiple).tolist()])
        chosen = _with_longer_rows(chosen, most, cost)
    return buckets_of(chosen)


def _with_longer_rows(chosen: list[int], most: int, cost: Callable) -> list[int]:
    """The lengths, or with rows longer than any example, up to `most`, where that is cheaper.

    Rows of a few short examples each are seldom full.
    """
    longest, before = chosen[-1], cost(chosen)
    longer = [length for times in LONGER if (length := longest * times) <= most]
    sets = [some for length in longer for some in ([length], [*chosen[:-1], length])]
    costs = [cost(some) for some in sets]
    if min(costs, default=before) > before * (1 - WORTH_LONGER):
        return chosen
    found = sets[next(i for i, value in enumerate(costs) if value <= min(costs) * (1 + WORTH))]
    log.info("buckets %s: rows longer than any example leave less padding", found)
    return found


def _cheapest(sets: Sequence[Any], cost: Callable) -> Any:
    """The first of the sets that is nearly as cheap as the cheapest."""
    costs = [cost(chosen) for chosen in sets]
    best = next(i for i, value in enumerate(costs) if value <= min(costs) * (1 + WORTH))
    log.info(
        "buckets %s: an epoch's cost as a multiple of its tokens, with so many buckets: %s%s",
        sets[best],
        ", ".join(f"{len(chosen)}: {cost:.3f}" for chosen, cost in zip(sets, costs, strict=True)),
        "; one bucket is enough" if best == 0 and len(sets) > 1 else "",
    )
    return sets[best]


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


def _split(counts: np.ndarray, longest: int) -> np.ndarray:
    """A histogram after all longer lengths are split: int64 [≤ longest + 1].

    >>> _split(np.array([0, 1, 0, 0, 0, 2]), 2).tolist()  # 5 = 2 + 2 + 1
    [0, 3, 4]
    """
    found = counts[: longest + 1].copy()
    over = np.arange(longest + 1, len(counts))
    if len(over):
        found[longest] += counts[over] @ (over // longest)
        np.add.at(found, over % longest, counts[over])
    return found
