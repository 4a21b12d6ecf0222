"""The text of `print(plan)`: where the plan changes, and the table of one epoch."""

import itertools
from collections.abc import Sequence

import numpy as np

from pipeline.errors import counted
from pipeline.planning.bucket import PAIR
from pipeline.planning.figures import Counts, count_losses
from pipeline.planning.lengths import weigh
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
    names, several = options.names, options.vectors
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
            * (options.overflow == "split")
        )
    return lines


def _tabulate_corpora(stage: Stage, counts: Counts) -> list[str]:
    names = stage.options.names
    alike = stage.options.by == "tokens" and names == PAIR[: len(names)]
    share = "share" if alike else "of tokens"
    rows = [["corpus", "weight", share, "epochs", "tokens of one", "examples"]]
    for stream in stage.streams:
        name, share_of = stream.name, stage.weights or {}
        weight = f"{float(share_of[name]):.4g}"
        tokens = weigh(stream.whole.layout.real.sum(axis=(0, 1)), stage.options.costs)
        epochs, tokens = f"{counts.passes[name]:.2f}", f"{round(tokens):,}"
        cells = name, weight, f"{counts.shares[name]:.3%}", epochs, tokens
        rows.append([*cells, f"{len(stream.lengths):,}"])
    lines = text_table(rows)
    how = "all its steps" if stage.end is not None else "steps until each has been through"
    return [*lines, f"an epoch is {how}"]
