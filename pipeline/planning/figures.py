"""Figures of a plan: batches, tokens, epochs and losses, computed from counts of rows."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipeline.planning.bucket import Bucket
from pipeline.planning.lengths import weigh

if TYPE_CHECKING:
    from pipeline.planning.plan import Plan


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


def count_steps(plan: "Plan", first: int, last: int) -> Counts:
    """The numbers of the steps `first` to `last`."""
    own, costs = plan.options.buckets, plan.options.costs
    batches = {bucket: n for bucket, n in plan.batches(first, last).items() if n or bucket in own}
    found = Counts(
        {b: np.array([number, *[0.0] * (1 + len(costs))]) for b, number in batches.items()},
        dict.fromkeys(plan.names, 0.0),
        dict.fromkeys(plan.names, 0.0),
        costs,
    )
    for stage, begin, end in plan.stages_between(first, last):
        begun, over = map(stage.schedule.taken, (begin, end))
        rows, counts = (begun.rows, over.rows), (over.batches - begun.batches).tolist()
        of_length = np.zeros((len(stage.options.groups), 1 + len(costs)))  # rows, real positions
        for number, stream in enumerate(stage.streams):
            for leg in stream.legs:
                most = None if leg.repeats else leg.rows
                before, after = (np.clip(at[:, number] - leg.start, 0, most) for at in rows)
                taken, layout = after - before, stream.plan_of(leg).layout
                real = layout.real.sum(axis=1) * (taken / np.maximum(leg.rows, 1))[:, None]
                found.tokens[stream.name] += float(weigh(real.sum(axis=0), costs))
                found.passes[stream.name] += float(taken.sum() / stream.whole.rows.sum())
                of_length += np.column_stack([taken, real])
        number_of = dict(zip(stage.options.buckets, counts, strict=True))
        for group, (taken, *real) in zip(stage.options.groups, of_length, strict=True):
            fill, left = np.array(real) / max(taken, 1), taken
            for bucket in group:  # only the last batch, which has the fewest rows, has empty rows
                if filled := min(number_of[bucket] * bucket.rows, left):
                    found.buckets[bucket][1:] += np.append(1, fill) * filled
                left -= filled
    return found


def epoch_steps(plan: "Plan") -> tuple[int, int]:
    """The first step of the epoch to which the figures apply, and one past its last step.

    With one corpus, this is the first whole epoch of the last stage. With several, it is the epoch
    in which the last stage begins, including the earlier stages of that epoch.
    """
    last = plan.stages[-1]
    epoch = plan.first_whole_epoch if last.weights is None else last.schedule.epoch_of(last.start)
    return plan.first_step(epoch), plan.first_step(epoch + 1)


def count_epoch(plan: "Plan") -> Counts:
    """The numbers of the epoch of `epoch_steps`."""
    return count_steps(plan, *epoch_steps(plan))


def whole_epochs(plan: "Plan", step: int) -> dict[str, int]:
    """The number of epochs of each corpus that end before `step`, by name."""
    found = dict.fromkeys(plan.names, 0)
    stage = plan.last_stage(step - 1)
    # Within a block, epochs that end in it are not over. No step after `step` is looked up.
    block = stage.assembly.block(max(step - 1, 0))
    epochs = stage.schedule.epochs(block.start if step < block.stop else step)
    return found | dict(zip((stream.name for stream in stage.streams), epochs, strict=True))


def losses(plan: "Plan") -> dict[str, int]:
    """Numbers of examples that whole epochs of the last stage leave out or cut, by reason.

    `exclude` leaves out the "excluded"; "empty" ones have no position to train on, and "overlong"
    ones are longer than the longest bucket. "lost" is the number of positions that these lose.
    """
    stage, found = plan.stages[-1], np.zeros(4, np.int64)
    for stream in stage.streams:
        layout, excluded = stream.whole.layout, stream.lengths.num_left_out
        overlong = len(layout.pieces.overlong)
        dropped = overlong if stage.options.overflow == "drop" else 0
        empty = int(layout.counts[0]) - dropped - excluded
        found += (excluded, empty, overlong, layout.pieces.lost)
    return dict(zip(("excluded", "empty", "overlong", "lost"), found.tolist(), strict=True))
