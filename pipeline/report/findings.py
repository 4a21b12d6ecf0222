"""Findings: sentences and tables that show the figures."""

from collections.abc import Sequence

from pipeline.errors import counted
from pipeline.planning.bucket import Bucket
from pipeline.report.figures import Epoch, Figures, Side
from pipeline.report.run import Run
from pipeline.report.strategies import BUCKETS, MOST_SHAPES, Strategy
from pipeline.report.tiers import TIERS

# Of the columns that compare ways to make batches.
HEADINGS = ("padding", "shapes", "batches", "on hosts", "cut", "work, dense", "work, segment")


def percent(share: float) -> str:
    """A share as a percentage, with about three digits.

    >>> percent(0.6818), percent(0.0312), percent(0.00052), percent(1e-9), percent(0)
    ('68.2%', '3.12%', '0.052%', '< 0.001%', '0%')
    """
    if share < 0.000005:
        return "< 0.001%" if share > 0 else "0%"
    digits = next((n for n, least in enumerate((0.0995, 0.00995)) if share >= least), 2)
    return f"{share:.{digits + 1}%}"


def list_words(items: Sequence[str]) -> str:
    """Items as a list in a sentence.

    >>> list_words(["one", "two", "three"])
    'one, two and three'
    """
    return " and ".join(filter(None, [", ".join(items[:-1]), items[-1]]))


def findings(figures: Figures) -> list[str]:
    """The sentences of the report, the most important first."""
    plan = figures.plan
    return [
        _about_plan(figures),
        *(_about_run(figures.run) if figures.run else []),
        *_about_ways(figures),
        *_about_buckets(figures),
        *_about_sides(plan),
        *_about_tiers(plan),
    ]


def _about_plan(figures: Figures) -> str:
    plan = figures.plan
    used = [str(Bucket(*bucket["bucket"])) for bucket in plan.buckets if bucket["batches"]]
    return (
        f"{'The run trains' if figures.ran else 'Train'} with {counted(len(used), 'bucket')} of "
        f"rows x positions: {list_words(used)}. An epoch takes {counted(plan.batches, 'batch')}, "
        f"and {percent(plan.padding)} of its positions are padding."
    )


def find_ours(figures: Figures) -> Strategy:
    """The strategy of the report's own plan; for a mixture, it has each example once."""
    wanted = figures.options["packing"], [bucket["bucket"] for bucket in figures.plan.buckets]
    return next(way for way in figures.strategies if (way.packing, way.buckets) == wanted)


def _about_ways(figures: Figures) -> list[str]:
    """The best of the ways that a run can use; and the others, with what they cost."""
    attention, ours = figures.options["attention"], find_ours(figures)
    documents = max(figures.sides[-1].examples - figures.sides[-1].empty, 1)
    best_first = figures.strategies[::-1]
    usable = [way for way in best_first if way.usable]
    theirs = [way for way in usable if way.packing is None]
    others = [way for way in best_first if not way.usable]

    def compare(way: Strategy, to: Strategy) -> str:
        ratio = way.work[attention] / to.work[attention]
        if ratio >= 2:
            return f"{ratio:.1f} times as much"
        if (difference := percent(abs(ratio - 1))) == "0%":
            return "as much"
        return f"{difference} {'less' if ratio < 1 else 'more'}"

    def price(way: Strategy) -> str:
        costs = [f"{way.shapes:,} programs to compile"] * (way.shapes > MOST_SHAPES)
        costs += ["unequal numbers of batches on hosts"] * (not way.equal)
        cuts_more = way.cut > 2 * ours.cut  # than the documents that no row can hold
        costs += [f"{percent(way.cut / documents)} of documents cut"] * cuts_more
        return list_words(costs)

    best, limits = usable[0], f"at most {MOST_SHAPES} shapes, as many batches on every host"
    sentence = f'Of the ways that a run can use ({limits}), "{best.name}" needs the least work, '
    sentence += f"{best.work[attention]:.3f} units for each token"
    if ours is not best:
        sentence += f'; "{ours.name}" needs {compare(ours, best)}'
    if theirs and theirs[0] is not best:
        name = theirs[0].name
        sentence += f'; the best that is not of Lockstep, "{name}", {compare(theirs[0], best)}'
    prices = [f'"{way.name}" needs {compare(way, best)} work, with {price(way)}' for way in others]
    return [f"{sentence}.", *[f"Of the other ways, {'; '.join(prices)}."] * bool(prices)]


def _about_run(run: Run) -> list[str]:
    """Where the losses of a run went, and how long it waited."""
    losses = [loss for loss in run.loss if loss is not None]
    if not losses:
        return []
    sentence = f"The losses of the run went from {losses[0]:.3f} to {losses[-1]:.3f}"
    if run.evaluations:
        (_, first), (_, last) = run.evaluations[0], run.evaluations[-1]
        sentence += f", those of evaluations from {first:.3f} to {last:.3f}"
    if (waiting := run.summary.get("waiting")) is not None:
        sentence += (
            f". It waited for batches for {percent(waiting)} of its steps' time, and trained "
            f"{run.summary['tokens_per_second']:,.0f} tokens a second"
        )
    return [f"{sentence}."]


def _about_buckets(figures: Figures) -> list[str]:
    """The smallest number of buckets whose work is within 1% of the least."""
    packing, attention = figures.options["packing"], figures.options["attention"]
    if packing == "none":  # fewer than UNPACKED buckets are not compared
        return []
    packed = [way for way in figures.strategies if way.packing == packing]
    work = {len(way.buckets): way.work[attention] for way in packed}
    enough = min(number for number in work if work[number] <= 1.01 * min(work.values()))
    model = "attention that skips other segments"
    if attention == "dense":
        model = f"attention over whole rows at width {figures.options['width']:,}"
    if enough == 1:
        return [
            f"One bucket is enough for {model}: more buckets would save less than 1% of the work."
        ]
    more = "more would save less than 1%" if enough < BUCKETS[-1] else "more were not tried"
    listed = figures.ran or enough == len(figures.plan.buckets)
    return [
        f"With {model}, {enough} buckets take {work[enough]:.3f} units of work per token where "
        f"1 takes {work[1]:.3f}; {more}{'' if listed else f' (--max-buckets {enough})'}."
    ]


def _about_sides(plan: Epoch) -> list[str]:
    """How full the inputs and the targets of pairs are."""
    used = [f"{percent(share)} of the positions of the {name}" for name, share in plan.used.items()]
    return [f"Tokens use {list_words(used)}."] if used else []


def _about_tiers(plan: Epoch) -> list[str]:
    """How long devices wait for each other; empty if no number of groups divides the rows."""
    if not plan.over_ideal:
        return []
    devices = f"{list_words([*plan.over_ideal])} devices"
    ratios = list_words([f"{ratio:.3f}" for ratio in plan.over_ideal.values()])
    more = ""
    if plan.with_tiers:
        times = list_words([f"{time:.3f}" for time in plan.with_tiers.values()])
        more = f"; with --tiers {TIERS}, they would take {times} times as long as now"
    return [
        "With attention that skips other segments, devices wait for the one with the most work: "
        f"steps on {devices} take {ratios} times as long as if all had the same work{more}. "
        "Attention over whole rows needs no tiers, as all rows cost the same."
    ]


def explain_strategies(figures: Figures) -> dict[str, str]:
    """The meaning of each column of the comparison, and where its figures come from."""
    width = f"{figures.options['width']:,}"
    others = (
        ""
        if len(figures.sides) > 1
        else "; those of other ways come from one random order of the lengths"
    )
    padding, shapes, batches, equal, cut, dense, segment = HEADINGS
    return {
        padding: "the share of positions that hold no token",
        shapes: "the different shapes of batches; each is a program to compile",
        batches: "the number of batches in an epoch",
        equal: "whether hosts that read documents of their own get as many batches each; if not, "
        "they cannot train together to the end",
        cut: "the share of documents that are in more than one segment",
        dense: "the work of a layer for each token, if attention goes over whole rows; a unit is "
        f"that of a position without attention: a row of L positions costs L + L² / (6 × {width})",
        segment: "the same if attention skips other segments: L² is the sum of the squares of "
        "their lengths",
        "figures": f"those of Lockstep are counts over its plans{others}",
    }


def tabulate_strategies(figures: Figures) -> list[list[str]]:
    """The comparison: a row of headings, and a row for each strategy."""
    documents = figures.sides[-1].examples - figures.sides[-1].empty
    return [
        ["way to make batches", *HEADINGS],
        *(
            [
                way.name,
                percent(way.padding),
                f"{way.shapes:,}",
                f"{way.batches:,}",
                "equal" if way.equal else "unequal",
                percent(way.cut / documents),
                *(f"{way.work[kind]:.3f}" for kind in ("dense", "segment")),
            ]
            for way in figures.strategies
        ),
    ]


def describe_side(side: Side) -> dict[str, str]:
    """The figures of lengths, by name."""
    examples, name = counted(side.examples, "example").split()
    weighted = side.learnt is not None and side.learnt < side.tokens
    return {
        name: examples,
        "tokens to train on": f"{side.tokens:,}",
        **({"of them with loss": f"{side.learnt:,}"} if weighted else {}),
        "mean length": f"{side.mean:,.1f}",
        f"lengths at percentiles {', '.join(side.percentiles)}": " · ".join(
            f"{length:,}" for length in side.percentiles.values()
        ),
        "longest length": f"{side.longest:,}",
        f"longer than the longest row, {side.row:,}": f"{side.overlong:,}",
        "with nothing to train on": f"{side.empty:,}",
    }
