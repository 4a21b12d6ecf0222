"""Figures: what a plan comes to. Functions of a plan, worked out from counts of rows."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from pipeline.packing.bucket import Bucket
from pipeline.packing.patterns import Packed
from pipeline.planning.order import imbalance as imbalance_of
from pipeline.planning.planned import PlannedBatch
from pipeline.planning.stage import Stage
from pipeline.planning.stages import Stages
from pipeline.planning.windows import Windows


def epoch_steps(plan: Stages) -> tuple[int, int]:
    """The first step of an epoch that the figures are of, and one past its last.

    The first whole epoch of the last stage; of several corpora, the one in progress where the last
    stage begins, with the phases before it.
    """
    last = plan.stages[-1].timetable
    epoch = last.first_epoch if plan.stages[-1].weights is None else last.epoch_of(0)
    return plan.first_step(epoch), plan.first_step(epoch + 1)


def _rows(stage: Stage, begin: int, end: int) -> Iterator[tuple[int, Windows, np.ndarray]]:
    """Each source's number, its windows, and which share of their rows of each bucket steps have.

    float64 [buckets]; above 1 where they have several epochs.
    """
    first, last = (stage.timetable.before(step - stage.start)[1] for step in (begin, end))
    for number, source in enumerate(stage.sources):
        before = source.remainder_rows
        rows = [np.minimum(taken[:, number], before) for taken in (first, last)]
        if source.remainder is not None:
            yield number, source.remainder, (rows[1] - rows[0]) / np.maximum(before, 1)
        more = (last - first)[:, number] - (rows[1] - rows[0])
        yield number, source.whole, more / np.maximum(source.whole.rows, 1)


def tokens(plan: Stages, first: int, last: int) -> dict[str, float]:
    """Real positions of each corpus in the steps `first` to `last`, at the mean fill of its rows.

    Exact for whole epochs.
    """
    found = {source.name: 0.0 for source in plan.stages[-1].sources}
    for stage, begin, end in plan.within(first, last):
        for number, windows, share in _rows(stage, begin, end):
            found[stage.sources[number].name] += float((windows.real * share).sum())
    return found


def shares(plan: Stages, first: int, last: int) -> dict[str, float]:
    """The share of each corpus in the real positions of some steps; arguments as `tokens`."""
    found = tokens(plan, first, last)
    total = max(sum(found.values()), 1)
    return {name: count / total for name, count in found.items()}


def passes(plan: Stages, step: int) -> dict[str, float]:
    """How often each corpus has been through before `step`, about."""
    found = {source.name: 0.0 for source in plan.stages[-1].sources}
    for stage, begin, end in plan.within(0, step):
        for number, windows, share in _rows(stage, begin, end):
            source = stage.sources[number]
            rows = float((windows.rows * share).sum()) / float(source.whole.rows.sum())
            found[source.name] += rows
    return found


def whole_epochs(plan: Stages, step: int) -> dict[str, int]:
    """How many epochs of each corpus are over before `step`."""
    found = {source.name: 0 for source in plan.stages[-1].sources}
    stage = [each for each in plan.stages if each.start < max(step, 1)][-1]
    taken = stage.timetable.before(step - stage.start)[1]
    for number, source in enumerate(stage.sources):
        found[source.name] = source.whole_epochs(taken[:, number])
    return found


def packed(plan: Stages) -> list[tuple[float, Packed]]:
    """Packed histograms, each with the patterns of one bucket; how often an epoch has them."""
    found = []
    for stage, begin, end in plan.within(*epoch_steps(plan)):
        for _, windows, share in _rows(stage, begin, end):
            for kind in windows.kinds:
                patterns = kind.slots.packed.patterns
                for index, often in enumerate(share.tolist()):
                    only = [each if i == index else () for i, each in enumerate(patterns)]
                    whole = Packed(stage.options.buckets, tuple(only), kind.slots.packed.counts)
                    found.append((often * kind.number, whole))
    return found


def epoch_batches(plan: Stages) -> dict[Bucket, int]:
    """Batches of each bucket in the epoch that the figures are of."""
    found = plan.batches(*epoch_steps(plan))
    return {bucket: found[bucket] for bucket in plan.stages[-1].options.buckets}


def num_tokens(plan: Stages) -> int:
    """Real positions in an epoch."""
    return round(sum(tokens(plan, *epoch_steps(plan)).values()))


def padding(plan: Stages) -> float:
    """The share of an epoch's positions that are padding, empty rows included."""
    there = sum(number * bucket.positions for bucket, number in epoch_batches(plan).items())
    return 1 - num_tokens(plan) / there


def side_fills(plan: Stages) -> tuple[float, ...]:
    """The share of an epoch's positions that are used; of pairs, of inputs and of targets."""
    used: Any = 0.0
    for stage, begin, end in plan.within(*epoch_steps(plan)):
        for _, windows, share in _rows(stage, begin, end):
            for kind in windows.kinds:
                for index, patterns in enumerate(kind.slots.packed.patterns):
                    for pattern in patterns:
                        sizes, times = np.array(pattern.pieces).T
                        sides = times @ windows.pieces.positions(sizes)
                        used = used + sides * (pattern.rows * kind.number * share[index])
    there = sum(
        n * bucket.rows * np.array(bucket.lengths) for bucket, n in epoch_batches(plan).items()
    )
    return tuple((used / there).tolist())


def imbalance(batches: Iterable[PlannedBatch], hosts: int) -> dict[Bucket, float]:
    """How much busier the busiest of `hosts` is than the mean, for attention inside segments.

    The mean over the batches of each bucket; without buckets whose rows `hosts` does not divide.
    """
    seen: dict[Bucket, list[float]] = {}
    for planned in batches:
        if (rows := planned.bucket.rows) % hosts == 0:
            seen.setdefault(planned.bucket, []).append(imbalance_of(planned.segments, rows, hosts))
    return {bucket: sum(values) / len(values) for bucket, values in seen.items()}


@dataclasses.dataclass(frozen=True)
class Losses:
    """Examples that no batch has, or not whole.

    Attributes:
        asked: examples with something to train on that are left out, as asked.
        empty: other examples with nothing to train on.
        overlong: examples that are longer than the longest bucket.
        lost: how many of their positions are in no batch.
    """

    asked: int
    empty: int
    overlong: int
    lost: int


def losses(plan: Stages) -> Losses:
    """What whole epochs of the last stage leave out."""
    asked = empty = overlong = lost = 0
    stage = plan.stages[-1]
    for source in stage.sources:
        pieces = source.whole.pieces
        dropped = len(pieces.overlong) if stage.options.overflow == "drop" else 0
        asked += source.lengths.num_left_out
        empty += int(source.whole.counts[0]) - dropped - source.lengths.num_left_out
        overlong, lost = overlong + len(pieces.overlong), lost + pieces.lost
    return Losses(asked, empty, overlong, lost)


def phases(plan: Stages) -> list[Stage]:
    """The last stage, and those before it that differ from it by weights and new corpora alone."""
    found = [plan.stages[-1]]
    for stage in reversed(plan.stages[:-1]):
        if found[0].sources[0] is not stage.sources[0]:
            break
        found.insert(0, stage)
    return found


def weights_by_phase(plan: Stages) -> list[tuple[int, Mapping[str, float]]]:
    """The first step of each of `phases`, and each corpus's share from there on."""
    names = [source.name for source in plan.stages[-1].sources]
    return [
        (stage.start, {name: float((stage.weights or {}).get(name, 0)) for name in names})
        for stage in phases(plan)
    ]
