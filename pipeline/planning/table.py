"""The table: a plan in words, for `print(plan)`."""

from collections.abc import Iterable, Mapping

import numpy as np

from pipeline.packing.bucket import Bucket
from pipeline.packing.pairs import volume_bound
from pipeline.planning import figures
from pipeline.planning.planned import PlannedBatch
from pipeline.planning.source import Source
from pipeline.planning.stage import Stage
from pipeline.planning.stages import Stages

# Of how many hosts the table shows the busiest, against their mean.
HOSTS = 8

SIDES = "inputs", "targets"  # of pairs


def heading(before: Stage, stage: Stage) -> str:
    """How a stage takes over from the one before it."""
    text = f"from step {stage.start:,} on"
    if new := stage.num_examples - before.num_examples:
        text += f", with {new:,} new examples"
    if left_out := sum(len(source.lengths.left_out) for source in stage.sources):
        text += f", without {left_out:,} examples that are left out"
    rests = [source.remainder for source in stage.sources if source.remainder is not None]
    if rests and stage.weights is None:
        (source,), rest = stage.sources, rests[0]
        there = sum(
            int(number) * bucket.positions
            for bucket, number in zip(stage.options.buckets, rest.batches, strict=True)
        )
        real = int(rest.real.sum())
        text += (
            f", {rest.steps:,} batches for the {real:,} positions that epoch {source.epoch - 1} "
            f"still had ({1 - real / there:.3%} padding), and then"
        )
    return f"{text}:"


def table(plan: Stages, batches: Iterable[PlannedBatch]) -> str:
    """What an epoch comes to: each bucket's batches, rows, fill and tokens; and padding.

    `batches` are some of the epoch's, to compare the work of hosts.

    Of one corpus, padding beside that of one example in a row of the longest bucket, and with
    "optimal" the share of positions used and its bound. Of several, what share each has: the weight
    that was asked for, in each phase, and what the epoch gives it of all real positions. At the
    end, what became of empty and of overlong examples.
    """
    stage = plan.stages[-1]
    lines = _buckets(plan, figures.imbalance(batches, HOSTS))
    if stage.weights is None:
        lines += _padding(plan, stage.sources[0])
    else:
        lines += _shares(plan)
    return "\n".join(lines + _losses(plan))


def _padding(plan: Stages, source: Source) -> list[str]:
    buckets = plan.stages[-1].options.buckets
    row, padding, tokens = sum(buckets[-1].lengths), figures.padding(plan), figures.num_tokens(plan)
    pieces = int(source.whole.counts[1:].sum())
    lines = [
        f"padding {padding:.3%}; padded to the longest bucket, one example in a row, the same data "
        f"would take {pieces:,} rows of {_longest(buckets)} and {1 - tokens / (pieces * row):.1%} "
        "padding",
        f"the largest position is {source.max_position:,}",
    ]
    bound = source.solution.bound if source.solution is not None else None
    if len(buckets[-1].lengths) == 2:
        totals = source.whole.pieces.due().sum(axis=0)
        bound, sides = volume_bound(totals, buckets)
        for name, used, most in zip(SIDES, figures.side_fills(plan), sides, strict=True):
            lines.append(
                f"{name}: {used:.2%} of positions used; the ratio of inputs to targets allows at "
                f"most {most:.2%}"
            )
    if bound is not None:
        lines.append(
            f"{1 - padding:.4%} of positions used; no packing can use more than {bound:.4%}"
        )
    return lines


def _shares(plan: Stages) -> list[str]:
    first, last = figures.epoch_steps(plan)
    shares, phases = figures.shares(plan, first, last), figures.weights_by_phase(plan)
    before, after = figures.passes(plan, first), figures.passes(plan, last)
    lines = [
        f"{'corpus':>14}{'weight':>12}{'share':>14}{'epochs':>10}{'tokens of one':>18}"
        f"{'examples':>16}"
    ]
    for source in plan.stages[-1].sources:
        name = source.name
        weights = " → ".join(f"{phase[name]:.4g}" for _, phase in phases)
        lines.append(
            f"{name:>14}{weights:>12}{shares[name]:>14.3%}{after[name] - before[name]:>10.2f}"
            f"{source.whole.real.sum():>18,}{len(source.lengths):>16,}"
        )
    if len(phases) > 1:
        lines.append(f"weights begin at steps {', '.join(f'{start:,}' for start, _ in phases)}")
    ends = plan.stages[-1].end is not None
    how = "all its steps" if ends else "steps until each has been through"
    lines.append(f"an epoch is {how}: {last - first:,}; padding {figures.padding(plan):.3%}")
    return lines


def _buckets(plan: Stages, busiest: Mapping[Bucket, float]) -> list[str]:
    lines = [
        f"{'bucket':>14}{'batches':>12}{'rows':>14}{'fill':>10}{'tokens':>18}"
        f"{f'busiest of {HOSTS}':>16}"
    ]
    packed = figures.packed(plan)
    total = np.zeros(4, np.int64)
    for bucket, batches in figures.epoch_batches(plan).items():
        of_bucket = [(often, each, each.buckets.index(bucket)) for often, each in packed]
        counts = np.array(
            [
                batches,
                round(sum(often * each.rows(index) for often, each, index in of_bucket)),
                round(sum(often * each.real(index) for often, each, index in of_bucket)),
                batches * bucket.positions,
            ]
        )
        even = f"{busiest[bucket]:.3f}×" if bucket in busiest else "–"
        lines.append(f"{_line(str(bucket), counts)}{even:>16}")
        total += counts
    lines.append(_line("epoch", total))
    return lines


def _losses(plan: Stages) -> list[str]:
    lines, found = [], figures.losses(plan)
    options = plan.stages[-1].options
    if found.asked:
        lines.append(f"{found.asked:,} examples are left out, as asked")
    if found.empty:
        lines.append(f"{found.empty:,} examples have nothing to train on and are left out")
    if found.overlong:
        done = {"split": "split", "truncate": "truncated", "drop": "dropped"}
        lines.append(
            f"{found.overlong:,} examples longer than {_longest(options.buckets)} are "
            f"{done[str(options.overflow)]}, {found.lost:,} positions lost"
        )
    return lines


def _longest(buckets: tuple[Bucket, ...]) -> str:
    return " and ".join(f"{length:,}" for length in buckets[-1].lengths)


def _line(name: str, counts: np.ndarray) -> str:
    batches, rows, tokens, positions = counts.tolist()
    fill = f"{tokens / positions:.2%}" if positions else "–"
    return f"{name:>14}{batches:>12,}{rows:>14,}{fill:>10}{tokens:>18,}"
