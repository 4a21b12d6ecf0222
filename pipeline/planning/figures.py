"""Figures of a plan: tokens, padding, shares and epochs, computed from counts of rows."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipeline.planning.bucket import Bucket
from pipeline.planning.stage import Stage
from pipeline.planning.stream import Pass, Stream

if TYPE_CHECKING:
    from pipeline.planning.plan import Plan


def epoch_steps(plan: "Plan") -> tuple[int, int]:
    """The first step of the epoch to which the figures apply, and one past its last step.

    With one corpus, this is the first whole epoch of the last stage. With several, it is the epoch
    in which the last stage begins, with the earlier stages of that epoch.
    """
    last = plan.stages[-1]
    epoch = plan.first_whole_epoch if last.weights is None else last.schedule.epoch_of(last.start)
    return plan.first_step(epoch), plan.first_step(epoch + 1)


def count_passes(
    plan: "Plan", first: int, last: int
) -> Iterator[tuple[Stage, Stream, Pass, np.ndarray]]:
    """How often the steps `first` to `last` have all rows of each pass of each stream.

    Yields a stage, a stream, a pass, and the times of each bucket: float64 [buckets].
    """
    for stage, begin, end in plan.stages_between(first, last):
        rows = [stage.schedule.before(step)[1] for step in (begin, end)]
        for number, stream in enumerate(stage.streams):
            for found, start in zip(stream.passes, stream.starts, strict=True):
                most = None if found.spans is None else found.rows
                before, after = (np.clip(each[:, number] - start, 0, most) for each in rows)
                yield stage, stream, found, (after - before) / np.maximum(found.rows, 1)


def tokens(plan: "Plan", first: int, last: int) -> dict[str, float]:
    """Real positions of each corpus in the steps `first` to `last`, by name.

    Exact for whole epochs; otherwise computed from the mean fill of the rows.
    """
    found = {stream.name: 0.0 for stream in plan.stages[-1].streams}
    for _, stream, each, times in count_passes(plan, first, last):
        found[stream.name] += float((each.layout.real.sum(axis=1) * times).sum())
    return found


def shares(plan: "Plan", first: int, last: int) -> dict[str, float]:
    """The share of each corpus in the real positions of some steps; arguments as for `tokens`."""
    found = tokens(plan, first, last)
    total = max(sum(found.values()), 1)
    return {name: count / total for name, count in found.items()}


def passes(plan: "Plan", step: int) -> dict[str, float]:
    """Epochs of each corpus before `step`, with fractions, by name."""
    found = {stream.name: 0.0 for stream in plan.stages[-1].streams}
    for _, stream, each, times in count_passes(plan, 0, step):
        found[stream.name] += float((each.rows * times).sum() / stream.whole.rows.sum())
    return found


def whole_epochs(plan: "Plan", step: int) -> dict[str, int]:
    """Epochs of each corpus that are over before `step`, by name."""
    found = {stream.name: 0 for stream in plan.stages[-1].streams}
    stage = [each for each in plan.stages if each.start < max(step, 1)][-1]
    block = stage.assembly.block(step)  # in the middle of it, epochs that end in it are not over
    epochs = stage.schedule.epochs(block.start)
    return found | dict(zip((stream.name for stream in stage.streams), epochs, strict=True))


def rows_and_tokens(plan: "Plan") -> dict[Bucket, np.ndarray]:
    """The rows of each bucket in an epoch, and the real positions in them: float64 [2]."""
    found: dict[Bucket, np.ndarray] = {}
    for stage, _, each, times in count_passes(plan, *epoch_steps(plan)):
        both = np.stack([each.rows, each.layout.real.sum(axis=1)], axis=1) * times[:, None]
        for bucket, values in zip(stage.options.buckets, both, strict=True):
            found[bucket] = found.get(bucket, np.zeros(2)) + values
    return found


def epoch_batches(plan: "Plan") -> dict[Bucket, int]:
    """Batches of each bucket in an epoch."""
    found = plan.batches(*epoch_steps(plan))
    return {bucket: found[bucket] for bucket in plan.stages[-1].options.buckets}


def num_tokens(plan: "Plan") -> int:
    """Real positions in an epoch."""
    return round(sum(tokens(plan, *epoch_steps(plan)).values()))


def padding(plan: "Plan") -> float:
    """The share of an epoch's positions that are padding, with empty rows; 0 without batches."""
    positions = sum(number * bucket.positions for bucket, number in epoch_batches(plan).items())
    return 1 - num_tokens(plan) / positions if positions else 0.0


def side_fills(plan: "Plan") -> tuple[float, ...]:
    """The share of an epoch's positions in use; for pairs, that of the inputs and the targets."""
    used = np.zeros(len(plan.buckets[0].lengths))
    for _, _, each, times in count_passes(plan, *epoch_steps(plan)):
        counts, pieces = each.layout.counts[1:], each.layout.pieces
        share = (each.rows * times).sum() / each.rows.sum()
        used += counts @ pieces.positions(np.arange(1, len(counts) + 1)) * share
    positions = sum(
        n * bucket.rows * np.array(bucket.lengths) for bucket, n in epoch_batches(plan).items()
    )
    return tuple((used / positions).tolist())


class Losses(NamedTuple):
    """Counts of examples that are not, or not wholly, in a batch, and of the positions `lost`.

    `exclude` excludes the `excluded`; `empty` ones have no position to train on, and `overlong`
    ones are longer than the longest bucket.
    """

    excluded: int
    empty: int
    overlong: int
    lost: int


def losses(plan: "Plan") -> Losses:
    """The examples that whole epochs of the last stage do not have."""
    stage, found = plan.stages[-1], np.zeros(4, np.int64)
    for stream in stage.streams:
        layout, excluded = stream.whole.layout, stream.lengths.num_left_out
        pieces, overlong = layout.pieces, len(layout.pieces.overlong)
        dropped = overlong if stage.options.overflow == "drop" else 0
        empty = int(layout.counts[0]) - dropped - excluded
        found += (excluded, empty, overlong, pieces.lost)
    return Losses(*found.tolist())


def phases(plan: "Plan") -> list[Stage]:
    """The last stage, and the stages before it that differ only in weights and new corpora."""
    found = [plan.stages[-1]]
    for stage in reversed(plan.stages[:-1]):
        if found[0].streams[0] is not stage.streams[0]:
            break
        found.insert(0, stage)
    return found


def weights_by_phase(plan: "Plan") -> list[tuple[int, Mapping[str, float]]]:
    """The first step of each of `phases`, and the weight of each corpus from there on."""
    names = [stream.name for stream in plan.stages[-1].streams]
    return [
        (stage.start, {name: float((stage.weights or {}).get(name, 0)) for name in names})
        for stage in phases(plan)
    ]
