"""Figures of a plan: batches, tokens, epochs and losses, computed from counts of rows."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipeline.planning.bucket import Bucket

if TYPE_CHECKING:
    from pipeline.planning.plan import Plan


class Counts(NamedTuple):
    """Numbers of batches, rows and tokens in some steps.

    Exact for whole epochs; otherwise, tokens are computed from the mean fill of the rows.

    Attributes:
        buckets: for each bucket, batches, rows that are not empty, and real positions: float64 [3].
        tokens: the real positions of each corpus, by name.
        passes: epochs of each corpus, with fractions, by name.
    """

    buckets: dict[Bucket, np.ndarray]
    tokens: dict[str, float]
    passes: dict[str, float]

    @property
    def num_tokens(self) -> int:
        """Real positions."""
        return round(sum(self.tokens.values()))

    @property
    def padding(self) -> float:
        """The share of the positions that are padding, with empty rows; 0 without batches."""
        positions = sum(counts[0] * bucket.positions for bucket, counts in self.buckets.items())
        return float(1 - self.num_tokens / positions) if positions else 0.0

    @property
    def shares(self) -> dict[str, float]:
        """The share of each corpus in the real positions, by name."""
        total = max(sum(self.tokens.values()), 1)
        return {name: count / total for name, count in self.tokens.items()}


def count_steps(plan: "Plan", first: int, last: int) -> Counts:
    """The numbers of the steps `first` to `last`."""
    own = plan.options.buckets
    batches = {bucket: n for bucket, n in plan.batches(first, last).items() if n or bucket in own}
    found = Counts(
        {bucket: np.array([number, 0.0, 0.0]) for bucket, number in batches.items()},
        dict.fromkeys(plan.names, 0.0),
        dict.fromkeys(plan.names, 0.0),
    )
    for stage, begin, end in plan.stages_between(first, last):
        begun, over = map(stage.schedule.taken, (begin, end))
        rows, counts = (begun.rows, over.rows), (over.batches - begun.batches).tolist()
        of_length = np.zeros((len(stage.options.groups), 2))  # rows and real positions
        for number, stream in enumerate(stage.streams):
            for leg in stream.legs:
                most = None if leg.repeats else leg.rows
                before, after = (np.clip(at[:, number] - leg.start, 0, most) for at in rows)
                taken, layout = after - before, stream.plan_of(leg).layout
                real = layout.real.sum(axis=1) * (taken / np.maximum(leg.rows, 1))
                found.tokens[stream.name] += float(real.sum())
                found.passes[stream.name] += float(taken.sum() / stream.whole.rows.sum())
                of_length += np.stack([taken, real], axis=1)
        number_of = dict(zip(stage.options.buckets, counts, strict=True))
        for group, (taken, real) in zip(stage.options.groups, of_length.tolist(), strict=True):
            fill, left = real / max(taken, 1), taken
            for bucket in group:  # only the last batch, which has the fewest rows, has empty rows
                if filled := min(number_of[bucket] * bucket.rows, left):
                    found.buckets[bucket][1:] += filled, fill * filled
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

    `exclude` leaves out the "excluded"; "silent" ones have no loss, "empty" ones no position to
    train on, and "overlong" ones are longer than the longest bucket. "lost" is the number of
    positions that these lose, "lost_loss" of those of them with loss, if the corpus has weights,
    and "silent_pieces" are pieces of these that are left out, since they have no loss.
    """
    stage, found = plan.stages[-1], np.zeros(7, np.int64)
    for stream in stage.streams:
        layout, silent = stream.whole.layout, stream.lengths.num_silent
        pieces, left_out = layout.pieces, stream.lengths.num_left_out
        overlong = len(pieces.overlong)
        dropped = overlong if stage.options.overflow == "drop" else pieces.silent_first
        empty = int(layout.counts[0]) - dropped - left_out
        of_pieces = overlong, pieces.lost, pieces.lost_loss, len(pieces.silent)
        found += (left_out - silent, silent, empty, *of_pieces)
    names = ("excluded", "silent", "empty", "overlong", "lost", "lost_loss", "silent_pieces")
    return dict(zip(names, found.tolist(), strict=True))
