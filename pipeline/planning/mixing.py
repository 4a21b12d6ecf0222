"""Mixtures in which some corpora grow: what each is due of every interval, in whole batches.

An interval takes the rows that are in hand until one of the corpora that grow has none left for
another batch; that one gains a window, the first by name if several run out together. Nothing that
decides depends on what else is sealed.
"""

import bisect
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Unpack, cast

import numpy as np

from pipeline.errors import InvalidValue
from pipeline.planning.bucket import Bucket, as_buckets
from pipeline.planning.following import (
    FollowedPlan,
    FollowedSchedule,
    identity_of,
    require_past,
)
from pipeline.planning.growing import APART, Chapter, Place
from pipeline.planning.identity import fingerprint_of
from pipeline.planning.lengths import Lengths
from pipeline.planning.options import LEAST_WINDOW, Options, PlanOptions, as_phases
from pipeline.planning.order import Purpose, Quota, random_bits, random_key
from pipeline.planning.plan import Plan
from pipeline.planning.schedule import NEVER, Interval
from pipeline.planning.stage import Stage
from pipeline.planning.stream import Stream

# What is owed is counted in parts of a row, or of a token.
PARTS = 1 << 20

# An interval of corpora of which none grows has about so many batches.
STEPS = 256


@dataclasses.dataclass(frozen=True)
class MixedStart:
    """Where a stage of a mixture begins.

    Attributes:
        step: its first step.
        places: of each corpus by name, where its chapter begins; None of one that does not grow.
        windows: the windows that each chapter has had, by name.
        rows: of each length, the rows taken of each corpus, since its chapter began.
        owed: of each length, what each corpus that does not grow is owed, in `PARTS` of rows; and
            in a last line, what those that grow are owed, in `PARTS` of tokens.
    """

    step: int
    places: Mapping[str, Place | None]
    windows: Mapping[str, int]
    rows: Sequence[Sequence[int]]
    owed: Sequence[Sequence[int]]


class MixedSchedule(FollowedSchedule):
    """The steps of a stage in which corpora that grow are mixed with each other and with others.

    The stage ends with a chapter of one of them: its last rows are completed by rows of corpora
    that are finished, or else batches are short.
    """

    def __init__(
        self,
        start: MixedStart,
        streams: Sequence[Chapter | Stream],
        options: Options,
        shares: Mapping[str, Fraction],
    ):
        self.start, self._streams, self._options = start.step, streams, options
        self._shares = [shares[stream.name] for stream in streams]
        self._each_rows = np.array([bucket.rows for bucket in options.buckets])
        self.end = None
        self._known = start.step
        self._batches = np.zeros(len(options.buckets), np.int64)
        # With a column for rows that are empty.
        self._rows = np.pad(np.array(start.rows, np.int64), ((0, 0), (0, 1)))
        self._owed = [list(each) for each in start.owed]
        self._intervals, self._begun = [], []
        self._ended: int | None = None  # the stream whose chapter ended
        self.__setstate__({})

    def following(self) -> Any:
        """The `MixedStart` of the next stage, once this one has ended."""
        assert self.end is not None, "the stage has ended"
        assert self._ended is not None, "with a chapter"
        places: dict[str, Place | None] = {}
        windows: dict[str, int] = {}
        for number, stream in enumerate(self._streams):
            grows, ended = isinstance(stream, Chapter), number == self._ended
            places[stream.name] = (stream.end if ended else stream.begin) if grows else None  # type: ignore[union-attr]
            windows[stream.name] = len(stream.windows) if grows and not ended else 0  # type: ignore[union-attr]
        rows, owed = self._rows[:, :-1].copy(), [list(each) for each in self._owed]
        rows[:, self._ended] = 0
        for of_length in owed[:-1]:
            of_length[self._ended] = 0
        return MixedStart(self.end, places, windows, rows.tolist(), owed)

    def _extend(self) -> None:
        """Adds the steps of what is in hand; if that is no batch, gains a window."""
        growing = {
            n: stream
            for n, stream in enumerate(self._streams)
            if isinstance(stream, Chapter) and self._shares[n]
        }
        left, means, times = self._measure(growing)
        first = min(growing, key=lambda n: (times[n], self._streams[n].name)) if growing else None
        time = Fraction(STEPS * max(bucket.positions for bucket in self._options.buckets))
        if first is not None:
            time = times[first]
        due = self._divide(time, left, means)
        batches = [
            max(sum(of_length), 0) // int(rows)
            for of_length, rows in zip(due, self._each_rows, strict=True)
        ]
        ends = False
        if first is not None and not any(batches):
            chapter = growing[first]
            if not chapter.over:
                chapter.gain()
                return
            ends = True
            remaining = left[first]
            batches = [
                -(-max(int(remaining[g]), max(int(sum(due[g])), 0)) // int(self._each_rows[g]))
                if remaining[g]
                else 0
                for g in range(len(due))
            ]
        taken = np.zeros_like(self._rows)
        for g, number in enumerate(batches):
            places = number * int(self._each_rows[g])
            if ends and number:
                assert first is not None
                taken[g] = self._complete(due[g], int(left[first][g]), first, places, g)
            elif number:
                taken[g, :-1] = _share_out(due[g], places)
        self._account(time, due, taken, means, growing)
        if any(batches):
            self._add_interval(np.array(batches), taken)
        if ends:
            self._ended, self.end = first, self._known

    def _measure(
        self, growing: Mapping[int, Chapter]
    ) -> tuple[dict[int, np.ndarray], dict[int, list[Fraction]], dict[int, Fraction]]:
        """Of each corpus that grows: rows in hand, tokens of a row, and when they are used up."""
        left, means, times = {}, {}, {}
        for n, chapter in growing.items():
            rows, real = chapter.rows, chapter.real
            left[n] = rows - self._rows[:, n]
            means[n] = [
                Fraction(int(t), int(r)) if r else Fraction(0)
                for t, r in zip(real, rows, strict=True)
            ]
            tokens = _count_tokens(left[n], means[n])
            owed = Fraction(self._owed[-1][n], PARTS)
            times[n] = max((tokens - owed) / self._shares[n], Fraction(0))
        return left, means, times

    def _divide(
        self, time: Fraction, left: Mapping[int, np.ndarray], means: Mapping[int, list[Fraction]]
    ) -> list[list[Fraction]]:
        """The rows of each length that each corpus is due in some time, as tokens of the plan."""
        due = [[Fraction(0)] * len(self._streams) for _ in self._each_rows]
        for n, stream in enumerate(self._streams):
            share = self._shares[n]
            if not share:
                continue
            if isinstance(stream, Chapter):
                tokens = _count_tokens(left[n], means[n])
                wanted = share * time + Fraction(self._owed[-1][n], PARTS)
                part = min(max(wanted / tokens, Fraction(0)), Fraction(1)) if tokens else 0
                for g, rows in enumerate(left[n].tolist()):
                    due[g][n] = rows * Fraction(part)
            else:
                pace = share * time / max(int(stream.whole.layout.real.sum()), 1)
                for g, rows in enumerate(stream.whole.rows.tolist()):
                    due[g][n] = max(rows * pace + Fraction(self._owed[g][n], PARTS), Fraction(0))
        return due

    def _complete(
        self, due: Sequence[Fraction], rest: int, first: int, places: int, length: int
    ) -> np.ndarray:
        """The rows of each corpus in the last batches of a chapter, which take all its rows."""
        taken = np.array([int(each) for each in due] + [0])
        taken[first] = rest
        others = [
            (share, -n)
            for n, (share, stream) in enumerate(zip(self._shares, self._streams, strict=True))
            if isinstance(stream, Stream) and share and stream.whole.rows[length]
        ]
        missing = places - int(taken.sum())
        assert missing >= 0, "all that is due has a place"
        taken[-max(others)[1] if others else -1] += missing
        return taken

    def _account(
        self,
        time: Fraction,
        due: Sequence[Sequence[Fraction]],
        taken: np.ndarray,
        means: Mapping[int, list[Fraction]],
        growing: Mapping[int, Chapter],
    ) -> None:
        """Notes what each corpus is owed after an interval."""
        if not taken.any():
            return
        for n, share in enumerate(self._shares):
            if n in growing:
                tokens = _count_tokens(taken[:, n], means[n])
                self._owed[-1][n] += int((share * time - tokens) * PARTS)
            elif share:
                for g in range(len(due)):
                    stream: Any = self._streams[n]
                    pace = share * time / max(int(stream.whole.layout.real.sum()), 1)
                    more = int(stream.whole.rows[g]) * pace - int(taken[g, n])
                    self._owed[g][n] += int(more * PARTS)

    def _add_interval(self, batches: np.ndarray, taken: np.ndarray) -> None:
        steps, rotation = int(batches.sum()), 0
        if self._options.shuffle:
            key = random_key(self._options.seed, "buckets", "mixture")
            bits = int(random_bits(key, Purpose.BUCKETS, 1, epoch=self._known)[0])
            rotation = bits % steps
        start = self._known
        ends = {each.name: each.end for each in self._streams if isinstance(each, Chapter)}
        self._begun.append((start, ends))
        self._intervals.append(
            Interval(
                start,
                self._batches,
                self._rows,
                np.arange(len(batches)),
                self._each_rows,
                Quota(batches.tolist()),
                [Quota(each if any(each) else [1, *each[1:]]) for each in taken.tolist()],
                np.full_like(self._rows, NEVER),
                rotation,
                end=start + steps,
            )
        )
        self._batches, self._rows = self._batches + batches, self._rows + taken
        self._known = start + steps

    def last_windows(self, step: int) -> dict[str, Place]:
        """Of each corpus that grows, the end of the windows in hand at the step before."""
        number = bisect.bisect_left(self._begun, step, key=lambda each: each[0]) - 1
        if number >= 0:
            return self._begun[number][1]
        return {each.name: each.begin for each in self._streams if isinstance(each, Chapter)}

    def at(self, step: int) -> tuple[int, list[tuple[int, int, int]]]:
        """See `Schedule.at`."""
        bucket, rows = self._interval(step).at(step)
        return bucket, [each for each in rows if each[0] < len(self._streams)]

    def before(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """As `FollowedSchedule.before`."""
        if step == self.start:
            base = self._intervals[0].rows if self._intervals else self._rows
            return np.zeros_like(self._batches), base[:, :-1]
        batches, rows = self._interval(step - 1).before(step)
        return batches, rows[:, :-1]

    def epoch_of(self, step: int) -> int:
        """The least epoch of the corpora that have a share."""
        rows = self.before(step)[1]
        return min(
            0 if isinstance(stream, Chapter) else stream.epoch + stream._count_times(rows[:, n])[0]
            for n, (stream, share) in enumerate(zip(self._streams, self._shares, strict=True))
            if share
        )


class FollowedMixture(FollowedPlan):
    """All batches of a mixture of corpora of which some grow.

    The examples of corpus number `n` have numbers from `n * APART` on.

    Args:
        corpora: by name, the sealed parts of one that grows, or lengths or a corpus as for `Plan`.
        buckets: as for `Plan`, one of each length.
        weights: the weight of each corpus by name, in tokens.
        **options: as for `FollowedPlan`.

    Raises:
        ValueError: an argument is not as above.
    """

    def __init__(
        self,
        corpora: Mapping[str, Any],
        buckets: Iterable[Bucket],
        *,
        weights: Mapping[str, float],
        **options: Unpack[PlanOptions],
    ):
        begin = Options(buckets=as_buckets(buckets), **options)
        if len(begin.groups) < len(begin.buckets) or begin.by != "tokens":
            raise InvalidValue(
                f"buckets are {', '.join(map(str, begin.buckets))} and by is {begin.by!r}; a "
                "mixture of corpora that grow has one bucket of each length, and by='tokens'"
            )
        if begin.ending != "repeat":
            raise InvalidValue(f"ending is {begin.ending!r}; corpora that grow take 'repeat' alone")
        phases = as_phases(weights, tuple(corpora))
        if len(phases) > 1:
            raise InvalidValue(
                "weights has phases, and some corpora grow; give the weights of all steps"
            )
        self._weights = phases[0][1]
        grows = {name: hasattr(each, "digest") for name, each in corpora.items()}
        window = min(begin.window, max(begin.window // len(corpora), LEAST_WINDOW))
        begin = dataclasses.replace(begin, window=window)
        sizes = len(begin.groups), len(corpora)
        start = MixedStart(
            0,
            {name: Place() if each else None for name, each in grows.items()},
            dict.fromkeys(corpora, 0),
            np.zeros(sizes, np.int64).tolist(),
            np.zeros((sizes[0] + 1, sizes[1]), np.int64).tolist(),
        )
        parts: Any = corpora
        starts: Any = [start]
        self._set_changes(parts, [(0, begin.as_json())], starts)

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names of the corpora, in order."""
        return tuple(self._weights)

    def _is_finished(self, start: Any) -> dict[str, bool]:
        """Of each corpus, whether it grew and no part follows the beginning of a stage."""
        corpora: Any = self.parts
        return {
            name: place is not None and corpora[name].lengths(place.part) is None
            for name, place in start.places.items()
        }

    def _begin_stage(self, number: int, start: Any, finished: Any) -> Stage:
        options, corpora = self.options_at(start.step), cast(Any, self.parts)
        before: Any = self._made.get(number - 1)
        # A stage that is not at its end, because it was made again, may still gain windows.
        ended = before is not None and before.schedule.end is not None
        there = {each.name: each for each in before.streams} if before is not None and ended else {}
        streams: list[Any] = []
        for n, (name, place) in enumerate(start.places.items()):
            had = there.get(name)
            own: Any = {"name": name, "first": n * APART, "by_row": True}
            if place is not None and not finished[name]:
                goes_on = isinstance(had, Chapter) and had.begin == place
                if not goes_on or len(cast(Any, had).windows) != start.windows[name]:
                    had = Chapter(corpora[name], options, self._cache, begin=place, **own)
                    for _ in range(start.windows[name]):
                        had.gain()
                streams.append(had)
            elif isinstance(had, Stream):
                streams.append(had)
            else:
                grew = hasattr(corpora[name], "whole")
                given = corpora[name].whole() if grew else corpora[name]
                streams.append(Stream(Lengths.of(given), options, epoch=int(grew), **own))
        schedule: Any = MixedSchedule(start, streams, options, self._weights)
        return Stage(options, tuple(streams), schedule, self._weights, self.parts, self._cache, {})

    def parts_of(self, step: int) -> dict[str, range]:  # type: ignore[override]
        """As `FollowedPlan.parts_of`, of each corpus that grows or has grown, by name."""
        schedule: Any = self.stage_at(step).schedule
        last, found = schedule.last_windows(step + 1), dict[str, range]()
        for stream in self.stage_at(step).streams:
            if isinstance(stream, Chapter):
                found[stream.name] = range(stream.begin.part, last[stream.name].part)
            elif stream.epoch:
                found[stream.name] = range(0)  # all of a corpus that is finished
        return found

    def after(self, step: int, **changes: Any) -> Plan:
        """Not while corpora of a mixture grow."""
        raise InvalidValue("a mixture in which a corpus grows cannot change; make another run")

    # ---- the data state

    @property
    def entries(self) -> tuple[dict[str, Any], ...]:
        """As `Plan.entries`."""
        identity = self._identity
        return ({"from": 0, "fingerprint": fingerprint_of(identity), "identity": identity},)

    @property
    def _identity(self) -> dict[str, Any]:
        """The options, the weights, and the lengths of corpora that do not grow, as JSON."""
        found = dict(identity_of(self.options))
        found["corpora"] = {}
        for name, share in self._weights.items():
            one: Any = cast(Any, self.parts)[name]
            of_one = {"weight": f"{share}"}
            if not hasattr(one, "digest"):
                of_one["lengths"] = Lengths.of(one).digest
            found["corpora"][name] = of_one
        return found

    def entries_at(self, step: int) -> tuple[dict[str, Any], ...]:
        """The entry of a data state after `step` batches: where the stage of the last one begins.

        Of each corpus that grows, "places" has where its chapter begins, the windows that it has
        had, and the end of the last window that has begun; "rows" and "owed" are those of
        `MixedStart`.
        """
        starts: Any = self._starts_of_stages
        start, last = starts[0], dict[str, Place]()
        if step > start.step:
            schedule: Any = self.stage_at(step - 1).schedule
            starts = self._starts_of_stages
            number = bisect.bisect_right(starts, step - 1, key=lambda each: each.step) - 1
            start, last = starts[number], schedule.last_windows(step)
        places: dict[str, Any] = {}
        for name, place in start.places.items():
            places[name] = None
            if place is not None:
                end: Any = last.get(name, place)
                where = {"windows": start.windows[name], "last": [end.part, end.digest]}
                places[name] = dataclasses.asdict(place) | where
        (entry,) = self.entries
        more = {"places": places, "rows": start.rows, "owed": start.owed}
        return (entry | {"from": start.step} | more,)

    def resume(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """As `FollowedPlan.resume`."""
        first, *_ = entries
        places: dict[str, Place | None] = {}
        windows: dict[str, int] = {}
        for name, given in first["places"].items():
            places[name], windows[name] = None, 0
            if given is not None:
                kept = {each.name: given[each.name] for each in dataclasses.fields(Place)}
                place, (part, digest) = Place(**kept), given["last"]
                places[name], windows[name] = place, given["windows"]
                require_past(cast(Any, self.parts)[name], place.part, place.digest)
                require_past(cast(Any, self.parts)[name], part, digest)
        rows, owed = ([list(each) for each in first[name]] for name in ("rows", "owed"))
        start: Any = MixedStart(first["from"], places, windows, rows, owed)
        self._begin_at(start)


def _count_tokens(rows: np.ndarray, means: Sequence[Fraction]) -> Fraction:
    """The tokens of rows of each length, from the mean of each."""
    return sum((int(n) * mean for n, mean in zip(rows, means, strict=True)), Fraction(0))


def _share_out(due: Sequence[Fraction], places: int) -> list[int]:
    """Places for rows that are due, of which there are at least as many: by largest remainders.

    >>> _share_out([Fraction(7, 2), Fraction(9, 2)], 6)
    [3, 3]
    """
    total = sum(due, Fraction(0))
    exact = [each * places / total for each in due]
    found = [int(each) for each in exact]
    by_remainder = sorted(range(len(due)), key=lambda n: (found[n] - exact[n], n))
    for n in by_remainder[: places - sum(found)]:
        found[n] += 1
    return found
