"""Figures: everything that the report says, computed here and nowhere else, as plain JSON."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pipeline.corpus.interface import AnyCorpus
from pipeline.errors import NotInstalled
from pipeline.planning import figures as planned_figures
from pipeline.planning.bucket import Bucket
from pipeline.planning.cascade import PACKINGS
from pipeline.planning.lengths import Lengths, histogram
from pipeline.planning.plan import Plan
from pipeline.planning.planned import PlannedBatch
from pipeline.report.dataset import Dataset, Options
from pipeline.report.tiers import compare_tiers, row_costs

VERSION = 3

# Buckets of the plans that are compared are fitted to about so many examples, at most.
FITTED = 1_000_000

Progress = Callable[[str], None]


def measure(
    dataset: Dataset,
    options: Options,
    *,
    optimal: bool = False,
    progress: Progress = lambda text: None,
) -> dict[str, Any]:
    """The report as JSON: `corpus`, `strategies`, `plan`, `cost` and the `options` behind them.

    For pairs, `corpus` describes the inputs and `targets` the targets. `optimal` includes optimal
    packing also where it may take minutes; `progress` is called with the name of each step.
    """
    options = options.for_lengths(dataset.lengths)
    progress("planning")
    plan = dataset.plan or options.plan(dataset.examples)
    longest, width = plan.options.buckets[-1].lengths, options["width"]
    figures: dict[str, Any] = {
        "version": VERSION,
        "name": dataset.name,
        "options": {name: value for name, value in options.items() if name != "buckets"},
        "plan": measure_epoch(plan, width=width),
    }
    progress("counting")
    for side, name in enumerate(("corpus", "targets")[: len(longest)]):
        figures[name] = measure_lengths(dataset, side, longest[side])
    if dataset.plan or options.get("buckets"):  # rows are as long as those of the plan
        options = options.replace(max_length=longest if dataset.pairs else longest[0])
    optimal = optimal or options["packing"] == "optimal"
    ours, figures["excluded"] = compare_plans(
        dataset.lengths, options, longest, optimal=optimal, progress=progress
    )
    if dataset.pairs:
        bucket = Bucket(max(options["tokens_per_batch"] // sum(longest), 1), longest)
        padded = options.replace(packing="none", **PLAIN).plan(dataset.lengths, (bucket,))
        about = f"every row {length_of(bucket.length)} long, one pair in a row"
        name = "padded to the longest of all"
        others = [_of_plan(name, about, padded, width, padded.num_batches())]
    else:
        others = compare_others(*histogram(dataset.lengths), options, *longest)
    figures["strategies"] = others + ours
    figures["cost"] = _cost(ours, width)
    return figures


# ---- the data

PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9)
BINS = 48

# The use of the vocabulary is counted over examples of about this many tokens, spread over the
# corpus, which are read in so many blocks.
TOKENS, BLOCKS = 1 << 24, 16


def measure_lengths(dataset: Dataset, side: int, longest: int) -> dict[str, Any]:
    """The lengths of a dataset, its sources and the use of its vocabulary; of pairs, of one side.

    `side` is 0, or 1 for the targets of pairs; examples are overlong beyond `longest` positions.
    The mean, the percentiles and the histogram leave out empty examples. A column of the histogram
    has the lengths from an edge up to the next, exclusive.
    """
    lengths = dataset.lengths.reshape(len(dataset.lengths), -1)[:, side]
    sizes, counts = histogram(lengths)
    tokens, all_examples = int(counts @ sizes), int(counts.sum())
    overlong = int(counts[sizes > longest].sum())
    sizes, counts = sizes[sizes > 0], counts[sizes > 0]
    below, examples = np.cumsum(counts), int(counts.sum())
    at = {f"{p:g}": int(sizes[np.searchsorted(below, p / 100 * examples)]) for p in PERCENTILES}
    # Edges grow by a fixed factor; short columns hold a single length.
    edges = np.unique(np.ceil(np.geomspace(1, sizes[-1] + 1, BINS + 1) - 1e-9).astype(np.int64))
    columns = {
        name: np.histogram(sizes, edges, weights=each)[0].tolist()
        for name, each in (("examples", counts), ("tokens", counts * sizes))
    }
    ends = np.cumsum([examples for _, examples in dataset.sources])
    of_sources = [int(part.sum(dtype=np.int64)) for part in np.split(lengths, ends[:-1])]
    sources = [
        {
            "name": name,
            "examples": number,
            "tokens": of_source,
            "share_of_examples": number / max(all_examples, 1),
            "share_of_tokens": of_source / max(tokens, 1),
        }
        for (name, number), of_source in zip(dataset.sources, of_sources, strict=True)
    ]
    return {
        "examples": all_examples,
        "tokens": tokens,
        "empty": all_examples - examples,
        "overlong": overlong,
        "longest_row": longest,
        "shortest": int(sizes[0]),
        "longest": int(sizes[-1]),
        "mean": tokens / examples,
        "percentiles": at,
        "histogram": {"edges": edges.tolist(), **columns},
        "sources": sources,
        "vocabulary": [measure_vocabulary(corpus, side) for corpus in dataset.corpora],
    }


def measure_vocabulary(corpus: AnyCorpus, side: int = 0) -> dict[str, Any]:
    """Which ids the targets of a corpus use; for pairs, those of a side.

    Of `of` tokens in all, `tokens` are counted. `rare` ids are used fewer than ten times; the
    `half` most frequent ids make half of all tokens; `entropy` is that of single tokens, in bits.
    """
    whole = np.asarray(corpus.lengths).reshape(len(corpus), -1)[:, side]
    total = int(whole.sum(dtype=np.int64))
    examples = np.arange(0, len(corpus), max(-(-total // TOKENS), 1))
    counts = np.zeros(corpus.vocab_size or 1, np.int64)
    for block in np.array_split(examples, BLOCKS):
        fields = corpus.sides[side].read(block, np.zeros_like(block), whole[block])
        ids = fields["targets" if "targets" in fields else "inputs"]
        more = np.bincount(ids, minlength=len(counts))
        more[: len(counts)] += counts
        counts = more
    tokens = int(counts.sum())
    frequent = np.sort(counts)[::-1]
    share = frequent[frequent > 0] / max(tokens, 1)
    learnt = corpus.num_learnt if side == len(corpus.sides) - 1 else None
    text = corpus.text_bytes if learnt else None
    return {
        "tokens": tokens,
        "of": total,
        "size": corpus.vocab_size,
        "used": int(np.count_nonzero(counts)),
        "rare": int(np.count_nonzero((counts > 0) & (counts < 10))),
        "half": int(np.searchsorted(np.cumsum(frequent), tokens / 2)) + 1,
        "entropy": float(-(share * np.log2(share)).sum()),
        "text_bytes_per_token": text / learnt if text and learnt else None,
        "learnt": learnt,
    }


# ---- ways to make batches

HOSTS = 8
BUCKETS = (1, 2, 3, 4, 6)
ROWS, WINDOW = 32, 320  # of batches with a fixed number of rows
READ_AHEAD = 10_000  # examples that are sorted before they are cut by a budget of tokens

# "optimal" is included without --optimal up to so many different lengths: it takes some seconds.
OPTIMAL_LENGTHS = 512

# Each example comes once an epoch, also in the plan of a mixture that is compared.
PLAIN: dict[str, Any] = {"weights": None, "by": None, "ending": None}


def strategy(
    name: str,
    about: str,
    width: int,
    hosts: Sequence[int],
    *,
    tokens: int,
    positions: float,
    scores: float,
    squares: float,
    batches: int,
    shapes: float,
    cut: float = 0,
    reread: int = 0,
) -> dict[str, Any]:
    """The figures of a way to make the batches of an epoch.

    `tokens` are the real ones of all `positions`; attention computes `scores` over whole rows, and
    `squares` inside segments; `hosts` has the number of batches of each host, where several share
    the rows; each of the `shapes` is compiled once; `cut` documents lie in several segments; at
    most `reread` examples are read again to resume. `cost` and `segment_cost` are the work of a
    layer per token, where 1 is the work at a position without attention: a row of `L` positions
    costs `L + L²/(6·width)`, or the squares of its segments instead of `L²`. The FLOPs are those of
    the scores and their use in one layer, forward.
    """
    real = max(tokens, 1)
    return {
        "name": name,
        "about": about,
        "padding": 1 - tokens / max(positions, 1),
        "batches": batches,
        "shapes": round(shapes),
        "positions_per_token": positions / real,
        "attention_flops_per_token": 4 * width * scores / real,
        "segment_attention_flops_per_token": 4 * width * squares / real,
        "cost": (positions + scores / (6 * width)) / real,
        "segment_cost": (positions + squares / (6 * width)) / real,
        "cut": round(cut),
        "reread": reread,
        "batches_per_host": list(hosts),
        "equal": len(set(hosts)) == 1,
    }


def compare_others(
    sizes: np.ndarray, counts: np.ndarray, options: Options, row: int
) -> list[dict[str, Any]]:
    """Figures of the ways to batch that others use: what is expected of a random order.

    There are `counts` examples of the lengths `sizes`; longer ones than `row` are treated as the
    `overflow` of the options says.
    """
    if (overflow := options.get("overflow")) == "truncate":
        sizes = np.minimum(sizes, row)
    kept = (sizes > 0) & (sizes <= row if overflow == "drop" else True)
    sizes, counts = sizes[kept].astype(np.int64), counts[kept]
    full = (sizes - 1) // row  # pieces of whole rows, before the last one of each document
    ends = np.bincount(sizes - full * row, counts, row + 1).astype(np.int64)
    ends[row] += counts @ full
    pieces = np.flatnonzero(ends)
    number, longest = int(ends.sum()), int(pieces[-1])
    tokens, budget, width = int(counts @ sizes), options["tokens_per_batch"], options["width"]
    found: list[dict[str, Any]] = []

    def add(name: str, about: str, hosts: Sequence[int], **sums) -> None:
        squares, cut = float(ends[pieces] @ pieces**2), int(counts[sizes > row].sum())
        common: dict[str, Any] = {"tokens": tokens, "squares": squares, "cut": cut}
        found.append(strategy(name, about, width, hosts, **common | sums))

    same = float(number * longest), float(number * longest**2), 1.0
    for name, about, window in (
        ("padded to the longest of all", f"batches of {ROWS}, every row {longest:,} long", 0),
        ("padded to the longest in the batch", f"batches of {ROWS} in random order", ROWS),
        ("sorted windows", f"windows of {WINDOW} sorted by length, batches of {ROWS}", WINDOW),
    ):
        positions, scores, lengths = (
            pad_windows(pieces, ends[pieces], ROWS, window) if window else same
        )
        add(
            name,
            about,
            [-(-((number + host) // HOSTS) // (ROWS // HOSTS)) for host in range(HOSTS)],
            positions=positions,
            scores=scores,
            batches=-(-number // ROWS),
            shapes=lengths + (number > ROWS and number % ROWS > 0),
            reread=min(window, number) if window > ROWS else 0,
        )
    # Every eighth document is a host's; the tokens of hosts differ as sums of random documents do.
    deviation = math.sqrt((HOSTS - 1) * (counts @ (sizes - tokens / counts.sum()) ** 2)) / tokens
    normal = statistics.NormalDist(1, deviation or 1e-9)
    ranks = [normal.inv_cdf((host + 0.625) / (HOSTS + 0.25)) for host in range(HOSTS)]
    (batches, positions, scores), lengths = read_ahead(pieces, ends[pieces], budget)
    (of_host, *_), _ = read_ahead(pieces, ends[pieces] / HOSTS, max(budget // HOSTS, 1))
    add(
        "token budget, read-ahead",
        f"infinibatch: {READ_AHEAD:,} read ahead and sorted, at most {budget:,} positions a batch",
        [math.ceil(round(rank * of_host, 6)) for rank in ranks],
        positions=positions,
        scores=scores,
        batches=math.ceil(batches),
        shapes=max(lengths, 1),
        reread=min(READ_AHEAD, number),
    )
    height, rows = max(budget // row, 1), -(-tokens // row)
    cut, squares = cut_documents(sizes, counts, row)
    of_host = tokens / HOSTS / (max(height // HOSTS, 1) * row)
    add(
        "concatenate and split",
        f"one run of tokens, cut every {row:,}, batches of {height}",
        [math.ceil(round(rank * of_host, 6)) for rank in ranks],
        positions=rows * row,
        scores=rows * row**2,
        squares=squares,
        batches=-(-rows // height),
        shapes=1 + (rows > height and rows % height > 0),
        cut=cut,
        reread=int(cut > 0),
    )
    return found


def pad_windows(
    sizes: np.ndarray, counts: np.ndarray, rows: int, window: int
) -> tuple[float, float, float]:
    """The positions, squared lengths of rows, and different lengths of batches of like examples.

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
        likely = np.zeros(len(sizes))  # that the k-th shortest is at most so long
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
) -> tuple[tuple[float, float, float], float]:
    """Batches, positions and squared lengths of rows if windows are cut by a budget of positions.

    A window has `READ_AHEAD` examples, taken to be like all of them. It is sorted from the longest
    down and cut into batches of `budget // longest left` rows. At the end are the different shapes:
    an example is the first of its batch in one case out of so many rows.
    """
    number = float(counts.sum())
    window = max(min(READ_AHEAD, int(number)), 1)
    evenly = (np.arange(window) + 0.5) / window * number
    left = sizes[np.searchsorted(np.cumsum(counts), evenly)][::-1].tolist()
    begin, batches = 0, []
    while begin < window:
        rows = min(max(budget // left[begin], 1), window - begin)
        batches.append((1, rows * left[begin], rows * left[begin] ** 2))
        begin += rows
    first, second, third = (np.sum(batches, axis=0) * (number / window)).tolist()
    shapes = float((1 - (1 - np.minimum(sizes / budget, 1)) ** counts).sum())
    return (first, second, third), shapes


def cut_documents(sizes: np.ndarray, counts: np.ndarray, row: int) -> tuple[float, float]:
    """How many documents a cut every `row` positions divides, and the squares of all segments.

    Where a document begins in its row is random, in steps of the lengths' greatest common divisor.

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


def compare_plans(
    lengths: np.ndarray,
    options: Options,
    longest: tuple[int, ...],
    *,
    optimal: bool = False,
    progress: Progress = lambda text: None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Figures of plans with several numbers of buckets and each way of packing.

    `longest` has the positions in a row of the longest bucket; for pairs, of inputs and of targets.
    Also returned: a sentence for each way of packing that is left out.
    """
    step = -(-len(lengths) // FITTED)
    sample = lengths
    if step > 1:  # without the longest example, the longest bucket would be shorter
        sample = np.concatenate([lengths[::step], lengths.max(axis=0, keepdims=True)])

    def fit(most: int, packing: str, hosts: int = 1) -> tuple[Bucket, ...]:
        """At most `most` buckets, whose rows `hosts` can share."""
        multiple = math.lcm(options["row_multiple"], hosts)
        unit = options["length_multiple"]
        row = sum(-(-length // unit) * unit for length in longest)
        budget = max(options["tokens_per_batch"], multiple * row)
        changes = {"row_multiple": multiple, "tokens_per_batch": budget, "packing": packing}
        return options.replace(buckets=None, max_buckets=most, **PLAIN, **changes).fit(sample)

    found: list[dict[str, Any]] = []
    excluded: list[str] = []
    pairs = len(longest) > 1
    different = 0 if pairs else len(histogram(lengths)[0])
    progress("fitting buckets")
    # The different sets of buckets, each with the least number that gives it.
    packed = {fit(most, "best_fit"): most for most in reversed(BUCKETS)}
    for packing in [each for each in PACKINGS if each != "optimal" or not pairs]:
        if packing == "optimal" and different > OPTIMAL_LENGTHS and not optimal:
            excluded.append(
                f"packing {packing!r}, whose linear programs may take minutes for "
                f"{different:,} different lengths; ask for it with --optimal"
            )
            continue
        plain = options.replace(packing=packing, **PLAIN)
        sets = {fit(4, "none"): 4} if packing == "none" else packed
        for buckets, most in reversed(sets.items()):
            how = {"best_fit": "", "none": ", one example a row"}.get(packing, f", {packing}")
            name = f"Lockstep, {len(buckets)} bucket{'s' * (len(buckets) > 1)}{how}"
            progress(name)
            try:
                plan = shared = plain.plan(Lengths(lengths), buckets)
            except NotInstalled as error:
                excluded.append(str(error))
                break
            # All hosts run every step of one plan, each on its own rows.
            if any(bucket.rows % HOSTS for bucket in buckets):
                shared = plain.plan(Lengths(lengths), fit(most, packing, HOSTS))
            about = ", ".join(f"{b.rows} rows × {length_of(b.length)}" for b in buckets)
            row = _of_plan(name, about, plan, options["width"], shared.num_batches())
            found.append(row | {"packing": packing, "buckets": [b.as_json for b in buckets]})
    return found, excluded


def _of_plan(name: str, about: str, plan: Plan, width: int, batches_of_host: int) -> dict[str, Any]:
    """Figures of an epoch of a plan of one corpus."""
    batches = planned_figures.epoch_batches(plan)
    (source,) = plan.stages[-1].sources
    squares = 0
    for kind, packed in zip(source.whole.kinds, source.whole.packed(), strict=True):
        sides = source.whole.pieces.positions(np.arange(len(packed.counts)))
        squares += kind.number * int(packed.counts @ _scores(sides.T))
    split = plan.options.overflow == "split"
    return strategy(
        name,
        about,
        width,
        [batches_of_host] * HOSTS,
        tokens=plan.num_tokens,
        positions=sum(number * bucket.positions for bucket, number in batches.items()),
        scores=sum(n * b.rows * int(_scores(b.lengths)) for b, n in batches.items()),
        squares=squares,
        batches=sum(batches.values()),
        shapes=sum(number > 0 for number in batches.values()),
        cut=planned_figures.losses(plan).overlong if split else 0,
    )


def _scores(sides: Any) -> Any:
    """Scores of attention inside rows or segments; targets attend to inputs too."""
    first, *second = sides
    return first**2 + sum(first * each + each**2 for each in second)


def _cost(plans: list[dict[str, Any]], width: int) -> dict[str, Any]:
    """How the work per token falls with the number of buckets, and how many are enough.

    One more bucket is worth its compilation if it saves more than 1%.
    """
    curve = [
        {"buckets": len(each["buckets"]), "dense": each["cost"], "segment": each["segment_cost"]}
        for each in plans
        if each["packing"] == "best_fit"
    ]
    enough = {}
    for kind in ("dense", "segment"):
        least = min(point[kind] for point in curve)
        enough[kind] = next(p["buckets"] for p in curve if p[kind] <= least * 1.01)
    return {"width": width, "most": BUCKETS[-1], "curve": curve, "enough": enough}


def length_of(length: int | Sequence[int]) -> str:
    """The length of a bucket as text; for pairs, of inputs and targets.

    >>> length_of(1024), length_of([512, 64])
    ('1,024', '512 + 64')
    """
    return " + ".join(f"{n:,}" for n in (length if isinstance(length, list | tuple) else [length]))


# ---- an epoch of the plan

# Some figures need every batch; in a longer epoch they are those of its first batches.
MOST_BATCHES = 10_000

# The shares of a mixture are compared with its weights over any so many steps in a row.
RUN = 200


def measure_epoch(
    plan: Plan, most_batches: int = MOST_BATCHES, *, width: int = 1024
) -> dict[str, Any]:
    """The figures of an epoch of a plan, as plain JSON.

    Of `walked` batches, `most_batches` at most, are `order` (the index of each one's bucket),
    `balance` (the work of the busiest host over the mean), `mean_length` (see `spread_of_means`),
    `documents_per_step` and the shares of `sources`; all else is of the whole epoch. `sides` has
    the fill of each side of pairs; `segments_per_row` the number of rows of each number of
    segments.
    """
    first, last = planned_figures.epoch_steps(plan)
    losses, (buckets, per_row) = planned_figures.losses(plan), _count_rows(plan)
    steps = range(first, min(last, first + most_batches))
    stages = [stage for stage, _, _ in plan.stages_between(steps.start, steps.stop)]
    number_of = {b: index for stage in stages for index, b in enumerate(stage.options.buckets)}
    hosts = next(h for h in (HOSTS, 4, 2, 1) if all(b.rows % h == 0 for b in number_of))
    walked = [_Batch(plan, plan.batch(step), hosts, width) for step in steps]
    order = np.array([number_of[each.bucket] for each in walked])
    for bucket, figures in buckets.items():
        documents = [each.documents for each in walked if each.bucket == bucket]
        figures["documents_per_step"] = float(np.mean(documents)) if documents else None
    busiest = np.array([each.busiest for each in walked])
    worst, mean = busiest.max(axis=0).tolist(), busiest.mean(axis=0).tolist()
    costs = [(each.bucket, each.costs) for each in walked]
    balance = {
        "hosts": hosts,
        "tokens": {"mean": mean[0], "worst": worst[0]},
        "attention": {"mean": mean[1], "worst": worst[1]},
        "over_ideal": compare_tiers(costs, plan.options.tiers),
    }
    return {
        "fingerprint": plan.fingerprint,
        "batches": last - first,
        "padding": plan.padding,
        "tokens": plan.num_tokens,
        "overflow": plan.options.overflow,
        "overlong": losses.overlong,
        "lost": losses.lost,
        "sides": list(planned_figures.side_fills(plan)),
        "buckets": [*buckets.values()],
        "segments_per_row": per_row,
        "walked": len(walked),
        "order": order.tolist(),
        "balance": balance,
        "mean_length": spread_of_means(order, np.array([each.moments for each in walked])),
        "sources": _measure_sources(plan, first, walked) if len(plan.names) > 1 else [],
    }


def _count_rows(plan: Plan) -> tuple[dict[Bucket, dict[str, Any]], list[list[int]]]:
    """Each bucket's figures, and `[segments, rows]` pairs, both from the packed histograms."""
    per_row: Counter[int] = Counter()
    segments: Counter[Bucket] = Counter()
    for _, of_histogram, packed in planned_figures.packed(plan):
        for index, (bucket, times) in enumerate(of_histogram):
            segments[bucket] += round(times * packed.segments(index))
            for pattern in packed.patterns[index]:
                per_row[pattern.segments] += round(times * pattern.rows)
    contents = planned_figures.rows_and_tokens(plan)
    buckets = {}
    for bucket, batches in planned_figures.epoch_batches(plan).items():
        rows, tokens = contents.get(bucket, np.zeros(2)).round().astype(int).tolist()
        if empty := batches * bucket.rows - rows:
            per_row[0] += empty
        buckets[bucket] = {
            "rows": bucket.rows,
            "length": bucket.length,
            "batches": batches,
            "fill": tokens / (batches * bucket.positions) if batches else None,
            "tokens": tokens,
            "segments": segments[bucket],
            "tokens_per_step": tokens / batches if batches else None,
        }
    return buckets, [[count, rows] for count, rows in sorted(per_row.items())]


class _Batch:
    """The figures of one batch, as `measure_epoch` adds them up."""

    def __init__(self, plan: Plan, planned: PlannedBatch, hosts: int, width: int):
        row, example, start = planned.segments[:, :3].T
        sides, rows = planned.segments[:, 3:].astype(float), planned.bucket.rows
        lengths, squares = sides.sum(axis=1), (sides**2).sum(axis=1)
        self.bucket, self.documents = planned.bucket, len(np.unique(example))
        # Tokens, and squared lengths of segments, of the busiest host ÷ those of the mean.
        work = np.stack([np.bincount(row, each, rows) for each in (lengths, squares)])
        of_hosts = work.reshape(2, hosts, -1).sum(axis=2)
        self.busiest = of_hosts.max(axis=1) / of_hosts.mean(axis=1)
        self.costs = row_costs(planned.bucket, planned.segments, width)
        self.moments = np.array([len(lengths), lengths.sum(), (lengths**2).sum()])
        if np.count_nonzero(np.diff(row)) + 1 < rows:
            self.moments *= math.nan  # its mean is over fewer rows
        # What it has of each corpus: real positions, and in the unit of the weights.
        sources = plan.stages[-1].sources
        self.tokens = self.content = [planned.sources.get(source.name, 0) for source in sources]
        if plan.options.by == "examples":  # those that begin in the batch
            firsts = [source.first for source in sources]
            owner = np.searchsorted(firsts, example[start == 0], side="right") - 1
            self.content = np.bincount(owner, minlength=len(sources)).tolist()


def _measure_sources(plan: Plan, first: int, walked: list[_Batch]) -> list[dict[str, Any]]:
    """What each corpus of a mixture gets of the real positions.

    `epochs` is how often an epoch of the plan goes through it; `off`, in the unit of the weights,
    the largest difference between its weight and its share of `RUN` steps in a row of one phase,
    None for shorter phases.
    """
    before, after = (
        planned_figures.passes(plan, step) for step in planned_figures.epoch_steps(plan)
    )
    phases = planned_figures.weights_by_phase(plan)
    tokens = np.sum([each.tokens for each in walked], axis=0)
    off = _deviations(plan, first, [each.content for each in walked])
    return [
        {
            "name": name,
            "weights": [[max(start - first, 0), weights[name]] for start, weights in phases],
            "share": float(tokens[index] / tokens.sum()),
            "epochs": after[name] - before[name],
            "off": None if off is None else off[index],
        }
        for index, name in enumerate(plan.names)
    ]


def _deviations(plan: Plan, first: int, contents: list[list[int]]) -> list[float] | None:
    """How far each corpus is off its weight over `RUN` steps of a phase, at most."""
    sums = np.cumsum([[0] * len(plan.names), *contents], axis=0)
    phases, found = planned_figures.weights_by_phase(plan), []
    ends = [*(start for start, _ in phases[1:]), first + len(contents)]
    for (start, weights), end in zip(phases, ends, strict=True):
        here = sums[max(start - first, 0) : max(end - first + 1, 0)]
        if len(here) > RUN:
            parts = here[RUN:] - here[:-RUN]
            shares = parts / parts.sum(axis=1, keepdims=True)
            found.append(np.abs(shares - list(weights.values())).max(axis=0))
    return np.max(found, axis=0).tolist() if found else None


def spread_of_means(buckets: np.ndarray, moments: np.ndarray) -> dict[str, float | None]:
    """How much the mean length of a batch's segments varies, compared with random batches.

    Random batches have as many segments, drawn from all of their bucket. `buckets` has the bucket
    of each batch, as an index; `moments` the number of its segments, the sum of their lengths and
    that of their squares, NaN for batches to leave out: float64 [batches, 3]. `ratio` is the
    standard deviation of the means over that of random batches, and `correlation` that of
    neighbouring batches; both are None if too few batches tell.
    """
    scores = np.full(len(buckets), np.nan)  # deviations of the means, with the variance 1 by chance
    full = ~np.isnan(moments[:, 0])
    for bucket in np.unique(buckets[full]):
        here = full & (buckets == bucket)
        number, total, squares = moments[here].T
        every = number.sum()
        mean = total.sum() / every
        variance = squares.sum() / every - mean**2
        if len(number) > 1 and variance > 1e-9 * mean**2:
            chance = variance * (1 / number - 1 / every)
            scores[here] = (total / number - mean) / np.sqrt(chance)
    pairs = np.stack([scores[:-1], scores[1:]])
    pairs = pairs[:, ~np.isnan(pairs).any(axis=0)]
    if pairs.shape[1] < 2 or not pairs.std(axis=1).all():
        return {"ratio": None, "correlation": None}
    ratio = float(np.sqrt(np.nanmean(scores**2)))
    return {"ratio": ratio, "correlation": float(np.corrcoef(pairs)[0, 1])}
