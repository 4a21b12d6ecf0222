"""The text of `print(plan)`: where the plan changes, and the table of one epoch."""

import itertools
from collections.abc import Sequence

import numpy as np

from pipeline.errors import counted
from pipeline.planning.figures import Counts, count_losses
from pipeline.planning.stage import Stage
from pipeline.planning.text_table import text_table

OVERFLOW = {"split": "split", "truncate": "truncated", "drop": "dropped"}


def describe(stages: Sequence[Stage], counts: Counts) -> str:
    """The text of `print(plan)`, from the numbers of an epoch of the last stage."""
    changes = [_describe_change(*pair) for pair in itertools.pairwise(stages)]
    return "\n".join([*changes, *_tabulate(stages[-1], counts)])


def _describe_change(before: Stage, stage: Stage) -> str:
    """A line that says what a stage changes."""
    names = [name for name in stage.changes if name not in ("examples", "exclude")]
    changed = [", ".join(names)] if names else []
    if new := stage.num_examples - before.num_examples:
        changed.append(counted(new, "new example"))
    if excluded := len(stage.excluded) - len(before.excluded):
        changed.append(f"{counted(excluded, 'more example')} left out")
    return f"from step {stage.start:,} on: {', '.join(changed) or 'the same options'}"


def _tabulate(stage: Stage, counts: Counts) -> list[str]:
    """An epoch of a stage: its buckets, its corpora if there are several, and losses."""
    found, options = {}, stage.options
    for bucket, each in counts.buckets.items():
        found[str(bucket)] = np.append(each.round().astype(int), int(each[0]) * bucket.positions)
    found["epoch"] = np.sum([*found.values()], axis=0)
    rows = [["bucket", "batches", "rows", "fill", "tokens"]]
    for name, (batches, filled, tokens, positions) in found.items():
        fill = f"{tokens / positions:.2%}" if positions else "–"
        rows.append([name, f"{batches:,}", f"{filled:,}", fill, f"{tokens:,}"])
    lines = [*text_table(rows), f"padding {counts.padding:.3%}"]
    stream, losses = stage.streams[0], count_losses(stage)
    if stage.weights is not None:
        lines += _tabulate_corpora(stage, counts)
    elif stream.solution is not None:
        lines[-1] += f"; no packing can have less than {1 - stream.solution.bound:.3%}"
    if options.packing == "fill":
        lines.append(f"cut to fill rows: {counted(stage.cuts, 'example')}")
    if losses["excluded"]:
        lines.append(f"left out: {counted(losses['excluded'], 'example')}, as asked")
    if losses["silent"]:
        lines.append(f"left out: {counted(losses['silent'], 'example')} without loss")
    if losses["empty"]:
        lines.append(f"left out: {counted(losses['empty'], 'example')} with nothing to train on")
    if losses["overlong"]:
        longest = " and ".join(f"{length:,}" for length in options.buckets[-1].lengths)
        lines.append(
            f"{OVERFLOW[str(options.overflow)]}: {counted(losses['overlong'], 'example')} "
            f"longer than {longest}, {counted(losses['lost'], 'position')} lost"
            + f", {losses['lost_loss']:,} of them with loss"
            * bool(losses["lost_loss"])
        )
    if losses["silent_pieces"]:
        lines.append(
            f"left out: {counted(losses['silent_pieces'], 'piece')} of these without loss"
            + (
                "; the others lack their beginning, such as a prompt: with overflow='drop' no "
                "example loses it, or give a longer bucket"
            )
            * (plan.options.overflow == "split")
        )
    return lines


def _tabulate_corpora(stage: Stage, counts: Counts) -> list[str]:
    share = "share" if stage.options.by == "tokens" else "of tokens"
    rows = [["corpus", "weight", share, "epochs", "tokens of one", "examples"]]
    for stream in stage.streams:
        name, share_of = stream.name, stage.weights or {}
        weight = f"{float(share_of[name]):.4g}"
        epochs, tokens = f"{counts.passes[name]:.2f}", f"{round(stream.whole.layout.real.sum()):,}"
        cells = name, weight, f"{counts.shares[name]:.3%}", epochs, tokens
        rows.append([*cells, f"{len(stream.lengths):,}"])
    lines = text_table(rows)
    how = "all its steps" if stage.end is not None else "steps until each has been through"
    return [*lines, f"an epoch is {how}"]
