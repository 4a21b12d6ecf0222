"""The text of `print(plan)`: where the plan changes, and the table of one epoch."""

import itertools
from typing import TYPE_CHECKING

import numpy as np

from pipeline.errors import counted
from pipeline.planning import figures
from pipeline.planning.lengths import weigh
from pipeline.planning.stage import Stage
from pipeline.planning.text_table import text_table

if TYPE_CHECKING:
    from pipeline.planning.plan import Plan

OVERFLOW = {"split": "split", "truncate": "truncated", "drop": "dropped"}


def describe(plan: "Plan") -> str:
    """The text of `print(plan)`. The epoch is one of the last stage."""
    if plan.follows:
        buckets = ", ".join(map(str, plan.buckets))
        return (
            f"a plan of a corpus that grows, in windows of up to {plan.options.window:,} pieces; "
            f"buckets {buckets}"
        )
    changes = [_describe_change(*stages) for stages in itertools.pairwise(plan.stages)]
    return "\n".join([*changes, *_tabulate(plan)])


def _describe_change(before: Stage, stage: Stage) -> str:
    """A line that says what a stage changes."""
    names = [name for name in stage.changes if name not in ("examples", "exclude")]
    changed = [", ".join(names)] if names else []
    if new := stage.num_examples - before.num_examples:
        changed.append(counted(new, "new example"))
    if excluded := len(stage.excluded) - len(before.excluded):
        changed.append(f"{counted(excluded, 'more example')} left out")
    return f"from step {stage.start:,} on: {', '.join(changed) or 'the same options'}"


def _tabulate(plan: "Plan") -> list[str]:
    """An epoch of the last stage: its buckets, its corpora if there are several, and losses."""
    counts, found = figures.count_epoch(plan), {}
    names, several = plan.options.names, plan.options.vectors
    for bucket, each in counts.buckets.items():
        positions = each[0] * bucket.rows * np.array(bucket.lengths)
        found[str(bucket)] = np.append(each, positions).round().astype(int)
    found["epoch"] = np.sum([*found.values()], axis=0)
    rows = [["bucket", "batches", "rows", *(names if several else ["fill", "tokens"])]]
    for name, (batches, filled, *others) in found.items():
        sides = zip(others[: len(names)], others[len(names) :], strict=True)
        fills = [f"{real / positions:.2%}" if positions else "–" for real, positions in sides]
        tokens = [f"{others[0]:,}"] * (not several)
        rows.append([name, f"{batches:,}", f"{filled:,}", *fills, *tokens])
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
    stage = plan.stages[-1]
    share = "share" if plan.options.by == "tokens" else "of tokens"
    rows = [["corpus", "weight", share, "epochs", "tokens of one", "examples"]]
    for stream in stage.streams:
        name, share_of = stream.name, stage.weights or {}
        weight = f"{float(share_of[name]):.4g}"
        tokens = weigh(stream.whole.layout.real.sum(axis=(0, 1)), plan.options.costs)
        epochs, tokens = f"{counts.passes[name]:.2f}", f"{round(tokens):,}"
        cells = name, weight, f"{counts.shares[name]:.3%}", epochs, tokens
        rows.append([*cells, f"{len(stream.lengths):,}"])
    lines = text_table(rows)
    how = "all its steps" if plan.finite else "steps until each has been through"
    return [*lines, f"an epoch is {how}"]
