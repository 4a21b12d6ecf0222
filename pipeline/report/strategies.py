"""Strategies: ways to make the batches of an epoch, Lockstep's and others', and their costs."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pipeline.planning.figures import count_epoch, losses
from pipeline.planning.lengths import Lengths
from pipeline.planning.patterns import Packed, count_segments
from pipeline.planning.plan import Plan
from pipeline.report.dataset import Options

BUCKETS = (1, 2, 3, 4, 6)  # numbers of buckets that are compared
UNPACKED = 4  # buckets of the plan with one example a row
FITTED = 1_000_000  # examples, about, that these buckets are fitted to at most
ROWS, WINDOW = 32, 320  # of batches with a fixed number of rows
READ_AHEAD = 10_000  # examples that are sorted before a budget of tokens cuts them

# In compared plans, each example comes once an epoch, also for a mixture.
PLAIN: dict[str, Any] = {"weights": None, "by": None, "ending": None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strategy:
    """A way to make the batches of an epoch, and its cost.

    Attributes:
        name: its name.
        about: its numbers of rows and lengths, in words.
        padding: the share of positions that hold no token.
        shapes: the number of shapes of batches, each of which is compiled once.
        batches: the number of batches in an epoch.
        cut: the number of documents in several segments.
        work: the work of a layer for each token, by kind of attention: "dense", over whole rows,
            and "segment", which skips other segments. 1 is the work at a position without
            attention.
        packing: that of Lockstep's plan; None for other strategies.
        buckets: those of Lockstep's plan, as JSON.
    """

    name: str
    about: str
    padding: float
    shapes: int
    batches: int
    cut: int
    work: dict[str, float]
    packing: str | None = None
    buckets: Sequence[Any] = ()


def weigh(
    width: int, *, tokens: int, positions: float, scores: float, squares: float, **others: Any
) -> Strategy:
    """A strategy from its sums over an epoch.

    `tokens` are the real ones of all `positions`; attention computes `scores` over whole rows, and
    `squares` inside segments. A row of `L` positions costs `L + L²/(6·width)`, or the squares of
    its segments instead of `L²`.
    """
    return Strategy(
        padding=1 - tokens / positions,
        work={
            "dense": (positions + scores / (6 * width)) / tokens,
            "segment": (positions + squares / (6 * width)) / tokens,
        },
        **others,
    )


# ---- other libraries


def compare_others(
    sizes: np.ndarray, counts: np.ndarray, options: Options, row: int
) -> list[Strategy]:
    """The ways to batch that others use, with expectations over random orders.

    There are `counts` examples of the lengths `sizes`; the `overflow` of the options decides about
    those longer than `row`.
    """
    if (overflow := options.get("overflow")) == "truncate":
        sizes = np.minimum(sizes, row)
    kept = (sizes > 0) & (sizes <= row if overflow == "drop" else True)
    sizes, counts = sizes[kept].astype(np.int64), counts[kept]
    full = (sizes - 1) // row  # pieces of whole rows, before the last one of each document
    ends = np.bincount(sizes - full * row, counts, row + 1).astype(np.int64)
    ends[row] += counts @ full
    pieces = np.flatnonzero(ends)
    ends = ends[pieces]
    number, longest, tokens = int(ends.sum()), int(pieces[-1]), int(counts @ sizes)
    inside, overlong = float(ends @ pieces**2), int(counts[sizes > row].sum())
    budget, found = options["tokens_per_batch"], []

    def add(
        name: str, about: str, squares: float = inside, cut: int = overlong, **sums: Any
    ) -> None:
        more = {"name": name, "about": about, "cut": cut, **sums}
        found.append(weigh(options["width"], tokens=tokens, squares=squares, **more))

    batches, last = -(-number // ROWS), int(number > ROWS and number % ROWS > 0)
    add(
        "padded to the longest of all",
        f"batches of {ROWS}, every row {longest:,} long",
        positions=number * longest,
        scores=number * longest**2,
        batches=batches,
        shapes=1 + last,
    )
    for name, about, window in (
        ("padded to the batch's longest", f"batches of {ROWS} in random order", ROWS),
        ("sorted windows", f"windows of {WINDOW} sorted by length, batches of {ROWS}", WINDOW),
    ):
        positions, scores, lengths = pad_windows(pieces, ends, ROWS, window)
        shapes = round(lengths) + last
        add(name, about, positions=positions, scores=scores, batches=batches, shapes=shapes)
    positions, scores, cuts, firsts = read_ahead(pieces, ends, budget)
    add(
        "token budget, read-ahead",
        f"{READ_AHEAD:,} read ahead and sorted, at most {budget:,} positions a batch; hosts that "
        "read their own documents have different numbers of batches",
        positions=positions,
        scores=scores,
        batches=math.ceil(cuts),
        shapes=max(round(firsts), 1),
    )
    height, rows = max(budget // row, 1), -(-tokens // row)
    cut, squares = cut_documents(sizes, counts, row)
    add(
        "concatenate and split",
        f"one sequence of tokens, cut every {row:,}, batches of {height}; hosts that read their "
        "own documents have different numbers of batches",
        positions=rows * row,
        scores=rows * row**2,
        squares=squares,
        batches=-(-rows // height),
        shapes=1 + int(rows > height and rows % height > 0),
        cut=round(cut),
    )
    return found


def pad_windows(
    sizes: np.ndarray, counts: np.ndarray, rows: int, window: int
) -> tuple[float, float, float]:
    """The positions, squared lengths of rows, and different lengths of batches of sorted windows.

    Windows of `window` examples in random order are sorted by length and cut into batches of
    `rows`, which are padded to their longest example: to the k-th shortest of n in the window. It
    is at most `l` long if k of the n are, which has a binomial probability.

    >>> pad_windows(np.array([1, 3]), np.array([2, 2]), rows=2, window=2)  # 11, 13, 31 or 33
    (10.0, 28.0, 1.375)
    """
    number = int(counts.sum())
    below = np.cumsum(counts) / number
    batches, height = np.zeros((2, len(sizes)))  # padded to each length, and rows in them
    for windows, examples in ((number // window, window), (1, number % window)):
        likely = np.zeros(len(sizes))  # probability that the k-th shortest is at most this long
        for k in range(examples if windows else 0, 0, -1):
            likely += math.comb(examples, k) * below**k * (1 - below) ** (examples - k)
            if k % rows and k < examples:
                continue
            share = np.diff(likely, prepend=0)
            batches += windows * share
            height += windows * share * (k % rows or rows)
    # Each example of a length is the longest of a batch with the same probability.
    absent = (1 - np.minimum(batches / counts, 1)) ** counts
    return float(height @ sizes), float(height @ sizes**2), float((1 - absent).sum())


def read_ahead(
    sizes: np.ndarray, counts: np.ndarray, budget: int
) -> tuple[float, float, float, float]:
    """Positions, squared lengths of rows, batches and shapes of windows that are cut by a budget.

    A window has `READ_AHEAD` examples, with the distribution of all of them. It is sorted from the
    longest down and cut into batches of `budget // longest left` rows. For the number of different
    shapes, an example is the first of its batch with a probability of 1 / rows.
    """
    number = float(counts.sum())
    window = max(min(READ_AHEAD, int(number)), 1)
    evenly = (np.arange(window) + 0.5) / window * number
    left = sizes[np.searchsorted(np.cumsum(counts), evenly)][::-1].tolist()
    begin, batches = 0, []
    while begin < window:
        rows = min(max(budget // left[begin], 1), window - begin)
        batches.append((rows * left[begin], rows * left[begin] ** 2, 1))
        begin += rows
    positions, scores, cuts = (np.sum(batches, axis=0) * (number / window)).tolist()
    shapes = float((1 - (1 - np.minimum(sizes / budget, 1)) ** counts).sum())
    return positions, scores, cuts, shapes


def cut_documents(sizes: np.ndarray, counts: np.ndarray, row: int) -> tuple[float, float]:
    """The number of documents that cuts every `row` positions divide, and the squares of segments.

    The beginning of a document in its row is random, in steps of the lengths' greatest common
    divisor.

    >>> cut_documents(np.array([2]), np.array([6]), row=3)  # they begin at 0, 1 or 2
    (2.0, 20.0)
    """
    unit = math.gcd(row, int(np.gcd.reduce(sizes)))
    size, length = sizes / unit, row // unit
    cut = np.minimum((size - 1) / length, 1)
    squares = np.where(
        size <= length,  # in one piece, or in two of k and size - k
        size**2 * (1 - cut) + (size - 1) * size * (2 * size - 1) / (3 * length),
        size * length - (length**2 - 1) / 3,
    )
    return float(counts @ cut), float(counts @ squares * unit**2)


# ---- Lockstep


def compare_plans(
    lengths: np.ndarray, options: Options, plan: Plan, progress: Callable[[str], None]
) -> list[Strategy]:
    """The buckets of `plan`, other numbers of buckets, and one example a row.

    Buckets are fitted with the options, to rows that are as long as those of the plan.
    """
    own, step = plan.options.buckets, -(-len(lengths) // FITTED)
    sample = lengths
    if step > 1:  # without the longest example, the longest bucket would be shorter
        sample = np.concatenate([lengths[::step], lengths.max(axis=0, keepdims=True)])
    unit = options["length_multiple"] or 128
    row = sum(-(-length // unit) * unit for length in own[-1].lengths)
    budget = max(options["tokens_per_batch"], options["row_multiple"] * row)
    found = []
    for packing in dict.fromkeys(("best_fit", "none", options["packing"])):
        plain = options.replace(packing=packing, **PLAIN)
        fitted = plain.replace(buckets=None, tokens_per_batch=budget)
        progress("fitting buckets")
        numbers = (UNPACKED,) if packing == "none" else BUCKETS
        sets = [fitted.replace(max_buckets=number).fit(sample) for number in numbers]
        if packing == options["packing"]:
            sets.append(own)
        for number, buckets in sorted({len(each): each for each in sets}.items()):
            how = {"best_fit": "", "none": ", no packing"}.get(packing, f", {packing}")
            name = f"Lockstep, {number} bucket{'s' * (number > 1)}{how}"
            progress(name)
            made = plain.plan(Lengths(lengths), buckets)
            own_plan = {"packing": packing, "buckets": [each.as_json for each in buckets]}
            about = ", ".join(map(str, buckets))
            found.append(count_plan(made, options["width"], name=name, about=about, **own_plan))
    return found


def count_plan(plan: Plan, width: int, **others: Any) -> Strategy:
    """The strategy of a plan of one corpus; `others` are other attributes."""
    batches = {bucket: int(each[0]) for bucket, each in count_epoch(plan).buckets.items()}
    layout = plan.stages[-1].streams[0].whole.layout
    sides = layout.pieces.positions(np.arange(len(layout.counts)))
    squares = int(layout.counts @ _scores(sides.T))
    for window in range(len(layout)) if layout.cuts[0].any() else ():
        squares -= _scores_between_pieces(layout.packed(window))
    return weigh(
        width,
        tokens=plan.num_tokens,
        positions=sum(number * bucket.positions for bucket, number in batches.items()),
        scores=sum(n * b.rows * int(_scores(b.lengths)) for b, n in batches.items()),
        squares=squares,
        batches=sum(batches.values()),
        shapes=sum(number > 0 for number in batches.values()),
        # An upper bound: a part of a document that is longer than a row may be cut again.
        cut=plan.cuts[0] + losses(plan)["overlong"] * (plan.options.overflow == "split"),
        **others,
    )


def _scores_between_pieces(packed: Packed) -> int:
    """Scores of attention between the two pieces of documents that are cut to fill rows."""
    sizes, (whole, first) = len(packed.counts), packed.cuts.T
    every = [pattern for patterns in packed.patterns for pattern in patterns]
    number = count_segments(every, sizes + 2 * len(whole))[sizes::2]
    return int(number @ (2 * first * (whole - first)))


def _scores(sides: Any) -> Any:
    """Scores of attention inside rows or segments; targets also attend to inputs."""
    first, *second = sides
    return first**2 + sum(first * each + each**2 for each in second)
