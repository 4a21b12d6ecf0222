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
SAMPLE = 1_000_000  # examples that are simulated at most

# In compared plans, each example comes once an epoch, also for a mixture.
PLAIN: dict[str, Any] = {"weights": None, "by": None, "ending": None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strategy:
    """A way to make the batches of an epoch, and its cost."""

    name: str
    about: str  # its numbers of rows and lengths, in words
    padding: float  # the share of positions that hold no token
    shapes: int  # different shapes of batches, each of which is compiled once
    batches: int
    cut: int  # documents in several segments
    work: dict[str, float]  # of a layer per token, by kind of attention; see `weigh`
    packing: str | None = None  # of Lockstep's plan; None for other strategies
    buckets: Sequence[Any] = ()  # of Lockstep's plan, as JSON


def weigh(
    width: int, *, tokens: int, positions: float, scores: float, squares: float, **others: Any
) -> Strategy:
    """The strategy with these sums over an epoch.

    Of all `positions`, `tokens` hold a token. Attention computes `scores` over whole rows ("dense")
    and `squares` if it skips other segments ("segment"). A position costs 1 without attention, and
    a row of `L` positions costs `L + L²/(6·width)`. If other segments are skipped, the sum of the
    squares of the segments replaces `L²`.
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
    """Ways to batch of other libraries, simulated on one random order of the examples.

    `counts` are the numbers of examples of the lengths `sizes`. The option `overflow` decides about
    examples that are longer than `row`.
    """
    if (overflow := options.get("overflow")) == "truncate":
        sizes = np.minimum(sizes, row)
    kept = (sizes > 0) & (sizes <= row if overflow == "drop" else True)
    sizes, counts = sizes[kept], counts[kept]
    full = (sizes - 1) // row  # pieces of whole rows, before the last one of each document
    last, whole, tokens = sizes - full * row, int(counts @ full), int(counts @ sizes)
    documents = draw_order(sizes, counts)
    pieces = draw_order(np.append(last, row), np.append(counts, whole))
    overlong, budget, found = int(counts[sizes > row].sum()), options["tokens_per_batch"], []

    def add(
        name: str,
        about: str,
        heights: np.ndarray,
        lengths: np.ndarray,
        drawn: np.ndarray = pieces,
        squares: float = float(np.square(pieces, dtype=float).sum()),
        cut: float = overlong,
    ) -> None:
        """Adds a strategy: batches of `heights` rows of `lengths`, which hold `drawn` examples."""
        some = int(drawn.sum())
        each = weigh(
            options["width"],
            name=name,
            about=about,
            tokens=some,
            positions=int(heights @ lengths),
            scores=float(heights @ np.square(lengths, dtype=float)),
            squares=squares,
            batches=math.ceil(len(heights) * (tokens / some)),
            shapes=np.unique(np.stack([heights, lengths]), axis=1).shape[1],
            cut=round(cut),
        )
        found.append(each)

    heights, lengths = pad_windows(pieces, ROWS, ROWS)
    longest = row if whole else last.max()
    about = f"batches of {ROWS}, every row {longest:,} long"
    add("padded to the longest of all", about, heights, np.full_like(lengths, longest))
    about = f"batches of {ROWS} in random order"
    add("padded to the batch's longest", about, heights, lengths)
    about = f"windows of {WINDOW} sorted by length, batches of {ROWS}"
    add("sorted windows", about, *pad_windows(pieces, ROWS, WINDOW))
    apart = "hosts that read their own documents have different numbers of batches"
    about = f"{READ_AHEAD:,} read ahead and sorted, at most {budget:,} positions a batch; {apart}"
    add("token budget, read-ahead", about, *read_ahead(pieces, budget))
    height, rows = max(budget // row, 1), -(-int(documents.sum()) // row)
    heights = np.minimum(height, rows - np.arange(0, rows, height))
    about = f"one sequence of tokens, cut every {row:,}, batches of {height}; {apart}"
    cut, squares = cut_documents(documents, row)
    cut *= counts.sum() / len(documents)
    lengths = np.full_like(heights, row)
    add("concatenate and split", about, heights, lengths, documents, squares, cut)
    return found


def draw_order(sizes: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """All lengths, `counts` of each of `sizes`, in a random order that is always the same: int64.

    If there are more than `SAMPLE`, an even sample of them.
    """
    ends = np.cumsum(counts)
    number = int(ends[-1])
    some = min(number, SAMPLE)
    evenly = (np.arange(some) * number + number // 2) // some
    lengths = sizes[np.searchsorted(ends, evenly, side="right")]
    return lengths[permutation(random_bits(random_key(0, "others"), Purpose.EXAMPLES, some))]


def sort_windows(lengths: np.ndarray, window: int) -> np.ndarray:
    """Lengths in windows, each sorted in descending order, the last filled with 0: [n, window]."""
    filled = np.zeros(-(-len(lengths) // window) * window, np.int64)
    filled[: len(lengths)] = lengths
    return -np.sort(-filled.reshape(-1, window))


def pad_windows(lengths: np.ndarray, rows: int, window: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows of each batch and their length: sorted windows are cut every `rows` examples.

    Each batch is padded to its longest example. `rows` divides `window`.

    >>> [each.tolist() for each in pad_windows(np.array([2, 5, 3, 1, 4]), rows=2, window=4)]
    [[2, 2, 1], [5, 2, 4]]
    """
    batches = sort_windows(lengths, window).reshape(-1, rows)
    batches = batches[batches[:, 0] > 0]
    return np.count_nonzero(batches, axis=1), batches[:, 0]


def read_ahead(lengths: np.ndarray, budget: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows of each batch and their length: sorted windows are cut by a budget of positions.

    A window has `READ_AHEAD` examples. A batch has `budget // longest` rows, at least one, where
    `longest` is the longest example that is left.

    >>> [each.tolist() for each in read_ahead(np.array([2, 5, 3, 1, 4]), budget=8)]
    [[1, 2, 2], [5, 4, 2]]
    """
    batches = []
    for window in sort_windows(lengths, READ_AHEAD):
        left = window[window > 0].tolist()
        begin = 0
        while begin < len(left):
            rows = min(max(budget // left[begin], 1), len(left) - begin)
            batches.append((rows, left[begin]))
            begin += rows
    heights, longest = np.array(batches).T
    return heights, longest


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
    """Lockstep with the buckets of `plan`, other numbers of buckets, and one example a row.

    The other buckets are fitted with the options, for rows as long as those of the plan.
    """
    own = plan.options.buckets
    unit = options["length_multiple"] or 128
    units = by_side("length_multiple", unit, own[-1].names)
    row = [-(-length // each) * each for length, each in zip(own[-1].lengths, units, strict=True)]
    row = math.ceil(np.dot(row, plan.options.costs))
    budget = max(options["tokens_per_batch"], options["row_multiple"] * row)
    found = []
    for packing in dict.fromkeys(("best_fit", "none", options["packing"])):
        plain = options.replace(packing=packing, **PLAIN)
        fitted = plain.replace(buckets=None, tokens_per_batch=budget)
        progress("fitting buckets")
        numbers = (UNPACKED,) if packing == "none" else BUCKETS
        sets = [fitted.replace(max_buckets=number).fit(lengths) for number in numbers]
        if packing == options["packing"]:
            sets.append(own)
        for number, buckets in sorted({len(each): each for each in sets}.items()):
            how = {"best_fit": "", "none": ", no packing"}.get(packing, f", {packing}")
            name = f"Lockstep, {number} bucket{'s' * (number > 1)}{how}"
            progress(name)
            others = {"packing": packing, "buckets": [each.as_json for each in buckets]}
            others |= {"name": name, "about": ", ".join(map(str, buckets))}
            made = plain.plan(Lengths(lengths), buckets)
            found.append(count_plan(made, options["width"], **others))
    return found


def count_plan(plan: Plan, width: int, **others: Any) -> Strategy:
    """The strategy of a plan of one corpus; `others` are its other fields."""
    batches = plan.count(0, plan.num_batches()).batches
    layout = plan.stages[-1].streams[0].whole.layout
    squares, costs = 0, plan.options.costs
    for window in range(len(layout)):
        sizes = layout.pieces.locate(layout.pieces_in(window))[2]
        squares += _scores(np.multiply(sizes, costs).T).sum()
        if layout.cuts[window]:
            squares -= _scores_between_pieces(layout.packed(window))
    return weigh(
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
    every = [pattern for patterns in packed.patterns for pattern in patterns]
    number = count_segments(every, sizes + 2 * len(whole))[sizes::2]
    return int(number @ (2 * first * (whole - first)))


def _scores(sides: Any) -> Any:
    """The scores of attention in rows or segments; later sides also attend to the first."""
    first, *second = sides
    return first**2 + sum(first * each + each**2 for each in second)
