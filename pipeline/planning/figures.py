"""Figures of a plan: batches, tokens, epochs and losses, from counts of rows; and their table."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipeline.errors import counted
from pipeline.planning.bucket import PAIR, Bucket
from pipeline.planning.changes import Change
from pipeline.planning.lengths import weigh
from pipeline.planning.stage import Stage
from pipeline.planning.text_table import text_table

LEFT_OUT = {
    "excluded": ", as asked",
    "silent": " without loss",
    "empty": " with nothing to train on",
}
OVERFLOW = {"split": "split", "truncate": "truncated", "drop": "dropped"}


class Counts(NamedTuple):
    """Numbers of batches, rows and tokens in some steps.

    Exact for whole epochs; otherwise, tokens are computed from the mean fill of the rows.
    """

    # For each: batches, rows that are not empty, real positions of each side: float64 [2 + sides].
    buckets: dict[Bucket, np.ndarray]
    tokens: dict[str, float]  # of each corpus; those of a side count with its cost
    passes: dict[str, float]  # epochs of each corpus, with fractions
    costs: tuple[float, ...]  # what a position of each side costs

    @property
    def batches(self) -> dict[Bucket, int]:
        """The batches of each bucket."""
        return {bucket: round(counts[0]) for bucket, counts in self.buckets.items()}

    @property
    def num_tokens(self) -> int:
        """Real positions; those of a side count with its cost."""
        return round(sum(self.tokens.values()))

    @property
    def padding(self) -> float:
        """The share of the positions that are padding, with empty rows; 0 without batches.

        Positions of a side count with its cost.
        """
        positions = sum(
            counts[0] * bucket.rows * weigh(bucket.lengths, self.costs)
            for bucket, counts in self.buckets.items()
        )
        return float(1 - self.num_tokens / positions) if positions else 0.0

    @property
    def shares(self) -> dict[str, float]:
        """The share of each corpus in the real positions, by name."""
        total = max(sum(self.tokens.values()), 1)
        return {name: count / total for name, count in self.tokens.items()}


def count_steps(stages: Sequence[Stage], first: int, last: int) -> Counts:
    """The numbers of the steps `first` to `last`, for all corpora and buckets of the last stage."""
    options = stages[-1].options
    costs = options.cost
    buckets = {bucket: np.zeros(2 + len(costs)) for bucket in options.buckets}
    tokens, passes = (dict.fromkeys(stages[-1].members.corpora, 0.0) for _ in range(2))
    for stage, following in itertools.zip_longest(stages, stages[1:]):
        begin, end = max(first, stage.start), min(last, following.start) if following else last
        if begin >= end:
            continue
        begun, over = map(stage.schedule.before, (begin, end))
        counts = (over.batches - begun.batches).tolist()
        of_bucket = np.zeros((len(counts), 1 + len(costs)))  # rows, real positions
        for number, stream in enumerate(stage.streams):
            for rows in stream.passes:
                most = None if rows.repeats else rows.counts
                before, after = (
                    np.clip(at.rows[:, number] - rows.start, 0, most) for at in (begun, over)
                )
                taken = after - before
                share = taken / np.maximum(rows.counts, 1)
                real = rows.windows.real.sum(axis=1) * share[:, None]
                tokens[stream.name] += float(weigh(real.sum(axis=0), costs))
                passes[stream.name] += float(taken.sum() / stream.whole.counts.sum())
                of_bucket += np.column_stack([taken, real])
        for bucket, number, of_rows in zip(stage.options.buckets, counts, of_bucket, strict=True):
            if number:
                numbers = buckets.setdefault(bucket, np.zeros(2 + len(costs)))
                numbers += np.append(number, of_rows)
    in_order = sorted(buckets.items(), key=lambda item: item[0].sort_key)
    return Counts(dict(in_order), tokens, passes, costs)


def count_losses(stage: Stage) -> dict[str, int]:
    """Numbers of examples that whole epochs of a stage leave out or cut, by reason.

    `exclude` leaves out the "excluded"; "silent" ones have no loss, "empty" ones no position to
    train on, and "overlong" ones are longer than the longest bucket. "lost" is the number of
    positions that these lose.
    """
    losses = np.zeros(5, np.int64)
    for stream in stage.streams:
        windows, silent = stream.whole.windows, stream.lengths.num_silent
        pieces, left_out = windows.pieces, stream.lengths.num_left_out
        overlong = len(pieces.overlong)
        dropped = overlong * (stage.options.overflow == "drop")
        empty = int(windows.counts[0]) - dropped - left_out
        losses += (left_out - silent, silent, empty, overlong, pieces.lost)
    names = ("excluded", "silent", "empty", "overlong", "lost")
    return dict(zip(names, losses.tolist(), strict=True))


def describe(history: Sequence[Change], counts: Counts) -> str:
    """The text of `print(plan)`, from the numbers of an epoch of the last stage."""
    changes = [_describe_change(*pair) for pair in itertools.pairwise(history)]
    return "\n".join([*changes, *_tabulate(history[-1].stage, counts)])


def _describe_change(before: Change, change: Change) -> str:
    """A line that says what a stage changes."""
    stage, keywords = change
    names = [name for name in keywords if name not in ("examples", "exclude")]
    changed = [", ".join(names)] if names else []
    if new := stage.members.count - before.stage.members.count:
        changed.append(counted(new, "new example"))
    if excluded := _count_excluded(stage) - _count_excluded(before.stage):
        changed.append(f"{counted(excluded, 'more example')} left out")
    return f"from step {stage.start:,} on: {', '.join(changed) or 'the same options'}"


def _count_excluded(stage: Stage) -> int:
    return sum(stream.lengths.num_excluded for stream in stage.streams)


def _tabulate(stage: Stage, counts: Counts) -> list[str]:
    """An epoch of a stage: its buckets, its corpora if there are several, and losses."""
    table, options = {}, stage.options
    names, several = options.names, options.vectors
    for bucket, numbers in counts.buckets.items():
        positions = numbers[0] * bucket.rows * np.array(bucket.lengths)
        table[str(bucket)] = np.append(numbers, positions).round().astype(int)
    table["epoch"] = np.sum([*table.values()], axis=0)
    rows = [["bucket", "batches", "rows", *(names if several else ["fill", "tokens"])]]
    for name, (batches, filled, *others) in table.items():
        sides = zip(others[: len(names)], others[len(names) :], strict=True)
        fills = [f"{real / positions:.2%}" if positions else "–" for real, positions in sides]
        tokens = [f"{others[0]:,}"] * (not several)
        rows.append([name, f"{batches:,}", f"{filled:,}", *fills, *tokens])
    lines = [*text_table(rows), f"padding {counts.padding:.3%}"]
    losses = count_losses(stage)
    if stage.weights is not None:
        lines += _tabulate_corpora(stage, counts)
    if options.cuts:
        lines.append(f"cut to fill rows: {counted(stage.cuts, 'example')}")
    for name, why in LEFT_OUT.items():
        if losses[name]:
            lines.append(f"left out: {counted(losses[name], 'example')}{why}")
    if losses["overlong"]:
        longest = " and ".join(f"{length:,}" for length in options.buckets[-1].lengths)
        lines.append(
            f"{OVERFLOW[str(options.overflow)]}: {counted(losses['overlong'], 'example')} "
            f"longer than {longest}, {counted(losses['lost'], 'position')} lost"
        )
        if warning := warn_of_loss(stage):
            lines.append(warning)
    return lines


def warn_of_loss(stage: Stage) -> str:
    """A sentence if a stage cuts examples some of whose positions have no loss; "" if not."""
    streams = [stream for stream in stage.streams if stream.lengths.partly_learnt]
    count = sum(len(stream.whole.windows.pieces.overlong) for stream in streams)
    what = {
        "split": "split: all pieces but the first lack the beginning, and some may have no loss",
        "truncate": "truncated: what is cut may be all that has loss, such as an answer",
    }
    if not count or stage.options.overflow not in what:
        return ""
    return (
        f"{counted(count, 'example')} with positions without loss, such as a prompt, "
        f"{what[stage.options.overflow]}; overflow='drop' leaves these examples out, and a longer "
        "bucket keeps them whole"
    )


def warn_of_overflow(stage: Stage) -> str:
    """A sentence if a stage drops or truncates examples, or cuts those of which parts have loss."""
    overflow = stage.options.overflow
    count = sum(len(stream.whole.windows.pieces.overlong) for stream in stage.streams)
    if (warning := warn_of_loss(stage)) or not count or overflow not in ("drop", "truncate"):
        return warning
    return (
        f"{counted(count, 'example')} longer than {stage.options.buckets[-1]}, {OVERFLOW[overflow]}"
        f" (overflow={overflow!r}); a longer bucket keeps them whole"
    )


# Beyond so many positions, and this many rows, a table of positions is more than a mistake allows.
FAR_POSITIONS, FAR_ROWS = 1 << 16, 64


def warn_of_positions(stage: Stage) -> str:
    """A sentence if pieces of examples have positions far beyond the longest row."""
    most, row = stage.max_position, max(stage.options.buckets[-1].lengths)
    if most < max(FAR_POSITIONS, FAR_ROWS * row):
        return ""
    return (
        f"positions go up to {most:,} in rows of {row:,}, since the pieces of an example continue "
        "its positions"
    )


def _tabulate_corpora(stage: Stage, counts: Counts) -> list[str]:
    names = stage.options.names
    alike = stage.options.by == "tokens" and names == PAIR[: len(names)]
    share = "share" if alike else "of tokens"
    rows = [["corpus", "weight", share, "epochs", "tokens of one", "examples"]]
    for stream in stage.streams:
        name, share_of = stream.name, stage.weights or {}
        weight = f"{float(share_of[name]):.4g}"
        tokens = weigh(stream.whole.windows.real.sum(axis=(0, 1)), stage.options.cost)
        epochs, tokens = f"{counts.passes[name]:.2f}", f"{round(tokens):,}"
        cells = name, weight, f"{counts.shares[name]:.3%}", epochs, tokens
        rows.append([*cells, f"{len(stream.lengths):,}"])
    lines = text_table(rows)
    return [*lines, "an epoch is steps until each has been through"]
