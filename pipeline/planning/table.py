"""The texts of a plan: `repr(plan)`, and tables for `print(plan)`."""

from typing import TYPE_CHECKING

import numpy as np

from pipeline.errors import counted
from pipeline.planning import figures
from pipeline.planning.stage import Stage
from pipeline.planning.text_table import text_table

if TYPE_CHECKING:
    from pipeline.planning.plan import Plan

OVERFLOW = {"split": "split", "truncate": "truncated", "drop": "dropped"}


def represent(plan: "Plan") -> str:
    """The text of `repr(plan)`: the options of the last stage, and figures of an epoch."""
    stage = plan.stages[-1]
    values = dict(vars(stage.options))
    if stage.weights is not None:
        values["weights"] = {name: f"{share}" for name, share in stage.weights.items()}
    names = "batches_per_bucket", "max_position", "num_examples", "counts", "names", "finite"
    for name in ("num_tokens", "padding", *names, "fingerprint"):
        values[name] = getattr(plan, name)
    return "\n".join(["Plan(", *(f"    {name}={value!r}," for name, value in values.items()), ")"])


def describe(plan: "Plan") -> str:
    """The text of `print(plan)`: how each stage takes over, and the table of an epoch of it.

    Stages that differ only in weights have one table.
    """
    if plan.follows:
        buckets = ", ".join(map(str, plan.buckets))
        return (
            f"a plan of a corpus that grows, in windows of up to {plan.options.window:,} pieces; "
            f"buckets {buckets}"
        )
    texts: list[str] = []
    before = None
    for group in figures.phases(plan):
        texts += [] if before is None else [heading(before, group[0])]
        before = group[-1]
        texts += _tabulate(plan.until(before.start))
    return "\n".join(texts)


def heading(before: Stage, stage: Stage) -> str:
    """A line that says how a stage takes over from the one before it."""
    text = f"from step {stage.start:,} on"
    if new := stage.num_examples - before.num_examples:
        text += f", with {counted(new, 'new example')}"
    if excluded := sum(len(stream.lengths.excluded) for stream in stage.streams):
        text += f", {counted(excluded, 'example')} left out"
    stream = stage.streams[0]
    if stage.weights is None and len(stream.legs) > 1:
        steps = stage.schedule.first_step(stream.epoch) - stage.start
        real = round(sum(stream.plan_of(leg).layout.real.sum() for leg in stream.legs[:-1]))
        text += (
            f", {counted(steps, 'batch')} for the {counted(real, 'position')} that epoch "
            f"{stream.epoch - 1} still had, and then"
        )
    return f"{text}:"


def _tabulate(plan: "Plan") -> list[str]:
    """An epoch of the last stage: its buckets, its corpora if there are several, and losses."""
    counts, found = figures.count_epoch(plan), {}
    for bucket, each in counts.buckets.items():
        found[str(bucket)] = np.append(each.round().astype(int), int(each[0]) * bucket.positions)
    found["epoch"] = np.sum([*found.values()], axis=0)
    rows = [["bucket", "batches", "rows", "fill", "tokens"]]
    for name, (batches, filled, tokens, positions) in found.items():
        fill = f"{tokens / positions:.2%}" if positions else "–"
        rows.append([name, f"{batches:,}", f"{filled:,}", fill, f"{tokens:,}"])
    lines = [*text_table(rows), f"padding {counts.padding:.3%}"]
    stream, losses = plan.stages[-1].streams[0], figures.losses(plan)
    if plan.stages[-1].weights is not None:
        lines += _tabulate_corpora(plan, counts)
    elif stream.solution is not None:
        lines[-1] += f"; no packing can have less than {1 - stream.solution.bound:.3%}"
    if plan.options.packing == "fill":
        lines.append(f"cut to fill rows: {counted(plan.cuts, 'example')}")
    if losses["excluded"]:
        lines.append(f"left out: {counted(losses['excluded'], 'example')}, as asked")
    if losses["empty"]:
        lines.append(f"left out: {counted(losses['empty'], 'example')} with nothing to train on")
    if losses["overlong"]:
        longest = " and ".join(f"{length:,}" for length in plan.options.buckets[-1].lengths)
        lines.append(
            f"{OVERFLOW[str(plan.options.overflow)]}: {counted(losses['overlong'], 'example')} "
            f"longer than {longest}, {counted(losses['lost'], 'position')} lost"
        )
    return lines


def _tabulate_corpora(plan: "Plan", counts: figures.Counts) -> list[str]:
    phases = figures.weights_by_phase(plan)
    share = "share" if plan.options.by == "tokens" else "of tokens"
    rows = [["corpus", "weight", share, "epochs", "tokens of one", "examples"]]
    for stream in plan.stages[-1].streams:
        name = stream.name
        weights = " → ".join(f"{phase[name]:.4g}" for _, phase in phases)
        epochs, tokens = f"{counts.passes[name]:.2f}", f"{round(stream.whole.layout.real.sum()):,}"
        cells = name, weights, f"{counts.shares[name]:.3%}", epochs, tokens
        rows.append([*cells, f"{len(stream.lengths):,}"])
    lines = text_table(rows)
    if len(phases) > 1:
        lines.append(f"weights begin at steps {', '.join(f'{start:,}' for start, _ in phases)}")
    how = "all its steps" if plan.finite else "steps until each has been through"
    return [*lines, f"an epoch is {how}"]
