"""The texts of a plan: `repr(plan)`, and the table of an epoch for `print(plan)`."""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from pipeline.planning import figures
from pipeline.planning.options import Options
from pipeline.planning.pair_packing import volume_bound
from pipeline.planning.stage import Stage
from pipeline.planning.text_table import text_table

if TYPE_CHECKING:
    from pipeline.planning.plan import Plan

UNITS = {
    "window": "pieces",
    "max_segments": "segments in a row",
    "num_tokens": "real positions in an epoch",
    "padding": "share of the positions in an epoch",
    "batches_per_bucket": "batches in an epoch",
    "max_position": "positions, from 0",
    "counts": "examples in each stage",
}
OVERFLOW = {"split": "split", "truncate": "truncated", "drop": "dropped"}


def represent(plan: "Plan") -> str:
    """The text of `repr(plan)`: the options of the last stage, and figures of an epoch."""
    stage = plan.stages[-1]
    values = {each.name: getattr(stage.options, each.name) for each in dataclasses.fields(Options)}
    if stage.weights is not None:
        values["weights"] = {name: f"{share}" for name, share in stage.weights.items()}
    values |= {"num_tokens": figures.num_tokens(plan), "padding": round(figures.padding(plan), 6)}
    names = "batches_per_bucket", "max_position", "num_examples", "counts", "names", "finite"
    values |= {name: getattr(plan, name) for name in (*names, "fingerprint")}
    lines = (f"    {k}={v!r},{f'  # {UNITS[k]}' if k in UNITS else ''}" for k, v in values.items())
    return "\n".join(["Plan(", *lines, ")"])


def heading(before: Stage, stage: Stage) -> str:
    """A line that says how a stage takes over from the one before it."""
    text = f"from step {stage.start:,} on"
    if new := stage.num_examples - before.num_examples:
        text += f", with {new:,} new examples"
    if excluded := sum(len(stream.lengths.excluded) for stream in stage.streams):
        text += f", without {excluded:,} examples that are left out"
    (stream, *_) = stage.streams
    if stage.weights is None and len(stream.passes) > 1:
        end = stage.schedule.first_step(stream.epoch)
        steps, epoch = end - stage.start, stream.epoch - 1
        batches = zip(stage.options.buckets, stage.schedule.before(end)[0].tolist(), strict=True)
        positions = sum(number * bucket.positions for bucket, number in batches)
        real = int(sum(each.layout.real.sum() for each in stream.passes[:-1]))
        text += (
            f", {steps:,} batches for the {real:,} positions that epoch {epoch} "
            f"still had ({1 - real / positions:.3%} padding), and then"
        )
    return f"{text}:"


def table(plan: "Plan") -> str:
    """The table of an epoch of the last stage, from the numbers of rows alone.

    Each bucket has a line. With one corpus, padding follows beside that of one example per row;
    with several, each has a line with its weight and its share of real positions.
    """
    lines = _bucket_lines(plan)
    lines += _padding_lines(plan) if plan.stages[-1].weights is None else _corpus_lines(plan)
    losses, options = figures.losses(plan), plan.stages[-1].options
    if losses.excluded:
        lines.append(f"{losses.excluded:,} examples are left out, as asked")
    if losses.empty:
        lines.append(f"{losses.empty:,} examples have nothing to train on and are left out")
    if losses.overlong:
        lines.append(
            f"{losses.overlong:,} examples longer than {_longest(plan)} are "
            f"{OVERFLOW[str(options.overflow)]}, {losses.lost:,} positions lost"
        )
    return "\n".join(lines)


def _bucket_lines(plan: "Plan") -> list[str]:
    contents, found = figures.rows_and_tokens(plan), {}
    for bucket, number in figures.epoch_batches(plan).items():
        rows, real = contents.get(bucket, np.zeros(2)).round().astype(int).tolist()
        found[str(bucket)] = np.array([number, rows, real, number * bucket.positions])
    found["epoch"] = np.sum([*found.values()], axis=0)
    lines = [["bucket", "batches", "rows", "fill", "tokens"]]
    for name, counts in found.items():
        batches, rows, tokens, positions = counts.tolist()
        fill = f"{tokens / positions:.2%}" if positions else "–"
        lines.append([name, f"{batches:,}", f"{rows:,}", fill, f"{tokens:,}"])
    return text_table(lines)


def _padding_lines(plan: "Plan") -> list[str]:
    stream, buckets = plan.stages[-1].streams[0], plan.stages[-1].options.buckets
    padding, tokens = figures.padding(plan), figures.num_tokens(plan)
    pieces = int(stream.whole.layout.counts[1:].sum())
    unpacked = pieces * sum(buckets[-1].lengths)
    lines = [
        f"padding {padding:.3%}; padded to the longest bucket, one example in a row, the same data "
        f"would take {pieces:,} rows of {_longest(plan)} and {1 - tokens / unpacked:.1%} padding",
        f"the largest position is {stream.max_position:,}",
    ]
    bound = stream.solution.bound if stream.solution is not None else None
    if len(buckets[-1].lengths) == 2:
        totals = stream.whole.layout.pieces.positions_per_example().sum(axis=0)
        bound, sides = volume_bound(totals, buckets)
        names = "inputs", "targets"
        for name, used, most in zip(names, figures.side_fills(plan), sides, strict=True):
            lines.append(
                f"{name}: {used:.2%} of positions used; the ratio of inputs to targets allows at "
                f"most {most:.2%}"
            )
    if bound is not None:
        lines.append(
            f"{1 - padding:.4%} of positions used; no packing can use more than {bound:.4%}"
        )
    return lines


def _corpus_lines(plan: "Plan") -> list[str]:
    first, last = figures.epoch_steps(plan)
    shares, phases = figures.shares(plan, first, last), figures.weights_by_phase(plan)
    before, after = figures.passes(plan, first), figures.passes(plan, last)
    share = "share" if plan.options.by == "tokens" else "of tokens"
    rows = [["corpus", "weight", share, "epochs", "tokens of one", "examples"]]
    for stream in plan.stages[-1].streams:
        name = stream.name
        weights = " → ".join(f"{phase[name]:.4g}" for _, phase in phases)
        epochs, tokens = f"{after[name] - before[name]:.2f}", f"{stream.whole.layout.real.sum():,}"
        cells = name, weights, f"{shares[name]:.3%}", epochs, tokens
        rows.append([*cells, f"{len(stream.lengths):,}"])
    lines = text_table(rows)
    if len(phases) > 1:
        lines.append(f"weights begin at steps {', '.join(f'{start:,}' for start, _ in phases)}")
    how = "all its steps" if plan.finite else "steps until each has been through"
    lines.append(f"an epoch is {how}: {last - first:,}; padding {figures.padding(plan):.3%}")
    return lines


def _longest(plan: "Plan") -> str:
    return " and ".join(f"{length:,}" for length in plan.stages[-1].options.buckets[-1].lengths)
