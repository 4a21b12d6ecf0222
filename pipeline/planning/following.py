"""Followed plans: plans of corpora that still grow.

The stages become known in order; each ends with a chapter of one of the corpora.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack

import numpy as np

from pipeline.errors import InvalidState, InvalidValue, require_whole
from pipeline.planning.bucket import Bucket, as_buckets
from pipeline.planning.cache import WindowCache
from pipeline.planning.growing import APART, Chapter, Parts, Place
from pipeline.planning.lengths import Lengths
from pipeline.planning.options import Options, PlanOptions, Weights, as_phases
from pipeline.planning.pieces import Pieces
from pipeline.planning.plan import Plan, check_first
from pipeline.planning.schedule import Schedule, Taken
from pipeline.planning.stage import Stage, check_options, options_as_json, options_of_streams
from pipeline.planning.stream import Stream

# The cache holds windows with this many pieces; more if needed at a time.
HELD = 1 << 18


@dataclasses.dataclass(frozen=True, eq=False)
class Start:
    """Where a stage begins.

    Attributes:
        places: by name of the corpus, where its chapter begins or its last chapter ended; None if
            it never grew.
        taken: the rows taken since these chapters began.
    """

    places: Mapping[str, Place | None]
    taken: Taken

    @property
    def step(self) -> int:
        """The first step of the stage."""
        return self.taken.step

    def after(self, stage: Stage) -> "Start":
        """The start of the next stage; `stage` began here and has ended."""
        ended, taken = stage.schedule.ended
        rows, owed, windows = taken.rows.copy(), [[*each] for each in taken.owed], [*taken.windows]
        chapter = stage.streams[ended]
        assert isinstance(chapter, Chapter), "no other stream ends a stage"
        places = {**self.places, chapter.name: chapter.last(windows[ended]).end}
        rows[:, ended], windows[ended] = 0, 0
        for of_length in owed:
            of_length[ended] = 0
        return Start(places, taken._replace(rows=rows, owed=owed, windows=windows))

    def entry(self, ends: Mapping[str, Place]) -> dict[str, Any]:
        """The start as JSON for an entry of a data state; `ends` has the ends of last windows."""
        places = dict[str, Any](self.places)
        for (name, place), number in zip(self.places.items(), self.taken.windows, strict=True):
            if place is not None:
                end = ends.get(name, place)
                last = {"windows": number, "last": [end.part, end.digest]}
                places[name] = dataclasses.asdict(place) | last
        rows, owed = self.taken.rows.tolist(), self.taken.owed
        return {"from": self.step, "places": places, "rows": rows, "owed": owed}

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> "Start":
        """The start from an entry of a data state."""
        places, windows = dict[str, Place | None](), []
        for name, given in entry["places"].items():
            kept = [given[each.name] for each in dataclasses.fields(Place)] if given else []
            places[name] = Place(*kept) if given else None
            windows.append(given["windows"] if given else 0)
        rows = np.array(entry["rows"], np.int64)
        return cls(places, Taken(entry["from"], rows[:0], rows, entry["owed"], windows))


class FollowedPlan(Plan):
    """All batches of a corpus that grows, or of a mixture with such corpora.

    A step waits until its rows are sealed, so a batch is the same at any time and in any process.
    Examples are planned in windows, in the order in which they are sealed. Once a corpus is
    finished, its later epochs are ordinary epochs of the entire corpus.

    In a mixture, the examples of corpus number `n` are numbered from `n * APART` on.

    Args:
        parts: the sealed parts. With `weights`, by name: the sealed parts of each corpus that
            grows, and for others lengths or a corpus, as for `Plan`.
        buckets: as for `Plan`; with `weights`, one of each length.
        weights: the weight of each corpus by name, in tokens. Default None: one corpus.
        **options: as for `Plan`. packing="optimal" and overflow="error" need a finished corpus.

    Attributes:
        stages: one for each change of options. Unlike those of `Plan`, they have no steps: the
            stages with the steps are made when they are needed.
        parts: the sealed parts of each corpus that grows or has grown, by name.

    Raises:
        ValueError: an argument is not as above.
    """

    def __init__(
        self,
        parts: Parts | Mapping[str, Any],
        buckets: Iterable[Bucket],
        *,
        weights: Weights | None = None,
        **options: Unpack[PlanOptions],
    ):
        checked = Options(buckets=as_buckets(buckets), **options)
        given: Any = {"": parts} if weights is None else parts
        (_, shares), *later = [(0, None)] if weights is None else as_phases(weights, tuple(given))
        if later:
            raise InvalidValue(
                "weights has phases, and some corpora grow; give one weight for each corpus"
            )
        self._given, self.parts = given, {n: p for n, p in given.items() if hasattr(p, "digest")}
        self._cache = WindowCache(HELD)
        begin = self._declare(0, checked, shares, options_as_json(checked, shares))
        self._set([begin])
        places = {name: Place() if name in self.parts else None for name in given}
        self._begun: tuple[Start, ...] = (Start(places, begin.schedule.taken(0)),)

    # ---- stages, which are made in order

    def _declare(self, step: int, options: Options, shares: Any, changes: Any) -> Stage:
        """A stage that only declares new options; its steps are not used."""
        _check_options(options, several=shares is not None)
        streams = tuple(self._stream(n, Place(), options) for n in range(len(self._given)))
        schedule = Schedule(step, streams, options, shares)
        return Stage(options, streams, schedule, shares, self._given, changes)

    def _stream(self, number: int, place: Place | None, options: Options) -> Stream:
        """The stream of a corpus: a chapter, or the entire corpus if it does not grow."""
        name, given = list(self._given.items())[number]
        options = options_of_streams(options, self._given)
        own: Any = {"name": name, "first": number * APART}
        if place is not None and name in self.parts:
            return Chapter(given, options, self._cache, begin=place, **own)
        grew = name in self.parts
        lengths = Lengths.of(given.whole() if grew else given)
        return Stream(lengths, options, self._cache, epoch=int(grew), **own)

    def _make(self, start: Start, before: Stage | None) -> tuple[Stage, ...]:
        """The stage that begins at `start`, with the stages of later epochs.

        Waits until it is known whether chapters follow. Streams of `before`, the stage before it,
        are used again.
        """
        declared, streams = self.last_stage(start.step), list[Stream]()
        there: dict[tuple[str, Place | None], Stream] = {
            (each.name, each.begin if isinstance(each, Chapter) else None): each
            for each in (*declared.streams, *(before.streams if before else ()))
        }
        for number, (name, place) in enumerate(start.places.items()):
            if place is not None and self.parts[name].lengths(place.part) is None:
                place = None  # the corpus is finished
            found = there.get((name, place))
            streams.append(found or self._stream(number, place, declared.options))
        until = next((each.start for each in self.stages if each.start > start.step), None)
        options, shares = declared.options, declared.weights
        schedule = Schedule(start.step, streams, options, shares, taken=start.taken, until=until)
        stage = dataclasses.replace(declared, streams=tuple(streams), schedule=schedule)
        if stage.grows:
            return (stage,)
        plan = Plan._from_stages([dataclasses.replace(stage, given=streams[0].lengths.given)])
        for later in self.stages:
            if later.start > start.step:
                new = {name: getattr(later.options, name) for name in later.changes}
                plan = plan.after(plan.next_block(later.start), **new)
        return plan.stages

    def _stages_at(self, step: int) -> tuple[Start, tuple[Stage, ...]]:
        """The last start at or before a step, and its stages; waits until they are known."""
        before = None
        while True:
            begun = self._begun
            check_first(step, begun[0].step)
            start = begun[bisect.bisect_right(begun, step, key=lambda each: each.step) - 1]
            stages = self._cache.get((self.stages, start), 0, self._make, start, before)
            if stages[-1].schedule.has(step):
                return start, stages
            before, following = stages[-1], start.after(stages[-1])
            if begun is self._begun and start is begun[-1]:
                self._begun = (*begun, following)

    def stage_at(self, step: int) -> Stage:
        """The stage of a step; waits until its rows are sealed, or the corpora are finished."""
        _, stages = self._stages_at(step)
        return stages[bisect.bisect_right(stages, step, key=lambda each: each.start) - 1]

    def after(self, step: int, *, exclude: Any = (), **changes: Any) -> Plan:
        """The plan with other options from the end of a window on.

        A chapter ends with the window of step `step - 1`, and the next chapter has the new options.
        In later epochs, which are ordinary, they apply from `step` on, or with tiers from the end
        of its block.

        Args:
            step: the first step that may differ; not before an earlier change.
            exclude: leave it out; an error while a corpus grows.
            **changes: `buckets`, and any other keyword of `Plan` except `ending`.

        Raises:
            ValueError: an argument is not as above, the plan is of a mixture, or `Plan` raises it.
        """
        step, last = require_whole("step", step, 0), self.stages[-1]
        if last.weights is not None:
            raise InvalidValue("a mixture in which a corpus grows cannot change; make another run")
        given = changes | ({"exclude": exclude} if np.size(exclude) else {})
        if wrong := [name for name in ("lengths", "weights", "exclude") if name in given]:
            raise InvalidValue(f"{wrong[0]} cannot change while a corpus grows; leave it out")
        if step < last.start:
            raise InvalidValue(
                f"step is {step:,}, and the last change of options is at step "
                f"{last.start:,}; give that step or a later one"
            )
        options = last.options.change(**changes)
        plan = object.__new__(FollowedPlan)
        plan._given, plan.parts, plan._cache = self._given, self.parts, self._cache
        plan._begun = tuple(start for start in self._begun if start.step <= step)
        plan._set([*self.stages, plan._declare(step, options, None, options.as_json(changes))])
        return plan

    def plan_of(self, step: int) -> Plan:
        """A plan of the stage of a step and of the stages of later epochs."""
        return Plan._from_stages(self._stages_at(step)[1])

    def parts_of(self, step: int) -> dict[str, range]:
        """See `Plan.parts_of`; an empty range stands for all parts of a finished corpus."""
        stage = self.stage_at(step)
        found, ends = dict.fromkeys(self.parts, range(0)), _ends(stage, step + 1)
        for stream in stage.streams:
            if isinstance(stream, Chapter):
                found[stream.name] = range(stream.begin.part, ends[stream.name].part)
        return found

    def may_wait(self, step: int) -> bool:
        """See `Plan.may_wait`: at the beginning of an interval, and of a stage."""
        stage = self.stage_at(step)
        return step == (stage.schedule.interval_around(step).start if stage.grows else stage.start)

    # ---- the data state

    def resume(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Continues from the entries of a data state, as `entries_at` returns them.

        The plan then has only the steps from the first entry on; no earlier step is planned again.

        Raises:
            ValueError: a corpus is not the one of the state, or is shorter.
        """
        start = Start.of(entries[0])
        for name, place in entries[0]["places"].items():
            if place is not None:
                _require_past(self.parts[name], place["part"], place["digest"])
                _require_past(self.parts[name], *place["last"])
        if not any((each.step, each.places) == (start.step, start.places) for each in self._begun):
            self._begun = (start,)

    def entries_at(self, step: int) -> tuple[dict[str, Any], ...]:
        """The entries of a data state after `step` batches, from the last chapter on.

        For each corpus that grows, "places" has the place where its chapter begins, the number of
        available windows, and the end of the last of them. "rows" and "owed" are those of
        `Start.taken`. In later epochs, entries as of `Plan` follow.
        """
        start, stages, ends = self._begun[0], tuple[Stage, ...](), dict[str, Place]()
        if step > start.step:
            start, stages = self._stages_at(step - 1)
            ends = _ends(stages[0], step)
        entry = dict(self.last_stage(start.step).entry)
        del entry["changes"]
        others = [each.entry for each in stages[1:] if each.start < step]
        return (entry | start.entry(ends), *map(dict, others))

    def first_epoch(self, name: str, step: int) -> tuple[np.ndarray, int]:
        """What the first epoch of a corpus that grows has, as far as it is known before a step.

        Returns the positions of each example in its batches, int64 [examples, 1 or 2], for all
        windows that are available before `step`; and the number of the first examples, all of
        whose batches are before `step`, as their chapters are over.
        """
        last = self.entries_at(step)[0]["places"][name]
        begun = [start for start in self._begun if start.step < step]
        edges = [place.part for start in begun if (place := start.places[name])]
        due = [np.zeros((0, len(self.options.buckets[-1].lengths)), np.int64)]
        for start, (part, end) in zip(
            begun, itertools.pairwise([*edges, last["last"][0]]), strict=True
        ):
            options = self.last_stage(start.step).options
            for number in range(part, end):
                sealed = self.parts[name].lengths(number)
                pieces = Pieces(sealed, options.buckets[-1].lengths, options.overflow)
                due.append(pieces.positions_per_example())
        return np.concatenate(due), last["example"]

    # ---- what is not known

    def first_step(self, epoch: int) -> int:
        """0 for epoch 0; an error for later ones, as the number of batches is not known."""
        if epoch == 0:
            return 0
        raise InvalidState(
            "the corpus grows, so its number of batches is not known yet; once it is finished, "
            "open it without follow=True"
        )

    @property
    def num_tokens(self) -> int:
        """An error; see `first_step`."""
        return self.first_step(1)

    @property
    def padding(self) -> float:
        """An error; see `first_step`."""
        return self.first_step(1)

    @property
    def batches_per_bucket(self) -> dict[Bucket, int]:
        """1 for each bucket: the number of batches is not known, and any bucket may have some."""
        return dict.fromkeys(self.buckets, 1)

    def most_segments(self) -> dict[Bucket, int]:
        """The most segments that a row of each bucket may have: one for each `align` columns."""
        most: dict[Bucket, int] = {}
        for options in (stage.options for stage in self.stages):
            for bucket in options.buckets:
                room = max(bucket.lengths[-1] // options.align, 1)
                room = min(room, options.max_segments or room)
                most[bucket] = max(most.get(bucket, 1), room)
        return most

    def between(self, first: int, last: int | None = None) -> Plan:
        """The plan itself, as its last step is not known."""
        return self

    def next_block(self, step: int) -> int:
        """`step`: options may change at any step, and apply after its window or block."""
        return require_whole("step", step, 0)

    def __repr__(self) -> str:
        return f"FollowedPlan(buckets={self.buckets}, fingerprint={self.fingerprint!r})"

    def __str__(self) -> str:
        buckets = ", ".join(map(str, self.buckets))
        return (
            f"a plan of a corpus that grows, in windows of up to {self.options.window:,} pieces; "
            f"buckets {buckets}"
        )


def _ends(stage: Stage, step: int) -> dict[str, Place]:
    """The end of the last available window of each chapter of a stage at a step, by name."""
    if not stage.grows:
        return {}
    windows = zip(stage.streams, stage.schedule.taken(step).windows, strict=True)
    return {each.name: each.last(n).end for each, n in windows if isinstance(each, Chapter)}


def _require_past(parts: Parts, number: int, then: str) -> None:
    """Raises an error if the first `number` parts of a corpus do not have the digest `then`."""
    if (now := parts.digest(number)) is None:
        raise InvalidValue(
            f"the state is of a corpus with {number:,} parts or more, and this one has fewer; it "
            "was cut short or replaced. Put back the parts that are missing, or start anew in "
            "another directory"
        )
    if now != then:
        raise InvalidValue(
            f"the first {number:,} parts of the corpus are no longer what the state was trained "
            f"on: their digest was {then} and is now {now}. Put them back, or start anew in "
            "another directory"
        )


def _check_options(options: Options, *, several: bool) -> None:
    check_options(options, several=several)
    if options.packing == "optimal":
        raise InvalidValue(
            "packing is 'optimal', which needs all lengths, and the corpus still grows; use "
            "'best_fit', or open the corpus without follow=True once it is finished"
        )
    if options.overflow == "error":
        raise InvalidValue(
            "overflow is 'error', and the longest example of a corpus that grows is not known yet; "
            "give overflow='split' (for pairs 'truncate') or 'drop'"
        )
    if options.by != "tokens" or options.ending != "repeat":
        raise InvalidValue(
            f"by is {options.by!r} and ending is {options.ending!r}; where a corpus grows, weights "
            "are shares of tokens (by='tokens'), and corpora repeat (ending='repeat')"
        )
