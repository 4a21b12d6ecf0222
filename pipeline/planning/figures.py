"""Figures of a plan: batches, tokens, epochs and losses, computed from counts of rows."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from pipeline.planning.bucket import Bucket
from pipeline.planning.lengths import weigh
from pipeline.planning.stage import Stage


class Counts(NamedTuple):
    """Numbers of batches, rows and tokens in some steps.

    Exact for whole epochs; otherwise, tokens are computed from the mean fill of the rows.

    Attributes:
        buckets: for each bucket, batches, rows that are not empty, and the real positions of each
            side: float64 [2 + sides].
        tokens: the real positions of each corpus, by name; those of a side count with its cost.
        passes: epochs of each corpus, with fractions, by name.
        costs: what a position of each side costs.
    """

    buckets: dict[Bucket, np.ndarray]
    tokens: dict[str, float]
    passes: dict[str, float]
    costs: tuple[float, ...]

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


def count_steps(steps: Iterable[tuple[Stage, int, int]], last: Stage) -> Counts:
    """The numbers of some steps: those of each stage from one to another, as `stages_between` says.

    `last` is the last stage of the plan, whose corpora and buckets are there in any case.
    """
    costs = last.options.costs
    buckets = {bucket: np.zeros(2 + len(costs)) for bucket in last.options.buckets}
    tokens, passes = (dict.fromkeys(last.members, 0.0) for _ in range(2))
    for stage, begin, end in steps:
        begun, over = map(stage.schedule.taken, (begin, end))
        rows, counts = (begun.rows, over.rows), (over.batches - begun.batches).tolist()
        of_length = np.zeros((len(stage.options.groups), 1 + len(costs)))  # rows, real positions
        for number, stream in enumerate(stage.streams):
            for leg in stream.legs:
                most = None if leg.repeats else leg.rows
                before, after = (np.clip(at[:, number] - leg.start, 0, most) for at in rows)
                taken, layout = after - before, stream.plan_of(leg).layout
                real = layout.real.sum(axis=1) * (taken / np.maximum(leg.rows, 1))[:, None]
                tokens[stream.name] += float(weigh(real.sum(axis=0), costs))
                passes[stream.name] += float(taken.sum() / stream.whole.rows.sum())
                of_length += np.column_stack([taken, real])
        number_of = dict(zip(stage.options.buckets, counts, strict=True))
        for bucket, number in number_of.items():
            if number:
                buckets.setdefault(bucket, np.zeros(2 + len(costs)))[0] += number
        for group, (taken, *real) in zip(stage.options.groups, of_length, strict=True):
            fill, left = np.array(real) / max(taken, 1), taken
            for bucket in group:  # only the last batch, which has the fewest rows, has empty rows
                if filled := min(number_of[bucket] * bucket.rows, left):
                    buckets[bucket][1:] += np.append(1, fill) * filled
                left -= filled
    in_order = sorted(buckets.items(), key=lambda item: item[0].order)
    return Counts(dict(in_order), tokens, passes, costs)


def count_losses(stage: Stage) -> dict[str, int]:
    """Numbers of examples that whole epochs of a stage leave out or cut, by reason.

    `exclude` leaves out the "excluded"; "silent" ones have no loss, "empty" ones no position to
    train on, and "overlong" ones are longer than the longest bucket. "lost" is the number of
    positions that these lose, "lost_loss" of those of them with loss, if the corpus has weights,
    and "silent_pieces" are pieces of these that are left out, since they have no loss.
    """
    found = np.zeros(7, np.int64)
    for stream in stage.streams:
        layout, silent = stream.whole.layout, stream.lengths.num_silent
        pieces, left_out = layout.pieces, stream.lengths.num_left_out
        overlong = len(pieces.overlong)
        dropped = overlong if stage.options.overflow == "drop" else len(pieces.silent)
        empty = int(layout.counts[0]) - dropped - left_out
        of_pieces = overlong, pieces.lost, pieces.lost_loss, len(pieces.silent)
        found += (left_out - silent, silent, empty, *of_pieces)
    names = ("excluded", "silent", "empty", "overlong", "lost", "lost_loss", "silent_pieces")
    return dict(zip(names, found.tolist(), strict=True))
