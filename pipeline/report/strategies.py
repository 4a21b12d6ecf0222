"""Strategies: Lockstep's and other ways to make the batches of an epoch, and their costs."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pipeline.planning.figures import count_losses
from pipeline.planning.lengths import Lengths
from pipeline.planning.options import by_side
from pipeline.planning.order import Purpose, permutation, random_bits, random_key
from pipeline.planning.patterns import Packed, count_segments
from pipeline.planning.plan import Plan
from pipeline.report.dataset import Options

BUCKETS = (1, 2, 3, 4, 6)  # numbers of buckets that are compared
UNPACKED = 4  # buckets of the plan with one example a row
ROWS, WINDOW = 32, 320  # of batches with a fixed number of rows
READ_AHEAD = 10_000  # examples that are sorted before a budget of tokens cuts them
# A run can use a strategy with at most so many shapes, each of which is a program to compile.
MOST_SHAPES = 16
SAMPLE = 1_000_000  # examples that are simulated at most

# In compared plans, each example comes once an epoch, also for a mixture.
PLAIN: dict[str, Any] = {"weights": None, "by": None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strategy:
    """A way to make the batches of an epoch, and its cost."""

    name: str
    about: str  # its numbers of rows and lengths, in words
    padding: float  # the share of positions that hold no token
    shapes: int  # different shapes of batches, each of which is compiled once
    batches: int
    cut: int  # documents in several segments
    work: dict[str, float]  # of a layer per token, by kind of attention; see `from_sums`
    equal: bool = True  # whether hosts that read documents of their own have as many batches each
    packing: str | None = None  # of Lockstep's plan; None for other strategies
    buckets: Sequence[Any] = ()  # of Lockstep's plan, as JSON

    @property
    def usable(self) -> bool:
        """Whether a run on several hosts can use it: with few shapes, and equal batches."""
        return self.equal and self.shapes <= MOST_SHAPES

    @classmethod
    def from_sums(
        cls,
        width: int,
        *,
        tokens: int,
        positions: float,
        scores: float,
        squares: float,
        **others: Any,
    ) -> "Strategy":
        """The strategy with these sums over an epoch, of whose `positions` `tokens` hold a token.

        A row of `L` positions costs `L + L²/(6·width)`; if attention skips other segments, the sum
        of the squares of the segments replaces `L²`. `scores` is the sum of `L²`, `squares` theirs.
        """
        return cls(
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
    """Ways to batch of other libraries, simulated on one random order of the examples.

    `counts` are the numbers of examples of the lengths `sizes`; `row` is the longest row.
    """
    if (overflow := options.get("overflow")) == "truncate":
        sizes = np.minimum(sizes, row)
    stays = (sizes > 0) & (sizes <= row if overflow == "drop" else True)
    sizes, counts = sizes[stays], counts[stays]
    full = (sizes - 1) // row  # pieces of whole rows, before the last one of each document
    last, whole = sizes - full * row, int(counts @ full)
    documents = draw_order(sizes, counts)
    pieces = draw_order(np.append(last, row), np.append(counts, whole))
    tokens, overlong = int(counts @ sizes), int(counts[sizes > row].sum())
    padded = compare_padding(pieces[:, None], options, tokens=tokens, cut=overlong)
    height, rows = max(options["tokens_per_batch"] // row, 1), -(-int(documents.sum()) // row)
    heights = np.minimum(height, rows - np.arange(0, rows, height))
    cut, squares = cut_documents(documents, row)
    return [
        *padded,
        _simulate(
            *(heights, np.full((len(heights), 1), row), documents[:, None], tokens, options),
            name="concatenate and split",
            about=f"one sequence of tokens, cut every {row:,}, batches of {height}",
            equal=False,
            squares=squares,
            cut=round(cut * counts.sum() / len(documents)),
        ),
    ]


def compare_other_pairs(
    lengths: np.ndarray, options: Options, row: tuple[int, ...]
) -> list[Strategy]:
    """The same for pairs, of lengths [n, 2], sorted by their sum, without ways that cut."""
    if options.get("overflow") == "truncate":
        lengths = np.minimum(lengths, row)
    lengths = lengths[lengths.any(axis=1) & (lengths <= np.array(row)).all(axis=1)]
    numbers = np.arange(len(lengths))
    order = draw_order(numbers, np.ones_like(numbers))
    pieces, tokens = lengths[order].astype(np.int64), int(lengths.sum(dtype=np.int64))
    return compare_padding(pieces, options, tokens=tokens, cut=0)


def compare_padding(
    pieces: np.ndarray, options: Options, *, tokens: int, cut: int
) -> list[Strategy]:
    """Batches of whole pieces, padded in four ways.

    `pieces` has the lengths of each piece on each side, in random order: [n, sides], or those of a
    sample of pieces with `tokens`. `cut` is the number of documents of several pieces.
    """
    budget, longest = options["tokens_per_batch"], pieces.max(axis=0)
    heights, lengths = pad_windows(pieces, ROWS, ROWS)
    lengths_of_rows = " and ".join(f"{length:,}" for length in longest)
    ways = {
        "padded to the longest of all": (
            f"batches of {ROWS}, every row {lengths_of_rows} long",
            (heights, np.broadcast_to(longest, lengths.shape)),
        ),
        "padded to the batch's longest": (
            f"batches of {ROWS} in random order",
            (heights, lengths),
        ),
        "sorted windows": (
            f"windows of {WINDOW} sorted by length, batches of {ROWS}",
            pad_windows(pieces, ROWS, WINDOW),
        ),
        "token budget, read-ahead": (
            f"{READ_AHEAD:,} read ahead and sorted, at most {budget:,} positions a batch",
            read_ahead(pieces, budget),
        ),
    }
    squares = float(_scores(pieces.T.astype(float)).sum())
    return [
        _simulate(
            *(*batches, pieces, tokens, options),
            name=name,
            about=about,
            squares=squares,
            cut=cut,
            # Others have a fixed number of examples in each batch.
            equal=name != "token budget, read-ahead",
        )
        for name, (about, batches) in ways.items()
    ]


def _simulate(
    heights: np.ndarray,
    lengths: np.ndarray,
    pieces: np.ndarray,
    tokens: int,
    options: Options,
    **others: Any,
) -> Strategy:
    """The strategy whose batches have `heights` rows of `lengths`, and hold `pieces` or more."""
    shapes, some = np.concatenate([heights[:, None], lengths], axis=1), int(pieces.sum())
    return Strategy.from_sums(
        options["width"],
        tokens=some,
        positions=int(heights @ lengths.sum(axis=1)),
        scores=float(heights @ _scores(lengths.T.astype(float))),
        batches=math.ceil(len(heights) * (tokens / some)),
        shapes=len(np.unique(shapes, axis=0)),
        **others,
    )


def draw_order(sizes: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """`counts` lengths of each of `sizes`, or an even sample, in one random order: int64."""
    ends = np.cumsum(counts)
    number = int(ends[-1])
    some = min(number, SAMPLE)
    evenly = (np.arange(some) * number + number // 2) // some
    lengths = sizes[np.searchsorted(ends, evenly, side="right")]
    return lengths[permutation(random_bits(random_key(0, "others"), Purpose.EXAMPLES, some))]


def sort_windows(lengths: np.ndarray, window: int) -> np.ndarray:
    """Lengths [n, sides] in windows [windows, window, sides], padded with 0, the longest first."""
    number, sides = lengths.shape
    filled = np.zeros((-(-number // window) * window, sides), np.int64)
    filled[:number] = lengths
    windows = filled.reshape(-1, window, sides)
    order = np.argsort(-windows.sum(axis=2), axis=1, kind="stable")
    return np.take_along_axis(windows, order[..., None], axis=1)


def pad_windows(lengths: np.ndarray, rows: int, window: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows of each batch and their lengths: sorted windows are cut every `rows` examples.

    Each batch is padded to its longest example on each side. `rows` divides `window`.

    >>> lengths = np.array([[2], [5], [3], [1], [4]])
    >>> [array.tolist() for array in pad_windows(lengths, rows=2, window=4)]
    [[2, 2, 1], [[5], [2], [4]]]
    """
    batches = sort_windows(lengths, window).reshape(-1, rows, lengths.shape[1])
    heights = np.count_nonzero(batches.any(axis=2), axis=1)
    return heights[heights > 0], batches[heights > 0].max(axis=1)


def read_ahead(lengths: np.ndarray, budget: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows of each batch and their lengths: sorted windows are cut by a budget of positions.

    A window has `READ_AHEAD` examples. A batch takes examples while it is padded to at most
    `budget` positions, and at least one.

    >>> lengths = np.array([[2], [5], [3], [1], [4]])
    >>> [array.tolist() for array in read_ahead(lengths, budget=8)]
    [[1, 2, 2], [[5], [4], [2]]]
    """
    heights, longest = [], []
    for window in sort_windows(lengths, READ_AHEAD):
        left = window[window.any(axis=1)]
        while len(left):
            some = left[: max(budget // int(left[0].sum()), 1)]
            padded = np.maximum.accumulate(some)
            sizes = padded.sum(axis=1) * np.arange(1, len(some) + 1)
            rows = max(int(np.searchsorted(sizes, budget, side="right")), 1)
            heights.append(rows)
            longest.append(padded[rows - 1])
            left = left[rows:]
    return np.array(heights), np.array(longest)


def cut_documents(lengths: np.ndarray, row: int) -> tuple[int, float]:
    """The number of documents that are cut, and the squares of segments, if cuts are `row` apart.

    >>> cut_documents(np.array([2, 2, 2]), row=3)  # segments of 2, 1 and 1, 2
    (1, 10.0)
    """
    room = row - (np.cumsum(lengths) - lengths) % row  # in the row where each document begins
    first = np.minimum(lengths, room)
    left = lengths - first
    squares = first.astype(float) ** 2 + left // row * float(row) ** 2 + (left % row) ** 2
    return int(np.count_nonzero(left)), float(squares.sum())


# ---- Lockstep


def compare_plans(
    lengths: Any, options: Options, plan: Plan, progress: Callable[[str], None]
) -> list[Strategy]:
    """Lockstep with the buckets of `plan`, other numbers of buckets, and one example a row."""
    of_plan = plan.options.buckets
    longest = of_plan[-1]
    multiples = by_side("length_multiple", options["length_multiple"] or 128, longest.names)
    pairs = zip(longest.lengths, multiples, strict=True)
    row = [-(-length // multiple) * multiple for length, multiple in pairs]
    row_cost = math.ceil(np.dot(row, plan.options.cost))
    budget = max(options["tokens_per_batch"], options["row_multiple"] * row_cost)
    strategies = []
    for packing in dict.fromkeys(("best_fit", "none", options["packing"])):
        plain = options.replace(packing=packing, **PLAIN)
        fitted = plain.replace(buckets=None, tokens_per_batch=budget)
        progress("fitting buckets")
        numbers = (UNPACKED,) if packing == "none" else BUCKETS
        sets = [fitted.replace(max_buckets=number).fit(lengths) for number in numbers]
        if packing == options["packing"]:
            sets.append(of_plan)
        for number, buckets in sorted({len(buckets): buckets for buckets in sets}.items()):
            how = {"best_fit": "", "none": ", no packing"}.get(packing, f", {packing}")
            name = f"Lockstep, {number} bucket{'s' * (number > 1)}{how}"
            progress(name)
            others = {"packing": packing, "buckets": [bucket.as_json for bucket in buckets]}
            others |= {"name": name, "about": ", ".join(map(str, buckets))}
            packed = plain.plan(Lengths(lengths), buckets)
            strategies.append(count_plan(packed, options["width"], **others))
    return strategies


def count_plan(plan: Plan, width: int, **others: Any) -> Strategy:
    """The strategy of a plan of one corpus; `others` are its other fields."""
    batches = plan.count(0, plan.num_batches()).batches
    windows = plan.stages[-1].streams[0].whole.windows
    squares, costs = 0, plan.options.cost
    for window in range(len(windows)):
        sizes = windows.pieces.locate(windows.pieces_in(window))[2]
        squares += _scores(np.multiply(sizes, costs).T).sum()
        if windows.cuts[window]:
            squares -= sum(map(_scores_between_pieces, windows.packings(window)))
    return Strategy.from_sums(
        width,
        tokens=plan.num_tokens,
        positions=sum(n * b.rows * float(np.dot(b.lengths, costs)) for b, n in batches.items()),
        scores=sum(n * b.rows * _scores(np.multiply(b.lengths, costs)) for b, n in batches.items()),
        squares=squares,
        batches=sum(batches.values()),
        shapes=sum(number > 0 for number in batches.values()),
        # An upper bound: a part of a document that is longer than a row may be cut again.
        cut=plan.cuts
        + count_losses(plan.stages[-1])["overlong"] * (plan.options.overflow == "split"),
        **others,
    )


def _scores_between_pieces(packed: Packed) -> int:
    """The scores of attention between the two pieces of documents that are cut to fill rows."""
    sizes, (whole, first) = len(packed.counts), packed.cuts.T
    patterns = [pattern for of_bucket in packed.patterns for pattern in of_bucket]
    number = count_segments(patterns, sizes + 2 * len(whole))[sizes::2]
    return int(number @ (2 * first * (whole - first)))


def _scores(sides: Any) -> Any:
    """The scores of attention in rows or segments; later sides also attend to the first."""
    first, *second = sides
    return first**2 + sum(first * other + other**2 for other in second)
