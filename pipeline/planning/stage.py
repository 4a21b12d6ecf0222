"""Stages: a stage says how batches are made from a step on. A plan is a list of stages."""

import copy
import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any, Unpack

import numpy as np

from pipeline.errors import DoesNotFit, InvalidValue, counted
from pipeline.fs.fork import Handles
from pipeline.planning.assembly import Assembly
from pipeline.planning.bucket import PAIR
from pipeline.planning.cache import WindowCache
from pipeline.planning.growing import APART, Place, first_examples, refuse_exclude
from pipeline.planning.identity import fingerprint_of
from pipeline.planning.lengths import (
    NO_EXAMPLES,
    Exclude,
    Lengths,
    as_corpora,
    exclude_from,
    select,
    take_first,
)
from pipeline.planning.options import (
    LEAST_WINDOW,
    VERSION,
    Changes,
    Options,
    as_phases,
)
from pipeline.planning.schedule import Schedule, Taken
from pipeline.planning.stream import Stream

# The cache holds windows with this many pieces; more if needed at a time. If a corpus grows, it
# holds fewer, as windows are smaller.
CACHED, HELD = 1 << 22, 1 << 18


class Stage(Handles):
    """The options of a plan from a step on, and the streams and the schedule that they give.

    Where a corpus grows, these are made when one of its steps is needed, since what the stage
    before it leaves is not known earlier.

    Attributes:
        start: the first step.
        options: the options.
        weights: the share of each of several corpora, by name; None for one corpus.
        given: the lengths or corpora of the plan, with corpora that have joined.
        members: the lengths of each corpus by name.
        firsts: the number in the plan of the first example of each corpus: int64 [corpora].
        changes: the changes of this stage, as keywords of `Plan.after` in JSON, with `examples`
            (their number from here on) instead of `lengths`. In the first stage, all options.
        replans: whether what the stage before it leaves of epochs is planned again, by new streams;
            else it has other weights than that, and perhaps more corpora.
        number: how often that was done up to this stage; it selects the random bits of streams.
    """

    def __init__(
        self,
        start: int,
        options: Options,
        members: Mapping[str, Lengths],
        weights: Mapping[str, Fraction] | None,
        given: Any,
        changes: Mapping[str, Any],
        *,
        before: "Stage | None" = None,
        replan: bool = True,
    ):
        self.start, self.options, self.weights, self.given = start, options, weights, given
        self.members, self.changes = members, changes
        self.grows = _any_grows(members)
        rooms = [APART if each.grows else len(each) for each in members.values()]
        self.firsts = first_examples(rooms)[:-1]
        self._before, self.replans = before, replan
        self._origin: Origin | None = None
        self.number: int = 0 if before is None else before.number + replan
        self._made: tuple[tuple[Stream, ...], Schedule] | None = None
        self._assembly: Assembly | None = None
        self.__setstate__({})
        if before is None or not self.grows:
            self._make()

    def _make(self) -> tuple[tuple[Stream, ...], Schedule]:
        """The streams and the schedule; waits until the steps before `start` are known."""
        if self._made is None:
            with self._lock:
                if self._made is None:
                    self._made = self._plan()
        return self._made

    def _plan(self) -> tuple[tuple[Stream, ...], Schedule]:
        every = self.options, self.weights
        if self._before is None:
            streams = make_streams(self, (), None)
            return streams, Schedule(self.start, streams, *every)
        before = self._before.schedule
        taken = before.taken(self.start)
        streams = make_streams(self, self._before.streams, taken if self.replans else None)
        left = None if self.replans else taken
        return streams, Schedule(self.start, streams, *every, before, taken=left)

    @property
    def streams(self) -> tuple[Stream, ...]:
        """One for each corpus, in order; see `_make`."""
        return self._make()[0]

    @property
    def schedule(self) -> Schedule:
        """The bucket and the rows of each step; see `_make`."""
        return self._make()[1]

    @property
    def num_examples(self) -> int:
        """Examples of all corpora, including those left out; those of growing ones do not count."""
        return int(self.firsts[-1]) + len([*self.members.values()][-1])

    @property
    def excluded(self) -> np.ndarray:
        """The examples that are left out, numbered over all corpora: int64, ascending."""
        each = zip(self.members.values(), self.firsts, strict=True)
        return np.concatenate([one.excluded + first for one, first in each])

    @property
    def end(self) -> int | None:
        """One past the last step of the schedule; None if it never ends."""
        return None if self.grows else self.schedule.end

    @property
    def max_position(self) -> int:
        """The largest position in any row, from 0; where a corpus grows, an upper bound."""
        if not self.grows:
            return max(stream.max_position for stream in self.streams)
        if self.options.overflow == "split":  # examples have no limit but that of int32
            return (1 << 31) - 1
        return max(max(bucket.lengths) for bucket in self.options.buckets) - 1

    @property
    def cuts(self) -> int:
        """The number of pieces that an epoch of each corpus cuts to fill rows."""
        return int(sum(stream.whole.layout.cuts.sum() for stream in self.streams))

    @property
    def assembly(self) -> Assembly:
        """The batches of each step."""
        if (found := self._assembly) is None:
            found = self._assembly = Assembly(self.streams, self.schedule, self.options)
        return found

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that the batches depend on, as JSON."""
        found: dict[str, Any] = {"plan": VERSION, **self.options.as_json()}
        found["buckets"] = "+".join(map(str, self.options.buckets))
        if (names := self.options.names) != PAIR[: len(names)]:
            found["sides"] = [*names]
        del found["window"]  # each stream has its own
        for name in ("align", "cost"):
            if found[name] == 1:  # it has no effect
                del found[name]
        own = self._identities()
        if self.weights is None:
            del found["by"], found["ending"]
            return found | own[""]
        corpora = {name: {**own[name], "weight": f"{self.weights[name]}"} for name in own}
        return found | {"corpora": corpora}

    def _identities(self) -> dict[str, dict[str, Any]]:
        """What the rows of each corpus depend on, by name. Where one grows, it never waits."""
        if not self.grows:
            return {stream.name: stream.identity for stream in self.streams}
        window = options_of_streams(self.options, self.members).window
        return {
            name: {"window": window} | ({} if each.grows else {"lengths": each.digest})
            for name, each in self.members.items()
        }

    @functools.cached_property
    def entry(self) -> Mapping[str, Any]:
        """The stage's entry in the data state."""
        fingerprint = fingerprint_of(self.identity)
        return {"from": self.start, "fingerprint": fingerprint, "identity": self.identity}

    # ---- while corpora grow

    @property
    def origin(self) -> "Origin":
        """The stage whose rest its streams may begin with, and what was taken of its streams."""
        if self._origin is None:
            before = self._before
            assert before is not None, "the first stage has no rest"
            replans = (before, before.schedule.taken(self.start)) if self.replans else None
            self._origin = replans or before.origin
        return self._origin

    def remake(
        self,
        *,
        before: "Stage | None" = None,
        origin: "Origin | None" = None,
        made: tuple[tuple[Stream, ...], Schedule] | None = None,
    ) -> "Stage":
        """The same stage after another one; or with the streams and the schedule `made`."""
        stage = copy.copy(self)
        stage._before, stage._origin, stage._made, stage._assembly = before, origin, made, None
        return stage

    @classmethod
    def begin(
        cls,
        lengths: Any,
        options: Options,
        weights: Mapping[str, Fraction] | None,
        exclude: Exclude,
    ) -> "Stage":
        """The stage at step 0; with weights, of several corpora. Arguments as for `Plan`."""
        given = {"": lengths} if weights is None else as_corpora(lengths)
        members = {name: Lengths.of(given[name]) for name in weights or given}
        check_options(options, several=weights is not None, growing=_any_grows(members))
        changes = options.as_json() | _weights_as_json(weights)
        if weights is None:
            del changes["by"], changes["ending"]
        excluded = _select(exclude, lengths, members)
        changes |= {"exclude": excluded.tolist()} if len(excluded) else {}
        return cls(0, options, exclude_from(members, excluded), weights, lengths, changes)

    def change(
        self,
        step: int,
        *,
        lengths: Any = None,
        exclude: Exclude = (),
        weights: Mapping[str, Any] | None = None,
        **changes: Unpack[Changes],
    ) -> "Stage":
        """The stage that takes over at `step`; arguments and errors as for `Plan.after`."""
        options = self.options.change(**changes)
        block = self.block(step)
        if block.start != step:
            raise InvalidValue(
                f"step is {step:,}, in the middle of the steps {block.start:,} to "
                f"{block.stop - 1:,}, whose rows are dealt together (tiers="
                f"{self.options.tiers}); change the plan at step {block.stop:,}"
            )
        check_options(options, several=self.weights is not None, growing=self.grows)
        given, members = self.given if lengths is None else lengths, self.members
        if lengths is not None and self.grows:
            raise InvalidValue(
                "lengths cannot be given while a corpus grows, which gains examples by itself"
            )
        if lengths is not None:
            members = self._extend(lengths, weights)
        shares = self.weights if weights is None else _as_shares(weights, members)
        more = np.setdiff1d(_select(exclude, given, members), self.excluded)
        new = options.as_json(changes)
        new |= {"exclude": more.tolist()} if len(more) else {}
        # If only weights and corpora are new, the present streams continue.
        replan = shares is None or bool(new)
        new |= _weights_as_json(shares) if weights is not None else {}
        count = sum(map(len, members.values()))
        new |= {"examples": count} if not self.grows and count > self.num_examples else {}
        members = exclude_from(members, more)
        return Stage(step, options, members, shares, given, new, before=self, replan=replan)

    def block(self, step: int) -> range:
        """The steps around a step between which the plan cannot change."""
        if not self.grows:
            return self.assembly.block(step)
        first = step // self.options.tiers * self.options.tiers
        return range(first, first + self.options.tiers)  # blocks end there, and wherever parts say

    def _extend(self, given: Any, weights: Any) -> dict[str, Lengths]:
        """The lengths of all corpora, with new examples (of one corpus) or new corpora."""
        if self.weights is None:
            return {"": self.members[""].extend(given)}
        if weights is None:
            raise InvalidValue("lengths are given without weights; give a weight for each corpus")
        every, present = as_corpora(given), self.members
        if list(every)[: len(present)] != [*present]:
            raise InvalidValue(
                f"the corpora are {', '.join(every)}, and the plan has {', '.join(present)}; put "
                "new corpora after the present ones"
            )
        for name, lengths in present.items():
            if not lengths.equals(Lengths.of(every[name])):
                raise InvalidValue(
                    f"corpus {name!r} has other lengths than before; a plan of several corpora "
                    "takes new corpora, not new examples: make a corpus of the new examples"
                )
        return {name: present.get(name) or Lengths.of(each) for name, each in every.items()}


def _any_grows(members: Mapping[str, Lengths]) -> bool:
    return any(each.grows for each in members.values())


def _select(exclude: Exclude, given: Any, members: Mapping[str, Lengths]) -> np.ndarray:
    """The examples to leave out, numbered over all corpora; none where a corpus grows."""
    if _any_grows(members):
        refuse_exclude(exclude)
        return NO_EXAMPLES
    count = sum(map(len, members.values()))
    return select(exclude, take_first(given, count, several="" not in members), count)


# A stage, and what was taken of its streams.
Origin = tuple[Stage, Taken]


def make_streams(
    stage: Stage,
    before: Sequence[Stream],
    taken: Taken | None,
    places: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[Stream, ...]:
    """The stream of each corpus of a stage.

    The streams `before` of the first corpora continue: unchanged, or with the rest of epochs after
    the rows `taken` of them planned again. If the stage goes on from an entry of a data state,
    `places` says where the other streams begin; see `resuming`.
    """
    own = options_of_streams(stage.options, stage.members)
    cache = before[0].cache if before else WindowCache(HELD if stage.grows else CACHED)
    streams: list[Stream] = []
    for number, (name, corpus) in enumerate(stage.members.items()):
        place = {} if places is None else places[name]
        continues = number < len(before) if places is None else "rest" in place
        try:
            if not continues:
                stream = _begin_stream(stage, number, place, own, cache)
            elif taken is None:
                stream = before[number]
            else:
                rows, leg = taken.rows[:, number], taken.legs[number]
                stream = before[number].after(rows, leg, corpus, own)
        except ValueError as error:
            raise InvalidValue(f"corpus {name!r}: {error}" if name else str(error)) from error
        except MemoryError as error:
            what = "the rest of a corpus that grows"
            if not corpus.grows:
                positions = int(corpus.array.sum(dtype=np.int64))
                what = f"{counted(len(corpus), 'example')} of {positions:,} positions"
            raise DoesNotFit(
                f"planning {what} takes more memory than there is; give longer buckets, so that "
                "fewer pieces are made of long examples, or overflow='truncate' or 'drop'"
            ) from error
        streams.append(stream)
    passes = [leg.planned for stream in streams for leg in stream.legs if leg.planned]
    cache.capacity = max(cache.capacity, sum(each.needs for each in passes))
    return tuple(streams)


def _begin_stream(
    stage: Stage, number: int, place: Mapping[str, Any], options: Options, cache: WindowCache
) -> Stream:
    """The stream of a corpus, by its number, from a place in an entry on, if one is given."""
    name, corpus = [*stage.members.items()][number]
    epoch = place.get("epoch", int(corpus.grows))
    if corpus.parts is not None and epoch > 1:
        corpus = Lengths.of(corpus.parts.whole())
    # No corpus joins those that grow, so that their streams are as many as the stage's number.
    return Stream(
        corpus,
        options,
        cache,
        name=name,
        first=int(stage.firsts[number]),
        number=stage.number if stage.grows else 0,
        epoch=epoch,
        begin=Place.of(place),
    )


def options_of_streams(options: Options, names: Collection[str]) -> Options:
    """The options of each corpus's stream; several divide `window` and have buckets of one row."""
    if "" in names:
        return options
    window = min(options.window, max(options.window // len(names), LEAST_WINDOW))
    buckets = tuple(dataclasses.replace(each, rows=1) for each in options.buckets)
    return dataclasses.replace(options, window=window, buckets=buckets)


def check_options(options: Options, *, several: bool, growing: bool) -> None:
    """Raises an error for options that a plan of one corpus, of several or growing ones lacks."""
    if several and len(options.groups) < len(options.buckets):
        raise InvalidValue(
            f"buckets are {', '.join(map(str, options.buckets))}; a second one of a length is for "
            "the last batches of an epoch, which a plan with weights does not have; give one "
            "bucket of each length"
        )
    if growing and options.overflow == "error":
        raise InvalidValue(
            "overflow is 'error', and the longest example of a corpus that grows is not known yet; "
            "give overflow='split' (for pairs 'truncate') or 'drop'"
        )
    if (growing or not several) and (options.by != "tokens" or options.ending != "repeat"):
        those = (
            "where a corpus grows, weights are shares of tokens (by='tokens'), and corpora repeat "
            "(ending='repeat')"
        )
        raise InvalidValue(
            f"by is {options.by!r} and ending is {options.ending!r}; "
            + (those if growing else "both are for several corpora; give weights= as well")
        )


def _as_shares(weights: Any, members: Mapping[str, Lengths]) -> Mapping[str, Fraction]:
    if "" in members:
        raise InvalidValue("weights are for several corpora, and this plan is of one")
    if not isinstance(weights, Mapping):
        raise InvalidValue(
            f"weights is {weights!r}; it must be numbers by name, the weights from this step on"
        )
    return as_phases(weights, tuple(members))[0][1]


def _weights_as_json(weights: Mapping[str, Fraction] | None) -> dict[str, Any]:
    return {} if weights is None else {"weights": {name: f"{weights[name]}" for name in weights}}
