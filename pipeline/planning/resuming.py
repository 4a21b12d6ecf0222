"""Data states of plans, and how a plan whose corpora grow goes on from one.

A plan of finished corpora goes on at any step, and its state only tells it from other plans. Where
corpora grow, all windows before a step would have to be planned again, so the entry of a stage says
what was taken at the last mark, and where the chapters of its streams begin then: at a place
between two parts, or with the rest of the stage before. If one begins with a rest, the entry of
that stage as of its end comes first, and so on. From entries, stages are made in the same order.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.errors import InvalidValue
from pipeline.planning.growing import grows, require_past
from pipeline.planning.plan import Plan, check_first
from pipeline.planning.schedule import Schedule, Taken
from pipeline.planning.stage import Origin, Stage, make_streams


def entries_at(plan: Plan, step: int) -> tuple[Mapping[str, Any], ...]:
    """The entries of a data state after `step` batches: of stages that begin before `step`.

    If corpora grow: of the stage of the last batch, and of those before it that it needs. For each
    corpus, "places" has the beginning of its chapter, and "last", the end of the last window that
    the batches depend on. "rows", "owed" and "legs" are what was taken since, as in
    `schedule.Taken`, up to the step "from".
    """
    if not plan.follows:
        return tuple(entry for entry in plan.entries if entry["from"] < max(step, 1))
    check_first(step, plan.first)
    stage = plan.stage_at(max(step - 1, plan.first))
    mark = taken = stage.schedule.marks[0]
    if step > mark.step:
        mark, taken = stage.schedule.mark(step - 1), stage.schedule.taken(step)
    entries = _make_entries(stage, mark)
    for number, (stream, leg) in enumerate(zip(stage.streams, taken.legs, strict=True)):
        chapter = stream.chapter(leg)
        if grows(stage.members[stream.name]):
            # A corpus without a weight has none: whether its window is known depends on others.
            needed = mark is not taken and (stage.weights is None or stage.weights[stream.name])
            begun = leg > chapter.number or (taken.rows[:, number] > chapter.start).any()
            end = stream.place_after(leg) if needed or begun else chapter.place
            entries[-1]["places"][stream.name]["last"] = [end.part, end.digest]
    return entries


def _make_entries(stage: Stage, taken: Taken) -> tuple[dict[str, Any], ...]:
    """The entry of a stage, from what was taken at a mark or at its end; and those before it."""
    rows, legs, places = taken.rows.copy(), [*taken.legs], dict[str, Any]()
    for number, stream in enumerate(stage.streams):
        chapter = stream.chapter(legs[number])
        rows[:, number] -= chapter.start
        legs[number] -= chapter.number
        grew = grows(stage.members[stream.name])
        place: dict[str, Any] = {"rest": True} if chapter.has_rest else {}
        place |= {"epoch": stream.epoch} if stream.epoch > grew else {}
        places[stream.name] = place | (dataclasses.asdict(chapter.place) if grew else {})
    entry = {**stage.entry, "from": taken.step, "places": places, "rows": rows.tolist()}
    entry |= {"owed": [[*each] for each in taken.owed], "legs": legs}
    if any(stage.schedule.offsets):
        entry["offsets"] = [*stage.schedule.offsets]
    rests = any("rest" in place for place in places.values())
    return (*(_make_entries(*stage.origin) if rests else ()), entry)


def match(
    plan: Plan, entries: Sequence[Mapping[str, Any]]
) -> list[tuple[Mapping[str, Any], Stage]]:
    """Each of the entries that `entries_at` returns with its stage, if corpora grow."""
    last = plan.last_stage(entries[-1]["from"])
    stages = plan.stages[: plan.stages.index(last) + 1]
    numbers = range(last.number + 1 - len(entries), last.number + 1)
    if numbers[0] < 0:
        raise InvalidValue(
            "the plan of the state has changed more often than this one; make the same changes "
            "before you restore it"
        )
    by_number = {stage.number: stage for stage in stages}  # the last one, of stages with the same
    return [(entry, by_number[number]) for entry, number in zip(entries, numbers, strict=True)]


def resumed(plan: Plan, entries: Sequence[Mapping[str, Any]]) -> Plan:
    """A plan of corpora that grow, with only the steps from the last of some entries on.

    Raises:
        ValueError: a corpus is not the one of the state, or is shorter, or the plan has not changed
            as that of the state.
    """
    for name, place in entries[-1]["places"].items():
        if name in plan.parts:
            require_past(plan.parts[name], *place["last"])
    origin: Origin | None = None
    number, stages = 0, [*plan.stages]
    for entry, stage in match(plan, entries):
        number, first = stages.index(stage), _resume_stage(stage, entry, origin)
        stages[number], origin = first, (first, first.schedule.marks[0])
    for later in range(number + 1, len(stages)):
        stages[later] = stages[later].remake(before=stages[later - 1])
    return Plan.from_stages(stages, entries[-1]["from"])


def _resume_stage(stage: Stage, entry: Mapping[str, Any], origin: Origin | None) -> Stage:
    """The stage as it was when `entry` was made of it."""
    rows = np.array(entry["rows"], np.int64)
    before, left = (origin[0].streams, origin[1]) if origin else ((), None)
    streams = make_streams(stage, before, left, entry["places"])
    for stream, leg, of_stream in zip(streams, entry["legs"], rows.T, strict=True):
        if leg or of_stream.any():
            stream.leg(leg)  # its parts are sealed
    taken = Taken(entry["from"], rows[:0, 0], rows, entry["owed"], entry["legs"])
    schedule = Schedule(
        entry["from"],
        streams,
        stage.options,
        stage.weights,
        taken=taken,
        offsets=entry.get("offsets"),
    )
    return stage.remake(origin=origin, made=(streams, schedule))


def parts_of(plan: Plan, step: int) -> dict[str, range]:
    """The parts of each corpus that grows of which a step, or one before it, may have rows.

    By name; parts are numbered from 0, from the beginning of the step's chapter. An empty range
    stands for all parts of a finished corpus.
    """
    if not plan.follows:
        return {}
    stage, found = plan.stage_at(step), dict.fromkeys(plan.parts, range(0))
    for number, leg in enumerate(stage.schedule.taken(step + 1).legs):
        stream = stage.streams[number]
        over = any(known.repeats for known in stream.legs[leg : leg + 1])
        if stream.parts is not None and not over:
            begin = _first_part(stage, number, leg)
            found[stream.name] = range(begin, stream.place_after(leg).part)
    return found


def _first_part(stage: Stage, number: int, leg: int) -> int:
    """The first part that the chapter of a leg needs; `number` is that of the stream."""
    chapter = stage.streams[number].chapter(leg)
    if not chapter.has_rest:
        return chapter.place.part
    before, taken = stage.origin
    return _first_part(before, number, taken.legs[number])


def may_wait(plan: Plan, step: int) -> bool:
    """Whether a step may wait for parts that the step before it did not need."""
    return plan.follows and plan.stage_at(step).schedule.may_wait(step)
