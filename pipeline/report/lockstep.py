"""Lockstep's rows of the comparison: plans with other numbers of buckets and ways of packing."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from pipeline.planning import figures as plan_figures
from pipeline.planning.bucket import Bucket
from pipeline.planning.cascade import PACKINGS
from pipeline.planning.lengths import Lengths, histogram
from pipeline.planning.plan import Plan
from pipeline.report.options import Options
from pipeline.report.simulations import Simulation
from pipeline.report.strategies import HOSTS, figures
from pipeline.report.table import length_of

BUCKETS = (1, 2, 3, 4, 6)

# "optimal" is included without --optimal up to so many different lengths: it takes some seconds.
OPTIMAL_LENGTHS = 512

# Each example comes once an epoch, also in the plan of a mixture that is compared.
PLAIN: dict[str, Any] = {"weights": None, "by": None, "ending": None}


def compare(
    lengths: Lengths,
    sample: np.ndarray,
    options: Options,
    longest: tuple[int, ...],
    *,
    optimal: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Figures of Lockstep with several numbers of buckets and each way of packing.

    Buckets are fitted to `sample`: all lengths, or a sample with the longest. `longest` has the
    positions in a row of the longest bucket; for pairs, of inputs and of targets. `optimal` and
    `progress` are those of `measure`.

    Returns:
        The figures, and a sentence for each way of packing that is left out.
    """

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
    different = 0 if pairs else len(histogram(lengths.array)[0])
    progress("fitting buckets")
    # The different sets of buckets, each with the least number that gives it.
    packed = {fit(most, "best_fit"): most for most in reversed(BUCKETS)}
    others = [name for name in PACKINGS if name not in ("best_fit", "none") and not pairs]
    for packing in ("best_fit", *others, "none"):
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
                plan = shared = plain.plan(lengths, buckets)
            except ImportError as error:
                excluded.append(str(error))
                break
            # All hosts run every step of one plan, each on its own rows.
            if any(bucket.rows % HOSTS for bucket in buckets):
                shared = plain.plan(lengths, fit(most, packing, HOSTS))
            row = figures(
                name,
                ", ".join(f"{b.rows} rows × {length_of(b.length)}" for b in buckets),
                simulation(plan),
                width=options["width"],
                hosts=[shared.num_batches()] * HOSTS,
            )
            found.append(row | {"packing": packing, "buckets": [b.as_json for b in buckets]})
    return found, excluded


def padded_pairs(lengths: Lengths, options: Options, longest: tuple[int, ...]) -> dict[str, Any]:
    """Figures of pairs padded to the longest inputs and the longest targets, one in a row."""
    bucket = Bucket(max(options["tokens_per_batch"] // sum(longest), 1), longest)
    plan = options.replace(packing="none", **PLAIN).plan(lengths, (bucket,))
    return figures(
        "padded to the longest of all",
        f"every row {length_of(bucket.length)} long, one pair in a row",
        simulation(plan),
        width=options["width"],
        hosts=[plan.num_batches()] * HOSTS,
    )


def simulation(plan: Plan) -> Simulation:
    """One epoch of a plan, in the terms of the other strategies."""
    batches = plan_figures.epoch_batches(plan)
    shapes = np.array([(b.rows, *b.lengths, 0)[:3] for b in batches], np.int64)
    rows, lengths, targets = np.repeat(shapes, list(batches.values()), axis=0).T
    split = plan.options.overflow == "split"
    return Simulation(
        rows=rows,
        lengths=lengths,
        targets=targets,
        tokens=plan.num_tokens,
        squares=_squares(plan),
        cut=plan_figures.losses(plan).overlong if split else 0,
        reread=0,
    )


def _squares(plan: Plan) -> int:
    """What attention inside segments computes in an epoch of a plan of one corpus."""
    (source,) = plan.stages[-1].sources
    total = 0
    for kind, packed in zip(source.whole.kinds, source.whole.packed(), strict=True):
        counts = packed.counts
        sides = source.whole.pieces.positions(np.arange(len(counts)))
        scores = sides[:, 0] ** 2
        if sides.shape[1] == 2:
            scores = scores + sides[:, 1] ** 2 + sides[:, 0] * sides[:, 1]
        total += kind.number * int(counts @ scores)
    return total
