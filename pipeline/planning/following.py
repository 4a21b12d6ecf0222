"""Followed plans: plans of corpora that grow, whose steps become known in order.

A plan is followed chapter by chapter: each stage begins where a chapter does, and its schedule adds
an interval when the rows in hand are used up. Windows are waited for, and which of them are there
already decides nothing. So a step is the same whoever asks for it, at any time.
"""

import bisect
import collections
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Unpack

import numpy as np

from pipeline.errors import InvalidState, InvalidValue, OutOfRange, require_whole
from pipeline.fs.fork import Handles
from pipeline.planning.bucket import Bucket, as_buckets
from pipeline.planning.cache import WindowCache
from pipeline.planning.growing import CHAPTER, Chapter, Parts, Place
from pipeline.planning.identity import fingerprint_of
from pipeline.planning.lengths import Lengths
from pipeline.planning.options import VERSION, Options, PlanOptions
from pipeline.planning.order import random_key
from pipeline.planning.plan import Plan
from pipeline.planning.schedule import Interval, Schedule, count_all_batches, cut_intervals
from pipeline.planning.stage import Stage
from pipeline.planning.stream import Stream

# The pieces of windows that are kept, if no more are needed at a time.
HELD = 1 << 18

# The stages that are kept: readers are in two at a time.
STAGES = 3


class Start(NamedTuple):
    """Where a stage begins: its first step, and the place of its chapter."""

    step: int
    place: Place


class FollowedSchedule(Handles):
    """The steps of a stage, in intervals that are added as windows are gained.

    Attributes:
        start: the first step.
        end: one past the last step, once the chapter is over; None before.
        known: the steps that are known by now.
    """

    handles = ()

    def __init__(self, start: int, chapter: Chapter, options: Options, change: int | None):
        """At step `change`, if any, or in the window of the step before, the chapter ends."""
        self.start, self.chapter, self._options, self._change = start, chapter, options, change
        self.end: int | None = None
        self._groups = options.groups
        self._rows_per_batch = np.array([bucket.rows for bucket, *_ in self._groups])
        self._first = np.cumsum([0, *map(len, self._groups[:-1])])  # the bucket of each length
        self._known = start
        self._batches = np.zeros(len(options.buckets), np.int64)
        self._rows = np.zeros(len(self._groups), np.int64)
        self._intervals: list[Interval] = []
        # Of each window, its first step and its end; in a mixture, the end of each corpus.
        self._begun: list[tuple[int, Any]] = []
        self.__setstate__({})

    def reach(self, step: int) -> bool:
        """Whether the stage has a step; gains windows until that is known."""
        while step >= self._known and self.end is None:
            with self._lock:
                if step >= self._known and self.end is None:
                    self._extend()
        return step < self._known

    def _extend(self) -> None:
        """Adds the steps of the next window; at the end of the chapter, those of all rows left."""
        chapter, before = self.chapter, self._rows
        cut = self._change is not None and self._known >= self._change
        gained = not cut and chapter.gain()
        over = cut or chapter.over
        if over:
            rows, counts = chapter.rows, count_all_batches(chapter.rows - before, self._groups)
        else:
            whole = (chapter.rows - before) // self._rows_per_batch
            rows, counts = before + whole * self._rows_per_batch, np.zeros_like(self._batches)
            counts[self._first] = whole
        if counts.any():
            key = random_key(self._options.seed, "buckets", chapter.end.part, gained)
            self._begun.append((self._known, chapter.end))
            self._intervals += cut_intervals(
                self._options, key, 0, counts, self._known, self._batches, before, rows
            )
        self._batches, self._rows = self._batches + counts, rows
        if over:
            self.end = self._known + int(counts.sum())
        self._known += int(counts.sum())  # last: threads read it without the lock

    def following(self) -> "Start":
        """Where the next stage begins, once this one has ended."""
        assert self.end is not None, "the stage has ended"
        return Start(self.end, self.chapter.end)

    def _interval(self, step: int) -> Interval:
        number = bisect.bisect_right(self._intervals, step, key=lambda each: each.start) - 1
        return self._intervals[number]

    def at(self, step: int) -> tuple[int, list[tuple[int, int, int]]]:
        """See `Schedule.at`."""
        return self._interval(step).at(step)

    def before(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """As `Schedule.before`; batches and rows are counted from the first step of the stage."""
        if step == self.start:
            return np.zeros_like(self._batches), np.zeros_like(self._rows)[:, None]
        return self._interval(step - 1).before(step)

    def last_window(self, step: int) -> Place:
        """The end of the last window that steps before `step` have rows of."""
        number = bisect.bisect_left(self._begun, step, key=lambda each: each[0]) - 1
        return self._begun[number][1] if number >= 0 else self.chapter.begin

    def epoch_of(self, step: int) -> int:
        """See `Schedule.epoch_of`."""
        return 0

    def epoch_around(self, step: int) -> range:
        """The steps that are known as soon as `step` is: rows of others are not dealt with it."""
        starts = [start for start, _ in self._begun]
        number = bisect.bisect_right(starts, step)
        return range(starts[number - 1], starts[number] if number < len(starts) else self._known)

    def known_around(self, step: int, steps: range) -> range:
        """See `Schedule.known_around`."""
        around = self.epoch_around(step)
        return range(max(around.start, steps.start), min(around.stop, steps.stop))

    def epochs(self, step: int) -> list[int]:
        """See `Schedule.epochs`."""
        return [0]


class FollowedPlan(Plan, Handles):
    """All batches of a corpus that grows: of what is sealed, and of what will be.

    The batches are the same whenever they are asked for: a step whose rows are not yet sealed is
    waited for. Examples are planned in windows, in the order in which they are sealed. Once the
    corpus is finished, later epochs are ordinary ones of all of it.

    `after` takes options from the end of a window on, which ends the chapter; they may change at
    steps that are not yet known.

    Args:
        parts: the sealed parts.
        buckets: as for `Plan`.
        **options: as for `Plan`. packing="optimal" and overflow="error" need the whole corpus.

    Raises:
        ValueError: an argument is not as above.
    """

    handles = ("_cache", "_made")
    follows = True
    stages = ()  # they are made when a step of theirs is asked for
    finite = False  # pyright: ignore
    names = ("",)  # pyright: ignore
    _last_epoch = float("inf")  # pyright: ignore

    def __init__(self, parts: Parts, buckets: Iterable[Bucket], **options: Unpack[PlanOptions]):
        begin = Options(buckets=as_buckets(buckets), **options)
        self._set_changes(parts, [(0, begin.as_json())], [Start(0, Place())])

    def _set_changes(
        self, parts: Parts, changes: Sequence[tuple[int, dict[str, Any]]], starts: Sequence[Start]
    ) -> None:
        self.parts, self._changes, self._starts_of_stages = parts, [*changes], [*starts]
        (_, begin), *later = changes
        self._options = [(0, Options(**_read_options(begin)))]
        for step, each in later:
            self._options.append((step, self._options[-1][1].change(**_read_options(each))))
        for _, options in self._options:
            _check_options(options)
        self.__setstate__({})

    def restart(self) -> None:
        """Forgets what was planned; see `Handles`."""
        super().restart()
        self._cache = WindowCache(HELD)
        # By the number of their start; the last may be a plan of whole epochs.
        self._made: collections.OrderedDict[int, Stage | Plan] = collections.OrderedDict()

    def stage_at(self, step: int) -> Stage:
        """The stage of a step; waits until its rows are sealed, or the corpus is finished."""
        while True:
            starts = self._starts_of_stages
            if step < starts[0].step:
                raise OutOfRange(
                    f"step is {step:,}, and this plan goes on from a state of which it knows steps "
                    f"from {starts[0].step:,} on"
                )
            number = bisect.bisect_right(starts, step, key=lambda each: each.step) - 1
            stage = self._make(number, starts[number])
            if isinstance(stage, Plan):
                return stage.stage_at(step)
            schedule: Any = stage.schedule
            if schedule.reach(step):
                return stage
            following = schedule.following()
            with self._lock:
                if starts is self._starts_of_stages and number == len(starts) - 1:
                    self._starts_of_stages = [*starts, following]

    def _make(self, number: int, start: Start) -> Stage | Plan:
        """The stage that begins at `start`, or the plan of whole epochs."""
        if (found := self._made.get(number)) is not None:
            return found
        finished = self._is_finished(start)  # waits: not under the lock
        with self._lock:
            if number not in self._made:
                self._made[number] = self._begin_stage(number, start, finished)
                for oldest in list(self._made)[:-STAGES]:
                    del self._made[oldest]
            return self._made[number]

    def options_at(self, step: int) -> Options:
        """The options that a chapter has which begins at a step."""
        return [each for start, each in self._options if start <= step][-1]

    def _is_finished(self, start: Start) -> Any:
        """Whether no part follows the beginning of a stage; waits until that is known."""
        return self.parts.lengths(start.place.part) is None

    def _begin_stage(self, number: int, start: Start, finished: Any) -> Stage | Plan:
        return self._plan_whole(start) if finished else self._begin_chapter(start)

    def _begin_chapter(self, start: Start) -> Stage:
        options = self.options_at(start.step)
        chapter = Chapter(self.parts, options, self._cache, begin=start.place)
        change = next((step for step, _ in self._options if step > start.step), None)
        schedule: Any = FollowedSchedule(start.step, chapter, options, change)
        streams: Any = (chapter,)
        return Stage(options, streams, schedule, None, self.parts, self._cache, {})

    def _plan_whole(self, start: Start) -> Plan:
        options, given = self.options_at(start.step), self.parts.whole()
        streams = (Stream(Lengths.of(given), options, epoch=1),)
        schedule = Schedule(start.step, streams, options)
        changes = _shorten(options.as_json())
        stage = Stage(options, streams, schedule, None, given, self._cache, changes)
        plan = Plan._from_stages([stage])
        for step, each in self._changes:
            if step > start.step:
                plan = plan.after(step, **_read_options(each))
        return plan

    def after(self, step: int, *, exclude: Any = (), **changes: Any) -> Plan:
        """The plan that goes on with other options from the end of a window on.

        A chapter ends with the window of step `step - 1`, and the next one has the new options. Of
        later epochs, which are ordinary ones, they hold from `step` on, as in `Plan.after`.

        Args:
            step: the first step that may differ; not before an earlier change.
            exclude: not for a corpus that grows.
            **changes: `buckets`, and any other keyword of `Plan` except `ending`.

        Raises:
            ValueError: an argument is not as above, or `Plan` raises it.
        """
        step = require_whole("step", step, 0)
        given = changes | ({"exclude": exclude} if np.size(exclude) else {})
        if wrong := [name for name in ("lengths", "weights", "exclude") if name in given]:
            raise InvalidValue(f"{wrong[0]} cannot change while a corpus grows; leave it out")
        if step < self._changes[-1][0]:
            raise InvalidValue(
                f"step is {step:,}, and the last change of options is at step "
                f"{self._changes[-1][0]:,}; give that step or a later one"
            )
        new = self.options_at(step).change(**changes).as_json(changes)
        plan = object.__new__(FollowedPlan)
        starts = [start for start in self._starts_of_stages if start.step <= step]
        plan._set_changes(self.parts, [*self._changes, (step, new)], starts)
        return plan

    def parts_of(self, step: int) -> range:
        """The numbers of the parts that a step and those before it in its chapter have rows of."""
        stage, starts = self.stage_at(step), self._starts_of_stages
        if not isinstance(stage.schedule, FollowedSchedule):
            return range(starts[-1].place.part)
        return range(stage.schedule.chapter.begin.part, stage.schedule.last_window(step + 1).part)

    # ---- the data state

    def resume(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Goes on from the entries of a data state, as of `entries_at`.

        Steps before the first are then unknown. Nothing before it is planned again.

        Raises:
            ValueError: the corpus is not the one of the state, or shorter.
        """
        first, *_ = entries
        place, last = Place(**first["place"]), first["last"]
        require_past(self.parts, place.part, place.digest)
        require_past(self.parts, last["part"], last["digest"])
        self._begin_at(Start(first["from"], place))

    def _begin_at(self, start: Start) -> None:
        """Makes a start the first that is known, unless it is known already."""
        with self._lock:
            if start not in self._starts_of_stages:
                self._starts_of_stages = [start]
                self._made.clear()

    def entries_at(self, step: int) -> tuple[dict[str, Any], ...]:
        """The entries of a data state after `step` batches: that of the chapter of the last one.

        "place" is where it begins, and "last" the end of the last window that has begun. In later
        epochs, entries of `Plan` follow "place" and "last", which are the end of the corpus.
        """
        starts = self._starts_of_stages
        if step <= starts[0].step:
            return (_state_entry(starts[0], identity_of(self.options_at(step)), starts[0].place),)
        stage, starts = self.stage_at(step - 1), self._starts_of_stages
        number = bisect.bisect_right(starts, step - 1, key=lambda each: each.step) - 1
        start = starts[number]
        if isinstance(stage.schedule, FollowedSchedule):
            identity, last = identity_of(stage.options), stage.schedule.last_window(step)
            return (_state_entry(start, identity, last),)
        plan = self._make(number, start)
        assert isinstance(plan, Plan), "the stage is one of its own"
        first, *others = plan.entries_at(step)
        return (_state_entry(start, first["identity"], start.place), *others)

    @property
    def changes(self) -> list[tuple[int, dict[str, Any]]]:
        """As `Plan.changes`."""
        return [(step, _shorten(each)) for step, each in self._changes]

    @property
    def entries(self) -> tuple[dict[str, Any], ...]:
        """As `Plan.entries`, one for each change of options."""
        found = []
        for number, ((start, options), (_, new)) in enumerate(
            zip(self._options, self.changes, strict=True)
        ):
            identity = identity_of(options)
            entry = {"from": start, "fingerprint": fingerprint_of(identity), "identity": identity}
            found.append(entry | ({"changes": new} if number else {}))
        return tuple(found)

    @property
    def identity(self) -> Any:  # pyright: ignore
        """The options; which examples there are is not known, and in no identity."""
        each = [{"from": entry["from"], **entry["identity"]} for entry in self.entries]
        return self.entries[0]["identity"] if len(each) == 1 else each

    @classmethod
    def replay(cls, lengths: Any, changes: Iterable[tuple[int, Mapping[str, Any]]]) -> Plan:
        """As `Plan.replay`; `lengths` are the sealed parts."""
        (_, begin), *later = changes
        first = _read_options(begin)
        plan: Plan = cls(lengths, first.pop("buckets"), **first)
        for step, each in later:
            plan = plan.after(step, **_read_options(each))
        return plan

    def between(self, first: int, last: int | None = None) -> Plan:
        """The plan itself: which steps it will have is not known."""
        return self

    # ---- what is not known

    def first_step(self, epoch: int) -> int:
        """0 for epoch 0; an error for another one: nobody knows how many batches there will be."""
        if epoch == 0:
            return 0
        raise InvalidState(
            "the corpus grows, so nobody knows how many batches it will have; once it is finished, "
            "open it without follow=True for figures of the whole"
        )

    def later_epochs(self, step: int) -> Plan:
        """The plan of whole epochs that has a step, of a corpus that is finished."""
        self.stage_at(step)
        number = bisect.bisect_right(self._starts_of_stages, step, key=lambda each: each.step) - 1
        found = self._make(number, self._starts_of_stages[number])
        assert isinstance(found, Plan), "the step is of a later epoch"
        return found

    # ---- figures

    @property
    def num_tokens(self) -> int:
        """An error; see `first_step`."""
        return self.first_step(1)

    @property
    def padding(self) -> float:
        """An error; see `first_step`."""
        return self.first_step(1)

    @property
    def max_position(self) -> int:
        """The largest position that a batch may have; of split examples there is none but int32."""
        longest = max(max(bucket.lengths) for bucket in self.buckets)
        split = any(options.overflow == "split" for _, options in self._options)
        return (1 << 31) - 1 if split else longest - 1

    @property
    def options(self) -> Options:
        """The options after all changes."""
        return self._options[-1][1]

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """All buckets, ascending by length; of equal lengths, those with more rows come first."""
        every = {bucket for _, options in self._options for bucket in options.buckets}
        return tuple(sorted(every, key=lambda bucket: bucket.order))

    @property
    def batches_per_bucket(self) -> dict[Bucket, int]:
        """1 for each bucket: how many batches it will have is unknown, and each may have some."""
        return dict.fromkeys(self.buckets, 1)

    def most_segments(self) -> dict[Bucket, int]:
        """The most segments that a row of each bucket may have: one for each `align` columns."""
        most: dict[Bucket, int] = {}
        for _, options in self._options:
            for bucket in options.buckets:
                room = max(bucket.lengths[-1] // options.align, 1)
                room = min(room, options.max_segments or room)
                most[bucket] = max(most.get(bucket, 1), room)
        return most

    def next_block(self, step: int) -> int:
        """`step`: options may change there, and chapters take them when they can."""
        return require_whole("step", step, 0)

    def __repr__(self) -> str:
        return f"FollowedPlan(buckets={self.buckets}, fingerprint={self.fingerprint!r})"

    def __str__(self) -> str:
        options = self.options
        buckets = ", ".join(map(str, self.buckets))
        return (
            f"a plan of a corpus that grows, in windows of up to {options.window:,} pieces; "
            f"buckets {buckets}"
        )


def require_past(parts: Parts, number: int, then: str) -> None:
    """Refuses a corpus whose parts before a number do not have the digest `then`."""
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


def _state_entry(start: Start, identity: dict[str, Any], last: Place) -> dict[str, Any]:
    return {
        "from": start.step,
        "fingerprint": fingerprint_of(identity),
        "identity": identity,
        "place": dataclasses.asdict(start.place),
        "last": {"part": last.part, "digest": last.digest},
    }


@functools.lru_cache(maxsize=16)
def identity_of(options: Options) -> dict[str, Any]:
    """Everything that the batches of a chapter depend on but its examples, as JSON."""
    found = {"plan": VERSION, "chapter": CHAPTER, **_shorten(options.as_json())}
    found["buckets"] = "+".join(map(str, options.buckets))
    return found


def _shorten(options: dict[str, Any]) -> dict[str, Any]:
    """Options as JSON without those of several corpora."""
    return {name: value for name, value in options.items() if name not in ("by", "ending")}


def _read_options(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Options from their JSON."""
    found = dict(changes)
    if "buckets" in found:
        found["buckets"] = tuple(Bucket(*shape) for shape in found["buckets"])
    return found


def _check_options(options: Options) -> None:
    if options.packing == "optimal":
        raise InvalidValue(
            "packing is 'optimal', which needs all lengths, and the corpus still grows; use "
            "'best_fit', or open the corpus without follow=True once it is finished"
        )
    if options.overflow == "error":
        raise InvalidValue(
            "overflow is 'error', and nobody knows how long the examples of a corpus that grows "
            "will be; give overflow='split' (of pairs 'truncate') or 'drop'"
        )
