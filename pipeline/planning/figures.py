"""Figures of a plan: tokens, padding, shares and epochs, computed from counts of rows."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from pipeline.planning.bucket import Bucket
from pipeline.planning.patterns import Packed
from pipeline.planning.source import Source
from pipeline.planning.stage import Stage
from pipeline.planning.stages import Stages
from pipeline.planning.windows import Windows


def epoch_steps(plan: Stages) -> tuple[int, int]:
    """The first step of the epoch to which the figures apply, and one past its last step.

    With one corpus, this is the first whole epoch of the last stage. With several, it is the epoch
    in which the last stage begins, with the earlier stages of that epoch.
    """
    last = plan.stages[-1].timetable
    epoch = last.first_epoch if plan.stages[-1].weights is None else last.epoch_of(0)
    return plan.first_step(epoch), plan.first_step(epoch + 1)


def _count_epochs(
    plan: Stages, first: int, last: int
) -> Iterator[tuple[Stage, Source, Windows, np.ndarray]]:
    """How often the steps `first` to `last` have all rows of the windows of each source.

    Yields a stage, a source, its windows, and for each bucket the number of their epochs: float64
    [buckets].
    """
    for stage, begin, end in plan.stages_between(first, last):
        rows = [stage.timetable.before(step - stage.start)[1] for step in (begin, end)]
        for number, source in enumerate(stage.sources):
            remainder = source.remainder_rows
            before, after = (np.minimum(each[:, number], remainder) for each in rows)
            if source.remainder is not None:
                yield stage, source, source.remainder, (after - before) / np.maximum(remainder, 1)
            rest = (rows[1] - rows[0])[:, number] - (after - before)
            yield stage, source, source.whole, rest / np.maximum(source.whole.rows, 1)


def tokens(plan: Stages, first: int, last: int) -> dict[str, float]:
    """Real positions of each corpus in the steps `first` to `last`, by name.

    Exact for whole epochs; otherwise computed from the mean fill of the rows.
    """
    found = {source.name: 0.0 for source in plan.stages[-1].sources}
    for _, source, windows, epochs in _count_epochs(plan, first, last):
        found[source.name] += float((windows.real * epochs).sum())
    return found


def shares(plan: Stages, first: int, last: int) -> dict[str, float]:
    """The share of each corpus in the real positions of some steps; arguments as for `tokens`."""
    found = tokens(plan, first, last)
    total = max(sum(found.values()), 1)
    return {name: count / total for name, count in found.items()}


def passes(plan: Stages, step: int) -> dict[str, float]:
    """Epochs of each corpus before `step`, with fractions, by name."""
    found = {source.name: 0.0 for source in plan.stages[-1].sources}
    for _, source, windows, epochs in _count_epochs(plan, 0, step):
        found[source.name] += float((windows.rows * epochs).sum() / source.whole.rows.sum())
    return found


def whole_epochs(plan: Stages, step: int) -> dict[str, int]:
    """Epochs of each corpus that are over before `step`, by name."""
    found = {source.name: 0 for source in plan.stages[-1].sources}
    stage = [each for each in plan.stages if each.start < max(step, 1)][-1]
    block = stage.tiers.block(step)  # in the middle of it, epochs that end in it are not over
    rows = stage.timetable.before(block.start - stage.start)[1]
    for number, source in enumerate(stage.sources):
        found[source.name] = source.count_epochs(rows[:, number])
    return found


def packed(plan: Stages) -> Iterator[tuple[Windows, list[tuple[Bucket, float]], Packed]]:
    """The packed histograms of an epoch, one after another.

    Each comes with its windows, and with its buckets and how often the epoch has their rows.
    """
    for stage, _, windows, epochs in _count_epochs(plan, *epoch_steps(plan)):
        for kind, histogram in zip(windows.kinds, windows.packed(), strict=True):
            times = (epochs * kind.number).tolist()
            yield windows, list(zip(stage.options.buckets, times, strict=True)), histogram


def rows_and_tokens(plan: Stages) -> dict[Bucket, np.ndarray]:
    """The rows of each bucket in an epoch, and the real positions in them: float64 [2]."""
    found: dict[Bucket, np.ndarray] = {}
    for stage, _, windows, epochs in _count_epochs(plan, *epoch_steps(plan)):
        both = np.stack([windows.rows, windows.real], axis=1) * epochs[:, None]
        for bucket, values in zip(stage.options.buckets, both, strict=True):
            found[bucket] = found.get(bucket, np.zeros(2)) + values
    return found


def epoch_batches(plan: Stages) -> dict[Bucket, int]:
    """Batches of each bucket in an epoch."""
    found = plan.batches(*epoch_steps(plan))
    return {bucket: found[bucket] for bucket in plan.stages[-1].options.buckets}


def num_tokens(plan: Stages) -> int:
    """Real positions in an epoch."""
    return round(sum(tokens(plan, *epoch_steps(plan)).values()))


def padding(plan: Stages) -> float:
    """The share of an epoch's positions that are padding, with empty rows; 0 without batches."""
    positions = sum(number * bucket.positions for bucket, number in epoch_batches(plan).items())
    return 1 - num_tokens(plan) / positions if positions else 0.0


def side_fills(plan: Stages) -> tuple[float, ...]:
    """The share of an epoch's positions in use; for pairs, that of the inputs and the targets."""
    used: Any = 0.0
    for windows, buckets, histogram in packed(plan):
        for (_, times), patterns in zip(buckets, histogram.patterns, strict=True):
            for pattern in patterns:
                sizes, pieces = np.array(pattern.pieces).T
                sides = pieces @ windows.pieces.positions(sizes)
                used = used + sides * (pattern.rows * times)
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


def losses(plan: Stages) -> Losses:
    """The examples that whole epochs of the last stage do not have."""
    stage, found = plan.stages[-1], np.zeros(4, np.int64)
    for source in stage.sources:
        pieces, excluded = source.whole.pieces, source.lengths.num_left_out
        overlong = len(pieces.overlong)
        dropped = overlong if stage.options.overflow == "drop" else 0
        empty = int(source.whole.counts[0]) - dropped - excluded
        found += (excluded, empty, overlong, pieces.lost)
    return Losses(*found.tolist())


def phases(plan: Stages) -> list[Stage]:
    """The last stage, and the stages before it that differ only in weights and new corpora."""
    found = [plan.stages[-1]]
    for stage in reversed(plan.stages[:-1]):
        if found[0].sources[0] is not stage.sources[0]:
            break
        found.insert(0, stage)
    return found


def weights_by_phase(plan: Stages) -> list[tuple[int, Mapping[str, float]]]:
    """The first step of each of `phases`, and the weight of each corpus from there on."""
    names = [source.name for source in plan.stages[-1].sources]
    return [
        (stage.start, {name: float((stage.weights or {}).get(name, 0)) for name in names})
        for stage in phases(plan)
    ]
